"""Compiles the functions a step is made of, through our passes, and counts what it cost.

A piece is compiled once for each static size it is asked for, and once with a dynamic size for all
others; the caller picks by size, so guards never decide between versions. Compiled code lands in
the engine's own cache folder; a second start with the same sources finds it there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.cache_folders import KERNELS, place_caches
from compiled_engine.compile.direct import DirectPiece, PlainPiece
from compiled_engine.compile.piece import Piece
from compiled_engine.compile.store import EntryStore
from compiled_engine.compile.torch_compat import compile_seconds, dynamo_counters
from compiled_engine.config import EngineConfig
from compiled_engine.counters import CompileCounters
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.tuning import KernelTuner
from compiled_engine.passes.defaults import disabled_passes
from compiled_engine.passes.names import PieceTraits
from compiled_engine.start_times import StartTimes

if TYPE_CHECKING:  # they bring Inductor, which only a piece that is compiled needs
    from compiled_engine.passes.dump import GraphDump
    from compiled_engine.passes.pipeline import PassPipeline

PLAIN = PieceTraits()


class CompileDriver:
    """One per engine.

    Args:
        config: `enforce_eager`, `disable_passes`, the options of kernels, `dump_graphs` and the
            cache folder are read.
        kept_ops: fused ops that have a kernel on this device and stay in the graph.
        device_type: "cpu" or "cuda": leaves out the passes that do not pay there.

    Raises:
        ConfigError: an unknown name in `disable_passes` or among the kernels, a folder for graphs
            that cannot be made.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kept_ops: frozenset[str] = frozenset(),
        device_type: str = "",
    ) -> None:
        self.counters = CompileCounters()
        self.times = StartTimes()
        self.store: EntryStore | None = None  # of compiled pieces, once the start's key is known
        self.pieces: list[Piece] = []  # all that were made
        self._seconds_before = compile_seconds()
        self.is_eager = config.enforce_eager
        self.kept_ops = kept_ops
        self.disabled_passes = disabled_passes(
            device_type, disabled=config.disable_passes, enabled=config.enable_passes
        )
        self.registry = make_registry(
            config.kernels,
            config_file=config.kernel_config,
            objective=config.kernel_objective,
            tuner=KernelTuner(Path(config.cache_dir) / KERNELS),
        )
        # Kernels in a cache may have been made without `waits_in_every_kernel`.
        dependent = {"triton.enable_pdl": True, "fx_graph_cache": False}
        self.options = dependent if config.inductor_pdl else {}
        self.dump_folder = config.dump_graphs
        if self.dump_folder is not None:  # what comes from a cache goes through no pass
            self.options["force_disable_caches"] = True
        place_caches(config.cache_dir)
        self._passes: dict[PieceTraits, PassPipeline] = {}
        self._start: dict[str, int] = {}
        if not self.is_eager:
            self._start = dynamo_counters()
            self._graphs_when_warm: int | None = None

    def passes(self, traits: PieceTraits, piece: str = "") -> PassPipeline:
        """The passes for pieces with such traits; with graphs to be written, of one piece."""
        if self.dump_folder is not None and piece:
            from compiled_engine.passes.dump import GraphDump

            return self._pipeline(traits, GraphDump(self.dump_folder / piece))
        if traits not in self._passes:
            self._passes[traits] = self._pipeline(traits, None)
        return self._passes[traits]

    def _pipeline(self, traits: PieceTraits, dump: GraphDump | None) -> PassPipeline:
        from compiled_engine.passes.pipeline import PassPipeline

        return PassPipeline(
            disabled=tuple(dict.fromkeys((*self.disabled_passes, *traits.skipped()))),
            kept_ops=self.kept_ops,
            on_pass=self.counters.count_pass,
            registry=self.registry,
            dump=dump,
        )

    def runs_pass(self, name: str) -> bool:
        """Whether compiled pieces that the pass is for are rewritten by it."""
        return not self.is_eager and name not in self.disabled_passes

    def compile(
        self,
        function: Callable[..., Any],
        name: str,
        traits: PieceTraits = PLAIN,
    ) -> Callable[..., Any]:
        """`function` compiled as one graph, or itself when eager.

        The copy has a code object of its own: other pieces made from the same function do not share
        compiled versions with it.
        """
        return function if self.is_eager else self._piece(function, name, traits)

    def _piece(self, function: Callable[..., Any], name: str, traits: PieceTraits) -> Piece:
        def options() -> dict[str, Any]:
            return {"post_grad_custom_pre_pass": self.passes(traits, name), **self.options}

        piece = Piece(function, name, options=options, counters=self.counters, store=self.store)
        self.pieces.append(piece)
        return piece

    def compile_direct(
        self,
        function: Callable[..., tuple[Any, ...]],
        name: str,
        *,
        num_static: int,
        num_shared: int,
        traits: PieceTraits = PLAIN,
    ) -> DirectPiece | PlainPiece:
        """`function` compiled as one graph that is called past Dynamo; see `DirectPiece`."""
        if self.is_eager:
            return PlainPiece(function)
        piece = self._piece(function, name, traits)
        return DirectPiece(piece, num_static=num_static, num_shared=num_shared)

    def compile_seconds(self) -> dict[str, float]:
        """Seconds of the compiles since this was made, as `torch_compat.compile_seconds`."""
        before = self._seconds_before
        return {name: s - before.get(name, 0.0) for name, s in compile_seconds().items()}

    def finish_warm_up(self) -> None:
        """From here on every captured graph counts as a recompile."""
        self.refresh()
        if not self.is_eager:
            self._graphs_when_warm = self.counters.num_graphs

    def refresh(self) -> CompileCounters:
        """Brings the counters up to date with torch's own, and returns them."""
        if self.is_eager:
            return self.counters
        for name, total in dynamo_counters().items():
            setattr(self.counters, name, total - self._start[name])
        self.counters.num_kernels += self.counters.num_loaded_kernels
        if self._graphs_when_warm is not None:
            self.counters.num_recompiles = self.counters.num_graphs - self._graphs_when_warm
        return self.counters
