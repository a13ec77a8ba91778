"""What the device gives: read and copy bandwidth and the matmul rate, as plain as can be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from perf.machine import clocks
from perf.rows import Measured
from perf.timing import event_ms

NUM_ELEMENTS = 2**32  # bf16: 8.6 GB, far more than any cache holds
MATMUL_SIZE = 8192
# An H200 that gives less is shared, throttled or broken, and says nothing about our code.
H200_READ_TB_S = 4.4
H200_MATMUL_TFLOPS = 740.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Medians are what shares are taken of.

    Attributes:
        read_tb_s, copy_tb_s, matmul_tflops: one value a repeat.
        environment: clocks while the device was busy.
    """

    read_tb_s: list[float]
    copy_tb_s: list[float]
    matmul_tflops: list[float]
    environment: dict[str, Any]

    @property
    def read(self) -> float:
        """Bytes a second."""
        return statistics.median(self.read_tb_s) * 1e12

    @property
    def matmul(self) -> float:
        """Operations a second."""
        return statistics.median(self.matmul_tflops) * 1e12

    def measured(self) -> list[Measured]:
        """The rows."""
        return [
            Measured(metric="read_tb_s", unit="TB/s", values=self.read_tb_s),
            Measured(metric="copy_tb_s", unit="TB/s", values=self.copy_tb_s),
            Measured(metric="matmul_tflops", unit="TFLOP/s", values=self.matmul_tflops),
        ]

    def is_void(self, device_name: str) -> bool:
        """Whether a run on the device of that name counts for nothing."""
        if "H200" not in device_name:
            return False
        return self.read < H200_READ_TB_S * 1e12 or self.matmul < H200_MATMUL_TFLOPS * 1e12


def measure_ceilings(num_repeats: int) -> Ceilings:
    """Takes 17 GB of the device's memory for some seconds."""
    import torch

    matmul, environment = matmul_tflops(num_repeats)
    ceilings = Ceilings(
        read_tb_s=read_tb_s(num_repeats),
        copy_tb_s=copy_tb_s(num_repeats),
        matmul_tflops=matmul,
        environment=environment,
    )
    torch.cuda.empty_cache()
    return ceilings


def read_tb_s(num_repeats: int) -> list[float]:
    """Reduction over 8.6 GB of bf16 by the best of some tile sizes."""
    import torch

    from perf.ceilings_triton import sum_tiles

    data = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    best: list[float] = [float("inf")]
    for tile, num_warps in ((4096, 4), (8192, 4), (8192, 8), (16384, 8), (32768, 16)):
        out = torch.empty(NUM_ELEMENTS // tile, dtype=torch.float32, device="cuda")
        grid = (NUM_ELEMENTS // tile,)

        def reduce(grid=grid, out=out, tile=tile, num_warps=num_warps) -> None:  # noqa: ANN001
            sum_tiles[grid](data, out, TILE=tile, num_warps=num_warps)

        taken = event_ms(reduce, num_calls=10, num_repeats=num_repeats)
        assert bool((out == tile).all()), "the reduction did not read what it says"
        if statistics.median(taken) < statistics.median(best):
            best = taken
    return [data.nbytes / (milliseconds * 1e-3) / 1e12 for milliseconds in best]


def copy_tb_s(num_repeats: int) -> list[float]:
    """Bytes read and written by a copy of 8.6 GB."""
    import torch

    source = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    taken = event_ms(lambda: target.copy_(source), num_calls=10, num_repeats=num_repeats)
    return [2 * source.nbytes / (milliseconds * 1e-3) / 1e12 for milliseconds in taken]


def matmul_tflops(num_repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Product of two random bf16 matrices by the library, and the clocks while it runs."""
    import torch

    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    for _ in range(3):  # settles the clocks
        multiply()
    taken = event_ms(multiply, num_calls=50, num_repeats=num_repeats)
    for _ in range(200):
        multiply()
    environment = clocks()
    torch.cuda.synchronize()
    operations = 2 * MATMUL_SIZE**3
    return [operations / (milliseconds * 1e-3) / 1e12 for milliseconds in taken], environment
