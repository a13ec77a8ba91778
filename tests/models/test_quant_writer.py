"""`compiled-engine quantize`: what it writes is read back in each format; mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiled_engine.cli import main
from compiled_engine.models import quant_writer
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.models.quant_plan import online_plan
from tests.helpers.hf_models import write_hf_config
from tests.helpers.quant_case import ONLINE, logits, quantized_model
from tests.helpers.quant_checkpoints import LAYOUTS, rewrite_quantized
from tests.helpers.tiny_model import write_tiny_model

# Columns that the layouts of 4-bit floats can hold; blocks of 128 end inside what is fused.
SIZES = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 48}


def quantize(folder: Path, output: Path, name: str, *more: str) -> int:
    flags = ["--format", name, "--output", str(output), "--device", "cpu"]
    return main(["quantize", str(folder), *flags, *more])


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("with_head", [False, True], ids=["plain_head", "head"])
@pytest.mark.parametrize("name", [name for name in ONLINE if name != "nvfp4_w4a4"])
def test_what_is_written_is_what_is_quantised_on_the_way_in(
    tmp_path: Path, name: str, with_head: bool, is_tied: bool
):
    folder = write_tiny_model(
        tmp_path / "plain", family="qwen3", tie_word_embeddings=is_tied, **SIZES
    )
    output = tmp_path / "out"
    assert quantize(folder, output, name, *["--quantize-lm-head"] * with_head) == 0
    written = quantized_model(output, None)
    online = quantized_model(folder, online_plan(name, "float32", quantizes_head=with_head))
    assert isinstance(written.lm_head, QuantLinear) == with_head
    for (layer, a), (_, b) in zip(written.named_modules(), online.named_modules(), strict=True):
        assert isinstance(a, QuantLinear) == isinstance(b, QuantLinear), layer
        if isinstance(a, QuantLinear) and isinstance(b, QuantLinear):
            assert (a.format, a.activation_format) == (b.format, b.activation_format)
            torch.testing.assert_close(
                a.dequantized(torch.float32), b.dequantized(torch.float32), rtol=1e-6, atol=0
            )
    torch.testing.assert_close(logits(written), logits(online), rtol=1e-4, atol=1e-3)
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (output / file).read_bytes() == (folder / file).read_bytes()


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_tiny_model(tmp_path / "plain")
    monkeypatch.setattr(quant_writer, "MAX_FILE_BYTES", 60_000)
    assert quantize(folder, tmp_path / "out", "int8") == 0
    monkeypatch.undo()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    assert not list((tmp_path / "out").glob("*.tmp"))
    single = quantized_model(folder, "int8")
    assert torch.equal(logits(quantized_model(tmp_path / "out", None)), logits(single))


def test_layers_whose_columns_do_not_divide_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = write_tiny_model(tmp_path / "plain", intermediate_size=100)
    assert quantize(folder, tmp_path / "out", "mxfp4") == 0
    assert "left as they are" in capsys.readouterr().err
    model = quantized_model(tmp_path / "out", None)
    assert not isinstance(model.layers[0].mlp.down_proj, QuantLinear)
    assert isinstance(model.layers[0].mlp.gate_up_proj, QuantLinear)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    assert logits(model).isfinite().all()


def test_mistakes_are_told_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_tiny_model(tmp_path / "plain", family="qwen3")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    assert quantize(folder, full, "int8") == 2
    assert "is not empty" in capsys.readouterr().err
    assert quantize(tmp_path / "nowhere", tmp_path / "out", "int8") == 2
    assert "nowhere" in capsys.readouterr().err
    assert quantize(folder, folder / "config.json" / "x", "int8") == 2
    assert "--output" in capsys.readouterr().err
    foreign = write_hf_config(tmp_path / "foreign", "phi3")
    assert quantize(foreign, tmp_path / "out", "int8") == 2
    assert "Phi3ForCausalLM; models are quantised that have a file here" in capsys.readouterr().err
    config, spell, _ = LAYOUTS["compressed_int8"]
    rewrite_quantized(folder, config, spell)
    assert quantize(folder, tmp_path / "out", "int8") == 2
    assert "quantised already (compressed-tensors)" in capsys.readouterr().err
    for flags in (["--format", "int3"], ["--format", "int8"]):
        with pytest.raises(SystemExit) as caught:
            main(["quantize", str(folder), *flags])
        assert caught.value.code == 2
    assert "--output" in capsys.readouterr().err
