"""The kernel "packed" of `experts` on CPU tensors: its source, on an emulated GPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from compiled_engine.custom_ops import moe_packed_token
from compiled_engine.custom_ops.moe_config import PackedExpertsConfig, PackedTokenConfig
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.moe_packed import (
    KERNEL,
    SOURCE,
    ExpertArgs,
    arguments,
    num_slots,
    variant_of,
)
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library
from tests.helpers.emulated_packed import MACHINE


def _call(kernel: str, struct: str) -> str:
    return f"""
static void call(const void* args) {{ {kernel}(*(const {struct}*)args); }}
extern "C" int emulate(const void* args, unsigned size, int grid, unsigned order) {{
    if (size != sizeof({struct}))
        return emulator::wrong_size("{struct}", sizeof({struct}), size);
    return emulator::run(call, args, grid, THREADS, order);
}}
"""


def run_emulated(
    operands: ExpertOperands,
    first: PackedExpertsConfig,
    second: PackedExpertsConfig,
    *,
    order: int = cuda_emulator.ASCENDING,
) -> Tensor:
    """The result of both products and the sum over a token's experts, in x's dtype.

    Raises:
        EmulatorError: threads wait for ever or at different barriers.
    """
    x, num_pairs = operands.x, operands.ids.numel()
    inner = torch.full((num_pairs, operands.inner_size), float("nan"), dtype=x.dtype)
    results = torch.full((num_pairs, x.shape[1]), float("nan"), dtype=x.dtype)
    for config, left, out in ((first, x, inner), (second, inner, results)):
        variant = variant_of(operands, config, is_down=out is results)
        args = arguments(operands, left, out, variant)
        library = emulated_library(SOURCE, MACHINE, _call(KERNEL, "ExpertArgs"), variant.flags)
        grid = num_slots(operands) * args.product.num_tiles
        if library.emulate(ctypes.byref(args), ctypes.sizeof(ExpertArgs), grid, order):
            raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    pairs = results.view(*operands.ids.shape, -1).float()
    return (pairs * operands.weights.unsqueeze(-1)).sum(1).to(x.dtype)


def run_emulated_token(
    operands: ExpertOperands,
    first: PackedTokenConfig,
    second: PackedTokenConfig,
    *,
    order: int = cuda_emulator.ASCENDING,
) -> Tensor:
    """The result of the kernel for one token, on a GPU of three multiprocessors.

    Raises:
        EmulatorError: threads wait for ever or at different barriers.
    """
    x, source = operands.x, moe_packed_token.SOURCE
    inner = torch.full((operands.top_k, operands.inner_size), float("nan"), dtype=x.dtype)
    result = torch.full((1, x.shape[1]), float("nan"), dtype=x.dtype)
    call = _call(moe_packed_token.KERNEL, "ExpertTokenArgs")
    for config, left, out in ((first, x, inner), (second, inner, result)):
        variant = moe_packed_token.variant_of(operands, config, is_down=out is result)
        args = moe_packed_token.arguments(operands, left, out, variant)
        library = emulated_library(source, MACHINE, call, variant.flags)
        grid = moe_packed_token.grid_of(args, variant, 3)
        if library.emulate(ctypes.byref(args), ctypes.sizeof(args), grid, order):
            raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return result
