"""Kernels of quantised linear layers: interpreted, emulated, compiled, chosen; on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from compiled_engine.custom_ops import quant_kernels
from compiled_engine.custom_ops.cuda_build import compile_source
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.quant import QUANT_OPS
from compiled_engine.custom_ops.quant_choice import (
    CANDIDATES,
    pick_config,
    quantized_linear_traits,
    scaled_linear_traits,
)
from compiled_engine.custom_ops.quant_packed import (
    MAX_SHARED_BYTES,
    SOURCE,
    PackedConfig,
    QuantOperands,
    launch_packed,
    variant_of,
)
from compiled_engine.custom_ops.registry import Target
from tests.helpers.cubin_copies import copies
from tests.helpers.cuda_emulator import DESCENDING
from tests.helpers.emulated_packed import run_emulated
from tests.helpers.interpreted import run_interpreted
from tests.helpers.quantized_linear import CALLS, LIMITS, Call, exact_result, prepare
from tests.helpers.tolerances import assert_close

A100, H200 = Target("cuda", 80), Target("cuda", 90)
BF16 = torch.bfloat16


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def test_interpreted_kernels_equal_the_references():
    pytest.importorskip("triton")
    run_interpreted("tests.helpers.interpreted_quant")


@pytest.mark.parametrize("call", [pytest.param(call, id=call.label) for call in CALLS])
def test_emulated_kernel_equals_the_exact_result(call: Call):
    operands = call.operands()
    prepared = prepare(operands, call.config)
    exact = exact_result(operands)
    first = run_emulated(operands, prepared, call.config, 3)
    error = relative_error(first, exact)
    assert error <= LIMITS[call.dtype], f"{error:.2e}"
    assert torch.equal(first, run_emulated(operands, prepared, call.config, 3, order=DESCENDING))


def meta_operands(
    format: str, activation_format: str, num_tokens: int, rows: int = 6144, size: int = 4096
) -> QuantOperands:
    """Shapes and dtypes of a call with a norm."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    weights = {
        "fp8_channel": (empty(rows, size, dtype=fp8), empty(rows, 1, dtype=fp32), None),
        "fp8_block": (empty(rows, size, dtype=fp8), empty(rows // 128, size // 128, dtype=fp32)),
        "nvfp4": (empty(rows, size // 2, dtype=torch.uint8), empty(rows, size // 16, dtype=fp8)),
        "int4_group": (empty(rows, size // 2, dtype=torch.uint8), empty(rows, size // 128)),
    }
    weight, scale = weights[format][:2]
    return QuantOperands(
        empty(num_tokens, size), weight, scale, None, None, None, None, format,
        activation_format, empty(size), 1e-6, None, False,
    )  # fmt: skip


FORMATS = (
    ("fp8_channel", "fp8_token"),
    ("fp8_block", "fp8_block"),
    ("nvfp4", ""),
    ("int4_group", ""),
)


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
@pytest.mark.parametrize(("format", "activation_format"), FORMATS)
def test_chosen_sizes_compile_without_spills(format, activation_format, num_tokens):
    operands = meta_operands(format, activation_format, num_tokens)
    traits = {**quantized_linear_traits(operands), "num_tokens": num_tokens}
    config = pick_config(traits)
    variant = variant_of(operands, prepare(operands, config), config)
    assert variant.shared_bytes <= MAX_SHARED_BYTES
    made = compile_source(SOURCE, "sm_90a", variant.flags)
    log = made.log
    assert copies(made.code)[1] == 0, "ptxas encoded a copy with a cache policy wrongly"
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    assert spilled == 0, log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * 32 * config.warps * config.resident <= 65536


def traits_of(call: Call) -> dict[str, int]:
    return {**quantized_linear_traits(call.operands()), "has_nvrtc": 1}


TRAITS = traits_of(Call("fp8_channel", "fp8_token", 8, 64, 256, "nr"))


def choose(traits: dict[str, int], target: Target = H200) -> tuple[str, dict[str, str]]:
    choice = make_registry().choose("quantized_linear", "few", target, BF16, traits)
    name = quant_kernels.select_kernel("quantized_linear", "", target, BF16, traits)
    assert name == choice.candidate.name
    return name, dict(choice.rejected)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Call("fp8_channel", "fp8_token", 1, 64, 256), "packed"),
        (Call("fp8_channel", "fp8_token", 33, 64, 256), "scaled"),
        (Call("fp8_channel", "fp8_token", 0, 64, 256), "dequantized"),
        (Call("fp8_block", "fp8_block", 40, 64, 256), "scaled"),
        (Call("fp8_channel", "", 40, 64, 256), "dequantized"),
        (Call("nvfp4", "", 32, 64, 256), "packed"),
        (Call("nvfp4", "", 33, 64, 256), "dequantized"),
        (Call("nvfp4", "fp8_token", 33, 64, 256), "dequantized"),
        (Call("int8_channel", "int8_token", 40, 64, 256), "scaled"),
    ],
)
def test_choice_goes_by_tokens_and_formats(call: Call, name: str):
    traits = traits_of(call)
    assert choose(traits)[0] == name
    assert choose(traits, A100)[0] == "torch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 33}, "takes 1 to 32 tokens, not 33"),
        ({"size": 264}, "needs a multiple of 16 columns, these are 264"),
        ({"has_fine_scales": 0}, "needs fp32 scales, of int4_group the dtype of x"),
        ({"has_whole_groups": 0}, "needs groups of a power of two of columns, from 32 on"),
        ({"is_aligned": 0}, "needs rows of x and weights at multiples of 16 bytes"),
        ({"weight_bytes": 2**32}, "counts bytes in 32 bits, too few for this weight"),
        ({"num_tokens": 1, "size": 16400}, "takes up to 16384 columns of 1 token, not 16400"),
        ({"has_nvrtc": 0}, "needs the cuda-bindings package"),
    ],
)
def test_choice_says_why_not_packed(change: dict[str, int], reason: str):
    name, rejected = choose({**TRAITS, **change})
    assert name == "scaled"
    assert rejected["packed"] == reason


