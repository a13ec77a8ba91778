"""The kernel "wide" of `fused_linear` on CPU tensors: its source, on an emulated Hopper."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from compiled_engine.custom_ops.gemm_skinny import Operands, WideConfig
from compiled_engine.custom_ops.gemm_wide import (
    KERNEL,
    SOURCE,
    WideArgs,
    arguments,
    make_scratch,
    num_blocks_of_threads,
    variant_of,
)
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library
from tests.helpers.emulated_mma import encode

MACHINE = ("emulated_matrix.h", "emulated_boxes.h", "emulated_wide.h")
_CALL = f"""
static void call(const void* args) {{ emulator::enter(); {KERNEL}(*(const WideArgs*)args); }}
extern "C" int emulate(const void* args, unsigned size, int blocks, unsigned order) {{
    if (size != sizeof(WideArgs)) return emulator::wrong_size("WideArgs", sizeof(WideArgs), size);
    return run_groups(call, args, 1, blocks, THREADS, order);
}}
"""


def run_emulated(
    operands: Operands,
    config: WideConfig,
    num_processors: int,
    *,
    order: int = cuda_emulator.ASCENDING,
    stages: int | None = None,
) -> Tensor:
    """The result of the kernel on a GPU of so many multiprocessors.

    Raises:
        EmulatorError: threads wait for ever, or a block is reached after its end.
    """
    x = operands.x
    scratch = make_scratch(x.device)
    out = torch.full((x.shape[0], operands.num_outputs), float("nan"), dtype=x.dtype)
    args = arguments(operands, out, config, scratch, encode)
    flags = variant_of(operands, config).flags
    if stages is not None:
        flags = (*flags, "-USTAGES", f"-DSTAGES={stages}")
    blocks = num_blocks_of_threads(operands.weight.shape[0], config, num_processors)
    library = emulated_library(SOURCE, MACHINE, _CALL, flags)
    if library.emulate(ctypes.byref(args), ctypes.sizeof(WideArgs), blocks, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    assert bool((scratch.view(torch.int32) == -1).all()), "sums are left in the scratch"
    return out
