"""Reads how a published checkpoint says it is quantised, and refuses by name what is not known.

From `quantization_config` of `config.json` (or `compression_config`, or ModelOpt's own
`hf_quant_config.json`) to a `QuantPlan`. Which tensors a layer then has is in `quant_layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint_header import first_dtype
from compiled_engine.models.quant_fields import Section
from compiled_engine.models.quant_plan import HEAD, LinearScheme, QuantPlan
from compiled_engine.models.quant_torchao import read_torchao

Rules = tuple[tuple[tuple[str, ...], LinearScheme], ...]
_WEIGHT_ONLY = "activations stay as they are: products with mxfp4 activations are not there"
_DYNAMIC = "activations get a scale a token, where the checkpoint asks for one of all tokens"
_CACHE_SCALES = "its scales of keys and values are used with --kv-cache-dtype fp8_e4m3"
# Scales of keys and values, behind the attention layer's name or a projection's.
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


def read_quantization(values: dict[str, Any], folder: Path, family: str) -> QuantPlan | None:
    """The plan of a checkpoint; None if it is not quantised.

    Args:
        values: its `config.json`.
        folder: where ModelOpt's file may lie.
        family: model type; one has experts in a format of its own.

    Raises:
        ConfigError: a method or an option that is not supported; names the field.
    """
    raw = values.get("quantization_config")
    if raw is None and values.get("compression_config") is not None:
        raw = {**values["compression_config"], "quant_method": "compressed-tensors"}
    own_path = folder / "hf_quant_config.json"
    if raw is None and own_path.exists():
        try:
            own = json.loads(own_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{own_path} cannot be read as JSON: {error}", param="model"
            ) from error
        inner = Section(own, own_path.name).section("quantization")
        raw = {**(inner.values if inner else {}), "quant_method": "modelopt"}
    if raw is None:
        return None
    section = Section(raw, "quantization_config")
    if family == "gpt_oss" and section.values.get("quant_method") == "mxfp4":
        section.only("quant_method modules_to_not_convert")
        return None  # experts bring tensors of their own, and no linear layer is quantised
    method = section.one_of("quant_method", *_METHODS)
    plan = _METHODS[method](section, folder)
    if _has_cache_scales(section):
        plan = replace(plan, note="; ".join(filter(None, (plan.note, _CACHE_SCALES))))
    return plan


def _has_cache_scales(section: Section) -> bool:
    """Whether the checkpoint says that it has scales of keys and values."""
    scheme = section.section("kv_cache_scheme")
    if scheme is None:
        return section.values.get("kv_cache_quant_algo") is not None
    scheme.one_of("type", None, "float")
    scheme.one_of("num_bits", 8)
    scheme.one_of("strategy", None, "tensor")
    scheme.one_of("dynamic", None, False)
    scheme.one_of("symmetric", None, True)
    return True


def _torchao(section: Section, folder: Path) -> QuantPlan:
    return read_torchao(section, _scale_dtype(folder, "._weight_scale"))


def _fp8(section: Section, folder: Path) -> QuantPlan:
    """DeepSeek's blocks of 128 x 128, and one scale a matrix."""
    section.only(
        "quant_method activation_scheme fmt weight_block_size ignored_layers "
        "modules_to_not_convert scale_fmt kv_cache_scheme"
    )
    section.one_of("fmt", None, "e4m3", "float8_e4m3fn")
    section.one_of("scale_fmt", None, "float")
    block = section.one_of("weight_block_size", None, [128, 128])
    activation = section.one_of("activation_scheme", "dynamic", *([] if block else ["static"]))
    ignored = section.names("ignored_layers", "modules_to_not_convert")
    if block:
        scheme = LinearScheme(
            format="fp8_block", activation_format="fp8_block", layout="fp8_block_inv"
        )
    else:
        scheme = _fp8_tensor(is_static=activation == "static")
    return QuantPlan(
        method="fp8",
        rules=((("Linear",), scheme),),
        ignored=(*ignored, HEAD),
        unused=KV_SCALES,
        note="" if block or activation == "static" else _DYNAMIC,
    )


def _fp8_tensor(*, is_static: bool) -> LinearScheme:
    activation = "fp8_tensor" if is_static else "fp8_token"
    return LinearScheme(format="fp8_tensor", activation_format=activation, layout="fp8")


