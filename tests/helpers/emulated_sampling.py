"""The CUDA sampling kernel on CPU tensors: the same source, a cluster as one emulated block."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from compiled_engine.custom_ops import sampling_cluster
from compiled_engine.custom_ops.sampling import Masks, Places, RowSettings
from compiled_engine.custom_ops.sampling_cluster import ClusterConfig, SampleArgs
from tests.helpers import cuda_emulator
from tests.helpers.emulated_build import emulated_library

_MACHINE = ("emulated_cluster.h",)
# Few enough fibers; with 64 bins every search has several levels.
SMALL = ClusterConfig(cluster=2, block=64, log_bins=6)
_CALL = f"""
static void call(const void* args) {{ {sampling_cluster.KERNEL}(*(const SampleArgs*)args); }}
extern "C" int emulate(
    const void* args, unsigned size, unsigned grid, unsigned block, unsigned order
) {{
    if (size != sizeof(SampleArgs))
        return emulator::wrong_size("SampleArgs", sizeof(SampleArgs), size);
    return emulator::run(call, args, grid, block, order);
}}
"""


def run_emulated(
    logits: Tensor,
    settings: RowSettings,
    places: Places | None,
    vocab_size: int,
    *,
    config: ClusterConfig = SMALL,
    order: int = cuda_emulator.ASCENDING,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sampling_cluster.launch`; results that the kernel does not write are 77 and True.

    Raises:
        EmulatorError: threads wait for ever or at different barriers.
    """
    num_results = logits.shape[0] if places is None else places.stop_ids.shape[0]
    tokens = torch.full((num_results,), 77, dtype=torch.int32)
    stops = torch.ones(num_results, dtype=torch.bool)
    variant = sampling_cluster.variant_of(logits.dtype, vocab_size, config)
    results = (tokens, stops.view(torch.uint8))
    args = sampling_cluster.arguments(
        logits, settings, places, results, variant, vocab_size, masks=masks
    )
    library = emulated_library(sampling_cluster.SOURCE, _MACHINE, _CALL, variant.flags)
    threads = config.cluster * config.block
    size = ctypes.sizeof(SampleArgs)
    if library.emulate(ctypes.byref(args), size, logits.shape[0], threads, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return tokens, stops
