"""The kernels "packed" and "ring" of `quantized_linear` on CPU tensors: their sources, emulated."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from compiled_engine.custom_ops.quant_packed import (
    KERNEL,
    PackedArgs,
    PackedConfig,
    Prepared,
    QuantOperands,
    arguments,
    grid_of,
    variant_of,
)
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library

MACHINE = ("emulated_matrix.h", "emulated_packed.h")
_CALL = f"""
static void call(const void* args) {{ {KERNEL}(*(const PackedArgs*)args); }}
extern "C" int emulate(const void* args, unsigned size, int grid, unsigned order) {{
    if (size != sizeof(PackedArgs))
        return emulator::wrong_size("PackedArgs", sizeof(PackedArgs), size);
    return emulator::run(call, args, grid, THREADS, order);
}}
"""


def run_emulated(
    operands: QuantOperands,
    prepared: Prepared,
    config: PackedConfig,
    num_processors: int,
    *,
    order: int = cuda_emulator.ASCENDING,
) -> Tensor:
    """The result of the kernel on a GPU of so many multiprocessors.

    Raises:
        EmulatorError: threads wait for ever or at different barriers.
    """
    x = operands.x
    out = torch.full((x.shape[0], operands.num_outputs), float("nan"), dtype=x.dtype)
    variant = variant_of(operands, prepared, config)
    args = arguments(operands, prepared, out, variant)
    library = emulated_library(variant.source, MACHINE, _CALL, variant.flags)
    grid = grid_of(operands, config, num_processors)
    if library.emulate(ctypes.byref(args), ctypes.sizeof(PackedArgs), grid, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return out
