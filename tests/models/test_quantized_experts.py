"""Experts quantised one by one: what a checkpoint says they are, or made so while it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.custom_ops.reference_moe import dequantize_stacked
from compiled_engine.errors import ConfigError
from compiled_engine.models import CausalLM
from compiled_engine.models.config import load_model_config
from compiled_engine.models.expert_parts import expert_matrices
from compiled_engine.models.moe import Experts
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.models.quant_plan import LinearScheme, QuantPlan, without_fp4_activations
from compiled_engine.models.quant_writer import quantize_checkpoint
from compiled_engine.models.weights import init_dummy_weights, load_weights
from tests.helpers.engines import reference_greedy, run_requests, tiny_engine
from tests.helpers.quant_case import CPU, logits, quantized_model
from tests.helpers.quant_checkpoints import LAYOUTS, rewrite_quantized
from tests.helpers.tiny_model import write_tiny_model
from tests.models.test_parity import relative_difference
from tests.models.test_weight_stream import stream_model

# Blocks of 128 end in the middle of what an expert reads, and with the rows of its gate.
SIZES = {"hidden_size": 192, "moe_intermediate_size": 128, "intermediate_size": 160, "head_dim": 48}
PUBLISHED = {
    "fp8_block_inv": "fp8_block",
    "fp8_block": "fp8_block",
    "mxfp4_packed": "mxfp4",
    "nvfp4": "nvfp4",
    "nvfp4_packed": "nvfp4",
}
# What writes the layouts of experts.
WRITERS = {
    "fp8_block_inv": "deepseek",
    "fp8_block": "compressed_block",
    "mxfp4_packed": "compressed_mxfp4",
    "nvfp4": "modelopt_nvfp4",
    "nvfp4_packed": "compressed_nvfp4",
}
ONLINE = {"fp8": "fp8_block", "fp8_block": "fp8_block", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}


def without_routers(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint whose routers are plain, as published ones are."""
    fields = ("ignore", "exclude_modules", "modules_to_not_convert")
    field = next(name for name in fields if name in config)
    return {**config, field: [*config.get(field, []), "re:.*mlp.gate$"]}


def layout_of(name: str) -> tuple[dict[str, Any], Any]:
    """Config and writer of the published layout that is read by `name`."""
    for config, spell, _ in LAYOUTS.values():
        if spell.__name__ == WRITERS[name]:
            return without_routers(config), spell
    raise AssertionError(name)


def experts_of(model: CausalLM) -> dict[str, Experts]:
    return {n: m for n, m in model.named_modules() if isinstance(m, Experts)}


def dequantized(experts: Experts, name: str) -> Tensor:
    """A stacked parameter [E, rows, columns] in fp32."""
    stacked = (getattr(experts, f"{name}{end}") for end in ("", "_scale", "_global_scale"))
    kind = experts.format, torch.float32
    parts = tuple(stacked)
    return torch.stack([dequantize_stacked(*parts, e, *kind) for e in range(experts.num_experts)])


