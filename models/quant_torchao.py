"""Reads the torchao configs that transformers writes, without torchao.

`quant_type` is a torchao config as JSON: `_type` names its class, `_data` holds its fields. Taken
are the ones whose tensors are plain: 8-bit values with a scale a row or a matrix, and two 4-bit
integers a byte with a scale and a zero for some columns. Other packings of 4 bits are made for the
kernels of one device and are refused by name.
"""

from __future__ import annotations

from typing import Any

from compiled_engine.models.quant_fields import Section
from compiled_engine.models.quant_plan import HEAD, LinearScheme, QuantPlan

# Class -> format of weights by granularity, of activations.
_INT8 = {"PerRow": "int8_channel"}
_FP8 = {"PerRow": "fp8_channel", "PerTensor": "fp8_tensor"}
_TYPES: dict[str, tuple[dict[str, str], str]] = {
    "Int8WeightOnlyConfig": (_INT8, ""),
    "Int8DynamicActivationInt8WeightConfig": (_INT8, "int8_token"),
    "Float8WeightOnlyConfig": (_FP8, ""),
    "Float8DynamicActivationFloat8WeightConfig": (_FP8, "fp8_token"),
}


_INT4 = "Int4WeightOnlyConfig"
_GROUPS = (32, 64, 128, 256)


def read_torchao(section: Section, scale_dtype: str) -> QuantPlan:
    """The plan of a `quantization_config` whose method is torchao.

    Args:
        section: the config.
        scale_dtype: of the scales in the checkpoint.

    Raises:
        ConfigError: a config, or a field of one, that is not supported; names it.
    """
    section.only("quant_method quant_type modules_to_not_convert")
    kinds = section.section("quant_type")
    if kinds is None or set(kinds.values) != {"default"}:
        section.refuse("quant_type", "must hold one config for all layers, called default")
    config = kinds.section("default")
    assert config is not None
    kind = config.one_of("_type", *_TYPES, _INT4)
    config.one_of("_version", 2)
    data = config.section("_data")
    if data is None:
        config.refuse("_data", "is missing")
    scheme = _int4(data, scale_dtype) if kind == _INT4 else _eight_bits(data, kind)
    ignored = (*section.names("modules_to_not_convert"), HEAD)
    return QuantPlan(method="torchao", rules=((("Linear",), scheme),), ignored=ignored)


def _int4(data: Section, scale_dtype: str) -> LinearScheme:
    data.only(
        "group_size set_inductor_config int4_packing_format int4_choose_qparams_algorithm "
        "int4_tile_packed_ntile"
    )
    packing = _name_of(data, "int4_packing_format") or "PLAIN"
    if packing.upper() != "PLAIN":
        data.refuse(
            "int4_packing_format",
            f"is {packing!r}, a layout for the kernels of one device; supported is 'PLAIN': save "
            "the model with that, or serve the unquantised model with --quantization int4",
        )
    group = data.one_of("group_size", *_GROUPS)
    return LinearScheme(
        format="int4_group",
        layout="torchao_int4",
        group_size=group,
        has_zero=True,
        has_offset=True,
        scale_dtype=scale_dtype,
    )


def _eight_bits(data: Section, kind: str) -> LinearScheme:
    data.only(
        "granularity set_inductor_config act_mapping_type weight_dtype activation_dtype mm_config "
        "kernel_preference packing_format alg_id"
    )
    _named(data, "act_mapping_type", None, "SYMMETRIC")
    _named(data, "packing_format", None, "PLAIN")
    for field in ("weight_dtype", "activation_dtype"):
        _named(data, field, None, "float8_e4m3fn")
    formats, activations = _TYPES[kind]
    granularity = _granularity(data)
    if granularity not in formats:
        data.refuse("granularity", f"is {granularity}; supported are {', '.join(formats)}")
    format = formats[granularity]
    return LinearScheme(
        format=format,
        activation_format=activations,
        layout="torchao_int8" if format == "int8_channel" else "torchao_fp8",
    )


def _name_of(section: Section, field: str) -> str | None:
    """Of an enumerated value, whose name stands in `_data`, or which is its name."""
    value = section.values.get(field)
    return value.get("_data") if isinstance(value, dict) else value


def _named(section: Section, field: str, *allowed: str | None) -> None:
    name = _name_of(section, field)
    if name not in allowed:
        section.refuse(field, f"is {name!r}; supported is {allowed[-1]!r}")


def _granularity(section: Section) -> str:
    """Of weights and activations, which must be one."""
    value: Any = section.values.get("granularity")
    listed = value if isinstance(value, list) else [value]
    names = {item.get("_type", "") if isinstance(item, dict) else "PerTensor" for item in listed}
    if len(names) != 1:
        section.refuse("granularity", f"is {sorted(names)}; one for weights and activations works")
    return str(names.pop())
