"""A run that is asked to end keeps what it has measured so far."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(SystemExit):
    """The run was asked to end: no fault of a part, so not caught with those.

    Event loops log what their callbacks raise and go on, but for this kind.
    """


def stop_on_sigterm() -> None:
    """From here on SIGTERM raises `Stopped` in the main thread."""
    signal.signal(signal.SIGTERM, _stop)


@contextmanager
def stoppable() -> Iterator[None]:
    """`stop_on_sigterm` for a block."""
    before = signal.getsignal(signal.SIGTERM)
    stop_on_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(*_: Any) -> None:
    raise Stopped


def left_out(name: str) -> str:
    """What a stopped run says of the part it was in."""
    return f"{name}: stopped by a signal, and what comes after it left out"
