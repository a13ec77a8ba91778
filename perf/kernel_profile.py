"""Where a decode step's time goes: kernels by name, and how long the device waits between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perf.decode import INPUT_LEN, OUTPUT_LEN, Driver, Progress, settle
from perf.rows import Measured

BATCH_SIZES = (1, 32)
NUM_STEPS = 16


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel (or copy) on the device; microseconds."""

    name: str
    start: float
    end: float


def idle_us(kernels: Iterable[Kernel]) -> float:
    """Time between first start and last end in which nothing ran."""
    idle, busy_until = 0.0, None
    for kernel in sorted(kernels, key=lambda k: k.start):
        if busy_until is not None and kernel.start > busy_until:
            idle += kernel.start - busy_until
        busy_until = kernel.end if busy_until is None else max(busy_until, kernel.end)
    return idle


def kernel_table(kernels: Sequence[Kernel], num_steps: int) -> str:
    """Kernels by their time in a step, longest first.

    Kernels that overlap (a prologue behind its predecessor's end) count in full, so the sum can
    exceed the step.
    """
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name].append(kernel)
    totals = {name: sum(k.end - k.start for k in runs) for name, runs in groups.items()}
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    lines = [
        "| kernel | a step | us each | us a step | share of the step |",
        "|---|---|---|---|---|",
    ]
    for name, total in sorted(totals.items(), key=lambda item: -item[1]):
        count = len(groups[name])
        shown = name.replace("|", "/")[:100]
        lines.append(
            f"| `{shown}` | {count / num_steps:g} | {total / count:.2f} "
            f"| {total / num_steps:.1f} | {total / span:.1%} |"
        )
    return "\n".join(lines) + "\n"


def measure_profile(driver: Driver, num_repeats: int) -> tuple[list[Measured], str]:
    """Idle time of the device a step, and the kernel tables of some batch sizes."""
    measured, document = [], "# Kernels of a steady decode step\n"
    for batch_size in BATCH_SIZES:
        runs = [_profile(driver, batch_size) for _ in range(num_repeats)]
        measured.append(
            Measured(
                metric="gpu_idle_us_per_step",
                unit="us",
                batch=batch_size,
                values=[idle_us(kernels) / NUM_STEPS for kernels in runs],
            )
        )
        document += f"\n## Batch {batch_size}\n\n{kernel_table(runs[-1], NUM_STEPS)}"
    return measured, document


def _profile(driver: Driver, batch_size: int) -> list[Kernel]:
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    ids = driver.submit_batch(batch_size, INPUT_LEN, OUTPUT_LEN)
    progress = Progress(ids)
    settle(driver, progress)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            driver.loop.step()
        torch.cuda.synchronize()
    driver.run_out(ids)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
