"""Checkpoints in the layouts that others publish, written by hand from a plain tiny model.

Each writer quantises a matrix by its own simple rule, spells it as the layout does, and says what
the numbers mean; nothing of the engine is used, so that a reader that is wrong is found out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Tensors of one layer by suffix, and the matrix that they mean.
Spelled = tuple[dict[str, Tensor], Tensor]

COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(
    packing: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """A compressed-tensors config with one group."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        **COMPRESSED,
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


def fp8_values(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-448, 448).to(E4M3)


def deepseek(weight: Tensor) -> Spelled:
    n, k = weight.shape
    scale = torch.empty(-(-n // 128), -(-k // 128))
    full = torch.empty(n, k)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scale[i, j] = weight[block].abs().max() / 448
            full[block] = scale[i, j]
    q = fp8_values(weight, full)
    return {"weight": q, "weight_scale_inv": scale}, q.float() * full


def compressed_block(weight: Tensor) -> Spelled:
    tensors, meant = deepseek(weight)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, meant


def fp8_tensor(weight: Tensor) -> Spelled:
    scale = weight.abs().max() / 448
    q = fp8_values(weight, scale)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def fp8_static(weight: Tensor) -> Spelled:
    tensors, meant = fp8_tensor(weight)
    return {**tensors, "input_scale": torch.tensor(0.02)}, meant


def fp8_channel(weight: Tensor) -> Spelled:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    q = fp8_values(weight, scale.float())
    return {"weight": q, "weight_scale": scale}, q.float() * scale.float()


def int8_channel(weight: Tensor) -> Spelled:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def grouped(weight: Tensor, size: int) -> Tensor:
    """[n, groups, size], zeros behind the last column."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))


def fp4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return ((groups / scale).unsqueeze(-1) - FP4_VALUES).abs().argmin(-1)


def fp4_bytes(codes: Tensor) -> Tensor:
    flat = codes.flatten(1)
    return (flat[:, 0::2] + 16 * flat[:, 1::2]).to(torch.uint8)


def nvfp4_parts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes, scales, the scale of scales, and what they mean."""
    groups = grouped(weight, 16)
    overall = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / 6 / overall).clamp(min=2**-9).to(E4M3)
    step = (scale.float() * overall).unsqueeze(-1)
    codes = fp4_codes(groups, step)
    meant = (FP4_VALUES[codes] * scale.float().unsqueeze(-1) * overall).flatten(1)
    return fp4_bytes(codes), scale, overall, meant


def modelopt_nvfp4(weight: Tensor) -> Spelled:
    q, scale, overall, meant = nvfp4_parts(weight)
    spelled = {"weight": q, "weight_scale": scale, "weight_scale_2": overall}
    return {**spelled, "input_scale": torch.tensor(0.01)}, meant


def compressed_nvfp4(weight: Tensor) -> Spelled:
    q, scale, overall, _ = nvfp4_parts(weight)
    divisor = (1 / overall).reshape(1)
    groups = FP4_VALUES[unpacked(q)].unflatten(1, (-1, 16))
    meant = (groups * (scale.float() / divisor).unsqueeze(-1)).flatten(1)
    spelled = {"weight_packed": q, "weight_scale": scale, "weight_global_scale": divisor}
    return {**spelled, "input_global_scale": torch.tensor([100.0])}, meant


def unpacked(q: Tensor) -> Tensor:
    return torch.stack((q & 15, q >> 4), -1).flatten(1).long()


def compressed_mxfp4(weight: Tensor) -> Spelled:
    groups = grouped(weight, 32)
    exponent = torch.log2(groups.abs().amax(-1) / 6).ceil()
    step = (2.0**exponent).unsqueeze(-1)
    codes = fp4_codes(groups, step)
    scale = (exponent + 127).to(torch.uint8)
    spelled = {"weight_packed": fp4_bytes(codes), "weight_scale": scale}
    return spelled, (FP4_VALUES[codes] * step).flatten(1)


def int32_words(codes: Tensor) -> Tensor:
    """Eight neighbours of a row in an int32, the first in the lowest bits."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8)).long()
    words = sum(codes[..., i] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_codes(weight: Tensor, size: int, *, has_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k], scales and zeros [n, groups]."""
    groups = grouped(weight, size)
    low, high = groups.amin(-1), groups.amax(-1)
    if has_zero:
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = (groups.abs().amax(-1) / 7.5).half()
        zero = torch.full_like(low, 8)
    codes = groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)
    codes = codes.round().clamp(0, 15).flatten(1)[:, : weight.shape[1]]
    return codes.long(), scale, zero.long()


