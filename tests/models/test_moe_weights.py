"""Experts of a checkpoint reach their rows, in every published form, copied or streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.custom_ops.reference_moe import dequantize_expert
from compiled_engine.errors import ConfigError
from compiled_engine.models import CausalLM
from compiled_engine.models.weights import init_dummy_weights, load_weights
from tests.helpers.tiny_model import write_tiny_model
from tests.models.test_weight_stream import build, stream_model

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = build(folder, dtype, CPU)
    load_weights(model, folder, dtype=dtype, device=CPU)
    return dict(model.named_parameters())


def test_one_tensor_an_expert(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="qwen3_moe")
    source, parameters = load_file(folder / "model.safetensors"), loaded(folder)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for expert in range(5):
            parts = [source[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")]
            assert torch.equal(parameters[f"{prefix}gate_up_proj"][expert], torch.cat(parts))
            down = source[f"{prefix}{expert}.down_proj.weight"]
            assert torch.equal(parameters[f"{prefix}down_proj"][expert], down)
    assert "model.layers.1.mlp.gate_up_proj.weight" in parameters


def test_mixtral_names(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="mixtral")
    source, parameters = load_file(folder / "model.safetensors"), loaded(folder)
    theirs, ours = "model.layers.1.block_sparse_moe.", "model.layers.1.mlp."
    assert torch.equal(parameters[f"{ours}gate.weight"], source[f"{theirs}gate.weight"])
    gate_up = torch.cat([source[f"{theirs}experts.3.{part}.weight"] for part in ("w1", "w3")])
    assert torch.equal(parameters[f"{ours}experts.gate_up_proj"][3], gate_up)
    assert torch.equal(
        parameters[f"{ours}experts.down_proj"][3], source[f"{theirs}experts.3.w2.weight"]
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_equal_single_ones(tmp_path: Path, family: str):
    """transformers 5 keeps them stacked, and its own names."""
    folder = write_tiny_model(tmp_path / "a", family=family)
    single = loaded(folder)
    qkv = [name for name in load_file(folder / "model.safetensors") if "mlp" not in name]
    kept = {n: load_file(folder / "model.safetensors")[n] for n in qkv if "sparse" not in n}
    mlp = {n: p.data.clone() for n, p in single.items() if ".mlp." in n}
    dense = {n: mlp.pop(n) for n in list(mlp) if n.endswith("gate_up_proj.weight")}
    for name, value in dense.items():
        gate, up = value.chunk(2)
        start = name.removesuffix("gate_up_proj.weight")
        mlp |= {f"{start}gate_proj.weight": gate.clone(), f"{start}up_proj.weight": up.clone()}
    save_file(kept | mlp, folder / "model.safetensors")
    for name, parameter in loaded(folder).items():
        assert torch.equal(parameter, single[name]), name


def test_packed_rows_of_gate_and_up_come_apart(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="gpt_oss")
    source, parameters = load_file(folder / "model.safetensors"), loaded(folder)
    prefix = "model.layers.2.mlp.experts."
    for ours, theirs in (("", "_blocks"), ("_scale", "_scales"), ("_bias", "_bias")):
        published = source[f"{prefix}gate_up_proj{theirs}"]
        expected = torch.cat((published[:, 0::2], published[:, 1::2]), 1)
        got = parameters[f"{prefix}gate_up_proj{ours}"]
        assert torch.equal(got, expected.reshape(got.shape))
        down = parameters[f"{prefix}down_proj{ours}"]
        assert torch.equal(down, source[f"{prefix}down_proj{theirs}"].reshape(down.shape))
    assert torch.equal(
        parameters["model.layers.0.mlp.gate.bias"], source["model.layers.0.mlp.router.bias"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_model_equals_a_copied_one(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path, family=family)
    expected = loaded(folder, dtype)
    streamed = build(folder, dtype, CPU)
    names = stream_model(streamed, folder, CPU, monkeypatch)
    assert sorted(names) == sorted(load_file(folder / "model.safetensors"))
    for name, parameter in streamed.named_parameters():
        assert parameter.dtype == expected[name].dtype
        assert torch.equal(parameter, expected[name]), name


def test_what_must_not_be_rounded_keeps_its_dtype(tmp_path: Path):
    parameters = loaded(write_tiny_model(tmp_path, family="gpt_oss"), torch.bfloat16)
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in parameters.items()}
    assert kinds["sinks"] == torch.float32
    assert (kinds["gate_up_proj"], kinds["down_proj_scale"]) == (torch.uint8, torch.uint8)
    assert (kinds["gate_up_proj_bias"], kinds["weight"]) == (torch.bfloat16, torch.bfloat16)


def test_problems_with_experts_are_listed(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "a", family="qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    del tensors[f"{prefix}4.up_proj.weight"]
    tensors[f"{prefix}5.up_proj.weight"] = torch.zeros(48, 64)
    tensors[f"{prefix}1.down_proj.weight"] = torch.zeros(64, 47)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    message = str(caught.value)
    assert f"1 tensor is missing: {prefix}4.up_proj.weight" in message
    assert f"1 tensor is unexpected: {prefix}5.up_proj.weight" in message
    assert f"{prefix}1.down_proj.weight is [64, 47], not [64, 48]" in message
    folder = write_tiny_model(tmp_path / "b", family="gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 tensor is not packed into bytes: {name}"):
        loaded(folder)


def dummy(folder: Path, seed: int) -> CausalLM:
    model = build(folder, torch.float32, CPU)
    init_dummy_weights(model, seed)
    return model


def test_dummy_experts_are_seeded_and_of_the_usual_size(tmp_path: Path):
    folder = write_tiny_model(tmp_path, family="gpt_oss")
    first, again = dict(dummy(folder, 1).named_parameters()), dummy(folder, 1)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, first[name]), name
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(first[name], dict(dummy(folder, 2).named_parameters())[name])
    experts = again.layers[0].mlp.experts
    values = dequantize_expert(
        experts.gate_up_proj[0], experts.gate_up_proj_scale[0], "mxfp4", torch.float32
    )
    assert 0.015 < float(values.std()) < 0.03
    assert not first["model.layers.0.self_attn.sinks"].any()
    assert not first["model.layers.0.mlp.experts.down_proj_bias"].any()
