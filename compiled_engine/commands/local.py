"""An engine in this process, for the commands that serve nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from compiled_engine.commands.progress import PhaseProgress, stderr_console
from compiled_engine.commands.settings_table import print_memory, print_settings
from compiled_engine.config import EngineConfig

if TYPE_CHECKING:
    from compiled_engine.engine import Engine
    from compiled_engine.loop import StepLoop
    from compiled_engine.models import CausalLM
    from compiled_engine.request import TokenEvent

OnReport = Callable[[str, str, int, int], None]


def open_engine(
    config: EngineConfig,
    *,
    is_quiet: bool = False,
    on_report: OnReport | None = None,
    progress_class: type[PhaseProgress] = PhaseProgress,
    loaded: CausalLM | None = None,
) -> Engine:
    """Builds an engine with progress on standard error.

    Args:
        config: of the engine.
        is_quiet: leave the table of settings out.
        on_report: also called with each progress report.
        progress_class: how progress is shown.
        loaded: the model of another engine, as `build_engine` takes it.
    """
    from compiled_engine.device import device_note
    from compiled_engine.engine import build_engine

    console = stderr_console()
    if not is_quiet:
        print_settings(console, config)
    note = device_note(config.device)
    if note:
        console.print(note)
    with progress_class(console) as progress:

        def report(phase: str, label: str, done: int, total: int) -> None:
            progress.update(phase, label, done, total)
            if on_report is not None:
                on_report(phase, label, done, total)

        engine = build_engine(config, report, loaded=loaded)
    if engine.memory is not None and not is_quiet:
        print_memory(console, dict(engine.memory.rows()))
    return engine


def run_loop(loop: StepLoop) -> Iterator[TokenEvent]:
    """Steps until nothing is left to do; yields events as they are read."""
    while loop.has_work:
        yield from loop.step()
    yield from loop.drain()
