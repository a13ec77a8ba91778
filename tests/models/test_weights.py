"""`load_weights` and `init_dummy_weights`: formats, fused parameters, and one error that lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.errors import ConfigError
from compiled_engine.models import ARCHITECTURES, CausalLM
from compiled_engine.models.config import load_model_config
from compiled_engine.models.weights import build_model, init_dummy_weights, load_weights
from tests.helpers.tiny_model import write_tiny_model

CPU = torch.device("cpu")


def build(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = load_model_config(folder)
    return build_model(ARCHITECTURES[config.architecture], config, dtype=dtype, device=CPU)


def load(
    folder: Path, dtype: torch.dtype = torch.float32, *, allow_pickle: bool = False
) -> CausalLM:
    model = build(folder, dtype)
    load_weights(model, folder, dtype=dtype, device=CPU, allow_pickle=allow_pickle)
    return model


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Changes tensors of the checkpoint; None removes one."""
    path = folder / "model.safetensors"
    merged = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, path)


def write_shards(folder: Path, num_shards: int) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(num_shards):
        name = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(weights.items())[index::num_shards])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    index_path = folder / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": weight_map}))


def assert_same_parameters(a: CausalLM, b: CausalLM) -> None:
    expected = dict(b.named_parameters())
    assert expected.keys() == dict(a.named_parameters()).keys()
    for name, parameter in a.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_weights_fills_fused_rows_in_order(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    folder = write_tiny_model(tmp_path, family=family, attention_bias=True, mlp_bias=True)
    model = load(folder, dtype)
    source = load_file(folder / "model.safetensors")
    layer = "model.layers.1."
    parts = {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "self_attn.o_proj": ["self_attn.o_proj"],
    }
    parameters = dict(model.named_parameters())
    for fused, names in parts.items():
        for kind in ("weight", "bias"):
            expected = torch.cat([source[f"{layer}{name}.{kind}"] for name in names]).to(dtype)
            assert torch.equal(parameters[f"{layer}{fused}.{kind}"], expected)
    assert torch.equal(parameters["model.norm.weight"], source["model.norm.weight"].to(dtype))
    assert all(p.dtype == dtype and not p.requires_grad for p in model.parameters())


def test_load_weights_sharded_equals_single(tmp_path: Path) -> None:
    single = load(write_tiny_model(tmp_path / "a", tie_word_embeddings=False))
    folder = write_tiny_model(tmp_path / "b", tie_word_embeddings=False)
    write_shards(folder, 3)
    assert_same_parameters(load(folder), single)


def test_load_weights_pickle_needs_the_flag(tmp_path: Path) -> None:
    single = load(write_tiny_model(tmp_path / "a"))
    folder = write_tiny_model(tmp_path / "b")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="--allow-pickle"):
        load(folder)
    assert_same_parameters(load(folder, allow_pickle=True), single)


def test_load_weights_pickle_never_runs_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("ran",))

    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read"):
        load(folder, allow_pickle=True)


def test_load_weights_lists_all_problems_in_one_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    rewrite(
        folder,
        {
            "model.layers.0.self_attn.k_proj.weight": None,
            "model.norm.weight": None,
            "model.layers.0.mlp.gate_proj.weight": torch.zeros(95, 64),
            "model.layers.1.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8),
            "model.layers.1.self_attn.extra.weight": torch.zeros(1),
        },
    )
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = caught.value.message
    assert "2 tensors are missing" in message
    assert "model.layers.0.self_attn.k_proj.weight, model.norm.weight" in message
    assert "1 tensor is unexpected: model.layers.1.self_attn.extra.weight" in message
    assert "model.layers.0.mlp.gate_proj.weight is [95, 64], not [96, 64]" in message
    assert "not bfloat16" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_load_weights_lists_at_most_twenty_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    rewrite(folder, {f"extra.{index}": torch.zeros(1) for index in range(25)})
    with pytest.raises(ConfigError, match=r"25 tensors are unexpected.* and 5 more"):
        load(folder)


def test_load_weights_accepts_harmless_extras(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        folder,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "lm_head.weight": embedding.clone(),
        },
    )
    load(folder)


def test_load_weights_untied_without_lm_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=False)
    rewrite(folder, {"lm_head.weight": None})
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("num_rows", [300, 384])
def test_load_weights_other_vocabulary_than_config_is_refused(
    tmp_path: Path, num_rows: int
) -> None:
    folder = write_tiny_model(tmp_path)
    rewrite(folder, {"model.embed_tokens.weight": torch.zeros(num_rows, 64)})
    with pytest.raises(ConfigError, match=rf"\[{num_rows}, 64\], not \[320, 64\].*vocab_size"):
        load(folder)


def test_load_weights_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    write_shards(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of 3 weight files: model-00002-of-00003"):
        load(folder)


def test_load_weights_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside the folder"):
        load(folder)


def test_load_weights_truncated_file_is_a_clear_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_load_weights_without_weights_names_the_formats(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no weights.*--load-format dummy"):
        load(folder)


def test_load_weights_reports_progress_up_to_the_total(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(
        build(folder),
        folder,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total, _label: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == sum(p.nbytes for p in build(folder).parameters())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_init_dummy_weights_depends_on_seed_and_name_only(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family="qwen3", attention_bias=True)
    first, again, other = (build(folder) for _ in range(3))
    num_threads = torch.get_num_threads()
    init_dummy_weights(first, 3)
    torch.set_num_threads(1)
    torch.manual_seed(99)
    init_dummy_weights(again, 3)
    torch.set_num_threads(num_threads)
    init_dummy_weights(other, 4)
    assert_same_parameters(first, again)
    weights = dict(first.named_parameters())
    matrix = weights["model.embed_tokens.weight"]
    assert abs(float(matrix.std()) - 0.02) < 0.002
    assert not torch.equal(matrix, dict(other.named_parameters())["model.embed_tokens.weight"])
    layers = [weights[f"model.layers.{index}.mlp.down_proj.weight"] for index in range(2)]
    assert not torch.equal(*layers)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    assert torch.equal(weights["model.layers.0.self_attn.q_norm.weight"], torch.ones(16))
    assert not weights["model.layers.0.self_attn.qkv_proj.bias"].any()


def test_build_model_has_real_rotary_frequencies(tmp_path: Path) -> None:
    model = build(write_tiny_model(tmp_path), torch.bfloat16)
    assert all(not buffer.is_meta and buffer.isfinite().all() for buffer in model.buffers())
