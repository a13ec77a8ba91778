"""The GPU memory budget: what a step needs besides weights and KV, measured before the KV pool.

A probe runs the largest step and captures a small one, without compiling and over a pool of a few
pages; compiled steps need no more than that. What is left of the allowed share becomes KV pages.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compiled_engine.compile.fingerprint import modules_digest
from compiled_engine.compile.store import EntryStore

# Kept on top of the measured needs, the larger of a share and bytes: allocators fragment.
MARGIN, LEAST_MARGIN = 0.05, 64 << 20
NUM_CAPTURES = 6
_PREFIX = "memory_"
# Modules that measure: what others of them found is not taken.
_PROBE = ("engine", "memory")


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What a probe measured, bytes.

    Attributes:
        activations: most that the largest step holds at once.
        pool: most that captured steps hold at once, in memory of their own. What steps launched
            kernel by kernel gave back is kept for them: a capture can not take from it.
        graphs: all captured graphs together.
        kept: what the probe left behind: workspaces and loaded code. A start that probes has it
            taken when the KV pool is sized; one that does not must leave it free, too.
    """

    activations: int
    pool: int
    graphs: int
    kept: int = 0

    @property
    def reserved(self) -> int:
        """What the KV pool must leave free."""
        needed = self.activations + self.pool + self.graphs
        return needed + max(int(needed * MARGIN), LEAST_MARGIN)


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Where the device's memory went, bytes; `other` is the driver's context and loaded code."""

    total: int
    allowed: int
    weights: int
    kv: int
    activations: int
    graphs: int
    other: int

    def rows(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) in the order they are shown; `free` is what nobody holds."""
        yield "weights", self.weights
        yield "KV cache", self.kv
        yield "activations", self.activations
        yield "graphs", self.graphs
        yield "context and code", self.other
        yield "left below the ceiling", self.allowed - self.used
        yield "above the ceiling", self.total - self.allowed

    @property
    def used(self) -> int:
        """Bytes that are taken or kept for a step."""
        return self.weights + self.kv + self.activations + self.graphs + self.other


@functools.cache
def needs_name(cudagraph_mode: str) -> str:
    """Of the entry with the needs of memory: a key leaves open how graphs are captured, and how
    needs are measured."""
    return f"{_PREFIX}{cudagraph_mode}_{modules_digest(_PROBE)}"


def is_needs(name: str) -> bool:
    """Whether an entry holds needs of memory, of whatever mode and measured however."""
    return name.startswith(_PREFIX)


def load_needs(store: EntryStore | None, name: str, free_bytes: int) -> MemoryNeeds | None:
    """What an earlier start measured; None if that is not known, or more than there is.

    Args:
        store: of this start, if it has one.
        name: of the entry.
        free_bytes: of the device, before the KV pool is made.
    """
    data = None if store is None else store.load(name)
    if store is None or data is None:
        return None
    try:
        fields = {key: int(value) for key, value in json.loads(data).items()}
        needs = MemoryNeeds(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        store.drop(name, f"it holds no needs of memory: {error}")
        return None
    if needs.activations <= 0 or min(fields.values()) < 0:
        store.drop(name, "it holds no needs of memory: a step needs some")
        return None
    return needs if needs.reserved + needs.kept <= free_bytes else None


def keep_needs(store: EntryStore, name: str, needs: MemoryNeeds) -> None:
    """Keeps what was measured for later starts; what was loaded is there already."""
    if name not in store.counters.hit_bytes:
        store.save(name, json.dumps(asdict(needs)).encode())


def measure_needs(
    device: torch.device,
    run_largest: Callable[[], Any],
    capture_one: Callable[[], Any],
    num_graphs: int,
) -> MemoryNeeds:
    """Runs the step once, and captures if there will be graphs.

    `capture_one` must keep its graph alive until the probe is dropped.
    """

    def free_bytes() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    free_bytes()
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest()
    torch.cuda.synchronize(device)
    # What fits into free blocks of today must find room in a graph's own memory, too.
    activations = max(
        torch.cuda.max_memory_reserved(device) - reserved,
        torch.cuda.max_memory_allocated(device) - allocated,
    )
    if not num_graphs:
        return MemoryNeeds(activations=activations, pool=0, graphs=0)
    capture_one()  # what the first capture sets up is not counted for each
    left = [free_bytes()]
    for _ in range(NUM_CAPTURES):
        capture_one()
        left.append(free_bytes())
    return MemoryNeeds(
        activations=activations, pool=activations, graphs=int(bytes_each(left) * num_graphs)
    )


def bytes_each(left: Sequence[int]) -> float:
    """What a capture took, given what was free before the first and after each, at least 3.

    The driver takes memory in large pieces, hence a mean; and another process may take or give
    back some meanwhile, hence one without the largest and the smallest.
    """
    taken = sorted(before - after for before, after in itertools.pairwise(left))
    return max(0.0, statistics.mean(taken[1:-1]))


def memory_table(
    device: torch.device, utilization: float, *, weights: int, kv: int, needs: MemoryNeeds
) -> MemoryTable:
    """The table after everything was built, with what graphs really took."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    # Memory the graphs share is the allocator's and holds their activations.
    activations = max(needs.activations + needs.pool, reserved - weights - kv)
    other = max(0, total - free - reserved)
    graphs = min(needs.graphs, other)
    return MemoryTable(
        total=total,
        allowed=int(total * utilization),
        weights=weights,
        kv=kv,
        activations=activations,
        graphs=graphs,
        other=other - graphs,
    )
