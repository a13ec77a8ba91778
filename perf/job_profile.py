"""Where whole jobs spend the device's time: steps with prompts, decode steps, and their kernels.

A step is one with prompts if attention ran over tiles of queries in it. Of both kinds: the time of
products, of attention and of everything else, beside what their operations need at the matmul rate,
or their bytes at the read bandwidth. Kernels that overlap count once: by how much they move the end
of all work further.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perf.ceilings import Ceilings
from perf.decode import Driver
from perf.kernel_profile import Kernel, device_kernels, idle_us, is_product, is_step_start
from perf.offline import (
    AGENTIC_BATCH,
    AGENTIC_OUTPUT,
    AGENTIC_OWN,
    AGENTIC_SHARED,
    E2E_BATCH,
    E2E_INPUT,
    E2E_OUTPUT,
    PREFILL_LENS,
    generate_s,
    prefill_s,
)
from perf.qwen3_8b import NUM_LAYERS, Prompts, attention_flops, prefill_flops, step_bytes

_TILES = "tiles_kernel"  # attention of prompts
_NUM_SHOWN = 14


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, and what it must cost.

    Attributes:
        title: of its section.
        work: does it once.
        flops: of its prompts, all in all.
        attention: of these, those of attention.
        step_bytes: of an average decode step.
    """

    title: str
    work: Callable[[], Any]
    flops: float
    attention: float
    step_bytes: float = 0.0


def jobs(llm: Any, driver: Driver) -> Iterator[Job]:
    """Those that have a target: prompts, end to end, and agents behind a new prefix."""
    prompts = driver.prompts

    def fresh(batch: list[list[int]], output_len: int) -> Callable[[], float]:
        def work() -> float:
            llm.reset_prefix_cache()
            return generate_s(llm, batch, output_len)

        return work

    yield Job(
        title=f"Prompts of {PREFILL_LENS[0]} tokens, {len(PREFILL_LENS)}",
        work=lambda: prefill_s(driver),
        flops=prefill_flops(PREFILL_LENS),
        attention=NUM_LAYERS * sum(map(attention_flops, PREFILL_LENS)),
    )
    lengths = [E2E_INPUT] * E2E_BATCH
    yield Job(
        title=f"{E2E_BATCH} x ({E2E_INPUT} + {E2E_OUTPUT}), nothing cached",
        work=fresh(prompts.many(E2E_BATCH, E2E_INPUT), E2E_OUTPUT),
        flops=prefill_flops(lengths),
        attention=NUM_LAYERS * sum(map(attention_flops, lengths)),
        step_bytes=step_bytes(E2E_BATCH * (E2E_INPUT + E2E_OUTPUT / 2), E2E_BATCH),
    )
    yield _agents(prompts, fresh)


def _agents(prompts: Prompts, fresh: Callable[[list[list[int]], int], Callable[[], float]]) -> Job:
    shared = prompts.one(AGENTIC_SHARED)
    whole = AGENTIC_SHARED + AGENTIC_OWN
    # A row's own tokens look at all before them; the prefix is computed once.
    own = attention_flops(whole) - attention_flops(AGENTIC_SHARED)
    attention = NUM_LAYERS * (attention_flops(AGENTIC_SHARED) + AGENTIC_BATCH * own)
    num_tokens = AGENTIC_SHARED + AGENTIC_BATCH * AGENTIC_OWN
    products = prefill_flops([num_tokens]) - NUM_LAYERS * attention_flops(num_tokens)
    read = AGENTIC_SHARED + AGENTIC_BATCH * (AGENTIC_OWN + AGENTIC_OUTPUT / 2)
    return Job(
        title=f"{AGENTIC_BATCH} behind a new prefix of {AGENTIC_SHARED}, {AGENTIC_OUTPUT} out",
        work=fresh([shared + mine for mine in prompts.many(AGENTIC_BATCH, AGENTIC_OWN)],
                   AGENTIC_OUTPUT),
        flops=products + attention,
        attention=attention,
        step_bytes=step_bytes(read, AGENTIC_BATCH),
    )  # fmt: skip


def profile_jobs(llm: Any, driver: Driver, ceilings: Ceilings) -> str:
    """A section for each job; it has run once before it is looked at."""
    document = "# Whole jobs by kinds of steps and kernels\n"
    for job in jobs(llm, driver):
        job.work()
        document += f"\n## {job.title}\n\n{job_table(device_kernels(job.work), job, ceilings)}"
    return document


def job_table(kernels: Sequence[Kernel], job: Job, ceilings: Ceilings) -> str:
    """The job's parts with their floors, and its kernels, longest first."""
    steps = split_steps(kernels)
    times, counts = step_times(steps)
    product_flops = job.flops - job.attention
    num_decode = counts.get("decode", 0)
    floors = {
        ("prompts", "products"): product_flops / ceilings.matmul,
        ("prompts", "attention"): job.attention / ceilings.matmul,
        ("decode", "all"): num_decode * job.step_bytes / ceilings.read,
    }
    lines = ["| steps | part | ms | floor | share of it |", "|---|---|---|---|---|"]
    for kind, count in counts.items():
        found = times[kind] | {"all": sum(times[kind].values())}
        for part, us in sorted(found.items(), key=lambda item: -item[1]):
            floor = floors.get((kind, part))
            beside = "| | |" if not floor else f"| {floor * 1e3:.1f} | {floor * 1e6 / us:.0%} |"
            lines.append(f"| {count} with {kind} | {part} | {us / 1e3:.1f} {beside}")
    lines.append(f"| | device idle | {idle_us(kernels) / 1e3:.1f} | | |")
    return "\n".join(lines) + "\n\n" + _kernels(steps)


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels by the step they belong to, in order; what comes before the first is left out."""
    steps: list[list[Kernel]] = []
    for kernel in sorted(kernels, key=lambda k: k.start):
        if is_step_start(kernel):
            steps.append([])
        if steps:
            steps[-1].append(kernel)
    return steps


def kind_of(step: Sequence[Kernel]) -> str:
    """ "prompts" or "decode"."""
    return "prompts" if any(_TILES in kernel.name for kernel in step) else "decode"


def step_times(
    steps: Sequence[Sequence[Kernel]],
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Kind of step -> part -> microseconds, and kind -> steps; idle time is in no part."""
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    busy_until = 0.0
    for step in steps:
        kind = kind_of(step)
        counts[kind] += 1
        for kernel in step:
            part = "other"
            if is_product(kernel):
                part = "products"
            elif "attention" in kernel.name or _TILES in kernel.name:
                part = "attention"
            begin = max(kernel.start, busy_until)
            times[kind][part] += max(0.0, kernel.end - begin)
            busy_until = max(busy_until, kernel.end)
    return {kind: dict(parts) for kind, parts in times.items()}, dict(counts)


def _kernels(steps: Sequence[Sequence[Kernel]]) -> str:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        kind = kind_of(step)
        for kernel in step:
            groups[kind, kernel.name].append(kernel.end - kernel.start)
    lines = ["| steps with | kernel | runs | us each | ms |", "|---|---|---|---|---|"]
    longest = sorted(groups.items(), key=lambda item: -sum(item[1]))
    for (kind, name), taken in longest[:_NUM_SHOWN]:
        shown = name.replace("|", "/")[:100]
        total = sum(taken)
        lines.append(
            f"| {kind} | `{shown}` | {len(taken)} | {total / len(taken):.2f} | {total / 1e3:.1f} |"
        )
    return "\n".join(lines) + "\n"