def int4_meant(codes: Tensor, scale: Tensor, zero: Tensor, size: int) -> Tensor:
    columns = torch.arange(codes.shape[1]) // size
    return (codes - zero[:, columns]) * scale.float()[:, columns]


def compressed_int4(size: int, *, has_zero: bool) -> Callable[[Tensor], Spelled]:
    def spell(weight: Tensor) -> Spelled:
        group = size if size else weight.shape[1]
        codes, scale, zero = int4_codes(weight, group, has_zero=has_zero)
        spelled = {
            "weight_packed": int32_words(codes),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zero:
            spelled["weight_zero_point"] = int32_words(zero.T).T
        return spelled, int4_meant(codes, scale, zero, group)

    return spell


def gptq(size: int, *, version: int, has_zero: bool) -> Callable[[Tensor], Spelled]:
    def spell(weight: Tensor) -> Spelled:
        codes, scale, zero = int4_codes(weight, size, has_zero=has_zero)
        stored = zero if version == 2 else (zero - 1) & 15
        spelled = {
            "qweight": int32_words(codes).T,
            "qzeros": int32_words(stored.T),
            "scales": scale.T,
            "g_idx": (torch.arange(weight.shape[1]) // size).int(),
        }
        return spelled, int4_meant(codes, scale, zero, size)

    return spell


def in_activation_order(
    size: int, spell: Callable[[Tensor], Spelled], codes: str, index: str
) -> Callable[[Tensor], Spelled]:
    """The same, whose groups are of columns from anywhere: alike in matrices of one input."""

    def spell_ordered(weight: Tensor) -> Spelled:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        back = order.argsort()
        spelled, meant = spell(weight[:, order])
        group = torch.arange(columns) // size
        words = spelled[codes].T if codes == "qweight" else spelled[codes]
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        nibbles = ((words.unsqueeze(-1) >> shifts) & 15).flatten(1)[:, back]
        stored = int32_words(nibbles.to(torch.uint8))
        values = stored.T if codes == "qweight" else stored
        return {**spelled, codes: values, index: group[back].int()}, meant[:, back]

    return spell_ordered


def awq(size: int) -> Callable[[Tensor], Spelled]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: Tensor) -> Tensor:
        return int32_words(codes.unflatten(1, (-1, 8))[..., order].flatten(1))

    def spell(weight: Tensor) -> Spelled:
        codes, scale, zero = int4_codes(weight, size, has_zero=True)
        spelled = {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T}
        return spelled, int4_meant(codes, scale, zero, size)

    return spell


def torchao(values: Callable[[Tensor], Spelled]) -> Callable[[Tensor], Spelled]:
    def spell(weight: Tensor) -> Spelled:
        tensors, meant = values(weight)
        q, scale = tensors["weight"], tensors["weight_scale"].float()
        spelled = {"_weight_qdata": q, "_weight_scale": scale}
        if q.dtype == torch.int8:
            spelled["_weight_zero_point"] = torch.zeros(scale.shape, dtype=torch.int8)
        return spelled, meant

    return spell


def torchao_int4(size: int) -> Callable[[Tensor], Spelled]:
    def spell(weight: Tensor) -> Spelled:
        groups = grouped(weight, size)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        step, middle = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
        q = ((groups - middle) / step).round().clamp(-8, 7)
        pairs = q.flatten(1).to(torch.int8)
        packed = (pairs[:, 0::2] & 15) | (pairs[:, 1::2] << 4)
        spelled = {"qdata": packed, "scale": scale.T, "zero_point": zero.T}
        return {f"_weight_{name}": tensor for name, tensor in spelled.items()}, (
            q * step + middle
        ).flatten(1)

    return spell


def torchao_config(kind: str, **data: Any) -> dict[str, Any]:
    """As transformers 5 writes it."""
    granularity = {"_data": {"dim": -1}, "_type": "PerRow", "_version": 1}
    if kind != "Int4WeightOnlyConfig":
        data = {"granularity": granularity, **data}
    config = {"set_inductor_config": True, **data}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_data": config, "_type": kind, "_version": 2}},
        "include_input_output_embeddings": False,
        "modules_to_not_convert": None,
        "untie_embedding_weights": False,
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}
LOCAL_FP4 = {**FP4, "symmetric": True, "dynamic": "local"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.37"}, "exclude_modules": ["lm_head"]}
BLOCK_INPUTS = {**TOKEN_FP8, "strategy": "group", "group_size": 128}

# Layout -> its quantization_config, the writer of a matrix, and what happens to activations.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Spelled], str]] = {
    "deepseek_fp8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        deepseek,
        "block",
    ),
    "fp8_static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_static,
        "static",
    ),
    "fp8_dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor, "token"),
    "compressed_fp8_channel": (
        compressed("float-quantized", {**FP8, "strategy": "channel"}, TOKEN_FP8),
        fp8_channel,
        "token",
    ),
    "compressed_fp8_static": (
        compressed(
            "float-quantized",
            {**FP8, "strategy": "tensor"},
            {**FP8, "strategy": "tensor", "dynamic": False},
        ),
        fp8_static,
        "static",
    ),
    "compressed_fp8_block": (
        compressed(
            "float-quantized",
            {**FP8, "strategy": "block", "block_structure": [128, 128]},
            BLOCK_INPUTS,
        ),
        compressed_block,
        "block",
    ),
    "compressed_int8": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {**TOKEN_FP8, "type": "int"},
        ),
        int8_channel,
        "int8",
    ),
    "compressed_int4": (
        compressed("pack-quantized", INT4, None),
        compressed_int4(32, has_zero=False),
        "",
    ),
    "compressed_int4_zero": (
        compressed("pack-quantized", {**INT4, "symmetric": False}, None),
        compressed_int4(32, has_zero=True),
        "",
    ),
    "compressed_int4_order": (
        compressed("pack-quantized", {**INT4, "actorder": "group"}, None),
        in_activation_order(
            32, compressed_int4(32, has_zero=False), "weight_packed", "weight_g_idx"
        ),
        "",
    ),
    "compressed_int4_channel": (
        compressed("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}, None),
        compressed_int4(0, has_zero=False),
        "",
    ),
    "compressed_nvfp4": (
        compressed("nvfp4-pack-quantized", FP4, LOCAL_FP4),
        compressed_nvfp4,
        "fp4_static",
    ),
    "compressed_mxfp4": (
        compressed("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32}, None),
        compressed_mxfp4,
        "",
    ),
    "modelopt_fp8": (
        {**MODELOPT, "quant_method": "modelopt", "quant_algo": "FP8"},
        fp8_static,
        "static",
    ),
    "modelopt_nvfp4": (
        {**MODELOPT, "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        modelopt_nvfp4,
        "fp4_static",
    ),
    "gptq": ({**GPTQ, "sym": True}, gptq(32, version=1, has_zero=False), ""),
    "gptq_zero": ({**GPTQ, "sym": False}, gptq(32, version=1, has_zero=True), ""),
    "gptq_v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(32, version=2, has_zero=True),
        "",
    ),
    "gptq_order": (
        {**GPTQ, "sym": False, "desc_act": True},
        in_activation_order(32, gptq(32, version=1, has_zero=True), "qweight", "g_idx"),
        "",
    ),
    "torchao_int8": (
        torchao_config(
            "Int8DynamicActivationInt8WeightConfig",
            act_mapping_type={"_data": "SYMMETRIC", "_type": "MappingType"},
            reduce_range=False,
            weight_only_decode=False,
        ),
        torchao(int8_channel),
        "int8",
    ),
    "torchao_fp8": (
        torchao_config(
            "Float8WeightOnlyConfig",
            weight_dtype={"_data": "float8_e4m3fn", "_type": "torch.dtype"},
        ),
        torchao(fp8_channel),
        "",
    ),
    "torchao_int4": (
        torchao_config(
            "Int4WeightOnlyConfig",
            group_size=32,
            int4_packing_format={"_data": "PLAIN", "_type": "Int4PackingFormat"},
            int4_choose_qparams_algorithm={
                "_data": "TINYGEMM",
                "_type": "Int4ChooseQParamsAlgorithm",
            },
            int4_tile_packed_ntile=8,
        ),
        torchao_int4(32),
        "",
    ),
    "awq": (AWQ, awq(32), ""),
}


def rewrite_quantized(
    folder: Path,
    config: dict[str, Any],
    spell: Callable[[Tensor], Spelled],
    *,
    skipped: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Quantises the linear layers of a plain tiny model in `folder`, in place.

    Returns the plain checkpoint that means the same: every weight dequantised.
    """
    path = folder / "model.safetensors"
    plain = load_file(path)
    written: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        layer, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and layer.endswith("_proj") and layer not in skipped
        if not is_linear:
            written[name] = meant[name] = tensor
            continue
        spelled, meant[name] = spell(tensor.float())
        for suffix, value in spelled.items():
            written[f"{layer}.{suffix}"] = value.contiguous()
    save_file(written, path, metadata={"format": "pt"})
    config_path = folder / "config.json"
    fields = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**fields, "quantization_config": config}))
    return meant
