"""Times of every candidate at the shapes of a model, and their share of the device's ceiling.

Read bandwidth and matmul rate are measured in the same run. A call's bytes and operations are what
its family says it must move and compute; the ceiling is the larger of the two times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.family_inputs import BenchCase, Shapes
from compiled_engine.custom_ops.kernel_family import Cost, KernelFamily, num_bytes
from compiled_engine.custom_ops.registry import Candidate, KernelRegistry, Priority, Target
from compiled_engine.custom_ops.timing import calls_ms
from compiled_engine.kernels.ceilings import Ceilings
from compiled_engine.kernels.check import as_tuple, is_interpreted

OUT_OF_CACHE_BYTES = 1e9
MAX_COPIES = 36
# Plain attention looks at the whole cache for every token: beyond this it is left out.
MAX_REFERENCE_BYTES = 4e9


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One candidate at one shape.

    Attributes:
        place, case, name: family and mode, shape, candidate.
        us: time of a call: median of the repeats, on a CPU the least; None if it did not run.
        repeats_us: each of them.
        tb_s, tflop_s: bytes moved and operations done in that time.
        share: of the ceiling: the least time of the call over its time.
        bound: "bytes" or "operations", which the least time comes from.
        reason: why it did not run; empty if it did.
    """

    place: str
    case: str
    name: str
    us: float | None
    repeats_us: tuple[float, ...] = ()
    tb_s: float = 0.0
    tflop_s: float = 0.0
    share: float = 0.0
    bound: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
        shapes: of the model.
        num_tokens: of the steps.
        only: a family or "family.mode"; empty for all.
        num_repeats: of every timing.
    """

    shapes: Shapes
    num_tokens: tuple[int, ...]
    only: str = ""
    num_repeats: int = 3


def bench_kernels(
    registry: KernelRegistry,
    device: torch.device,
    ceilings: Ceilings,
    options: Options,
    note: Callable[[Timing], None] = lambda _: None,
) -> list[Timing]:
    """Times of all candidates; `note` gets each."""
    found = []
    for family in FAMILIES:
        if options.only not in ("", family.family, family.place):
            continue
        for case, context in _cases(family, device, options):
            for timing in _time_case(family, case, context, registry, device, ceilings, options):
                note(timing)
                found.append(timing)
    return found


def _cases(
    family: KernelFamily, device: torch.device, options: Options
) -> Iterator[tuple[BenchCase, int]]:
    """Cases and the context their attention has; the op's largest example where there are none."""
    shapes = options.shapes
    if family.bench_cases is None:
        examples = family.op.example_inputs(shapes.dtype, device, 0)

        def size(given: tuple[Any, ...]) -> int:
            return sum(num_bytes(value) for value in given)

        largest = max(examples, key=size)
        yield BenchCase("largest example", lambda: largest), shapes.context
        return
    for num_tokens in options.num_tokens:
        for case in family.bench_cases(shapes, num_tokens, device):
            yield case, num_tokens if case.label.startswith("prompt") else shapes.context


def _time_case(
    family: KernelFamily,
    case: BenchCase,
    context: int,
    registry: KernelRegistry,
    device: torch.device,
    ceilings: Ceilings,
    options: Options,
) -> Iterator[Timing]:
    first = family.bind(case.make())
    target = Target.of(device)
    traits = family.traits(first, target)
    layout = str(first[family.layout]) if family.layout else ""
    size = sum(num_bytes(value) for value in first.values())
    sets = [first] + [family.bind(case.make()) for _ in range(num_copies(size, device) - 1)]
    blank: dict[str, Any] = {"place": family.place, "case": case.label}
    cost: Cost | None = None
    for candidate in registry.of(family.family, family.mode):
        blank |= {"name": candidate.name}
        reason = candidate.rejection(target, family.dtype_of(first), traits, layout)
        is_interpreted_here = device.type == "cpu" and is_interpreted(candidate)
        if reason is None and _is_too_large(family, candidate, first):
            reason = "would look at the whole cache for every token"
        if reason is not None and is_interpreted_here:
            reason = "runs in Triton's interpreter: its time says nothing"
        if reason is not None:
            yield Timing(**blank, us=None, reason=reason)
            continue
        call = _callable(family, candidate, device)
        calls = [partial(call, given) for given in sets]
        try:
            with torch.no_grad():
                if cost is None:
                    cost = family.cost(first, as_tuple(calls[0]()), context)
                taken = calls_ms(calls, device, num_repeats=options.num_repeats)
        except Exception as error:  # one kernel must not cost the others
            yield Timing(**blank, us=None, reason=f"{type(error).__name__}: {error}")
            continue
        best = min(taken) if device.type == "cpu" else statistics.median(taken)
        repeats = {"repeats_us": tuple(ms * 1e3 for ms in taken)}
        yield _timing(blank | repeats, best * 1e-3, cost, ceilings)


def _timing(blank: dict[str, Any], seconds: float, cost: Cost, ceilings: Ceilings) -> Timing:
    rate = ceilings.rate(is_8bit=cost.is_8bit)
    is_moving = cost.num_bytes / ceilings.read >= cost.num_flops / rate
    return Timing(
        **blank,
        us=seconds * 1e6,
        tb_s=cost.num_bytes / seconds / 1e12,
        tflop_s=cost.num_flops / seconds / 1e12,
        share=ceilings.floor_s(cost.num_bytes, cost.num_flops, is_8bit=cost.is_8bit) / seconds,
        bound="bytes" if is_moving else "operations",
    )


def num_copies(size: int, device: torch.device) -> int:
    """Sets of inputs of `size` bytes each, so many that no cache holds them all."""
    if device.type == "cpu":
        return 2
    return max(2, min(MAX_COPIES, int(-(-OUT_OF_CACHE_BYTES // max(1, size)))))


def _callable(
    family: KernelFamily, candidate: Candidate, device: torch.device
) -> Callable[[dict[str, Any]], Any]:
    """The candidate over arguments by name; on a GPU plain torch as Inductor compiles it."""
    is_plain = candidate.priority is Priority.REFERENCE and candidate.launch is None
    # Bodies of ops that are told which kernel runs are hardly ever left to Inductor.
    is_fused = family.op.is_expandable and not family.has_impl
    if not (is_plain and device.type == "cuda" and is_fused):
        return partial(family.run, candidate)
    body = torch.compile(family.op.reference, dynamic=False)

    def compiled(arguments: dict[str, Any]) -> Any:
        return body(*(value for name, value in arguments.items() if name != "impl"))

    return compiled


def _is_too_large(family: KernelFamily, candidate: Candidate, arguments: dict[str, Any]) -> bool:
    """Plain attention gathers the cache in fp32 for each token."""
    if candidate.priority is not Priority.REFERENCE or "block_table" not in arguments:
        return False
    table, main = arguments["block_table"], arguments[family.main]
    cache = arguments.get("k_cache")
    if not isinstance(cache, Tensor):
        return False
    each = table.shape[1] * cache.shape[1] * cache.shape[2] * cache.shape[3] * 8.0
    return bool(main.shape[0] * each > MAX_REFERENCE_BYTES)


def summarize(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """The fastest candidate of each case that ran, for a quick look."""
    best: dict[tuple[str, str], Timing] = {}
    for timing in timings:
        key = (timing.place, timing.case)
        if timing.us is not None and (key not in best or timing.us < (best[key].us or 0)):
            best[key] = timing
    return [
        {"place": t.place, "case": t.case, "fastest": t.name, "us": t.us, "share": t.share}
        for t in best.values()
    ]
