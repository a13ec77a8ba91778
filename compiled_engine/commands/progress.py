"""Shows how far loading and compiling is: a bar on a terminal, lines elsewhere. Owns stderr's part.

Standard output stays free for results.
"""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_DETAIL = re.compile(r"(.*) \((\d+)/(\d+)\)")


def stderr_console() -> Console:
    """A console on standard error as it is now."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def split_detail(detail: str) -> tuple[str, int, int]:
    """Label, done and total of `EngineStatus.phase_detail`; 0 of 0 where it holds no numbers."""
    found = _DETAIL.fullmatch(detail)
    return (found[1], int(found[2]), int(found[3])) if found else (detail, 0, 0)


class PhaseProgress:
    """Progress of an engine that starts.

    On a terminal one bar for each phase; elsewhere one line for each phase with its seconds at the
    end, so that logs stay short.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_live = console.is_terminal
        self._phase = ""
        self._since = time.perf_counter()
        self._task: TaskID | None = None
        self._bars = Progress(
            TextColumn("{task.fields[phase]:<9}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )

    def __enter__(self) -> PhaseProgress:
        if self.is_live:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_live:
            self._bars.stop()
        if error is None:
            self._end_phase()

    def update(self, phase: str, label: str, done: int, total: int) -> None:
        """Takes one report; `total` 0 means that nobody knows."""
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            self._since = time.perf_counter()
            if self.is_live:
                self._task = self._bars.add_task(label, phase=phase, total=None)
            else:
                self.console.print(f"{phase} ...")
        if self.is_live and self._task is not None:
            self._bars.update(
                self._task, description=label, completed=done, total=total if total else None
            )

    def abandon(self) -> None:
        """The work of this phase has failed: nothing is reported as done."""
        self._phase = ""

    def _end_phase(self) -> None:
        if self._phase:
            seconds = time.perf_counter() - self._since
            if self._task is not None:
                self._bars.remove_task(self._task)
                self._task = None
            self.console.print(f"{self._phase}: done in {seconds:.1f} s")
        self._phase = ""


class PieceProgress(PhaseProgress):
    """Shows each compiled piece: a bar of its own on a terminal, a line with its seconds elsewhere.

    Captured graphs, of which there are dozens, share one.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._piece = ""
        self._piece_since = 0.0
        self._piece_task: TaskID | None = None

    def update(self, phase: str, label: str, done: int, total: int) -> None:
        """Takes one report; a new label ends the piece before."""
        super().update(phase, label, done, total)
        piece = "graphs" if label.startswith("graph of ") else label
        if phase != "compiling" or done == total:
            piece = ""
        if piece == self._piece:
            return
        self._end_piece()
        self._piece, self._piece_since = piece, time.perf_counter()
        if piece and self.is_live:
            self._piece_task = self._bars.add_task(piece, phase="", total=None)

    def _end_piece(self) -> None:
        seconds = time.perf_counter() - self._piece_since
        if self._piece_task is not None:
            self._bars.update(
                self._piece_task, total=1, completed=1, description=f"{self._piece}, done"
            )
            self._bars.stop_task(self._piece_task)
            self._piece_task = None
        elif self._piece:
            self.console.print(f"  {self._piece}: {seconds:.1f} s")
