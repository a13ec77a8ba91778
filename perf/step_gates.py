"""What steady decode steps of an engine cost, in counts, and ratios of times that take turns.

Counts are the same on every machine. Host reads are the calls by which Python gets a tensor's
values, which on a GPU would wait for the device; on a CPU the step reads its own plan, once. Bytes
to and from the device are those of the entries handed to a step, and of the record it leaves: what
a GPU's copies would hold. Bytes copied are those of the calls named below that Python makes on this
thread, also in the function that launches a compiled piece's kernels. What other threads, kernels
and native code copy is not seen, nor a copy by a call of another name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from perf.decode import Driver, Progress, settle
from perf.qwen3_8b import Prompts
from perf.rows import Measured

BATCH_SIZES = (1, 8)
PROMPT_LEN, OUTPUT_LEN = 16, 160
NUM_STEPS = 16
NUM_TURNS = 5
NUM_PROMPTS = 3
LONG_PROMPT_LEN = 240
Clock = Callable[[], float]
# Calls of `torch.Tensor` that hand values to Python.
READS = ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "cpu", "nonzero")
# Calls that copy their first argument's bytes or give them to Python (`__setitem__`: those of the
# part it names), and those that make a tensor of Python's values. On one device some copy nothing,
# and would with two.
COPIES = frozenset({*READS, "copy_", "_to_copy", "to", "cuda", "numpy", "__array__", "__setitem__"})
NEW = frozenset({"tensor", "as_tensor", "asarray"})


def count_steps(engine: Any) -> Iterator[Measured]:
    """Host reads, allocations, bytes across, and recompiles, by batch size."""
    driver = Driver(engine, Prompts(vocab_size=engine.settings.vocab_size))
    for batch_size in BATCH_SIZES:
        with steady(driver, batch_size) as step:
            step()
            with counted_reads() as reads:
                _repeat(step)
            with counted_bytes(engine) as (sent, received):
                _repeat(step)
            with counted_copies() as copies:
                _repeat(step)
            allocations = count_allocations(lambda step=step: _repeat(step))  # type: ignore[misc]
        counts = {
            "host_reads_per_step": len(reads) / NUM_STEPS,
            "allocations_per_step": allocations / NUM_STEPS,
            "bytes_to_device_per_step": sum(sent) / NUM_STEPS,
            "bytes_to_host_per_step": sum(received) / NUM_STEPS,
            "copied_bytes_per_step": sum(size for _, size in copies) / NUM_STEPS,
        }
        for metric, value in counts.items():
            yield Measured(metric=metric, unit="count", batch=batch_size, values=[value])
    recompiles = engine.driver.refresh().num_recompiles
    yield Measured(metric="recompiles_in_steps", unit="count", values=[recompiles])


def _repeat(step: Callable[[], None]) -> None:
    for _ in range(NUM_STEPS):
        step()


@contextmanager
def steady(driver: Driver, batch_size: int) -> Iterator[Callable[[], None]]:
    """A function that does one step in which every row decodes."""
    ids = driver.submit_batch(batch_size, PROMPT_LEN, OUTPUT_LEN)
    progress = Progress(ids)
    settle(driver, progress)

    def step() -> None:
        progress.add(driver.loop.step())
        assert not progress.is_over, "a row ended while steps were counted"

    yield step
    driver.run_out(ids)


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Collects the name of each call inside that reads a tensor's values into Python."""
    import torch

    found: list[str] = []
    before = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return read(self, *args, **kwargs)

        return counted

    try:
        for name, read in before.items():
            setattr(torch.Tensor, name, counting(name, read))
        yield found
    finally:
        for name, read in before.items():
            setattr(torch.Tensor, name, read)


@contextmanager
def counted_bytes(engine: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Collects the bytes of the entries and of the record of each step inside."""
    from torch.utils._pytree import tree_leaves

    executor, sent, received = engine.loop.executor, list[int](), list[int]()
    launch, read = executor.launch, executor.outbox.read

    def counted_launch(inbox: Any, param_inbox: Any, key: Any, **more: Any) -> None:
        if more["has_entries"]:
            tensors = [t for t in tree_leaves((inbox, param_inbox)) if hasattr(t, "nbytes")]
            sent.append(sum(t.nbytes for t in tensors))
        launch(inbox, param_inbox, key, **more)

    def counted_read() -> Any:
        record = read()
        received.append(record.rows.nbytes + 8 * len(record.counts))
        return record

    with (
        patch.object(executor, "launch", counted_launch),
        patch.object(executor.outbox, "read", counted_read),
    ):
        yield sent, received


@contextmanager
def counted_copies() -> Iterator[list[tuple[str, int]]]:
    """Collects name and bytes of each call of `COPIES` and `NEW` that this thread makes inside."""
    from torch.overrides import TorchFunctionMode

    found: list[tuple[str, int]] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.__name__.partition(".")[0]  # of an op it ends by its overload
            if name == "__setitem__":
                found.append((name, args[0][args[1]].nbytes))
            elif name in COPIES:
                found.append((name, args[0].nbytes))
            elif name in NEW:
                found.append((name, result.nbytes))
            return result

    with Counting():
        yield found


def count_allocations(work: Callable[[], None]) -> int:
    """Blocks of memory that torch hands out during `work`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    results = seen.profiler.kineto_results
    return sum(e.name() == "[memory]" and e.nbytes() > 0 for e in results.events())


def time_steps(compiled: Any, eager: Any) -> Iterator[Measured]:
    """Compiled over eager, 8 rows over one, a warm over a cold prefix: the fastest of some turns.

    In processor time of an engine of one thread, which other work on a machine hardly changes.
    """
    drivers = [Driver(e, Prompts(vocab_size=e.settings.vocab_size)) for e in (compiled, eager)]
    times: dict[str, list[float]] = {}
    for _ in range(NUM_TURNS):
        cold, warm = prefix_s(drivers[0], time.process_time)
        taken = {
            "compiled": step_s(drivers[0], 8, time.process_time),
            "eager": step_s(drivers[1], 8, time.process_time),
            "one": step_s(drivers[0], 1, time.process_time),
            "cold": cold,
            "warm": warm,
        }
        for name, seconds in taken.items():
            times.setdefault(name, []).append(seconds)
    for metric, one, other in (
        ("compiled_step_over_eager", "compiled", "eager"),
        ("step_of_8_rows_over_one", "compiled", "one"),
        ("warm_prefix_over_cold", "warm", "cold"),
    ):
        ratio = min(times[one]) / min(times[other])
        yield Measured(metric=metric, unit="ratio", values=[ratio])


def step_s(driver: Driver, batch_size: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of the fastest of some steady steps: other work makes the rest slower."""
    taken = []
    with steady(driver, batch_size) as step:
        for _ in range(2 * NUM_STEPS):
            begin = clock()
            step()
            taken.append(clock() - begin)
    return min(taken)


def prefix_s(driver: Driver, clock: Clock) -> tuple[float, float]:
    """Seconds to the first token of a long prompt: nothing cached, then all of it; the fastest."""
    prompts = driver.prompts.many(NUM_PROMPTS, LONG_PROMPT_LEN)
    pairs = [(first_token_s(driver, p, clock), first_token_s(driver, p, clock)) for p in prompts]
    return min(cold for cold, _ in pairs), min(warm for _, warm in pairs)


def first_token_s(driver: Driver, prompt: list[int], clock: Clock = time.perf_counter) -> float:
    """Seconds from its submit to its first token, alone."""
    begin = clock()
    request_id = driver.submit(prompt, 2)
    while not driver.loop.step():
        pass
    taken = clock() - begin
    driver.run_out({request_id})
    return taken
