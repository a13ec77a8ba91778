"""A matrix product of the library, called directly: `residual + x @ weight.T`, or without a sum.

`torch.addmm` copies the residual to the result first and lets the library add to that copy. The
library itself reads the addend from where it is: one pass over memory less. With few tokens its
own choice of a kernel runs; with many, where the first call pays for it, the kernels that it
proposes are timed on the operands of the first call of a shape, and the fastest stays, for later
processes too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.build_cache import load_or_build
from compiled_engine.cache_folders import PRODUCTS, build_dir
from compiled_engine.compile.torch_compat import raw_stream

# What the library may use beside the operands, bytes; its kernels that split the columns need it.
WORKSPACE_BYTES = 32 * 1024**2
# Tokens from which proposals are timed: a product takes much longer than its launch then.
MIN_TIMED_TOKENS = 2048
NUM_TIMED = 8
# A proposal must be faster than the library's first one by this share: times vary.
MIN_GAIN = 0.02
# Shapes whose kernel is remembered: sizes of a captured step, and of prompts in parts.
MAX_PLANS = 4096

_CUDA_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3
_MAX_WORKSPACE = 1
# The library expects 256 bytes unless it is told.
_MIN_ALIGNMENTS = (5, 6, 7, 8)
ALIGNMENT_BYTES = 16
_TRANSPOSED = 1


class _Algorithm(ctypes.Structure):
    """One kernel of the library with its settings, opaque."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """A kernel that the library proposes."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Shape(NamedTuple):
    """What a plan is made for: sizes, strides of rows in values, dtype, index of the device.

    `residual_stride` is 0 without a residual.
    """

    num_tokens: int
    rows: int
    size: int
    x_stride: int
    residual_stride: int
    dtype: torch.dtype
    device: int


@dataclass
class _Plan:
    """Descriptors of a product of one shape, and kernels for it, the one to run first.

    All live as long as the process.
    """

    product: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    algorithms: list[_Algorithm]
    is_timed: bool


class _Call(NamedTuple):
    """Operands of one product; `residual` is `out` itself where nothing is added."""

    weight: Tensor
    x: Tensor
    residual: Tensor
    out: Tensor
    addend: float


@functools.cache
def has_cublaslt() -> bool:
    """Whether the library can be called directly: torch is for CUDA and the library is found."""
    if torch.version.cuda is None:
        return False
    try:
        _library()
    except OSError:
        return False
    return True


def library_product(residual: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """`residual + x @ weight.T`, the sum rounded once.

    Args:
        residual: [T, n] bf16 or fp16 on a GPU, last dim contiguous; as all of them, with rows at
            multiples of `ALIGNMENT_BYTES`. None adds nothing.
        x: [T, k] of the same dtype, last dim contiguous.
        weight: [n, k] of the same dtype, contiguous.

    Returns:
        [T, n], contiguous.

    Raises:
        RuntimeError: the library has no kernel for the shape, or fails.
    """
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, weight.shape[0])
    if num_tokens == 0:
        return out
    stride = 0 if residual is None else residual.stride(0)
    device = x.device.index
    shape = _Shape(num_tokens, weight.shape[0], size, x.stride(0), stride, x.dtype, device)
    plan = _plan(shape)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
    if residual is None:
        call = _Call(weight, x, out, out, 0.0)
    else:
        call = _Call(weight, x, residual, out, 1.0)
    if not plan.is_timed and not torch.cuda.is_current_stream_capturing():
        plan.algorithms = [_known_fastest(shape, lambda: _fastest(plan, call, workspace))]
        plan.is_timed = True
    _multiply(plan, plan.algorithms[0], call, workspace)
    return out


def _multiply(plan: _Plan, algorithm: _Algorithm, call: _Call, workspace: Tensor) -> None:
    operands: list[ctypes.c_void_p] = []
    one, addend = ctypes.c_float(1.0), ctypes.c_float(call.addend)
    for tensor, layout in zip(call[:4], plan.layouts, strict=True):
        operands += [ctypes.c_void_p(tensor.data_ptr()), layout]
    status = _library().cublasLtMatmul(
        _handle(call.x.device.index),
        plan.product,
        ctypes.byref(one),
        *operands[:4],
        ctypes.byref(addend),
        *operands[4:],
        ctypes.byref(algorithm),
        ctypes.c_void_p(workspace.data_ptr()),
        ctypes.c_size_t(WORKSPACE_BYTES),
        ctypes.c_void_p(raw_stream(call.x.device.index)),
    )
    _check(status, "cublasLtMatmul")


