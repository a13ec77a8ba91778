"""The kernel "mma" of `fused_linear` on CPU tensors: its source, on an emulated Hopper or older."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.gemm_mma import (
    KERNEL,
    SOURCE,
    MmaArgs,
    arguments,
    num_tiles,
    variant_of,
)
from compiled_engine.custom_ops.gemm_skinny import MmaConfig, Operands
from compiled_engine.custom_ops.tensor_maps import MAP_BYTES, Boxes
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library

MACHINE = ("emulated_matrix.h", "emulated_boxes.h", "emulated_mma.h")
_CALL = f"""
static void call(const void* args) {{ emulator::enter(); {KERNEL}(*(const MmaArgs*)args); }}
extern "C" int emulate(const void* args, unsigned size, int blocks, unsigned order) {{
    if (size != sizeof(MmaArgs)) return emulator::wrong_size("MmaArgs", sizeof(MmaArgs), size);
    return run_groups(call, args, blocks, 1, THREADS, order);
}}
"""


class EmulatedBoxes(ctypes.Structure):
    """Mirror of `Boxes` in `emulated_boxes.h`."""

    _fields_: ClassVar = [
        ("address", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * 4),
        ("box", ctypes.c_int32 * 4),
    ]


def encode(boxes: Boxes) -> bytes:
    """Boxes as the emulator takes them, in as many bytes as the chip takes."""
    assert not any(stride % 16 for stride in (boxes.address, *boxes.strides)), boxes
    assert all(side <= 256 for side in boxes.box), boxes
    strides, sizes, box = (
        (ctypes.c_uint64 * 4)(*boxes.strides),
        (ctypes.c_int32 * 4)(*boxes.sizes),
        (ctypes.c_int32 * 4)(*boxes.box),
    )
    made = EmulatedBoxes(boxes.address, strides, len(boxes.sizes), sizes, box)
    return bytes(made).ljust(MAP_BYTES, b"\0")


def run_emulated(
    operands: Operands,
    config: MmaConfig,
    *,
    order: int = cuda_emulator.ASCENDING,
    has_bulk: bool = True,
) -> Tensor:
    """The result of the kernel on a GPU with or without bulk copies.

    Raises:
        EmulatorError: threads wait for ever, or a block is reached after its end.
    """
    x = operands.x
    out = torch.full((x.shape[0], operands.num_outputs), float("nan"), dtype=x.dtype)
    args = arguments(operands, out, config, encode)
    tiles = num_tiles(operands.weight.shape[0], config)
    flags = (*variant_of(operands, config).flags, f"-DHAS_BULK={int(has_bulk)}")
    library = emulated_library(SOURCE, MACHINE, _CALL, flags)
    if library.emulate(ctypes.byref(args), ctypes.sizeof(MmaArgs), tiles, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return out
