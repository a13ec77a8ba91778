"""Quantised models: published layouts, weights quantised on the way in, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compiled_engine.custom_ops.quant_pack import quantize_weight, unpacked_weight
from compiled_engine.custom_ops.reference_fp4 import tile_scales
from compiled_engine.errors import ConfigError
from compiled_engine.models import CausalLM
from compiled_engine.models.config import load_model_config
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.models.quant_plan import (
    LinearScheme,
    QuantPlan,
    matches,
    online_plan,
    without_fp4_activations,
)
from compiled_engine.models.weights import init_dummy_weights, load_weights
from tests.helpers.quant_case import CPU, ONLINE, logits, quantized_layer, quantized_model
from tests.helpers.quant_checkpoints import (
    FP4_VALUES,
    LAYOUTS,
    compressed_int4,
    fp8_channel,
    rewrite_quantized,
    torchao_config,
)
from tests.helpers.tiny_model import write_tiny_model

# Hidden 192 and 96 rows of k and v: blocks of 128 end in the middle of what is fused.
SIZES = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 48}
E4M3 = torch.float8_e4m3fn


def fake_quantized(x: Tensor, how: str) -> Tensor:
    """What an activation is after it was quantised, by plain arithmetic."""
    if how == "static":
        return (x / 0.02).clamp(-448, 448).to(E4M3).float() * 0.02
    if how == "int8":
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale
    if how.startswith("fp4"):
        overall = x.abs().amax(-1, keepdim=True) / (6 * 448) if how == "fp4" else 0.01
        groups = nn.functional.pad(x / overall, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
        scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(2**-9, 448).to(E4M3).float()
        away = (groups.abs() / scale).unsqueeze(-1) - FP4_VALUES[:8]
        nearest = FP4_VALUES[away.abs().argmin(-1)] * groups.sign() * scale
        return nearest.flatten(-2)[..., : x.shape[-1]] * overall
    if how == "block":
        parts = [fake_quantized(part, "token") for part in x.split(128, -1)]
        return torch.cat(parts, -1)
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(E4M3).float() * scale


def plain_twin(folder: Path, meant: dict[str, Tensor], activations: str) -> CausalLM:
    """A model without quantised layers that computes the same: dequantised weights, and hooks."""
    write_tiny_model(folder, family="qwen3", **SIZES)
    save_file(
        {name: value.float().contiguous() for name, value in meant.items()},
        folder / "model.safetensors",
    )
    model = quantized_model(folder, None)
    for name, module in model.named_modules():
        if activations and isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, x: (fake_quantized(x[0], activations),))
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_means_the_dequantised_model(tmp_path: Path, layout: str):
    config, spell, activations = LAYOUTS[layout]
    folder = write_tiny_model(tmp_path / "model", family="qwen3", **SIZES)
    meant = rewrite_quantized(folder, config, spell)
    model = quantized_model(folder, None)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 2 * 4
    for name, module in layers.items():
        path = name.rpartition(".")[0]
        last = name.rpartition(".")[2]
        parts = [f"{path}.{part}.weight" for part in model.packed_modules.get(last, (last,))]
        expected = torch.cat([meant[part] for part in parts])
        if module.input_order is not None:
            expected = expected[:, module.input_order]
        torch.testing.assert_close(module.dequantized(torch.float32), expected, rtol=1e-6, atol=0)
    twin = plain_twin(tmp_path / "twin", meant, activations)
    got, expected = logits(model), logits(twin)
    # A code may fall to either side of a half where a scale was divided by or multiplied with.
    allowed = 0.05 if activations else 1e-4
    assert (got - expected).abs().max() <= allowed * expected.abs().max()


@pytest.mark.parametrize("layout", ["compressed_nvfp4", "modelopt_nvfp4"])
def test_4_bit_activations_are_left_out_where_no_product_takes_them(tmp_path: Path, layout: str):
    config, spell, _ = LAYOUTS[layout]
    folder = write_tiny_model(tmp_path / "model", family="qwen3", **SIZES)
    meant = rewrite_quantized(folder, config, spell)
    plan = load_model_config(folder).quantization
    assert plan is not None
    assert not plan.note
    plan = without_fp4_activations(plan)
    assert plan.note.startswith("activations stay as they are")
    got = logits(quantized_model(folder, plan))
    expected = logits(plain_twin(tmp_path / "twin", meant, ""))
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    other = logits(quantized_model(folder, None))
    assert (got - other).abs().max() > 0.01 * expected.abs().max()


def test_scales_in_tiles_are_filled_part_by_part():
    """Parts that end within a tile, one of them shorter than a tile; nothing is left as it was."""
    parts, size = (70, 5, 96, 128), 200
    scheme = LinearScheme(format="nvfp4", activation_format="nvfp4_token")
    layer = QuantLinear(size, parts, scheme, has_bias=False)
    layer.scale.view(torch.uint8).fill_(0x7F)  # not a number
    weight = torch.randn(sum(parts), size, generator=torch.Generator().manual_seed(0))
    start, scales, meant = 0, [], []
    for rows in parts:
        packed = quantize_weight(weight[start : start + rows], "nvfp4")
        layer.fill(packed, start, rows)
        scales.append(packed.scale.view(torch.uint8))
        meant.append(unpacked_weight(packed, "nvfp4", size, torch.float32))
        start += rows
    assert layer.scale.shape == (384, 16)
    expected = tile_scales(torch.cat(scales).view(E4M3))
    assert torch.equal(layer.scale.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(layer.dequantized(torch.float32), torch.cat(meant))


def test_the_activation_oracle_can_fail(tmp_path: Path):
    """Without its hooks the twin of a layout with quantised activations is another model."""
    config, spell, _ = LAYOUTS["compressed_int8"]
    folder = write_tiny_model(tmp_path / "model", family="qwen3", **SIZES)
    meant = rewrite_quantized(folder, config, spell)
    got = logits(quantized_model(folder, None))
    exact = logits(plain_twin(tmp_path / "a", meant, "int8"))
    other = logits(plain_twin(tmp_path / "b", meant, "static"))
    assert (got - exact).abs().max() < 0.1 * (got - other).abs().max()


@pytest.mark.parametrize("name", ONLINE)
def test_quantised_on_the_way_in(tmp_path: Path, name: str):
    folder = write_tiny_model(tmp_path, attention_bias=True, std=0.05, **SIZES)
    plain, model = quantized_model(folder, None), quantized_model(folder, name)
    weights = load_file(folder / "model.safetensors")
    allowed = {"int8": 0.01, "fp8": 0.04, "fp8_block": 0.04}.get(name, 0.15)
    for layer, module in model.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        path, _, last = layer.rpartition(".")
        parts = [f"{path}.{part}.weight" for part in model.packed_modules.get(last, (last,))]
        expected = torch.cat([weights[part] for part in parts])
        error = (module.dequantized(torch.float32) - expected).norm() / expected.norm()
        assert 0 < error < allowed, (layer, error)
        if module.bias is not None:
            assert torch.equal(
                module.bias, torch.cat([weights[p.replace("weight", "bias")] for p in parts])
            )
    error = (logits(model) - logits(plain)).norm() / logits(plain).norm()
    assert 0 < error < 3 * allowed


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_quantised_only_if_asked_for(tmp_path: Path, is_tied: bool):
    folder = write_tiny_model(tmp_path, std=0.05, tie_word_embeddings=is_tied)
    without = quantized_model(folder, "int8")
    assert not isinstance(without.lm_head, QuantLinear)
    plan = online_plan("int8", "float32", quantizes_head=True)
    model = quantized_model(folder, plan)
    assert isinstance(model.lm_head, QuantLinear)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    expected = load_file(folder / "model.safetensors")[name]
    error = (model.lm_head.dequantized(torch.float32) - expected).norm() / expected.norm()
    assert 0 < error < 0.01
    assert torch.equal(model.model.embed_tokens.weight, without.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ONLINE)
def test_dummy_weights_are_quantised_and_repeatable(tmp_path: Path, name: str):
    folder = write_tiny_model(tmp_path, **SIZES)
    first, second = quantized_model(folder, name), quantized_model(folder, name)
    init_dummy_weights(first, 7)
    init_dummy_weights(second, 7)
    for (layer, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), layer
    weight = first.layers[0].self_attn.qkv_proj.dequantized(torch.float32)
    assert 0.015 < weight.std() < 0.025
    assert logits(first).isfinite().all()


@pytest.mark.parametrize("layout", ["compressed_fp8_channel", "awq", "modelopt_nvfp4"])
def test_a_layer_on_the_ignore_list_stays_plain(tmp_path: Path, layout: str):
    config, spell, _ = LAYOUTS[layout]
    field = {"compressed_fp8_channel": "ignore", "awq": "modules_to_not_convert"}.get(
        layout, "exclude_modules"
    )
    skipped = ("model.layers.1.mlp.down_proj",)
    pattern = "re:.*layers.1.mlp.down_proj" if field == "ignore" else "model.layers.1.mlp.down*"
    config = {**config, field: ["lm_head", pattern]}
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, spell, skipped=skipped)
    model = quantized_model(folder, None)
    assert isinstance(model.layers[0].mlp.down_proj, QuantLinear)
    assert isinstance(model.layers[1].mlp.down_proj, nn.Linear)
    assert logits(model).isfinite().all()


def test_patterns_of_names():
    name = "model.layers.11.mlp.gate_proj"
    for pattern in ("re:.*gate_proj", "*gate*", "model.layers.11*", "gate_proj", "mlp", name):
        assert matches(pattern, name), pattern
    for pattern in ("re:gate_proj", "gate", "layers.1", "model.layers.1.*", "lm_head", "*up*"):
        assert not matches(pattern, name), pattern


def test_zeros_of_another_dtype_than_the_scales_are_refused(tmp_path: Path):
    config, spell, _ = LAYOUTS["torchao_int4"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, spell)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj._weight_zero_point"
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors")
    said = "layers.1.mlp.up_proj: its zero points are torch.float32 and its scales torch.bfloat16"
    with pytest.raises(ConfigError, match=said):
        quantized_model(folder, None)


def test_parts_of_a_fused_layer_must_be_alike(tmp_path: Path):
    config, spell, _ = LAYOUTS["compressed_fp8_channel"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, {**config, "ignore": ["re:.*k_proj"]}, spell)
    with pytest.raises(ConfigError, match=r"q_proj is fp8_channel and .*k_proj is not quantised"):
        quantized_model(folder, None)


def changed(layout: str, **fields: Any) -> dict[str, Any]:
    return {**LAYOUTS[layout][0], **fields}


def in_weights(layout: str, **fields: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(LAYOUTS[layout][0]))
    config["config_groups"]["group_0"]["weights"].update(fields)
    return config


def in_inputs(layout: str, **fields: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(LAYOUTS[layout][0]))
    config["config_groups"]["group_0"]["input_activations"].update(fields)
    return config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported is 'fp8'"),
        (changed("gptq", desc_act="yes"), "desc_act is 'yes'"),
        (changed("gptq", bits=3), "bits is 3; supported is 4"),
        (changed("gptq", dynamic={"-:lm_head": {}}), "dynamic is .* nobody knows here"),
        (changed("gptq", group_size=20), "group_size is 20"),
        (changed("awq", version="gemv"), "version is 'gemv'"),
        (changed("awq", zero_point=False), "zero_point is False"),
        (changed("deepseek_fp8", weight_block_size=[64, 64]), r"weight_block_size is \[64, 64\]"),
        (changed("deepseek_fp8", scale_fmt="ue8m0"), "scale_fmt is 'ue8m0'"),
        (changed("modelopt_fp8", quant_algo="W4A8_AWQ"), "quant_algo is 'W4A8_AWQ'"),
        (changed("modelopt_nvfp4", group_size=32), "group_size is 32"),
        (changed("compressed_int4", transform_config={"a": 1}), "transform_config is"),
        (changed("compressed_int4", sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (changed("compressed_int4", format="marlin-24"), "format is 'marlin-24'"),
        (in_weights("compressed_int4", num_bits=3), "num_bits is 3"),
        (in_weights("compressed_int4", actorder="any"), "actorder is 'any'"),
        (in_weights("compressed_int8", symmetric=False), "symmetric is False"),
        (in_inputs("compressed_int8", dynamic=False), "dynamic is False"),
        (in_inputs("compressed_fp8_channel", num_bits=4), "num_bits is 4"),
        (
            changed("compressed_int8", kv_cache_scheme={"type": "int", "num_bits": 8}),
            "type is 'int'",
        ),
        (torchao_config("Int4WeightOnlyConfig"), "group_size is None; supported is 32, 64, 128"),
        (
            torchao_config(
                "Int4WeightOnlyConfig",
                group_size=128,
                int4_packing_format={"_data": "TILE_PACKED_TO_4D", "_type": "Int4PackingFormat"},
            ),
            "'TILE_PACKED_TO_4D', a layout for the kernels of one device; supported is 'PLAIN'",
        ),
        (
            torchao_config(
                "Int4WeightOnlyConfig", group_size=32, int4_packing_format="plain_int32"
            ),
            "is 'plain_int32', a layout for the kernels",
        ),
        (torchao_config("Float8DynamicActivationInt4WeightConfig"), "_type is 'Float8Dynamic"),
        (torchao_config("Int8WeightOnlyConfig", granularity=None), "granularity is PerTensor"),
        (torchao_config("Int8WeightOnlyConfig", group_size=32), "group_size is 32"),
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, config: Any, said: str):
    folder = write_tiny_model(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises(ConfigError, match=said):
        load_model_config(folder)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path):
    config, spell, _ = LAYOUTS["modelopt_nvfp4"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, spell)
    inside = logits(quantized_model(folder, None))
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    own = {key: value for key, value in fields.pop("quantization_config").items()}
    producer, _ = own.pop("producer"), own.pop("quant_method")
    path.write_text(json.dumps(fields))
    own_file = {"producer": producer, "quantization": {**own, "kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own_file))
    assert torch.equal(logits(quantized_model(folder, None)), inside)


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path):
    config, spell, _ = LAYOUTS["compressed_fp8_channel"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, spell)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.0.mlp"
    tensors[f"{layer}.down_proj.weight"] = tensors[f"{layer}.down_proj.weight"].to(torch.int8)
    tensors[f"{layer}.up_proj.weight_scale"] = torch.ones(7, 1)
    tensors[f"{layer}.up_proj.weight_zero_point"] = torch.ones(7, 1)
    del tensors[f"{layer}.gate_proj.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        quantized_model(folder, None)
    message = str(caught.value)
    assert "missing: model.layers.0.mlp.gate_proj.weight_scale" in message
    assert "up_proj.weight_scale is [7, 1], not [] or [1] or [160, 1] or [160]" in message
    assert "unexpected: model.layers.0.mlp.up_proj.weight_zero_point" in message
    assert "does not mean: model.layers.0.mlp.down_proj.weight" in message


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        (
            "gptq",
            lambda index, _: index.flip(0),
            "g_idx sorts the columns by activation order; the",
        ),
        ("gptq_order", lambda index, _: index * 0, "g_idx does not give every group 32 columns"),
        (
            "gptq_order",
            lambda index, rows: index.roll(7) if rows == 96 else index,  # k and v
            "k_proj: its columns are in another order than those of the layers beside it",
        ),
    ],
    ids=["not said", "groups", "parts"],
)
def test_orders_of_columns_that_cannot_be_right_are_refused(
    tmp_path: Path, layout: str, change: Any, said: str
):
    config, spell, _ = LAYOUTS[layout]

    def changed_order(weight: Tensor) -> Any:
        spelled, meant = spell(weight)
        return {**spelled, "g_idx": change(spelled["g_idx"], weight.shape[0])}, meant

    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, changed_order)
    with pytest.raises(ConfigError, match=said):
        quantized_model(folder, None)


def test_random_weights_in_activation_order(tmp_path: Path):
    config, spell, _ = LAYOUTS["gptq_order"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    rewrite_quantized(folder, config, spell)
    model = quantized_model(folder, None)
    order = model.layers[0].self_attn.qkv_proj.input_order
    assert order.sort().values.tolist() == list(range(192))
    init_dummy_weights(model, 0)
    assert order.tolist() == list(range(192))
    assert logits(model).isfinite().all()


def test_scales_of_keys_and_values_are_known_tensors(tmp_path: Path):
    config, _, _ = LAYOUTS["compressed_fp8_channel"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    rewrite_quantized(folder, {**config, "kv_cache_scheme": scheme}, fp8_channel)
    plan = load_model_config(folder).quantization
    assert plan is not None
    assert plan.note == "its scales of keys and values are used with --kv-cache-dtype fp8_e4m3"
    path = folder / "model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{n}_scale": torch.tensor(0.5) for i in (0, 1) for n in "kv"
    }
    before = logits(quantized_model(folder, None))
    save_file({**load_file(path), **scales}, path)
    assert torch.equal(logits(quantized_model(folder, None)), before)


def test_columns_that_do_not_divide_are_padded(tmp_path: Path):
    """200 columns: no multiple of 16, of 32 or of a group."""
    sizes = {"hidden_size": 200, "intermediate_size": 136, "head_dim": 24}
    folder = write_tiny_model(tmp_path, **sizes)
    config = {**LAYOUTS["compressed_int4"][0]}
    meant = rewrite_quantized(folder, config, compressed_int4(32, has_zero=False))
    model = quantized_model(folder, None)
    layer = model.layers[0].mlp.down_proj
    assert layer.weight.shape == (200, 160 // 2)
    expected = meant["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(layer.dequantized(torch.float32), expected, rtol=1e-6, atol=0)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", ONLINE)
def test_a_layer_is_its_dequantised_product(name: str):
    layer = quantized_layer(name, 200, 40, has_bias=True)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    how = {"fp8": "token", "fp8_block": "block", "int8": "int8", "nvfp4_w4a4": "fp4"}.get(name, "")
    expected = nn.functional.linear(
        fake_quantized(x, how) if how else x, layer.dequantized(torch.float32), layer.bias
    )
    got = layer(x)
    assert (got - expected).abs().max() <= (0.01 if how else 1e-6) * expected.abs().max()


def test_a_plan_takes_the_first_rule_that_matches():
    first, second = LinearScheme(format="nvfp4"), LinearScheme(format="int8_channel")
    plan = QuantPlan(method="x", rules=((("re:.*down_proj",), first), (("Linear",), second)))
    assert plan.scheme("model.layers.0.mlp.down_proj") == first
    assert plan.scheme("model.layers.0.mlp.up_proj") == second
    assert replace(plan, ignored=("mlp",)).scheme("model.layers.0.mlp.up_proj") is None


def test_load_weights_of_a_model_on_another_dtype(tmp_path: Path):
    """Stored values and scales keep their own dtypes, whatever the model computes in."""
    config, spell, _ = LAYOUTS["compressed_int4"]
    folder = write_tiny_model(tmp_path, family="qwen3", **SIZES)
    meant = rewrite_quantized(folder, config, spell)
    model = quantized_model(folder, None, torch.bfloat16)
    load_weights(model, folder, dtype=torch.bfloat16, device=CPU)
    layer = model.layers[0].mlp.down_proj
    assert (layer.weight.dtype, layer.scale.dtype) == (torch.uint8, torch.float16)
    expected = meant["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(layer.dequantized(torch.float32), expected, rtol=1e-6, atol=0)
    assert logits(model).dtype == torch.bfloat16
