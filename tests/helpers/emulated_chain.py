"""Chains of products on CPU tensors: the kernel's source, on an emulated Hopper."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.gemm_chain import (
    KERNEL,
    SOURCE,
    ChainArgs,
    ChainConfig,
    Product,
    Scratch,
    make_arguments,
    num_blocks_of_threads,
    padded_tokens,
    variant_flags,
)
from compiled_engine.custom_ops.tensor_maps import MAP_BYTES, Boxes
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library

MACHINE = ("emulated_matrix.h", "emulated_chain.h")
_CALL = f"""
static void call(const void* args) {{ emulator::enter(); {KERNEL}(*(const ChainArgs*)args); }}
extern "C" int emulate(const void* args, unsigned size, int clusters, unsigned order) {{
    if (size != sizeof(ChainArgs)) return emulator::wrong_size("ChainArgs", sizeof(ChainArgs), size);
    return run_clusters(call, args, 1, clusters, THREADS, order);
}}
"""


class EmulatedBoxes(ctypes.Structure):
    """Mirror of `Boxes` in `emulated_chain.h`."""

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
    x: Tensor,
    products: list[Product],
    config: ChainConfig,
    num_processors: int,
    scratch: Scratch,
    *,
    order: int = cuda_emulator.ASCENDING,
) -> list[Tensor]:
    """The results of the kernel on a GPU of so many multiprocessors.

    Raises:
        EmulatorError: threads wait for ever, or a block is reached after its end.
    """
    args, outs = make_arguments(x, products, config, scratch, encode)
    for out in outs:
        out.fill_(float("nan"))
    blocks = num_blocks_of_threads(products, config, num_processors)
    flags = variant_flags(config, padded_tokens(x.shape[0]), is_half=x.dtype == torch.float16)
    library = emulated_library(SOURCE, MACHINE, _CALL, flags)
    if library.emulate(ctypes.byref(args), ctypes.sizeof(ChainArgs), blocks, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return outs