@pytest.mark.parametrize("layout", PUBLISHED)
def test_published_experts_mean_what_their_layout_says(tmp_path: Path, layout: str):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    config, spell = layout_of(layout)
    meant = rewrite_quantized(folder, config, spell)
    model = quantized_model(folder, None)
    found = experts_of(model)
    assert list(found) == [f"model.layers.{layer}.mlp.experts" for layer in (0, 2)]
    for path, module in found.items():
        assert (module.format, module.layout) == (PUBLISHED[layout], layout)
        for expert in range(5):
            prefix = f"{path}.{expert}."
            gate_up = [meant[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")]
            expected = {
                "gate_up_proj": torch.cat(gate_up),
                "down_proj": meant[f"{prefix}down_proj.weight"],
            }
            for name, value in expected.items():
                got = dequantized(module, name)[expert]
                torch.testing.assert_close(got, value, rtol=1e-6, atol=0)
    assert isinstance(model.layers[1].mlp.gate_up_proj, QuantLinear)
    assert not isinstance(model.layers[0].mlp.gate, QuantLinear)


@pytest.mark.parametrize("layout", ["nvfp4", "nvfp4_packed"])
def test_experts_in_4_bits_answer_as_their_values_do(tmp_path: Path, layout: str):
    """Each matrix with its own scale, of very different size in gate and up."""
    folder = write_tiny_model(tmp_path / "quantised", family="qwen3_moe", **SIZES)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "experts.1.gate_proj" in name:
            tensors[name] *= 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    plain = shutil.copytree(folder, tmp_path / "plain")
    config, spell = layout_of(layout)
    meant = rewrite_quantized(folder, config, spell)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    plan = load_model_config(folder).quantization
    assert plan is not None
    model = quantized_model(folder, without_fp4_activations(plan))
    scales = model.layers[0].mlp.experts.gate_up_proj_global_scale
    assert scales.shape == (5, 2)
    assert len(set(scales.flatten().tolist())) == 10
    assert relative_difference(logits(model), logits(quantized_model(plain, None))) <= 1e-5
    engine = tiny_engine(folder)
    assert {m.format for m in experts_of(engine.loop.executor.model).values()} == {"nvfp4"}
    prompts = [[7, 8, 9], list(range(20, 60))]
    expected = [reference_greedy(engine, prompt, 8) for prompt in prompts]
    assert run_requests(engine, prompts).tokens == expected


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_plain_experts_are_quantised_on_the_way_in(tmp_path: Path, family: str, name: str):
    sizes = dict(SIZES)
    if family == "mixtral":
        sizes |= {"intermediate_size": sizes.pop("moe_intermediate_size")}
    folder = write_tiny_model(tmp_path, family=family, **sizes)
    plain, model = quantized_model(folder, None), quantized_model(folder, name)
    pairs = zip(experts_of(plain).values(), experts_of(model).values(), strict=True)
    for before, after in pairs:
        assert (after.format, after.layout) == (ONLINE[name], "plain")
        for part in ("gate_up_proj", "down_proj"):
            expected, got = getattr(before, part), dequantized(after, part)
            error = (got - expected).norm() / expected.norm()
            assert 0 < error < (0.2 if name.endswith("fp4") else 0.05)
    got = logits(model)
    for module in experts_of(model).values():
        values = {part: dequantized(module, part) for part in ("gate_up_proj", "down_proj")}
        module.quantize("")
        for part, value in values.items():
            getattr(module, part).data = value
    assert relative_difference(got, logits(model)) <= 1e-5


def test_streamed_quantised_experts_equal_copied_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    rewrite_quantized(folder, *layout_of("fp8_block_inv"))
    copied = quantized_model(folder, None, torch.bfloat16)
    streamed = quantized_model(folder, None, torch.bfloat16)
    for parameter in streamed.parameters():
        parameter.zero_()
    names = stream_model(streamed, folder, CPU, monkeypatch)
    assert sorted(names) == sorted(load_file(folder / "model.safetensors"))
    expected = dict(copied.named_parameters())
    for name, parameter in streamed.named_parameters():
        assert torch.equal(parameter.float(), expected[name].float()), name


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_an_engine_serves_quantised_experts(tmp_path: Path, name: str):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    engine = tiny_engine(folder, quantization=name)
    assert {m.format for m in experts_of(engine.loop.executor.model).values()} == {ONLINE[name]}
    prompts = [[7, 8, 9], list(range(20, 60))]
    expected = [reference_greedy(engine, prompt, 8) for prompt in prompts]
    assert run_requests(engine, prompts).tokens == expected


def test_dummy_experts_are_random_in_their_format(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    model, again = quantized_model(folder, "fp8"), quantized_model(folder, "fp8")
    init_dummy_weights(model, 1)
    init_dummy_weights(again, 1)
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(mine.float(), theirs.float()), name
    experts = model.layers[0].mlp.experts
    values = dequantized(experts, "gate_up_proj")
    assert 0.018 < float(values.std()) < 0.022
    assert len({float(value.sum()) for value in values}) == experts.num_experts
    assert len(list(expert_matrices(experts))) == 2 * experts.num_experts


@pytest.mark.parametrize(
    ("options", "quantization", "said"),
    [
        ({}, "int8", "quantization: int8 quantises experts in int8_channel; supported"),
        ({}, "int4", "fp8, fp8_block, mxfp4 and nvfp4"),
        ({"moe_intermediate_size": 48}, "nvfp4", "48 columns: nvfp4 needs a multiple of 32"),
        ({"moe_intermediate_size": 96}, "fp8", "experts of 96 rows: fp8_block needs a multiple"),
        ({"moe_intermediate_size": 48}, "mxfp4", "48 columns: mxfp4 needs a multiple of 32"),
        ({"hidden_size": 72}, "fp8", "72 columns: fp8_block needs a multiple of 16"),
    ],
)
def test_what_experts_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, Any], quantization: str, said: str
):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **{**SIZES, **options})
    with pytest.raises(ConfigError, match=said):
        quantized_model(folder, quantization)