def _known_fastest(shape: _Shape, measure: Callable[[], _Algorithm]) -> _Algorithm:
    """What an earlier process measured, else `measure()`, which is kept in the cache folder.

    The library lets an algorithm be stored and used again with the same version of it.
    """
    properties = torch.cuda.get_device_properties(shape.device)
    device = (properties.name, properties.multi_processor_count)
    parts = (*shape._replace(device=0), _version(), device, WORKSPACE_BYTES, NUM_TIMED)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = build_dir() / PRODUCTS / f"{key}.algorithm"
    found = load_or_build(path, lambda: bytes(measure()))
    return _Algorithm.from_buffer_copy(found)


def _fastest(plan: _Plan, call: _Call, workspace: Tensor) -> _Algorithm:
    """The kernel with the shortest of three times, if it is well ahead of the first one's."""
    times = []
    for algorithm in plan.algorithms:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        for event in events:
            _multiply(plan, algorithm, call, workspace)
            event.record()
        events[-1].synchronize()
        times.append(min(a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])))
    best = min(range(len(times)), key=times.__getitem__)
    is_ahead = times[best] < (1 - MIN_GAIN) * times[0]
    return plan.algorithms[best if is_ahead else 0]


@functools.cache
def _library() -> Any:
    assert torch.version.cuda is not None
    major = torch.version.cuda.split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")
    library.cublasLtMatmul.restype = ctypes.c_int
    return library


def _version() -> int:
    function = _library().cublasLtGetVersion
    function.restype = ctypes.c_size_t
    return int(function())


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} failed with status {status}")


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan(shape: _Shape) -> _Plan:
    """The library sees matrices by columns: `out.T = weight @ x.T + residual.T`."""
    library = _library()
    product = ctypes.c_void_p()
    status = library.cublasLtMatmulDescCreate(ctypes.byref(product), _COMPUTE_FLOAT32, _FLOAT32)
    _check(status, "cublasLtMatmulDescCreate")
    transposed = ctypes.c_int32(_TRANSPOSED)
    status = library.cublasLtMatmulDescSetAttribute(
        product, _TRANSPOSE_A, ctypes.byref(transposed), ctypes.c_size_t(4)
    )
    _check(status, "cublasLtMatmulDescSetAttribute")
    layouts = (
        _layout(shape, shape.size, shape.rows, shape.size),
        _layout(shape, shape.size, shape.num_tokens, shape.x_stride),
        _layout(shape, shape.rows, shape.num_tokens, shape.residual_stride or shape.rows),
        _layout(shape, shape.rows, shape.num_tokens, shape.rows),
    )
    is_timed = shape.num_tokens < MIN_TIMED_TOKENS
    found = _proposals(shape.device, product, layouts, 1 if is_timed else NUM_TIMED)
    if not found:
        raise RuntimeError(f"the library has no kernel for {shape}")
    return _Plan(product, layouts, found, is_timed)


def _layout(shape: _Shape, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    # The stride of a lone column is never used, but must be possible.
    status = _library().cublasLtMatrixLayoutCreate(
        ctypes.byref(layout),
        _CUDA_DTYPES[shape.dtype],
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(max(stride, rows)),
    )
    _check(status, "cublasLtMatrixLayoutCreate")
    return layout


def _proposals(
    device: int,
    product: ctypes.c_void_p,
    layouts: tuple[ctypes.c_void_p, ...],
    count: int,
) -> list[_Algorithm]:
    """Up to `count` kernels that the library proposes, the one it expects to be fastest first."""
    library = _library()
    preference = ctypes.c_void_p()
    _check(
        library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)),
        "cublasLtMatmulPreferenceCreate",
    )
    limit, alignment = ctypes.c_uint64(WORKSPACE_BYTES), ctypes.c_uint32(ALIGNMENT_BYTES)
    settings: list[tuple[int, Any]] = [(_MAX_WORKSPACE, limit)]
    settings += [(name, alignment) for name in _MIN_ALIGNMENTS]
    for name, value in settings:
        status = library.cublasLtMatmulPreferenceSetAttribute(
            preference, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        _check(status, "cublasLtMatmulPreferenceSetAttribute")
    found = (_Heuristic * count)()
    num_found = ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), product, *layouts, preference, count, found, ctypes.byref(num_found)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if status != 0:
        return []
    return [item.algorithm for item in found[: num_found.value] if item.state == 0]
