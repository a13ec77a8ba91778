"""What a device gives at most: read bandwidth and matmul rate, as plain as can be."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compiled_engine.custom_ops.timing import event_ms, host_ms

NUM_ELEMENTS = 2**32  # bf16: 8.6 GB, far more than any cache of a GPU holds
MATMUL_SIZE = 8192
CPU_BYTES, CPU_MATMUL_SIZE = 2**28, 1024
BURST_CALLS = 20  # products, about 0.03 s of them
REST_S = 0.5
FIRST_8BIT = (8, 9)  # compute capability from which on tensor cores multiply 8-bit floats


@dataclass(frozen=True)
class Ceilings:
    """What a device does in a second; medians of a run.

    Attributes:
        read: bytes.
        matmul: operations of products of 16-bit numbers (on a CPU of the dtype it computes in).
        matmul_8bit: the same of 8-bit floats; None where there are no such products, or nobody
            measured them: then they are judged by `matmul`.
    """

    read: float
    matmul: float
    matmul_8bit: float | None = None

    def rate(self, *, is_8bit: bool) -> float:
        """Operations a second of products of such numbers."""
        return self.matmul_8bit if is_8bit and self.matmul_8bit else self.matmul

    def floor_s(self, num_bytes: float, num_flops: float, *, is_8bit: bool = False) -> float:
        """The least time that so much takes."""
        return max(num_bytes / self.read, num_flops / self.rate(is_8bit=is_8bit))


def measure(device: torch.device, dtype: torch.dtype, num_repeats: int = 3) -> Ceilings:
    """Both, on this device now. On a GPU it takes 9 GB of memory for some seconds."""
    if device.type == "cuda":
        read = statistics.median(gpu_read_tb_s(num_repeats)) * 1e12
        multiply, flops = product(MATMUL_SIZE, device, dtype)
        for _ in range(3):  # the library picks its kernel
            multiply()
        taken = event_ms(multiply, num_calls=BURST_CALLS, num_repeats=num_repeats, rest_s=REST_S)
        matmul_8bit = None
        if torch.cuda.get_device_capability(device) >= FIRST_8BIT:
            matmul_8bit = statistics.median(matmul_8bit_flop_s(num_repeats))
        torch.cuda.empty_cache()
        return Ceilings(read, flops / (statistics.median(taken) * 1e-3), matmul_8bit)
    data = torch.ones(CPU_BYTES // 4)
    # The fastest repeat: other work on a CPU makes the rest slower.
    read_s = min(host_ms([data.sum], num_repeats=num_repeats)) * 1e-3
    multiply, flops = product(CPU_MATMUL_SIZE, device, dtype)
    matmul_s = min(host_ms([multiply], num_repeats=num_repeats)) * 1e-3
    return Ceilings(data.nbytes / read_s, flops / matmul_s)


def product(
    size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], float]:
    """A product of two random square matrices by the library, and its floating operations."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply, 2.0 * size**3


def matmul_8bit_flop_s(num_repeats: int) -> list[float]:
    """Product of two random e4m3 matrices with scales of rows, by a GPU's library, in bursts."""
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    left, right = (
        torch.ones(shape, device="cuda") for shape in ((MATMUL_SIZE, 1), (1, MATMUL_SIZE))
    )

    def multiply() -> None:
        torch._scaled_mm(a, b.T, left, right, out_dtype=torch.bfloat16, use_fast_accum=True)

    for _ in range(3):
        multiply()
    taken = event_ms(multiply, num_calls=BURST_CALLS, num_repeats=num_repeats, rest_s=REST_S)
    return [2.0 * MATMUL_SIZE**3 / (milliseconds * 1e-3) for milliseconds in taken]


def gpu_read_tb_s(num_repeats: int) -> list[float]:
    """Reduction over 8.6 GB of bf16 by the best of some tile sizes, for each repeat."""
    from compiled_engine.kernels.ceilings_triton import sum_tiles

    data = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    best: list[float] = [float("inf")]
    for tile, num_warps in ((4096, 4), (8192, 4), (8192, 8), (16384, 8), (32768, 16)):
        out = torch.empty(NUM_ELEMENTS // tile, dtype=torch.float32, device="cuda")
        grid = (NUM_ELEMENTS // tile,)

        def reduce(grid=grid, out=out, tile=tile, num_warps=num_warps) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
            sum_tiles[grid](data, out, TILE=tile, num_warps=num_warps)

        taken = event_ms(reduce, num_calls=10, num_repeats=num_repeats)
        assert bool((out == tile).all()), "the reduction did not read what it says"
        if statistics.median(taken) < statistics.median(best):
            best = taken
    return [data.nbytes / (milliseconds * 1e-3) / 1e12 for milliseconds in best]
