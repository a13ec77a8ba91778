"""Launcher of the CUDA C++ sampling kernel: from logits to tokens in one kernel, a cluster a row.

The blocks of a cluster keep a row in their shared memory, so however many passes the limits take,
the row is read from memory once. Needs clusters, thus compute capability 9.0 or later. The kernel
is `csrc/sampling/sample.cu`; what it cannot serve is left to `sampling_triton`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.sampling import Masks, Places, RowSettings

SOURCE = "sampling/sample.cu"
KERNEL = "sample_cluster"
_KINDS = (torch.float32, torch.bfloat16, torch.float16)
_VECTOR_BYTES = 16
# every device of these capabilities launches clusters of this size
_PORTABLE_CLUSTER = 8
# What a block may have on the devices that the choice of sizes was measured on.
_MOST_SHARED_BYTES = 227 * 1024


class SampleArgs(ctypes.Structure):
    """Mirror of `SampleArgs` in `csrc/sampling/row.cuh`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_k", "top_p")),
        *((name, ctypes.c_void_p) for name in ("min_p", "seed", "position", "rows", "stop_ids")),
        *((name, ctypes.c_void_p) for name in ("mask_bits", "has_grammar")),
        *((name, ctypes.c_void_p) for name in ("tokens", "stops")),
        *((name, ctypes.c_int64) for name in ("row_stride", "stop_stride", "mask_stride")),
        *((name, ctypes.c_int32) for name in ("temperature_stride", "top_k_stride")),
        *((name, ctypes.c_int32) for name in ("top_p_stride", "min_p_stride", "seed_stride")),
        *((name, ctypes.c_int32) for name in ("position_stride", "num_rows", "num_stops")),
        *((name, ctypes.c_int32) for name in ("vocab_size", "slice", "is_wide")),
    ]


@dataclass(frozen=True)
class ClusterConfig:
    """How a launch is cut.

    Attributes:
        cluster: blocks that share a row; more than 8 needs a device that allows it.
        block: threads of a block.
        resident: blocks a multiprocessor, for which registers are left.
        log_bins: log2 of the bins of a histogram.
    """

    cluster: int = _PORTABLE_CLUSTER
    block: int = 1024
    resident: int = 1
    log_bins: int = 9


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for, and the vectors of a row a block of it holds."""

    dtype: torch.dtype
    config: ClusterConfig
    slice: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        return (
            f"-DKIND={_KINDS.index(self.dtype)}",
            f"-DCLUSTER={self.config.cluster}",
            f"-DBLOCK={self.config.block}",
            f"-DRESIDENT={self.config.resident}",
            f"-DLOG_BINS={self.config.log_bins}",
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: `Exchange` in `row.cuh`, and the slice."""
        return (16 << self.config.log_bins) + 1024 + self.slice * _VECTOR_BYTES


def variant_of(dtype: torch.dtype, vocab_size: int, config: ClusterConfig) -> Variant:
    """The kernel for rows of `vocab_size`, wherever in a vector they begin."""
    per_vector = _VECTOR_BYTES // dtype.itemsize
    vectors = (vocab_size + 2 * per_vector - 2) // per_vector
    return Variant(dtype, config, -(-vectors // config.cluster))


def default_config(dtype: torch.dtype, vocab_size: int, num_places: int) -> ClusterConfig:
    """Many blocks a row while there are few rows, then few: as measured on an H200."""
    if num_places <= 16:
        return ClusterConfig()
    configs = [ClusterConfig(cluster=cluster) for cluster in (2, 4)]
    sizes = [variant_of(dtype, vocab_size, config).shared_bytes for config in configs]
    fitting = (c for c, size in zip(configs, sizes, strict=True) if size <= _MOST_SHARED_BYTES)
    return next(fitting, ClusterConfig())


@functools.cache
def _limits(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, and bytes of shared memory of a block."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    return (properties.major, properties.minor), int(shared)


def is_served(logits: Tensor, vocab_size: int) -> bool:
    """Whether the kernel takes these logits, on their device."""
    if not logits.is_cuda or torch.version.hip:
        return False
    capability, shared_bytes = _limits(logits.device)
    config = default_config(logits.dtype, vocab_size, logits.shape[0])
    variant = variant_of(logits.dtype, vocab_size, config)
    return capability >= (9, 0) and variant.shared_bytes <= shared_bytes


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    library = load_library(SOURCE, arch, cubin_dir(), variant.flags)
    if variant.config.cluster > _PORTABLE_CLUSTER:
        _allow_large_clusters(library)
    return Kernel(
        library,
        KERNEL,
        block=variant.config.block,
        shared_bytes=variant.shared_bytes,
        is_dependent=True,
    )


def _allow_large_clusters(library: Any) -> None:
    from cuda.bindings import driver

    status, kernel = driver.cuLibraryGetKernel(library, KERNEL.encode())
    assert int(status) == 0, status
    device = torch.cuda.current_device()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    (status,) = driver.cuKernelSetAttribute(attribute, 1, kernel, driver.CUdevice(device))
    assert int(status) == 0, status


def arguments(
    logits: Tensor,
    settings: RowSettings,
    places: Places | None,
    results: tuple[Tensor, Tensor],
    variant: Variant,
    vocab_size: int,
    *,
    masks: Masks | None = None,
) -> SampleArgs:
    """The kernel's argument; `results` are tokens i32 and stop flags u8, by row or place."""
    tokens, stops = results
    strides = {f"{name}_stride": t.stride(0) for name, t in settings._asdict().items()}
    return SampleArgs(
        **{name: t.data_ptr() for name, t in settings._asdict().items()},
        **strides,
        logits=logits.data_ptr(),
        rows=None if places is None else places.rows.data_ptr(),
        stop_ids=None if places is None else places.stop_ids.data_ptr(),
        mask_bits=None if masks is None else masks.bits.data_ptr(),
        has_grammar=None if masks is None else masks.has_grammar.data_ptr(),
        tokens=tokens.data_ptr(),
        stops=stops.data_ptr(),
        row_stride=logits.stride(0),
        stop_stride=0 if places is None else places.stop_ids.stride(0),
        mask_stride=0 if masks is None else masks.bits.stride(0),
        num_rows=tokens.shape[0],
        num_stops=0 if places is None else places.stop_ids.shape[1],
        vocab_size=vocab_size,
        slice=variant.slice,
        is_wide=settings.position.dtype == torch.int64,
    )


def launch(
    logits: Tensor,
    settings: RowSettings,
    places: Places | None,
    vocab_size: int,
    *,
    config: ClusterConfig | None = None,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel on arguments that `sampling_triton.unsupported_reason` lets pass.

    Returns:
        Tokens by place [S] i32, or by row [R] with `places`; and then stop flags [R] bool.
    """
    num_places = logits.shape[0]
    num_results = num_places if places is None else places.stop_ids.shape[0]
    tokens = torch.empty(num_results, dtype=torch.int32, device=logits.device)
    stops = torch.empty(num_results, dtype=torch.bool, device=logits.device)
    if not num_places:
        return tokens.zero_(), stops.zero_()
    config = config or default_config(logits.dtype, vocab_size, num_places)
    variant = variant_of(logits.dtype, vocab_size, config)
    results = (tokens, stops.view(torch.uint8))
    args = arguments(logits, settings, places, results, variant, vocab_size, masks=masks)
    load_variant(variant, arch_of(logits.device)).launch(num_places * config.cluster, args)
    return tokens, stops
