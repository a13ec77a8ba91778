"""Kernels of quantised linear layers: interpreted, emulated, compiled, chosen; on a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from compiled_engine.custom_ops import quant_kernels
from compiled_engine.custom_ops.cuda_build import compile_source
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.quant import QUANT_OPS, SCALED_PAIRS
from compiled_engine.custom_ops.quant_choice import (
    CANDIDATES,
    pick_config,
    pick_ring,
    quantized_linear_traits,
    scaled_linear_traits,
)
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.quant_packed import (
    MAX_SHARED_BYTES,
    PackedConfig,
    QuantOperands,
    launch_packed,
    variant_of,
)
from compiled_engine.custom_ops.quant_scaled import ScaledOperands, scaled_mm
from compiled_engine.custom_ops.reference_quant import quantize, scaled_linear
from compiled_engine.custom_ops.registry import Target
from compiled_engine.passes.choose_kernels import token_limits
from tests.helpers.cubin_copies import copies
from tests.helpers.cuda_emulator import DESCENDING
from tests.helpers.emulated_packed import run_emulated
from tests.helpers.interpreted import run_interpreted
from tests.helpers.quantized_linear import (
    CALLS,
    LIMITS,
    Call,
    exact_result,
    in_ring,
    prepare,
)
from tests.helpers.tolerances import assert_close

A100, H200 = Target("cuda", 80), Target("cuda", 90)
BF16 = torch.bfloat16


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def test_interpreted_kernels_equal_the_references():
    pytest.importorskip("triton")
    run_interpreted("tests.helpers.interpreted_quant")


@pytest.mark.parametrize("is_ring", [False, True], ids=["packed", "ring"])
@pytest.mark.parametrize("call", [pytest.param(call, id=call.label) for call in CALLS])
def test_emulated_kernel_equals_the_exact_result(call: Call, is_ring: bool):
    operands = call.operands()
    config = replace(call.config, is_ring=is_ring)
    prepared = prepare(operands, config)
    exact = exact_result(operands)
    first = run_emulated(operands, prepared, config, 3)
    error = relative_error(first, exact)
    assert error <= LIMITS[call.dtype], f"{error:.2e}"
    assert torch.equal(first, run_emulated(operands, prepared, config, 3, order=DESCENDING))


def meta_operands(
    format: str, activation_format: str, num_tokens: int, rows: int = 6144, size: int = 4096
) -> QuantOperands:
    """Shapes and dtypes of a call with a norm."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    weights = {
        "fp8_channel": (empty(rows, size, dtype=fp8), empty(rows, 1, dtype=fp32), None),
        "fp8_block": (
            empty(rows, size, dtype=fp8),
            empty(-(-rows // 128), size // 128, dtype=fp32),
        ),
        "int8_channel": (empty(rows, size, dtype=torch.int8), empty(rows, 1, dtype=fp32)),
        "mxfp4": (
            empty(rows, size // 2, dtype=torch.uint8),
            empty(rows, size // 32, dtype=torch.uint8),
        ),
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
    ("int8_channel", "int8_token"),
    ("nvfp4", ""),
    ("mxfp4", ""),
    ("int4_group", ""),
)
# Rows and columns of weights that sizes differ for: some rows, few, many, long ones.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))


def chosen_config(format: str, activation_format: str, num_tokens: int, shape=SHAPES[0]):
    """Arguments, the kernel chosen for them on a Hopper, and its sizes."""
    operands = meta_operands(format, activation_format, num_tokens, *shape)
    traits = {**quantized_linear_traits(operands), "has_nvrtc": 1}
    name = quant_kernels.select_kernel("quantized_linear", "", H200, BF16, traits)
    return operands, name, {"packed": pick_config, "ring": pick_ring}[name](traits)


def assert_compiles(operands: QuantOperands, config: PackedConfig) -> None:
    variant = variant_of(operands, prepare(operands, config), config)
    made = compile_source(variant.source, "sm_90a", variant.flags)
    log = made.log
    assert copies(made.code)[1] == 0, "ptxas encoded a copy with a cache policy wrongly"
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    assert spilled == 0, log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * 32 * config.warps * config.resident <= 65536


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
@pytest.mark.parametrize(("format", "activation_format"), FORMATS)
def test_chosen_sizes_compile_without_spills(format, activation_format, num_tokens):
    operands, _, config = chosen_config(format, activation_format, num_tokens)
    assert_compiles(operands, config)


@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_values_for_zeros_compile_without_spills(num_tokens):
    operands, _, config = chosen_config("int4_group", "", num_tokens)
    assert_compiles(operands._replace(zero=operands.scale), config)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize(("format", "activation_format"), [FORMATS[0], FORMATS[3]])
def test_sizes_of_other_weights_compile_without_spills(
    format, activation_format, num_tokens, shape
):
    operands, name, config = chosen_config(format, activation_format, num_tokens, shape)
    assert name == "ring"
    has_norm = shape[0] > 4096  # of what leads back to the residual there is none in front
    assert_compiles(operands if has_norm else operands._replace(norm_weight=None), config)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 16384), (152064, 256)])
