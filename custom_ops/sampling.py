"""Contract of the sampling family: the cut-off that top-k, top-p and min-p put on logits."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import LIBRARY, define_op


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for rows, vocab in ((1, 50), (6, 1003), (0, 8)):
        logits = torch.randn(rows, vocab, generator=generator, device=device) * 4
        top_k = torch.randint(0, vocab + 2, (rows,), generator=generator, device=device).int()
        top_p = 1 - 0.9 * torch.rand(rows, generator=generator, device=device)
        min_p = torch.rand(rows, generator=generator, device=device).square() * 0.3
        if rows > 1:
            top_p[0], min_p[1], top_k[2] = 1.0, 0.0, 1
        made.append((logits, top_k, top_p, min_p))
    return made


SAMPLING_THRESHOLD = define_op(
    "sampling_threshold(Tensor logits, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    reference=reference.sampling_threshold,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0]),
    example_inputs=_examples,
    is_expandable=False,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("sampling_cpu.cpp").ce_sampling_threshold
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2
    return function


def sampling_threshold_cpu(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The C++ kernel; arguments and result as `reference.sampling_threshold`."""
    for tensor in (logits, top_p, min_p):
        assert tensor.dtype == torch.float32, f"{tensor.dtype} where fp32 is meant"
    assert top_k.dtype == torch.int32, f"top_k is {top_k.dtype}, not int32"
    logits, top_k = logits.contiguous(), top_k.contiguous()
    top_p, min_p = top_p.contiguous(), min_p.contiguous()
    out = logits.new_empty(logits.shape[0])
    _cpu_kernel()(
        logits.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        out.data_ptr(),
        logits.shape[0],
        logits.shape[1],
    )
    return out


LIBRARY.impl("sampling_threshold", sampling_threshold_cpu, "CPU")


def sampling_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Smallest logit each row keeps; see `reference.sampling_threshold`."""
    return torch.ops.ce.sampling_threshold.default(logits, top_k, top_p, min_p)
