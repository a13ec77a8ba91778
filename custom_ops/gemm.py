"""Contracts of the GEMM family: `linear`, and `fused_linear` with norm, gate and residual.

A pass puts `linear` in the place of plain matrix products on the CPU: few rows run our kernel,
which reads the weights once at memory speed; many rows go to the library behind
`torch.nn.functional.linear`. `fused_linear` is the same for the GPU: few rows run the kernels that
`gemm_skinny` launches, the others the library. `CANDIDATES` says which can take what, and why not;
which of those that can is the fastest is in `gemm_choice`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import gemm_skinny, reference
from compiled_engine.custom_ops.gemm_choice import (
    hopper_rejects,
    pick_config,
    why_hopper_is_slower,
    why_mma_is_slower,
    why_wide_is_slower,
)
from compiled_engine.custom_ops.gemm_library import MIN_TIMED_TOKENS, has_cublaslt, library_product
from compiled_engine.custom_ops.gemm_mma import MAX_TOKENS as MAX_MMA_TOKENS
from compiled_engine.custom_ops.gemm_mma import mma_rejects
from compiled_engine.custom_ops.gemm_wide import MAX_TOKENS as MAX_WIDE_TOKENS
from compiled_engine.custom_ops.gemm_wide import wide_rejects
from compiled_engine.custom_ops.library import CPU_DTYPES, LIBRARY, define_op
from compiled_engine.custom_ops.registry import (
    MAX_DECISIONS,
    Candidate,
    Priority,
    Target,
    Traits,
    best_of,
    by_tokens,
)
from compiled_engine.custom_ops.toolchain import has_nvrtc

# Rows up to which the CPU kernel is faster than the library, by dtype.
MAX_SKINNY_ROWS = {torch.float32: 16, torch.bfloat16: 8, torch.float16: 4}

# The most tokens that the kernels of `fused_linear` for few tokens take.
MAX_ROW_TOKENS = 1
MAX_TILE_TOKENS = 32
MAX_HOPPER_TOKENS = 32
MOST_TOKENS = {
    "row": MAX_ROW_TOKENS,
    "tile": MAX_TILE_TOKENS,
    "hopper": MAX_HOPPER_TOKENS,
    "mma": MAX_MMA_TOKENS,
    "wide": MAX_WIDE_TOKENS,
}


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    shapes = [(1, 7, 33), (3, 64, 96), (8, 130, 20), (40, 33, 64), (0, 8, 8)]
    return [
        (normal(m, k), normal(n, k) * k**-0.5, normal(n) if m % 2 else None, "")
        for m, n, k in shapes
    ]


def _fused_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    found: list[tuple[Any, ...]] = []
    # tokens, outputs, size, then: bias, norm, residual, gate
    for m, n, k, has_bias, has_norm, has_residual, is_gated in (
        (1, 7, 48, True, True, False, False),
        (3, 24, 64, False, False, True, False),
        (9, 33, 96, False, True, False, True),
        (40, 16, 33, True, False, True, True),
        (0, 8, 16, False, True, True, True),
    ):
        rows = 2 * n if is_gated else n
        bias = normal(rows) if has_bias else None
        norm_weight = normal(k) if has_norm else None
        residual = normal(m, n) if has_residual else None
        weight = normal(rows, k) * k**-0.5
        found.append((normal(m, k), weight, bias, norm_weight, 1e-6, residual, is_gated, ""))
    return found


def _fake_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    is_gated: bool,
    impl: str = "",
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if is_gated else 1)))


LINEAR = define_op(
    'linear(Tensor x, Tensor weight, Tensor? bias, str impl="") -> Tensor',
    reference=reference.linear,
    fake=lambda x, weight, bias, impl="": x.new_empty((x.shape[0], weight.shape[0])),
    example_inputs=_examples,
    is_expandable=False,
)
FUSED_LINEAR = define_op(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, "
    'Tensor? residual, bool is_gated, str impl="") -> Tensor',
    reference=reference.fused_linear,
    fake=_fake_fused,
    example_inputs=_fused_examples,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("linear_cpu.cpp").ce_linear
    function.restype = None
    function.argtypes = [ctypes.c_int32] + [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    return function


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, impl: str = "") -> Tensor:
    """Arguments and result as `reference.linear`.

    Without a name the number of rows picks: "cpp" is the kernel for few, "torch" the library.

    Raises:
        ValueError: no such kernel, or it cannot serve the call.
    """
    num_rows, size = x.shape
    impl = by_tokens(impl, num_rows)
    if impl not in ("", "cpp", "torch"):
        raise ValueError(f"linear has no kernel {impl}; there are cpp, torch")
    if impl == "cpp" and not weight.is_contiguous():
        raise ValueError("linear: kernel cpp needs a contiguous weight")
    is_few = num_rows <= MAX_SKINNY_ROWS[x.dtype] and weight.is_contiguous()
    if num_rows == 0 or impl == "torch" or not (is_few or impl == "cpp"):
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


def _rejects_beyond(max_tokens: int) -> Callable[[Traits], str | None]:
    """What a kernel for up to `max_tokens` tokens cannot take."""

    def rejects(traits: Traits) -> str | None:
        num_tokens, size = traits["num_tokens"], traits["size"]
        rules = (
            (1 <= num_tokens <= max_tokens, f"takes 1 to {max_tokens} tokens, not {num_tokens}"),
            (size % 16 == 0, f"needs a multiple of 16 columns, these are {size}"),
            (traits["has_one_dtype"], "needs the same dtype for all tensors"),
            (traits["is_weight_contiguous"], "needs a contiguous weight"),
            (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        )
        return next((reason for is_met, reason in rules if not is_met), None)

    return rejects


def _rejects_hopper(traits: Traits) -> str | None:
    """What the kernel that copies by TMA and multiplies by WGMMA cannot take."""
    if not traits["is_hopper"]:
        return "needs compute capability 9"
    if not traits["is_aligned"]:
        return "needs rows of x and weights at multiples of 16 bytes"
    return _rejects_beyond(MAX_HOPPER_TOKENS)(traits) or hopper_rejects(traits)


def _rejects_mma(traits: Traits) -> str | None:
    """What the kernel in CUDA C++ cannot take."""
    if not traits["is_hopper"]:
        return "needs compute capability 9"
    if not traits["has_nvrtc"]:
        return "needs the cuda-bindings package"
    return mma_rejects(traits)


def _rejects_wide(traits: Traits) -> str | None:
    """What the kernel for more tokens cannot take."""
    if not traits["is_hopper"]:
        return "needs compute capability 9"
    if not traits["has_nvrtc"]:
        return "needs the cuda-bindings package"
    return wide_rejects(traits)


def _rejects_cublaslt(traits: Traits) -> str | None:
    """What the direct call of the library is not for, or cannot take."""
    is_plain = not traits["has_bias"] and not traits["is_gated"]
    rules = (
        (traits["has_cublaslt"], "needs the cuBLAS that torch for CUDA comes with"),
        (is_plain, "adds no bias and has no gate"),
        (traits["has_one_dtype"], "needs the same dtype for all tensors"),
        (traits["is_weight_contiguous"], "needs a contiguous weight"),
        (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        (
            traits["is_aligned"] and traits["is_residual_aligned"] and traits["rows"] % 8 == 0,
            "needs rows of all tensors at multiples of 16 bytes",
        ),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _why_cublaslt_is_slower(traits: Traits) -> str | None:
    """The reason to leave the call to torch."""
    if traits["has_residual"] or traits["num_tokens"] >= MIN_TIMED_TOKENS:
        return None
    return f"is the same as library without a residual below {MIN_TIMED_TOKENS} tokens"


def _rejects_library(traits: Traits) -> str | None:
    return None if traits["has_one_dtype"] else "needs the same dtype for all tensors"


def _few_tokens(name: str, priority: Priority, max_tokens: int, **rules: Any) -> Candidate:
    rules.setdefault("rejects", _rejects_beyond(max_tokens))
    rules.setdefault("min_arch", 80)
    return Candidate(
        family="fused_linear",
        mode="few",
        name=name,
        priority=priority,
        device_type="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        tags=("deterministic", "latency", f"1 to {max_tokens} tokens"),
        **rules,
    )


# Traits: those that `fused_linear_traits` gives.
CANDIDATES = (
    _few_tokens("row", Priority.SPECIALIZED, MAX_ROW_TOKENS),
    _few_tokens("tile", Priority.TUNED, MAX_TILE_TOKENS),
    _few_tokens(
        "mma",
        Priority.SPECIALIZED,
        MAX_MMA_TOKENS,
        min_arch=90,
        max_arch=99,
        rejects=_rejects_mma,
        slower=why_mma_is_slower,
    ),
    _few_tokens(
        "wide",
        Priority.SPECIALIZED,
        MAX_WIDE_TOKENS,
        min_arch=90,
        max_arch=99,
        rejects=_rejects_wide,
        slower=why_wide_is_slower,
    ),
    _few_tokens(
        "hopper",
        Priority.SPECIALIZED,
        MAX_HOPPER_TOKENS,
        min_arch=90,
        max_arch=99,
        rejects=_rejects_hopper,
        slower=why_hopper_is_slower,
    ),
    Candidate(
        family="fused_linear",
        mode="few",
        name="cublaslt",
        priority=Priority.TUNED,
        device_type="cuda",
        min_arch=80,
        dtypes=(torch.bfloat16, torch.float16),
        rejects=_rejects_cublaslt,
        slower=_why_cublaslt_is_slower,
        num_kernels=lambda traits: 1 + traits["has_norm"],
        tags=("throughput", "a kernel for the norm", "reads the residual where it is"),
    ),
    Candidate(
        family="fused_linear",
        mode="few",
        name="library",
        priority=Priority.PORTABLE,
        device_type="cuda",
        min_arch=80,
        dtypes=(torch.bfloat16, torch.float16),
        rejects=_rejects_library,
        num_kernels=lambda traits: 1 + traits["has_norm"] + traits["is_gated"],
        tags=(
            "deterministic",
            "portable",
            "throughput",
            "a kernel for the norm and one for the gate",
        ),
    ),
    Candidate(
        family="fused_linear",
        mode="few",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
)


def _library_product(operands: gemm_skinny.Operands, *, is_direct: bool) -> Tensor:
    """As `reference.fused_linear` on a GPU, with the library's product."""
    from compiled_engine.custom_ops.activation_triton import silu_and_mul
    from compiled_engine.custom_ops.norm_triton import rms_norm

    x, weight, bias, norm_weight, eps, residual, is_gated = operands
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if is_direct:
        return library_product(residual, x, weight)
    if residual is not None and bias is None and not is_gated:
        return torch.addmm(residual, x, weight.T)
    y = torch.nn.functional.linear(x, weight, bias)
    if is_gated:
        y = silu_and_mul(y)
    return y if residual is None else y.add_(residual)


