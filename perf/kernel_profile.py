"""Where a decode step's time goes: kernels by name, and how long the device waits between them."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perf.decode import INPUT_LEN, OUTPUT_LEN, Driver, Progress, settle
from perf.qwen3_8b import (
    DTYPE_BYTES,
    HIDDEN,
    KV_BYTES_PER_TOKEN,
    LAYER_PRODUCTS,
    NUM_LAYERS,
    VOCAB_SIZE,
)
from perf.rows import Measured

BATCH_SIZES = (1, 8, 32, 128)
NUM_STEPS = 16

_FIRST = "scheduler_plan"  # every step begins with it
_ATTENTION = "decode_attention"
_PRODUCT = re.compile(
    "row_kernel|tile_kernel|hopper_kernel|_product|nvjet|gemm|cutlass", re.IGNORECASE
)
_PRODUCTS = ("qkv", "o", "gate_up", "down")


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


def part_table(kernels: Sequence[Kernel], batch_size: int, read: float) -> str:
    """What each part of a step takes, beside the time its bytes need at `read` bytes a second.

    A part's time is by how much its kernels move the end of all work further: what it overlaps with
    the kernel before it costs nothing. The parts add up to the step.
    """
    slots, num_steps = step_parts(kernels)
    floors = part_floors(batch_size, read)
    lines = ["| part | us a step | us each | floor | share of it |", "|---|---|---|---|---|"]
    for name, taken in sorted(slots.items(), key=lambda item: -sum(item[1])):
        each, total = sum(taken) / len(taken), sum(taken) / num_steps
        floor = floors.get(name)
        beside = "| | |" if floor is None else f"| {floor:.2f} | {floor / each:.0%} |"
        shown = "" if floor is None else f"{each:.2f}"
        lines.append(f"| {name} | {total:.1f} | {shown} {beside}")
    return "\n".join(lines) + "\n"


def step_parts(kernels: Sequence[Kernel]) -> tuple[dict[str, list[float]], int]:
    """Microseconds of every run of each part in the whole steps, and the number of steps.

    Parts: the four products of a layer, attention, the head, what lies between, and what comes
    before the first product and after the head.
    """
    ordered = sorted(kernels, key=lambda k: k.start)
    starts = [i for i, kernel in enumerate(ordered) if _FIRST in kernel.name]
    slots: dict[str, list[float]] = defaultdict(list)
    if len(starts) < 2:
        return slots, 0
    busy_until = max((k.end for k in ordered[: starts[0]]), default=ordered[0].start)
    num_products = num_attentions = 0
    for index in range(starts[0], starts[-1]):
        kernel = ordered[index]
        if _FIRST in kernel.name:
            num_products = num_attentions = 0
        if _ATTENTION in kernel.name:
            num_attentions += 1
            name = "attention"
        elif _PRODUCT.search(kernel.name):
            is_head = num_products == NUM_LAYERS * len(_PRODUCTS)
            name = "head" if is_head else _PRODUCTS[num_products % len(_PRODUCTS)]
            num_products += 1
        else:
            is_inside = 0 < num_products < NUM_LAYERS * len(_PRODUCTS)
            name = "between products" if is_inside else "before the first and after the head"
        slots[name].append(max(0.0, kernel.end - busy_until))
        busy_until = max(busy_until, kernel.end)
    return slots, len(starts) - 1


def part_floors(batch_size: int, read: float) -> dict[str, float]:
    """Microseconds that the bytes of the parts need."""
    weights = [rows * columns * DTYPE_BYTES for rows, columns in LAYER_PRODUCTS]
    sizes = dict(zip(_PRODUCTS, weights, strict=True))
    sizes["head"] = VOCAB_SIZE * HIDDEN * DTYPE_BYTES
    sizes["attention"] = batch_size * INPUT_LEN * KV_BYTES_PER_TOKEN // NUM_LAYERS
    return {name: size / read * 1e6 for name, size in sizes.items()}


def layer_table(kernels: Sequence[Kernel]) -> str:
    """Kernels of a layer in their order, from one attention to the next, means over the layers.

    What a kernel adds is by how much it moves the end of all work further; the column adds up to
    the layer. Layers of another number of kernels than most have are left out.
    """
    ordered = sorted(kernels, key=lambda k: k.start)
    added, end = [], ordered[0].start
    for kernel in ordered:
        added.append(max(0.0, kernel.end - end))
        end = max(end, kernel.end)
    places = [i for i, kernel in enumerate(ordered) if is_attention(kernel)]
    spans = [
        (a, b)
        for a, b in itertools.pairwise(places)
        if not any(is_step_start(k) for k in ordered[a:b])
    ]
    if not spans:
        return "no layers were seen\n"
    length = statistics.mode(b - a for a, b in spans)
    layers = [range(a, b) for a, b in spans if b - a == length]
    lines = ["| kernel | us | adds us |", "|---|---|---|"]
    for place in range(length):
        runs = [layer[place] for layer in layers]
        took = statistics.mean(ordered[i].end - ordered[i].start for i in runs)
        adds = statistics.mean(added[i] for i in runs)
        shown = ordered[runs[0]].name.replace("|", "/")[:100]
        lines.append(f"| `{shown}` | {took:.2f} | {adds:.2f} |")
    total = sum(statistics.mean(added[layer[i]] for layer in layers) for i in range(length))
    lines.append(f"| {len(layers)} layers of {length} kernels | | {total:.2f} |")
    return "\n".join(lines) + "\n"


def model_profile(driver: Driver, batch_sizes: Sequence[int]) -> str:
    """A document of a steady decode step of any model: a layer in order, and kernels by name."""
    document = "# A steady decode step by kernels\n"
    for batch_size in batch_sizes:
        kernels = profiled_steps(driver, batch_size)
        document += f"\n## Batch {batch_size}\n\n{layer_table(kernels)}"
        document += f"\n{kernel_table(kernels, NUM_STEPS)}"
    return document


def measure_profile(driver: Driver, read: float, num_repeats: int) -> tuple[list[Measured], str]:
    """Idle time of the device a step, and the tables of parts and kernels of some batch sizes.

    The floors are taken of `read`, the bytes a second that the device reads.
    """
    measured, document = [], "# A steady decode step by parts and kernels\n"
    for batch_size in BATCH_SIZES:
        runs = [profiled_steps(driver, batch_size) for _ in range(num_repeats)]
        measured.append(
            Measured(
                metric="gpu_idle_us_per_step",
                unit="us",
                batch=batch_size,
                values=[idle_us(kernels) / NUM_STEPS for kernels in runs],
            )
        )
        document += f"\n## Batch {batch_size}\n\n{part_table(runs[-1], batch_size, read)}"
        document += f"\n{kernel_table(runs[-1], NUM_STEPS)}"
    return measured, document


def profiled_steps(driver: Driver, batch_size: int) -> list[Kernel]:
    """What ran on the device in `NUM_STEPS` steady decode steps."""
    ids = driver.submit_batch(batch_size, INPUT_LEN, OUTPUT_LEN)
    progress = Progress(ids)
    settle(driver, progress)

    def work() -> None:
        for _ in range(NUM_STEPS):
            driver.loop.step()

    kernels = device_kernels(work)
    driver.run_out(ids)
    return kernels


def device_kernels(work: Callable[[], Any]) -> list[Kernel]:
    """What ran on the device until `work` was done."""
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def is_product(kernel: Kernel) -> bool:
    """Whether it is a matrix product: ours or the library's."""
    return _PRODUCT.search(kernel.name) is not None


def is_attention(kernel: Kernel) -> bool:
    """Whether it is the attention of a layer."""
    return _ATTENTION in kernel.name


def is_step_start(kernel: Kernel) -> bool:
    """Whether a step begins with it."""
    return _FIRST in kernel.name