@pytest.mark.parametrize("pick", [pick_config, pick_ring])
def test_sizes_fit_a_multiprocessor(pick, shape):
    for (format, activation), num_tokens in itertools.product(FORMATS, range(1, 33)):
        operands = meta_operands(format, activation, num_tokens, *shape)
        config = pick(quantized_linear_traits(operands))
        variant = variant_of(operands, prepare(operands, config), config)
        assert variant.shared_bytes <= MAX_SHARED_BYTES


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
        (Call("fp8_channel", "fp8_token", 1, 64, 256), "ring"),
        (Call("fp8_tensor", "fp8_tensor", 8, 64, 256), "ring"),
        (Call("fp8_channel", "fp8_token", 32, 64, 256), "ring"),
        (Call("fp8_channel", "fp8_token", 33, 64, 256), "scaled"),
        (Call("fp8_channel", "fp8_token", 0, 64, 256), "dequantized"),
        (Call("fp8_block", "fp8_block", 1, 64, 256), "packed"),
        (Call("fp8_block", "fp8_block", 40, 64, 256), "scaled"),
        (Call("fp8_channel", "", 40, 64, 256), "dequantized"),
        (Call("nvfp4", "", 1, 64, 256), "ring"),
        (Call("nvfp4", "", 2, 64, 256), "packed"),
        (Call("nvfp4", "", 8, 64, 256), "packed"),
        (Call("nvfp4", "", 9, 64, 256), "ring"),
        (Call("nvfp4", "", 32, 64, 256), "ring"),
        (Call("nvfp4", "", 33, 64, 256), "dequantized"),
        (Call("nvfp4", "fp8_token", 33, 64, 256), "dequantized"),
        (Call("mxfp4", "", 1, 64, 256), "packed"),
        (Call("int4_group", "", 32, 64, 256), "packed"),
        (Call("int8_channel", "int8_token", 32, 64, 256), "ring"),
        (Call("int8_channel", "int8_token", 40, 64, 256), "scaled"),
    ],
)
def test_choice_goes_by_tokens_and_formats(call: Call, name: str):
    traits = traits_of(call)
    assert choose(traits)[0] == name
    assert choose(traits, A100)[0] == "torch"
    # less shared memory than the ring takes
    for small in (Target("cuda", 89), Target("cuda", 120)):
        assert choose(traits, small)[0] == name.replace("ring", "packed")


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
    assert rejected["packed"] == rejected["ring"] == reason


def test_the_ring_needs_words_of_scales():
    name, rejected = choose({**TRAITS, "has_scale_words": 0})
    assert name == "packed"
    assert rejected["ring"] == "needs scales at multiples of 4 bytes, and as many"
    operands = Call("nvfp4", "", 3, 64, 256).operands()
    assert quantized_linear_traits(operands)["has_scale_words"]
    shifted = torch.zeros(64 * 16 + 2, dtype=torch.uint8)[2:].view(64, 16)
    operands = operands._replace(scale=shifted.view(torch.float8_e4m3fn))
    assert not quantized_linear_traits(operands)["has_scale_words"]
    # 35 rows of two scales of a byte: the last word would end behind them.
    assert not quantized_linear_traits(Call("nvfp4", "", 3, 35, 32).operands())["has_scale_words"]


def test_choice_says_why_not_the_ring():
    _, rejected = choose(traits_of(Call("nvfp4", "", 4, 64, 256)))
    assert rejected["ring"].startswith("was slower with nvfp4 and 2 to 8 tokens")
    _, rejected = choose(traits_of(Call("int4_group", "", 4, 64, 256)))
    assert rejected["ring"].startswith("was not faster with scales of blocks or groups")


@pytest.mark.parametrize("low", [1, 2, 9, 16, 17, 33])
def test_what_serves_a_limit_of_tokens_serves_all_below_it(low: int):
    """A list by tokens, as a pass writes it, names none that would refuse a step."""
    limits = token_limits(low, 600)
    for call in CALLS:
        operands = call.operands()

        def traits(num_tokens: int, operands=operands) -> dict[str, int]:
            x = operands.x.new_empty((num_tokens, operands.x.shape[1]))
            return quantized_linear_traits(operands._replace(x=x, residual=None))

        assert_serve_ranges("quantized_linear", traits, limits, low)
    weight = torch.empty(256, 512, dtype=torch.int8)
    for format, activation in SCALED_PAIRS:
        dtype = torch.int8 if format == "int8_channel" else torch.float8_e4m3fn

        def scaled(num_tokens: int, dtype=dtype, pair=(format, activation)) -> dict[str, int]:
            q = torch.empty(num_tokens, 512, dtype=dtype)
            return scaled_linear_traits(q, weight, torch.ones(256, 1), *pair, H200)

        assert_serve_ranges("scaled_linear", scaled, limits, low)