def test_traits_say_what_is_in_the_way():
    operands = Call("int4_group", "", 3, 64, 256, "r").operands()
    assert quantized_linear_traits(operands)["has_fine_scales"]
    other = operands._replace(scale=operands.scale.float())
    assert not quantized_linear_traits(other)["has_fine_scales"]
    shifted = operands._replace(x=torch.zeros(3, 280, dtype=BF16)[:, 4:260])
    assert not quantized_linear_traits(shifted)["is_aligned"]
    plain = quantized_linear_traits(operands)
    assert plain["is_aligned"]
    assert (plain["num_tokens"], plain["rows"], plain["size"]) == (3, 64, 256)
    mixed = operands._replace(residual=torch.zeros(3, 64))
    assert not quantized_linear_traits(mixed)["has_one_dtype"]


def test_a_list_by_tokens_names_one_for_each():
    for num_tokens, name in ((8, "packed"), (32, "packed"), (100, "dequantized")):
        traits = {**TRAITS, "num_tokens": num_tokens}
        wanted = "32=packed,128=dequantized"
        assert quant_kernels.select_kernel("quantized_linear", wanted, H200, BF16, traits) == name


def test_unknown_or_unfit_kernels_are_refused():
    with pytest.raises(ValueError, match="has no kernel fast; there are packed, scaled"):
        quant_kernels.select_kernel("quantized_linear", "fast", H200, BF16, TRAITS)
    with pytest.raises(ValueError, match="kernel packed takes 1 to 32 tokens, not 40"):
        quant_kernels.select_kernel(
            "quantized_linear", "packed", H200, BF16, {**TRAITS, "num_tokens": 40}
        )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "scaled_mm"),
        ({"size": 4104, "stored": 4104}, "triton"),
        ({"in_blocks": 1}, "scaled_mm"),
        ({"in_blocks": 1, "size": 4224, "stored": 4224}, "triton"),
        ({"in_blocks": 1, "arch": 100}, "triton"),
        ({"has_token_blocks": 1, "in_blocks": 1}, "triton"),
        ({"is_fp8": 0}, "triton"),
        ({"is_fp8": 0, "is_int8": 1}, "int_mm"),
        ({"is_fp8": 0, "is_int8": 1, "num_tokens": 16}, "triton"),
        ({"is_fp8": 0, "is_int8": 1, "rows": 6140}, "triton"),
        ({"is_scaled_pair": 0, "is_fp8": 0}, "torch"),
    ],
)
def test_products_of_bytes_go_to_the_library_where_it_takes_them(change, name):
    q, weight = (torch.zeros(n, 4096, dtype=torch.float8_e4m3fn) for n in (40, 144))
    traits = scaled_linear_traits(q, weight, torch.ones(144, 1), "fp8_channel", "fp8_token")
    traits |= {"arch": 90, "rows": 6144}
    found = quant_kernels.select_kernel("scaled_linear", "", H200, BF16, {**traits, **change})
    assert found == name


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("call", [pytest.param(call, id=call.label) for call in CALLS])
def test_packed_kernel_equals_the_exact_result(call: Call):
    operands = call.operands("cuda")
    exact = exact_result(operands)
    for config in (call.config, pick_config(quantized_linear_traits(operands))):
        error = relative_error(launch_packed(operands, config), exact)
        assert error <= LIMITS[call.dtype], f"{config}: {error:.2e}"
    apart = PackedConfig(1, 4, 1, is_apart=True)
    assert relative_error(launch_packed(operands, apart), exact) <= LIMITS[call.dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("spec", QUANT_OPS, ids=lambda spec: spec.name)
def test_every_candidate_agrees_with_the_plain_body(spec):
    device = torch.device("cuda")
    family = [c.name for c in CANDIDATES if c.family == spec.name] or [None]
    for args in spec.example_inputs(BF16, device, 0):
        expected = spec.reference(*args)
        for name in family:
            try:
                got = spec.overload(*args[:-1], name) if name else spec.overload(*args)
            except ValueError:
                if name is None:
                    raise
                continue  # it says that it cannot
            pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
            for mine, theirs in pairs:
                assert mine.dtype == theirs.dtype
                # q: another order of a sum may move a value to its neighbour
                factor = 16.0 if mine.element_size() > 1 else 40.0
                assert_close(f"{spec.name} {name}", mine.to(BF16), theirs.float(), factor=factor)