def fused_linear_traits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    is_gated: bool,
    target: Target | None = None,
) -> dict[str, int]:
    """The traits of these arguments of `fused_linear` that `CANDIDATES` look at.

    num_tokens, rows and size of the weight, and flags. `target` is what code is made for, if that
    is not the device of `x`.
    """
    target = target or Target.of(x.device)
    others = [t for t in (weight, bias, norm_weight, residual) if t is not None]
    return {
        "num_tokens": x.shape[0],
        "rows": weight.shape[0],
        "size": x.shape[1],
        "is_gated": is_gated,
        "has_norm": norm_weight is not None,
        "has_bias": bias is not None,
        "has_residual": residual is not None,
        "is_residual_aligned": residual is None or _is_aligned(residual),
        "has_one_dtype": all(t.dtype == x.dtype for t in others),
        "is_weight_contiguous": weight.is_contiguous(),
        "is_last_dim_contiguous": all(t.stride(1) == 1 for t in (x, residual) if t is not None),
        "is_aligned": all(_is_aligned(t) for t in (x, weight, norm_weight) if t is not None),
        "is_hopper": target.arch // 10 == 9,
        "has_nvrtc": target.is_described or has_nvrtc(),
        "has_cublaslt": target.is_described or has_cublaslt(),
        **({"is_described": 1} if target.is_described else {}),
    }