def _gptq(section: Section, folder: Path) -> QuantPlan:
    section.only(
        "quant_method bits group_size desc_act sym checkpoint_format format lm_head damp_percent "
        "static_groups true_sequential model_name_or_path model_file_base_name meta quantizer "
        "dataset tokenizer model_seqlen block_name_to_quantize module_name_preceding_first_block "
        "batch_size pad_token_id use_exllama use_cuda_fp16 max_input_length exllama_config "
        "cache_block_outputs backend pack_dtype mse damp_auto_increment uri version"
    )
    section.one_of("bits", 4)
    section.one_of("pack_dtype", None, "int32")
    field = "checkpoint_format" if section.values.get("checkpoint_format") else "format"
    version = section.one_of(field, None, "gptq", "gptq_v2")
    is_symmetric = section.one_of("sym", True, False)
    scheme = LinearScheme(
        format="int4_group",
        layout=version or "gptq",
        group_size=_group_size(section, "group_size"),
        has_zero=not is_symmetric,
        scale_dtype=_scale_dtype(folder, ".scales"),
        has_order=section.one_of("desc_act", None, False, True) is True,
    )
    ignored = () if section.values.get("lm_head") else (HEAD,)
    return QuantPlan(method="gptq", rules=((("Linear",), scheme),), ignored=ignored)


def _awq(section: Section, folder: Path) -> QuantPlan:
    section.only(
        "quant_method bits group_size zero_point version modules_to_not_convert backend do_fuse "
        "fuse_max_seq_len modules_to_fuse exllama_config"
    )
    section.one_of("bits", 4)
    section.one_of("zero_point", None, True)
    section.one_of("version", None, "gemm", "GEMM")
    scheme = LinearScheme(
        format="int4_group",
        layout="awq",
        group_size=_group_size(section, "group_size"),
        has_zero=True,
        scale_dtype=_scale_dtype(folder, ".scales"),
    )
    ignored = (*section.names("modules_to_not_convert"), HEAD)
    return QuantPlan(method="awq", rules=((("Linear",), scheme),), ignored=ignored)


def _group_size(section: Section, field: str) -> int:
    """Columns that share a scale; 0 for all of them."""
    value = section.values.get(field)
    if value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value % 8:
        section.refuse(field, f"is {value!r}; supported are -1 and multiples of 8")
    return value


def _scale_dtype(folder: Path, suffix: str) -> str:
    """Dtype of the checkpoint's scales: that of the first tensor whose name ends so."""
    return first_dtype(folder, suffix) or "bfloat16"


def _modelopt(section: Section, folder: Path) -> QuantPlan:
    section.only(
        "quant_method quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules "
        "ignore producer config_groups"
    )
    algorithm = section.one_of("quant_algo", "FP8", "NVFP4")
    section.one_of("kv_cache_quant_algo", None, "FP8")
    ignored = (*section.names("exclude_modules", "ignore"), HEAD)
    if algorithm == "FP8":
        scheme = _fp8_tensor(is_static=True)
    else:
        section.one_of("group_size", None, 16)
        scheme = LinearScheme(format="nvfp4", activation_format="nvfp4_tensor", layout="nvfp4")
    return QuantPlan(
        method="modelopt",
        rules=((("Linear",), scheme),),
        ignored=ignored,
        unused=KV_SCALES,
    )


def _compressed_tensors(section: Section, folder: Path) -> QuantPlan:
    section.only(
        "quant_method config_groups format ignore kv_cache_scheme quantization_status "
        "sparsity_config global_compression_ratio version"
    )
    section.one_of("quantization_status", None, "compressed")
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.one_of("format", None, "dense")
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        section.refuse("config_groups", "is missing")
    rules: Rules = ()
    notes = []
    for name in groups.values:
        group = groups.section(name)
        assert group is not None
        group.only("targets weights input_activations output_activations format")
        overall = section.values.get("format")
        scheme, note = _compressed_scheme(group, group.values.get("format") or overall, folder)
        notes.append(note)
        rules = (*rules, (group.names("targets"), scheme))
    # A layer's own name counts for more than its class.
    rules = tuple(sorted(rules, key=lambda rule: "Linear" in rule[0]))
    return QuantPlan(
        method="compressed-tensors",
        rules=rules,
        ignored=section.names("ignore"),
        unused=KV_SCALES,
        note=next((note for note in notes if note), ""),
    )


