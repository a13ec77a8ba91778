"""Serving before anything is compiled: plain pieces at once, compiled ones when they are there.

Processes compile into the cache meanwhile. Between two steps the compiled pieces are loaded and
take the place of the plain ones; rows, pages and what is in flight stay as they are. A piece that
was compiled and cannot be kept stays plain; if one is missing for another reason, plain code goes
on serving all of them. Both are said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from compiled_engine.build_ahead import BuildProcesses
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.graphs import StepGraphs
from compiled_engine.pieces import StepPieces
from compiled_engine.step import StepExecutor

logger = logging.getLogger(__name__)


class LaterPieces:
    """Looks before every launch whether the compiled pieces are there, and takes them up.

    Args:
        executor: runs plain pieces.
        driver: has the store that the processes fill.
        make: compiled pieces for the executor's model and shape.
        processes: compile.
        graphs: for steps of compiled pieces, which are captured when they first run; None on a CPU.

    Attributes:
        is_waiting: neither taken up nor given up yet.
        on_taken: called once the compiled pieces serve.
    """

    def __init__(
        self,
        executor: StepExecutor,
        driver: CompileDriver,
        make: Callable[[], StepPieces],
        processes: BuildProcesses,
        graphs: StepGraphs | None,
    ) -> None:
        self.is_waiting = True
        self.on_taken: Callable[[], None] = lambda: None
        self._executor = executor
        self._driver = driver
        self._make = make
        self._processes = processes
        self._graphs = graphs
        executor.before_launch = self.look

    def look(self) -> None:
        """Takes the compiled pieces up once they are there; costs next to nothing before."""
        if not self._processes.is_done():
            return
        self._processes.wait()
        self.close()
        try:
            self._take_up()
        except Exception:  # a server that serves must not end by what would make it faster
            logger.exception("uncompiled code goes on serving: what was compiled cannot be loaded")

    def close(self) -> None:
        """Ends the processes; what runs stays as it is."""
        self.is_waiting = False
        self._executor.before_launch = lambda: None
        self._processes.close()

    def _take_up(self) -> None:
        start = time.perf_counter()
        executor = self._executor
        pieces = self._make()
        names = pieces.preload()
        unkept = [name for name in names if name in self._processes.unkept]
        missing = [name for name in names if name not in unkept]
        if missing:
            logger.warning(
                "uncompiled code goes on serving: %s could not be compiled; the messages above say "
                "why, or start with --compile-mode first",
                ", ".join(missing),
            )
            return
        if unkept:  # compiling them here would stop all requests for as long
            pieces.leave_plain(unkept)
            logger.warning(
                "%s cannot be kept and stay uncompiled: the next start compiles them before it "
                "serves, as this one does with --compile-mode first",
                ", ".join(unkept),
            )
        if executor.device.type == "cuda":
            torch.cuda.synchronize(executor.device)  # steps in flight belong to the plain pieces
        executor.take_pieces(pieces, self._driver, self._graphs)
        self._driver.finish_warm_up()
        self.on_taken()
        seconds = time.perf_counter() - start
        logger.info("compiled code serves from here on; it was loaded in %.2f s", seconds)
