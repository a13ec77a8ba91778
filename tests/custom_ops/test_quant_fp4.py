"""4-bit weights times 4-bit activations: order of scales, quantiser, product, choice; on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_engine.custom_ops import quant_fp4, quant_kernels, reference_quant
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.quant import FP4_PAIRS
from compiled_engine.custom_ops.quant_choice import CANDIDATES, quantized_linear_traits
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.reference_fp4 import (
    tile_places,
    tile_scales,
    tiled_shape,
    untile_scales,
)
from compiled_engine.custom_ops.registry import Target
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tolerances import assert_close

H200, B200, RTX5090 = (Target("cuda", arch) for arch in (90, 100, 120))
BF16, E4M3, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
SHAPES = [(1, 1), (128, 4), (37, 12), (130, 13), (257, 6)]


def random_scales(rows: int, groups: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 0x7E, (rows, groups), generator=generator)
    return codes.to(torch.uint8).view(E4M3)


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_tiles_are_those_of_the_library(rows: int, groups: int):
    """By the formula of cuBLAS's documentation, one scale after the other."""
    scale = random_scales(rows, groups)
    tiled = tile_scales(scale)
    assert tiled.shape == tiled_shape(rows, groups)
    expected = torch.zeros(tiled.numel(), dtype=torch.uint8)
    across = -(-groups // 4)
    for outer in range(rows):
        for inner in range(groups):
            tile = outer // 128 * across + inner // 4
            offset = outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4
            expected[512 * tile + offset] = scale.view(torch.uint8)[outer, inner]
    assert torch.equal(tiled.view(torch.uint8).flatten(), expected)
    assert torch.equal(
        untile_scales(tiled, rows, groups).view(torch.uint8), scale.view(torch.uint8)
    )


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
@pytest.mark.parametrize("first", [0, 5, 128, 200])
def test_places_are_those_of_the_tiles(rows: int, groups: int, first: int):
    scale = random_scales(first + rows, groups).view(torch.uint8)
    tiled = tile_scales(scale.view(E4M3)).view(torch.uint8)
    places = tile_places(first, rows, tiled.shape[1], scale.device)
    assert torch.equal(tiled.flatten()[places][:, :groups], scale[first:])


def test_values_of_a_row_do_not_depend_on_other_rows():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    whole = reference_quant.rounded(x * torch.tensor([1, 1e4, 1, 1, 1])[:, None], "nvfp4_token",
                                    None, FP32)  # fmt: skip
    assert torch.equal(whole[2:3], reference_quant.rounded(x[2:3], "nvfp4_token", None, FP32))


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_rows_of_any_size_are_quantised_alike(factor: float):
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    values = reference_quant.rounded(x * factor, "nvfp4_token", None, FP32) / factor
    groups = x.unflatten(1, (-1, 16))
    step = groups.abs().amax(-1, keepdim=True) / 6
    error = (values.unflatten(1, (-1, 16)) - groups).abs()
    assert (error <= 1.1 * step).all()  # the largest codes are 4 and 6


def test_a_static_scale_saturates():
    x = torch.full((1, 16), 1e4)
    values = reference_quant.rounded(x, "nvfp4_tensor", torch.tensor([1.0]), FP32)
    assert torch.equal(values, torch.full((1, 16), 6 * 448.0))


def test_interpreted_kernels_equal_the_references():
    pytest.importorskip("triton")
    run_interpreted("tests.helpers.interpreted_fp4")


@pytest.mark.parametrize("arch", [90, 100])
def test_the_quantiser_compiles(arch: int):
    """For a device that is not here: what the interpreter takes is not all that a compiler does."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from compiled_engine.custom_ops.quant_fp4_triton import _quantize_kernel as kernel

    constants = {
        "SIZE": 200, "STORED": 224, "TILED_GROUPS": 16, "BLOCK": 256, "ROWS": 2, "HAS_NORM": True,
        "HAS_STATIC": False, "LEAST": 2.0**-64, "ROUND_FIRST": False, "PDL": True,
    }  # fmt: skip
    signature = {
        "x": "*bf16", "weight": "*bf16", "static_scale": "*fp32", "q": "*u8", "scale": "*u8",
        "token_scale": "*fp32", "num_rows": "i32", "eps": "fp32", "x_stride": "i32",
    } | dict.fromkeys(constants, "constexpr")  # fmt: skip
    assert list(signature) == kernel.arg_names
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 2})
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]
    assert ".local" not in made.asm["ptx"]


def operands(
    num_tokens: int, rows: int, size: int, device: str = "cpu", **more: Any
) -> QuantOperands:
    """A call with a static scale where `more` has one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(BF16).to(device)

    packed = quantize_weight(normal(rows, size) * size**-0.5, "nvfp4_tiles")
    static = more.pop("input_scale", None)
    given = {"bias": None, "norm_weight": None, "residual": None, "is_gated": False, **more}
    return QuantOperands(
        x=normal(num_tokens, size),
        weight=packed.weight,
        scale=packed.scale,
        zero=None,
        global_scale=packed.global_scale,
        input_scale=static,
        format="nvfp4_tiles",
        activation_format="nvfp4_token" if static is None else "nvfp4_tensor",
        eps=1e-6,
        **given,
    )


@pytest.mark.parametrize(
    ("num_tokens", "rows", "size"), [(1, 48, 200), (130, 16, 64), (5, 272, 96)]
)
def test_the_library_is_called_as_it_says(num_tokens: int, rows: int, size: int):
    """PyTorch's own checks of shapes, dtypes, strides and orders, of tensors without values."""
    with FakeTensorMode():
        x = torch.empty(num_tokens, size, dtype=BF16, device="cuda")
        stored = size + -size % 32
        q, scale, token_scale = torch.ops.ce.quantize_nvfp4(x, None)
        weight = torch.empty(rows, stored // 2, dtype=torch.uint8, device="cuda")
        tiled = tiled_shape(rows, stored // 16)
        weight_scale = torch.empty(tiled, dtype=E4M3, device="cuda")
        y = quant_fp4.fp4_product(q, scale, weight, weight_scale, BF16)
        assert (y.shape, y.dtype) == ((num_tokens, rows), BF16)
        assert token_scale.shape == (num_tokens, 1)
        short = torch.empty(tiled[0], tiled[1] - 4, dtype=E4M3, device="cuda")
        with pytest.raises(Exception, match=r"scal|cuda"):
            quant_fp4.fp4_product(q, scale, weight, short, BF16)


def reasons(call: QuantOperands, target: Target) -> dict[str, str | None]:
    traits = {**quantized_linear_traits(call), "has_nvrtc": 1}
    few = [c for c in CANDIDATES if c.family == "quantized_linear"]
    return {c.name: c.rejection(target, BF16, traits) for c in few}


@pytest.mark.parametrize("num_tokens", [1, 32, 4096])
@pytest.mark.parametrize(
    ("target", "name"), [(H200, "dequantized"), (B200, "fp4"), (RTX5090, "fp4")]
)
def test_choice_goes_by_what_the_device_multiplies(target: Target, name: str, num_tokens: int):
    call = operands(num_tokens, 48, 64)
    traits = {**quantized_linear_traits(call), "has_nvrtc": 1}
    choice = make_registry().choose("quantized_linear", "few", target, BF16, traits)
    assert choice.candidate.name == name
    found = reasons(call, target)
    if name != "fp4":
        assert found["fp4"] == "needs sm_100, this is sm_90"
    assert found["packed"] == "reads scales by rows, not in tiles"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (operands(1, 40, 64), "needs a multiple of 16 outputs, not 40"),
        (operands(1, 48, 64)._replace(activation_format=""), "needs nvfp4 weights in tiles and"),
        (operands(0, 48, 64), "needs a token"),
        (operands(1, 48, 64, bias=torch.zeros(48)), "needs the same dtype"),
    ],
)
def test_choice_says_why_not_fp4(call: QuantOperands, reason: str):
    found = reasons(call, B200)["fp4"]
    assert found is not None
    assert found.startswith(reason)


def test_weights_alone_in_4_bits_stay_with_kernels_that_read_them():
    packed = quantize_weight(torch.zeros(48, 64), "nvfp4")
    call = operands(1, 48, 64)._replace(
        format="nvfp4", activation_format="", weight=packed.weight, scale=packed.scale
    )
    assert reasons(call, B200)["ring"] is None
    assert reasons(call, B200)["fp4"] == "needs nvfp4 weights in tiles and nvfp4 activations"


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("num_tokens", [1, 5, 128, 129, 300])
@pytest.mark.parametrize("is_static", [False, True])
def test_the_layer_equals_its_plain_body(num_tokens: int, is_static: bool):
    """By the library's product where the device has one, else by 16-bit floats."""
    device = torch.device("cuda")
    static = torch.tensor([0.002], device=device) if is_static else None
    more = {
        "input_scale": static,
        "bias": torch.ones(144, dtype=BF16, device=device),
        "norm_weight": torch.ones(200, dtype=BF16, device=device),
    }
    call = operands(num_tokens, 144, 200, "cuda", **more)
    got = quant_kernels.quantized_linear_cuda(*call)
    # a norm's sum in another order moves a value to another code now and then
    assert_close("layer", got, reference_quant.quantized_linear(*call), factor=32)
    assert (call.format, call.activation_format) in FP4_PAIRS