def assert_serve_ranges(family: str, traits, limits: list[int], low: int) -> None:
    for candidate in (c for c in CANDIDATES if c.family == family):
        for first, limit in itertools.pairwise([low - 1, *limits]):
            if candidate.rejects({**traits(limit), "has_nvrtc": 1}) is None:
                for count in range(first + 1, limit):
                    reason = candidate.rejects({**traits(count), "has_nvrtc": 1})
                    assert reason is None, f"{candidate.name} of {count} tokens {reason}"


def test_traits_say_what_is_in_the_way():
    operands = Call("int4_group", "", 3, 64, 256, "r").operands()
    assert quantized_linear_traits(operands)["has_fine_scales"]
    other = operands._replace(scale=operands.scale.float())
    assert not quantized_linear_traits(other)["has_fine_scales"]
    other = operands._replace(zero=operands.scale.float())
    assert not quantized_linear_traits(other)["has_fine_scales"]
    assert quantized_linear_traits(operands._replace(zero=operands.scale))["has_fine_scales"]
    shifted = operands._replace(x=torch.zeros(3, 280, dtype=BF16)[:, 4:260])
    assert not quantized_linear_traits(shifted)["is_aligned"]
    plain = quantized_linear_traits(operands)
    assert plain["is_aligned"]
    assert (plain["num_tokens"], plain["rows"], plain["size"]) == (3, 64, 256)
    mixed = operands._replace(residual=torch.zeros(3, 64))
    assert not quantized_linear_traits(mixed)["has_one_dtype"]


def test_a_list_by_tokens_names_one_for_each():
    for num_tokens, name in ((8, "ring"), (32, "packed"), (100, "dequantized")):
        traits = {**TRAITS, "num_tokens": num_tokens}
        wanted = "8=ring,32=packed,128=dequantized"
        assert quant_kernels.select_kernel("quantized_linear", wanted, H200, BF16, traits) == name


def test_unknown_or_unfit_kernels_are_refused():
    with pytest.raises(ValueError, match="has no kernel fast; there are ring, packed"):
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


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 6, 40, 41])
def test_scales_of_blocks_reach_the_library_in_whole_fours(num_tokens, monkeypatch):
    asked = []

    def library(q, weight, left, right, *, bias, out_dtype, use_fast_accum):
        asked.append((q.shape[0], left.stride(), use_fast_accum))
        pair = ("fp8_block", "fp8_block")
        return scaled_linear(q, left.contiguous(), weight.T, right.T, bias, *pair, out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", library)
    q, scale = quantize(torch.randn(num_tokens, 256), "fp8_block", None)
    packed = quantize_weight(torch.randn(128, 256), "fp8_block")
    args = (q, scale, packed.weight, packed.scale, torch.randn(128))
    operands = ScaledOperands(*args, "fp8_block", "fp8_block", torch.float32)
    got = scaled_mm(operands)
    padded = -(-num_tokens // 4) * 4
    assert asked == [(padded, (1, padded), False)]
    assert_close("padded", got, scaled_linear(*operands))


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("call", [pytest.param(call, id=call.label) for call in CALLS])
def test_packed_kernel_equals_the_exact_result(call: Call):
    operands = call.operands("cuda")
    exact = exact_result(operands)
    traits = quantized_linear_traits(operands)
    for config in (call.config, in_ring(call.config), pick_config(traits), pick_ring(traits)):
        error = relative_error(launch_packed(operands, config), exact)
        assert error <= LIMITS[call.dtype], f"{config}: {error:.2e}"
    for is_ring in (False, True):
        apart = PackedConfig(1, 4, 1, is_apart=True, is_ring=is_ring)
        assert relative_error(launch_packed(operands, apart), exact) <= LIMITS[call.dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 15, 17, 33, 34, 35, 129])
@pytest.mark.parametrize(("format", "activation_format"), SCALED_PAIRS)
def test_products_of_bytes_take_any_number_of_tokens(format, activation_format, num_tokens):
    generator = torch.Generator("cpu").manual_seed(num_tokens)
    x = torch.randn(num_tokens, 512, generator=generator).to(BF16)
    packed = quantize_weight(torch.randn(256, 512, generator=generator).to(BF16), format)
    q, scale = quantize(x, activation_format, None)
    args = (q, scale, packed.weight, packed.scale)
    exact = scaled_linear(*args, None, format, activation_format, torch.float32).double()
    on_gpu = [t.cuda() for t in args]
    for impl in [c.name for c in CANDIDATES if c.family == "scaled_linear"]:
        traits = scaled_linear_traits(on_gpu[0], *on_gpu[2:], format, activation_format)
        if next(c for c in CANDIDATES if c.name == impl).rejects(traits) is None:
            got = quant_kernels.scaled_linear_cuda(
                *on_gpu, None, format, activation_format, BF16, impl
            )
            assert relative_error(got.cpu(), exact) <= 4e-3, impl


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
