"""A function that is compiled once, by its first call or by an earlier start, and called directly.

Dynamo's guards and bytecode cost more than a small layer's own overhead, and they can decide
nothing for us: the caller picks the version by size. So the first call goes through `torch.compile`
and is recorded as a program; later calls, and later starts, hand the program its inputs.
`tests/engine/test_engine.py` compares with the eager twin.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from compiled_engine.cache_folders import make_room_for_compilers
from compiled_engine.compile.program import (
    LoadedProgram,
    Program,
    ProgramError,
    ProgramInput,
    ProgramLoadError,
    binder,
    rebuilder,
)
from compiled_engine.compile.torch_compat import (
    Compiled,
    apply_marks,
    inductor_backend,
    input_sources,
    noted_matches,
    with_own_code,
)
from compiled_engine.counters import CompileCounters

logger = logging.getLogger(__name__)


class ProgramStore(Protocol):
    """Where programs are kept between starts; `compile.store.EntryStore` is one."""

    def load(self, name: str) -> bytes | None:
        """The entry, or None."""

    def save(self, name: str, data: bytes) -> None:
        """Keeps an entry."""

    def drop(self, name: str, reason: str) -> None:
        """An entry that was loaded is of no use."""


@dataclass
class Captured:
    """A piece that could not be recorded: Inductor's code, called past Dynamo.

    Attributes:
        inputs, outputs, bind, call, rebuild: as those of `LoadedProgram`.
    """

    inputs: tuple[ProgramInput, ...]
    outputs: list[Any]
    bind: Callable[..., list[Any]]
    call: Callable[[list[Any]], Any]
    rebuild: Callable[..., Any]


class Piece:
    """A compiled function; its first call decides about sizes, but for dims that are marked.

    Args:
        function: mutates at most what its arguments hold; returns tensors in tuples.
        name: of the piece; of its entry in the store.
        options: gives Inductor's, the passes among them, when something is compiled.
        counters: count what happens.
        store: what earlier starts compiled; None keeps nothing.

    Attributes:
        loaded: what is called; None before the first call, and where only Dynamo can call it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        options: Callable[[], dict[str, Any]],
        counters: CompileCounters,
        store: ProgramStore | None,
    ) -> None:
        self.name = name
        self.parameters = list(inspect.signature(function).parameters)
        self.loaded: LoadedProgram | Captured | None = None
        self._function = function
        self._options = options
        self._counters = counters
        self._store = store
        self._traced: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function; the first call loads or compiles it."""
        loaded = self.loaded
        if loaded is None:
            return self.first(*arguments)
        results = loaded.call(loaded.bind(*arguments))
        return loaded.rebuild(results, *arguments)

    def first(self, *arguments: Any) -> Any:
        """Makes `loaded`, from the store or by compiling, and calls the function."""
        if self._traced is not None:
            return self._traced(*arguments)
        start = time.perf_counter()
        try:
            if self.preload():
                return self(*arguments)
            return self._compile(*arguments)
        finally:
            self._counters.piece_seconds[self.name] = time.perf_counter() - start

    def preload(self) -> bool:
        """Takes the piece from the store without calling it; False if it is not there."""
        if self.loaded is None:
            self.loaded = self._from_store()
        return self.loaded is not None

    def stay_plain(self) -> None:
        """Has the function itself called from here on: nothing is compiled for it."""
        self._traced = self._function

    @property
    def is_unkept(self) -> bool:
        """Whether what was compiled for it could not be made a program."""
        return self._traced is not None or isinstance(self.loaded, Captured)

    def _from_store(self) -> LoadedProgram | None:
        data = None if self._store is None else self._store.load(self.name)
        if data is None:
            return None
        assert self._store is not None
        try:
            program = Program.from_bytes(data)
            loaded = LoadedProgram(program, self.parameters)
        except ProgramLoadError as error:  # the entry may be good
            logger.warning("%s; it is compiled again", error)
            return None
        except ProgramError as error:
            self._store.drop(self.name, str(error))
            return None
        self._counters.count_loaded(program.num_kernels, program.num_matches)
        self._counters.num_expansions += program.num_expansions
        return loaded

    def _compile(self, *arguments: Any) -> Any:
        before = dict(self._counters.num_matches), self._counters.num_expansions
        noted = noted_matches()
        capture = _Capture()
        make_room_for_compilers()
        apply_marks(arguments)
        traced = torch.compile(
            with_own_code(self._function, self.name),
            fullgraph=True,
            dynamic=False,
            backend=inductor_backend(self._options(), capture.keep),
        )
        try:
            returned = traced(*arguments)
            self._count_what_was_cached(noted, before)
            self.loaded = self._recorded(capture, returned, arguments, before)
            if self.loaded is None:
                self._traced = traced
        finally:
            capture.forget()
        return returned

    def _count_what_was_cached(
        self, noted: dict[str, int], before: tuple[dict[str, int], int]
    ) -> None:
        """Counts matches in what Inductor took from its cache: no pass ran over that here."""
        counted = self._counters.matches_since(before[0])
        counted["expand"] = self._counters.num_expansions - before[1]
        for name, total in noted_matches().items():
            rest = total - noted.get(name, 0) - counted.get(name, 0)
            if rest:
                self._counters.count_pass(name, rest, 0.0)

    def _recorded(
        self,
        capture: _Capture,
        returned: Any,
        arguments: tuple[Any, ...],
        before: tuple[dict[str, int], int],
    ) -> LoadedProgram | Captured | None:
        from compiled_engine.compile import program_record as recording

        named = dict(zip(self.parameters, arguments, strict=True))
        try:
            inputs = recording.graph_inputs(capture.graph, capture.sources)
            outputs = recording.output_structure(returned, capture.results, named)
            recording.check_marks(inputs, capture.arguments)  # or Dynamo guards every call
        except Exception as error:
            self._refuse(error)
            return None
        try:
            recording.check_same(capture.watched, capture.arguments, capture.results)
            program = recording.record(
                capture.watched,
                name=self.name,
                inputs=inputs,
                outputs=outputs,
                num_matches=self._counters.matches_since(before[0]),
                num_expansions=self._counters.num_expansions - before[1],
            )
            # What runs here is what a later start will run.
            data = program.to_bytes()
            loaded = LoadedProgram(Program.from_bytes(data), self.parameters)
            recording.check_bound(loaded.bind(*arguments), capture.arguments)
        except Exception as error:  # the piece itself runs: nothing here may end a start
            self._refuse(error)
            made = capture.compiled
            return Captured(
                inputs,
                outputs,
                binder(self.parameters, [item.source for item in inputs]),
                lambda values: made(*values),
                rebuilder(self.parameters, outputs),
            )
        if self._store is not None:
            self._store.save(self.name, data)
        return loaded

    def _refuse(self, error: Exception) -> None:
        """Counts and says that the piece cannot be kept."""
        self._counters.num_unrecorded += 1
        # The text alone: a record of the log would keep the error's frames, and weights in them.
        logger.warning("%s is compiled again at every start: %s", self.name, str(error))


class _Capture:
    """What the backend saw of a piece, and its first call."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Dynamo keeps its backend for good, which must not keep weights."""
        watched = getattr(self, "watched", None)
        if watched is not None:
            watched.stop()
        self.graph: Any = None
        self.sources: list[str] = []
        self.compiled: Any = None
        self.watched: Any = None
        self.arguments: list[Any] = []
        self.results: list[Any] = []

    def keep(self, graph: torch.fx.GraphModule, made: Compiled) -> Callable[..., Any]:
        """Called by the backend; what it returns is called once, by Dynamo."""
        from compiled_engine.compile.program_record import Watched

        assert self.graph is None, "captured twice"
        self.graph, self.sources = graph, input_sources(graph)
        self.compiled = compiled = made.function
        self.watched = Watched(made.code)

        def first_call(*arguments: Any) -> Any:
            results = compiled(*arguments)
            self.arguments, self.results = list(arguments), list(results)
            return results

        return first_call
