"""Rounding rules of the quantisers, and the codes of packed weights, against scalar spellings."""

from __future__ import annotations

import math

import pytest
import torch

from compiled_engine.custom_ops.quant_pack import (
    quantize_weight,
    stored_columns,
    unpacked_weight,
)
from compiled_engine.custom_ops.reference_quant import (
    MIN_AMAX,
    WEIGHT_FORMATS,
    dequantize,
    quantize_fp8,
    quantize_int8,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
F32 = torch.float32


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# Largest error of a value, as a share of the largest value that shares its scale.
LARGEST = {
    "fp8_tensor": 2**-4,
    "fp8_channel": 2**-4,
    "fp8_block": 2**-4,
    "fp8_token_block": 2**-4,
    "int8_channel": 0.51 / 127,
    "int4_group": 0.3,  # clipping an outlier may be worth it
    "nvfp4": 1.1 / 6,
    "nvfp4_tiles": 1.1 / 6,
    "mxfp4": 0.36,
}


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(5, 96), (130, 200), (1, 16)])
def test_a_packed_weight_is_near_the_weight(format: str, shape: tuple[int, int]):
    values = weight(*shape)
    packed = quantize_weight(values, format)
    got = unpacked_weight(packed, format, shape[1], F32)
    assert got.shape == shape
    assert (got - values).abs().max() <= LARGEST[format] * values.abs().max()
    assert packed.weight.is_contiguous()
    row_bytes = packed.weight.shape[1] * packed.weight.element_size()
    assert row_bytes % 16 == 0, "rows start at multiples of 16 bytes"


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_zeros_stay_zeros(format: str):
    packed = quantize_weight(torch.zeros(3, 64), format)
    assert torch.equal(unpacked_weight(packed, format, 64, F32), torch.zeros(3, 64))


def test_every_4_bit_code_is_the_nearest_one():
    """Against a search through all codes; at a tie the code with the even mantissa."""
    steps = torch.arange(0, 7.01, 0.0625)
    values = torch.cat((steps, -steps))
    values = torch.nn.functional.pad(values, (0, -len(values) % 32))
    scale_of_one = torch.full((len(values) // 32,), 127, dtype=torch.uint8)
    # A group that holds 6 and nothing larger has the scale 1.
    groups = values.clamp(-6, 6).view(-1, 32).clone()
    groups[:, -1] = 6.0
    packed = quantize_weight(groups, "mxfp4")
    assert torch.equal(packed.scale[:, 0], scale_of_one)
    got = unpacked_weight(packed, "mxfp4", 32, F32)
    for value, rounded in zip(groups.flatten().tolist(), got.flatten().tolist(), strict=True):
        nearest = min(E2M1, key=lambda c: (abs(abs(value) - c), E2M1.index(c) % 2))
        assert rounded == math.copysign(nearest, value), value


def test_low_nibbles_come_first():
    q = torch.tensor([[0x21, 0x43] * 8], dtype=torch.uint8)
    got = dequantize(q, torch.ones(1, 1), None, None, "int4_group", 4, F32)
    assert got.tolist() == [[1 - 8.0, 2 - 8.0, 3 - 8.0, 4 - 8.0]]
    zero = torch.tensor([[3]], dtype=torch.uint8)
    half, three = torch.full((1, 1), 0.5), torch.full((1, 1), 3.0)
    got = dequantize(q, half, three, None, "int4_group", 4, F32)
    assert got.tolist() == [[-0.5, 0.0, 0.5, 1.0]]
    got = dequantize(q, torch.full((1, 1), 0.5), zero, None, "int4_group", 3, F32)
    assert got.tolist() == [[-1.0, -0.5, 0.0]]


def test_all_4_bit_floats_and_powers():
    codes = torch.arange(16, dtype=torch.uint8)
    q = (codes[0::2] | (codes[1::2] << 4)).repeat(2).view(1, 16)
    for exponent in (0, 1, 120, 127, 130, 251):
        scale = torch.tensor([[exponent]], dtype=torch.uint8)
        got = dequantize(q, scale, None, None, "mxfp4", 16, torch.float64)
        expected = [math.copysign(2.0 ** (exponent - 127), s) * v for s in (1, -1) for v in E2M1]
        assert got.tolist() == [expected], exponent


@pytest.mark.parametrize("kind", ["tensor", "token", "block"])
def test_fp8_rounding_rule(kind: str):
    x = weight(4, 200) * torch.tensor([[1.0], [1e-3], [1e3], [0.0]])
    q, scale = quantize_fp8(x, kind, None)
    groups = {"tensor": (1,), "token": (4, 1), "block": (4, 2)}
    assert scale.shape == groups[kind]
    for row in range(4):
        for column in range(0, 200, 37):
            near = {
                "tensor": x,
                "token": x[row],
                "block": x[row, column // 128 * 128 :][: 128 if column < 128 else 72],
            }[kind]
            step = max(float(near.abs().max()), MIN_AMAX) / 448
            expected = torch.tensor(float(x[row, column]) / step).to(torch.float8_e4m3fn)
            got = q[row, column].float()
            # One code apart at most: the rule multiplies by the inverse.
            assert abs(float(got) - float(expected.float())) <= 2**-3 * abs(float(expected)) + 1e-6
    assert (q[3].float() == 0).all()
    assert (scale > 0).all()


def test_a_static_scale_saturates():
    q, scale = quantize_fp8(torch.tensor([[1.0, -900.0, 900.0]]), "tensor", torch.tensor([1.0]))
    assert q.float().tolist() == [[1.0, -448.0, 448.0]]
    assert scale.tolist() == [1.0]


def test_int8_rounds_ties_to_even_and_never_uses_minus_128():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -127.0, -0.5]])
    q, scale = quantize_int8(x)
    assert scale.tolist() == [[1.0]]
    assert q.tolist() == [[127, 0, 2, 2, -127, 0]]


def test_scales_that_are_rounded_are_rounded_first():
    """Codes are the nearest ones for the bf16 scale that is stored."""
    values = weight(3, 256).bfloat16()
    packed = quantize_weight(values, "int4_group")
    assert packed.scale.dtype == torch.bfloat16
    got = unpacked_weight(packed, "int4_group", 256, F32)
    step = packed.scale.float().repeat_interleave(128, 1)
    inside = values.float().abs() < 7 * step
    assert ((got - values.float()).abs() <= 0.5001 * step)[inside].all()


def test_two_exponents_are_tried():
    """A group whose largest value lies just above a power's range clips it: less error in all."""
    group = torch.full((1, 32), 0.5)
    group[0, 0] = 6.2
    packed = quantize_weight(group, "mxfp4")
    assert int(packed.scale[0, 0]) == 127
    got = unpacked_weight(packed, "mxfp4", 32, F32)
    assert got[0, 0] == E2M1[-1]


@pytest.mark.parametrize(
    ("format", "size", "group", "stored"),
    [
        ("fp8_channel", 100, 1, 112),
        ("int8_channel", 96, 1, 96),
        ("nvfp4", 80, 16, 96),
        ("mxfp4", 96, 32, 96),
        ("int4_group", 576, 128, 640),
        ("int4_group", 100, 40, 160),
    ],
)
def test_stored_columns(format: str, size: int, group: int, stored: int):
    assert stored_columns(format, size, group) == stored