def _compressed_scheme(
    group: Section, packing: str | None, folder: Path
) -> tuple[LinearScheme, str]:
    """The scheme of one group, and what is to be said about it."""
    weights, inputs = group.section("weights"), group.section("input_activations")
    group.one_of("output_activations", None)
    if weights is None:
        group.refuse("weights", "is missing")
    for part in (weights, inputs):
        if part is not None:
            part.only(
                "num_bits type symmetric strategy group_size dynamic block_structure observer "
                "observer_kwargs scale_dtype zp_dtype actorder"
            )
    weights.one_of("dynamic", None, False)
    has_order = weights.one_of("actorder", None, False, "static", "weight", "group", True)
    kind = (weights.values.get("type"), weights.values.get("num_bits"))
    if kind == ("float", 8):
        return _compressed_fp8(weights, inputs)
    if kind == ("int", 8):
        return _compressed_int8(group, weights, inputs, packing)
    if kind == ("float", 4):
        return _compressed_fp4(group, weights, inputs, packing)
    if kind == ("int", 4):
        if inputs is not None:
            group.refuse("input_activations", "with 4-bit integer weights are not supported")
        if packing != "pack-quantized":
            group.refuse("format", f'is {packing!r}; 4-bit integers are "pack-quantized"')
        strategy = weights.one_of("strategy", "group", "channel")
        scheme = LinearScheme(
            format="int4_group",
            layout="int4_rows",
            group_size=_group_size(weights, "group_size") if strategy == "group" else 0,
            has_zero=weights.one_of("symmetric", True, False) is False,
            scale_dtype=_scale_dtype(folder, ".weight_scale"),
            has_order=has_order in ("group", True),
        )
        return scheme, ""
    weights.refuse("num_bits", f"is {kind[1]!r} of type {kind[0]!r}; supported are 4 and 8")


def _compressed_fp8(weights: Section, inputs: Section | None) -> tuple[LinearScheme, str]:
    weights.one_of("symmetric", None, True)
    strategy = weights.one_of("strategy", "tensor", "channel", "block")
    format, layout = {
        "tensor": ("fp8_tensor", "fp8"),
        "channel": ("fp8_channel", "fp8"),
        "block": ("fp8_block", "fp8_block"),
    }[strategy]
    if strategy == "block":
        weights.one_of("block_structure", [128, 128], "128x128")
    if inputs is None:
        return LinearScheme(format=format, layout=layout), ""
    if (inputs.values.get("type"), inputs.values.get("num_bits")) != ("float", 8):
        inputs.refuse("num_bits", f"is {inputs.values.get('num_bits')!r}; with fp8 weights it is 8")
    inputs.one_of("symmetric", None, True)
    is_static = inputs.one_of("dynamic", True, False) is False
    note = ""
    if strategy == "block":
        inputs.one_of("strategy", "group")
        inputs.one_of("group_size", 128)
        inputs.one_of("dynamic", True)
        activation = "fp8_block"
    elif is_static:
        inputs.one_of("strategy", "tensor")
        activation = "fp8_tensor"
    else:
        activation = "fp8_token"
        note = _DYNAMIC if inputs.one_of("strategy", "token", "tensor") == "tensor" else ""
    return LinearScheme(format=format, activation_format=activation, layout=layout), note


def _compressed_int8(
    group: Section, weights: Section, inputs: Section | None, packing: str | None
) -> tuple[LinearScheme, str]:
    if packing != "int-quantized":
        group.refuse("format", f'is {packing!r}; 8-bit integers are "int-quantized"')
    weights.one_of("symmetric", None, True)
    weights.one_of("strategy", "channel", "tensor")
    activation = ""
    if inputs is not None:
        inputs.one_of("type", "int")
        inputs.one_of("num_bits", 8)
        inputs.one_of("symmetric", None, True)
        inputs.one_of("strategy", "token")
        inputs.one_of("dynamic", True)
        activation = "int8_token"
    return LinearScheme(format="int8_channel", activation_format=activation, layout="int8"), ""


def _compressed_fp4(
    group: Section, weights: Section, inputs: Section | None, packing: str | None
) -> tuple[LinearScheme, str]:
    if packing == "nvfp4-pack-quantized":
        weights.one_of("strategy", "tensor_group")
        weights.one_of("group_size", 16)
        activation = "" if inputs is None else _fp4_activation(inputs)
        scheme = LinearScheme(format="nvfp4", activation_format=activation, layout="nvfp4_packed")
        return scheme, ""
    if packing == "mxfp4-pack-quantized":
        weights.one_of("strategy", "group")
        weights.one_of("group_size", 32)
        note = "" if inputs is None else _WEIGHT_ONLY
        return LinearScheme(format="mxfp4", layout="mxfp4_packed"), note
    group.refuse("format", f"is {packing!r}; 4-bit floats are nvfp4- or mxfp4-pack-quantized")


def _fp4_activation(inputs: Section) -> str:
    """4 bits in groups of 16, whose own scales are made on the way; that of all may be stored."""
    inputs.one_of("type", "float")
    inputs.one_of("num_bits", 4)
    inputs.one_of("symmetric", None, True)
    inputs.one_of("strategy", "tensor_group")
    inputs.one_of("group_size", 16)
    return "nvfp4_token" if inputs.one_of("dynamic", "local", True) is True else "nvfp4_tensor"


_METHODS: dict[str, Callable[[Section, Path], QuantPlan]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "torchao": _torchao,
}
