"""Contract of the GEMM family: `linear`, which a pass puts in the place of plain matrix products.

On the CPU few rows run our kernel, which reads the weights once at memory speed; many rows go to
the library behind `torch.nn.functional.linear`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import CPU_DTYPES, LIBRARY, define_op

# Rows up to which the CPU kernel is faster than the library, by dtype.
MAX_SKINNY_ROWS = {torch.float32: 16, torch.bfloat16: 8, torch.float16: 4}


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    shapes = [(1, 7, 33), (3, 64, 96), (8, 130, 20), (40, 33, 64), (0, 8, 8)]
    return [
        (normal(m, k), normal(n, k) * k**-0.5, normal(n) if m % 2 else None) for m, n, k in shapes
    ]


LINEAR = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.linear,
    fake=lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
    example_inputs=_examples,
    is_expandable=False,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("linear_cpu.cpp").ce_linear
    function.restype = None
    function.argtypes = [ctypes.c_int32] + [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    return function


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Picks the kernel by the number of rows; arguments and result as `reference.linear`."""
    num_rows, size = x.shape
    if not 0 < num_rows <= MAX_SKINNY_ROWS[x.dtype] or not weight.is_contiguous():
        return reference.linear(x, weight, bias)
    x = x.contiguous()
    out = x.new_empty(num_rows, weight.shape[0])
    _cpu_kernel()(
        CPU_DTYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        weight.shape[0],
        size,
    )
    return out


LIBRARY.impl("linear", linear_cpu, "CPU")
