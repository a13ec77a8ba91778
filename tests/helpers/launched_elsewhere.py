"""Launches kernels as on a GPU of sm_90, through Triton's own launch path, and says what was found.

Run as a program: the cache folder, then prints one JSON line per kernel looked for. The tensors are
real and lie in host memory, the driver below the launch does nothing; so whatever key Triton makes
of arguments, it makes here as it would there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from compiled_engine.build_cache import file_problem
from compiled_engine.cache_folders import place_caches
from compiled_engine.custom_ops import cuda_build, sampling_cluster


class Driver:
    """Of a GPU on which every launch succeeds at once."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
        )
        self.launcher_cls = lambda *_: lambda *_: None

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def is_kept(source: str, flags: tuple[str, ...]) -> bool:
    """Whether a start on the GPU would find a source's cubin."""
    arch = cuda_build.arch_of(torch.device("cuda", 0))
    path = cuda_build.cubin_dir() / f"{cuda_build.cache_key(source, arch, flags)}.cubin"
    return not file_problem(path)


def cluster(vocab_size: int) -> tuple[str, ...]:
    """Flags of the sampling kernel for one row."""
    config = sampling_cluster.default_config(torch.bfloat16, vocab_size, 1)
    return sampling_cluster.variant_of(torch.bfloat16, vocab_size, config).flags


def main() -> None:
    place_caches(Path(sys.argv[1]))
    from triton import knobs
    from triton.runtime.driver import driver

    from compiled_engine.custom_ops import activation_triton, norm_triton, sampling_triton
    from compiled_engine.custom_ops.sampling import Places, RowSettings
    from compiled_engine.sampler import MAX_STOP_IDS

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        print(json.dumps([src.name, cache_hit]))

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    driver.set_active(Driver())  # type: ignore[arg-type]
    knobs.compilation.listener = listener
    for module in (activation_triton, norm_triton, sampling_triton):
        module.has_pdl = lambda _: True  # type: ignore[attr-defined]

    def rows(count: int, size: int) -> torch.Tensor:
        return torch.zeros(count, size, dtype=torch.bfloat16)

    hidden, inner, vocab = 64, 96, 320
    norm_triton.launch(rows(1, hidden), rows(1, hidden)[0], 1e-5, None)
    activation_triton.silu_and_mul(rows(1, 2 * inner))
    floats = torch.zeros(2, 6)
    settings = RowSettings(
        floats[:, 0],
        torch.zeros(2, dtype=torch.int32),
        floats[:, 1],
        floats[:, 2],
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
    )
    places = Places(
        torch.zeros(1, dtype=torch.int32), torch.zeros(2, MAX_STOP_IDS, dtype=torch.int32)
    )
    sampling_triton.launch(rows(1, vocab), settings, places, vocab, True)
    for source, flags in (("scheduler/plan.cu", ()), ("sampling/sample.cu", cluster(vocab))):
        print(json.dumps([source, is_kept(source, flags)]))
    print(json.dumps(["control", None]))
    print(json.dumps(["scheduler/page_ops.cu", is_kept("scheduler/page_ops.cu", ())]))
    norm_triton.launch(rows(1, 2 * hidden), rows(1, 2 * hidden)[0], 1e-5, None)


if __name__ == "__main__":
    main()