def _is_aligned(tensor: Tensor) -> bool:
    """Whether rows of 16-bit values start at multiples of 16 bytes; storage itself does."""
    has_rows = tensor.dim() == 2 and tensor.shape[0] != 1
    return tensor.storage_offset() % 8 == 0 and (not has_rows or tensor.stride(0) % 8 == 0)


def select_kernel(kernel: str, target: Target, dtype: torch.dtype, traits: Traits) -> str:
    """`kernel` if it can serve, or the best candidate's name if that is empty.

    `kernel` may be a list by tokens, see `by_tokens`.

    Raises:
        ValueError: `kernel` is unknown or cannot serve; says why.
    """
    kernel = by_tokens(kernel, traits["num_tokens"])
    reasons = {c.name: c.rejection(target, dtype, traits) for c in CANDIDATES}
    if kernel not in ("", *reasons):
        raise ValueError(f"fused_linear has no kernel {kernel}; there are {', '.join(reasons)}")
    if kernel and reasons[kernel] is not None:
        raise ValueError(f"fused_linear: kernel {kernel} {reasons[kernel]}")
    return kernel or best_of([c for c in CANDIDATES if reasons[c.name] is None], traits).name


@functools.lru_cache(maxsize=MAX_DECISIONS)
def _selected(
    impl: str, target: Target, dtype: torch.dtype, items: tuple[tuple[str, int], ...]
) -> tuple[str, gemm_skinny.Config | None]:
    """The kernel and its sizes, if it has some; every layer of a step asks the same."""
    traits = dict(items)
    kernel = select_kernel(impl, target, dtype, traits)
    is_sized = kernel not in ("torch", "library", "cublaslt")
    return kernel, pick_config(kernel, traits) if is_sized else None


def fused_linear_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    is_gated: bool,
    impl: str = "",
) -> Tensor:
    """Runs `impl`, or the best one if that is empty; as `reference.fused_linear`.

    Raises:
        ValueError: as `select_kernel`.
    """
    traits = fused_linear_traits(x, weight, bias, norm_weight, residual, is_gated)
    kernel, config = _selected(impl, Target.of(x.device), x.dtype, tuple(traits.items()))
    if kernel == "torch":
        return reference.fused_linear(x, weight, bias, norm_weight, eps, residual, is_gated)
    operands = gemm_skinny.Operands(x, weight, bias, norm_weight, eps, residual, is_gated)
    if config is None:
        return _library_product(operands, is_direct=kernel == "cublaslt")
    return gemm_skinny.launch(kernel, operands, config)


LIBRARY.impl("linear", linear_cpu, "CPU")
LIBRARY.impl("fused_linear", fused_linear_cuda, "CUDA")
