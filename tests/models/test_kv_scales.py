"""Scales of keys and values of a checkpoint: folded into weights, the model stays the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_engine.errors import ConfigError
from compiled_engine.models.kv_scales import fold_kv_scales, kv_scale_names
from compiled_engine.models.weights import load_weights
from tests.helpers.quant_case import CPU, logits, quantized_model
from tests.helpers.quant_checkpoints import LAYOUTS, rewrite_quantized
from tests.helpers.tiny_model import write_tiny_model

FORMATS = [None, "fp8", "fp8_block", "int8", "int4", "nvfp4", "mxfp4"]


def written_keys_and_values(model, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer as attention gets them, after rotation."""
    from compiled_engine.models import layers

    seen = []
    original = layers.attention

    def attention(q, k, v, *rest, **options):
        seen.append((k.clone(), v.clone()))
        return original(q, k, v, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(layers, "attention", attention)
        logits(model)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", FORMATS)
def test_folding_divides_keys_and_values_and_nothing_else(
    tmp_path: Path, family: str, name: str | None, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path, family=family, attention_bias=True)
    plain = quantized_model(folder, name)
    folded = copy.deepcopy(plain)
    # Rounded up to powers of two: 4, 0.25, and 1 as it is.
    fold_kv_scales(folded, {(0, "k"): 3.0, (0, "v"): 0.2, (1, "v"): 1.0})
    torch.testing.assert_close(logits(folded), logits(plain), rtol=1e-5, atol=1e-4)
    before = written_keys_and_values(plain, monkeypatch)
    after = written_keys_and_values(folded, monkeypatch)
    for (k, v), (k_folded, v_folded), (k_scale, v_scale) in zip(
        before, after, [(4.0, 0.25), (1.0, 1.0)], strict=True
    ):
        torch.testing.assert_close(k_folded * k_scale, k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(v_folded * v_scale, v, rtol=1e-5, atol=1e-5)


def test_a_static_input_scale_follows(tmp_path: Path):
    config, spell, _ = LAYOUTS["fp8_static"]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    plain = quantized_model(folder, None)
    folded = copy.deepcopy(plain)
    fold_kv_scales(folded, {(0, "v"): 2.0, (1, "k"): 8.0})
    assert float(folded.layers[0].self_attn.o_proj.input_scale) == pytest.approx(0.01)
    assert torch.equal(logits(folded), logits(plain))


@pytest.mark.parametrize("spelling", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale"])
def test_scales_are_read_from_the_checkpoint_if_asked_for(tmp_path: Path, spelling: str):
    config, spell, _ = LAYOUTS["compressed_fp8_channel"]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    path = folder / "model.safetensors"
    scales = {
        f"model.layers.{layer}.{spelling.format(kind)}": torch.tensor(0.5)
        for layer in (0, 1)
        for kind in "kv"
    }
    save_file({**load_file(path), **scales}, path)
    model = quantized_model(folder, None)
    weight = model.layers[0].self_attn.k_norm.weight.clone()
    load_weights(model, folder, dtype=torch.float32, device=CPU, folds_kv_scales=True)
    assert torch.equal(model.layers[0].self_attn.k_norm.weight, weight * 2)


def test_names_of_scales():
    names = ["model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_proj.v_scale", "x"]
    assert kv_scale_names(names) == {(3, "k"): names[0], (3, "v"): names[1]}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_refused(tmp_path: Path, scale: float):
    model = quantized_model(write_tiny_model(tmp_path), None)
    with pytest.raises(ConfigError, match="k_scale of layer 0"):
        fold_kv_scales(model, {(0, "k"): scale})
