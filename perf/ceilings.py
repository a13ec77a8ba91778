"""What the device gives: read and copy bandwidth and the matmul rate, as plain as can be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from compiled_engine.kernels.ceilings import (
    BURST_CALLS,
    MATMUL_SIZE,
    NUM_ELEMENTS,
    REST_S,
    product,
)
from compiled_engine.kernels.ceilings import gpu_read_tb_s as read_tb_s
from perf.machine import clocks
from perf.rows import Measured
from perf.timing import event_ms

SUSTAINED_CALLS = 700  # products, about 1 s of them
# An H200 that gives less is shared, throttled or broken, and says nothing about our code.
H200_READ_TB_S = 4.4
H200_MATMUL_TFLOPS = 740.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Medians are what shares are taken of.

    Attributes:
        read_tb_s, copy_tb_s, matmul_tflops: one value a repeat, products in short bursts.
        sustained_tflops: the same product for a second on end, at the device's power limit.
        environment: clocks while the device was busy.
    """

    read_tb_s: list[float]
    copy_tb_s: list[float]
    matmul_tflops: list[float]
    sustained_tflops: list[float]
    environment: dict[str, Any]

    @property
    def read(self) -> float:
        """Bytes a second."""
        return statistics.median(self.read_tb_s) * 1e12

    @property
    def matmul(self) -> float:
        """Operations a second."""
        return statistics.median(self.matmul_tflops) * 1e12

    @property
    def sustained(self) -> float:
        """Operations a second, for a second on end."""
        return statistics.median(self.sustained_tflops) * 1e12

    def measured(self) -> list[Measured]:
        """The rows."""
        return [
            Measured(metric="read_tb_s", unit="TB/s", values=self.read_tb_s),
            Measured(metric="copy_tb_s", unit="TB/s", values=self.copy_tb_s),
            Measured(metric="matmul_tflops", unit="TFLOP/s", values=self.matmul_tflops),
            Measured(
                metric="matmul_sustained_tflops", unit="TFLOP/s", values=self.sustained_tflops
            ),
        ]

    def is_void(self, device_name: str) -> bool:
        """Whether a run on the device of that name counts for nothing."""
        if "H200" not in device_name:
            return False
        return self.read < H200_READ_TB_S * 1e12 or self.matmul < H200_MATMUL_TFLOPS * 1e12


def measure_ceilings(num_repeats: int) -> Ceilings:
    """Takes 17 GB of the device's memory for some seconds."""
    import torch

    matmul, sustained, environment = matmul_tflops(num_repeats)
    ceilings = Ceilings(
        read_tb_s=read_tb_s(num_repeats),
        copy_tb_s=copy_tb_s(num_repeats),
        matmul_tflops=matmul,
        sustained_tflops=sustained,
        environment=environment,
    )
    torch.cuda.empty_cache()
    return ceilings


def copy_tb_s(num_repeats: int) -> list[float]:
    """Bytes read and written by a copy of 8.6 GB."""
    import torch

    source = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    taken = event_ms(lambda: target.copy_(source), num_calls=10, num_repeats=num_repeats)
    return [2 * source.nbytes / (milliseconds * 1e-3) / 1e12 for milliseconds in taken]


def matmul_tflops(num_repeats: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Product of two random bf16 matrices by the library: in bursts, and for a second on end.

    The third value is the clocks under that load.
    """
    import torch

    multiply, flops = product(MATMUL_SIZE, torch.device("cuda"), torch.bfloat16)

    def rate(num_calls: int, rest_s: float) -> list[float]:
        taken = event_ms(multiply, num_calls=num_calls, num_repeats=num_repeats, rest_s=rest_s)
        return [flops / (milliseconds * 1e-3) / 1e12 for milliseconds in taken]

    for _ in range(3):  # the library picks its kernel
        multiply()
    bursts = rate(BURST_CALLS, REST_S)
    sustained = rate(SUSTAINED_CALLS, 0.0)
    for _ in range(200):
        multiply()
    environment = clocks()
    torch.cuda.synchronize()
    return bursts, sustained, environment


__all__ = ["Ceilings", "copy_tb_s", "matmul_tflops", "measure_ceilings", "read_tb_s"]