def test_published_experts_in_another_format_are_refused(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    scheme = LinearScheme(format="fp8_channel", activation_format="fp8_token", layout="fp8")
    plan = QuantPlan(method="fp8", rules=((("Linear",), scheme),), ignored=("gate", "lm_head"))
    with pytest.raises(ConfigError, match="quantization_config: fp8 quantises experts in fp8_chan"):
        quantized_model(folder, plan)
    mixed = QuantPlan(
        method="fp8", rules=((("Linear",), scheme),), ignored=("gate", "lm_head", "experts.3")
    )
    with pytest.raises(ConfigError, match=r"experts\.3\.gate_proj is not quantised"):
        quantized_model(folder, mixed)


def test_stacked_experts_are_not_quantised_on_the_way_in(tmp_path: Path):
    """Those that are packed already stay so; plain ones would have to be read all at once."""
    folder = write_tiny_model(tmp_path, family="gpt_oss")
    model = quantized_model(folder, "fp8")
    assert {m.format for m in experts_of(model).values()} == {"mxfp4"}
    assert isinstance(model.layers[0].self_attn.qkv_proj, QuantLinear)
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="experts that the checkpoint holds stacked"):
        quantized_model(folder, "fp8")


def test_a_missing_scale_of_an_expert_is_named(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **SIZES)
    rewrite_quantized(folder, *layout_of("fp8_block_inv"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.4.up_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    assert load_model_config(folder).quantization is not None
    with pytest.raises(ConfigError, match=f"1 tensor is missing: {name}"):
        quantized_model(folder, None)
    with pytest.raises(ConfigError, match=f"1 tensor is missing: {name}"):
        load_weights(quantized_shell(folder), folder, dtype=torch.float32, device=CPU)


def quantized_shell(folder: Path) -> CausalLM:
    """The model without weights."""
    from compiled_engine.models import ARCHITECTURES
    from compiled_engine.models.weights import outline_model

    config = load_model_config(folder)
    return outline_model(ARCHITECTURES[config.architecture], config, dtype=torch.float32)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "nvfp4"])
def test_a_written_checkpoint_reads_back_as_it_was_quantised(tmp_path: Path, name: str):
    folder = write_tiny_model(tmp_path / "plain", family="qwen3_moe", **SIZES)
    options = {"quantizes_head": False, "device": CPU, "allow_pickle": False}
    left = quantize_checkpoint(
        folder, tmp_path / "written", name, progress=lambda *_: None, **options
    )
    assert left == []
    written = quantized_model(tmp_path / "written", None)
    online = quantized_model(folder, name)
    assert {m.layout for m in experts_of(written).values()} == {
        {"fp8_block": "fp8_block_inv", "mxfp4": "mxfp4_packed", "nvfp4": "nvfp4_packed"}[name]
    }
    assert not isinstance(written.layers[0].mlp.gate, QuantLinear)
    # the layout of nvfp4 holds the inverse of a scale
    assert relative_difference(logits(written), logits(online)) <= (1e-6 if name == "nvfp4" else 0)


def test_a_format_that_experts_are_not_read_in_is_not_written(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "plain", family="qwen3_moe", **SIZES)
    with pytest.raises(ConfigError, match="--format fp8: experts are served in fp8_block"):
        quantize_checkpoint(
            folder,
            tmp_path / "written",
            "fp8",
            quantizes_head=False,
            device=CPU,
            allow_pickle=False,
            progress=lambda *_: None,
        )
    assert not (tmp_path / "written").exists()
