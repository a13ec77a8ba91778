"""Counts of what a compile and a run did, so that tests can assert costs.

The owner of a counter is whoever did the work; nothing here is global. `expect` states the change
a block of code must cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class CompileCounters:
    """What compiling has cost so far.

    Attributes:
        num_graphs: graphs Dynamo captured.
        num_graph_breaks: places where Dynamo had to give up; 0 with `fullgraph`.
        num_recompiles: graphs captured for a function beyond its first, after warm-up.
        num_inductor_compiles: graphs Inductor generated code for (cache misses).
        num_cache_hits: graphs Inductor took from its cache.
        num_loaded: pieces that an earlier start had compiled; they meet none of the above.
        num_unrecorded: pieces that were compiled and could not be kept for a later start.
        num_kernels: kernels in the generated code, loaded pieces included.
        num_matches: matches by pass name.
        num_expansions: semantic ops that no pass took.
        num_loaded_kernels: those of loaded pieces.
        pass_seconds: time by pass name.
        piece_seconds: time by piece until its first call returned.
    """

    num_graphs: int = 0
    num_graph_breaks: int = 0
    num_recompiles: int = 0
    num_inductor_compiles: int = 0
    num_cache_hits: int = 0
    num_loaded: int = 0
    num_unrecorded: int = 0
    num_kernels: int = 0
    num_expansions: int = 0
    num_loaded_kernels: int = 0
    num_matches: dict[str, int] = field(default_factory=dict)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    piece_seconds: dict[str, float] = field(default_factory=dict)

    def count_pass(self, name: str, matches: int, seconds: float) -> None:
        """Adds one run of a pass over one graph."""
        self.pass_seconds[name] = self.pass_seconds.get(name, 0.0) + seconds
        if name == "expand":
            self.num_expansions += matches
        else:
            self.num_matches[name] = self.num_matches.get(name, 0) + matches

    def count_loaded(self, num_kernels: int, num_matches: dict[str, int]) -> None:
        """Adds a piece that was compiled before; matches count as when it was."""
        self.num_loaded += 1
        self.num_loaded_kernels += num_kernels
        for name, count in num_matches.items():
            self.num_matches[name] = self.num_matches.get(name, 0) + count

    def matches_since(self, before: dict[str, int]) -> dict[str, int]:
        """Matches by pass beyond those of `before`, an earlier copy of `num_matches`."""
        found = {n: count - before.get(n, 0) for n, count in self.num_matches.items()}
        return {name: count for name, count in found.items() if count}

    @contextmanager
    def expect(self, **changes: int) -> Iterator[None]:
        """Asserts that the block changes the named counters by exactly these amounts."""
        names = {f.name for f in fields(self)}
        assert changes.keys() <= names, f"no such counter: {changes.keys() - names}"
        before = {name: getattr(self, name) for name in changes}
        yield
        got = {name: getattr(self, name) - before[name] for name in changes}
        assert got == changes, f"counters changed by {got}, expected {changes}"
