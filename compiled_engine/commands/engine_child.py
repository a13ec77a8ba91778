"""The engine process as a child of this one: start, watch, end. Never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

from compiled_engine.config import EngineConfig, config_to_json

# The engine answers a shutdown frame between two steps; whoever takes longer hangs.
STOP_TIMEOUT_S = 10.0
KILL_AFTER_S = 3.0


class EngineChild:
    """`python -m compiled_engine.engine_start`; its output goes where ours goes.

    It has a process group of its own, so that Ctrl-C reaches only the API process, which drains.

    Args:
        endpoint: address that the API process binds.
        config: what the engine is told.
    """

    def __init__(self, endpoint: str, config: EngineConfig) -> None:
        self._command = [
            sys.executable,
            "-m",
            "compiled_engine.engine_start",
            endpoint,
            config_to_json(config),
            str(os.getpid()),
        ]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, process_group=0)

    def restart(self) -> None:
        """Ends what is left of it and starts a new one at the same address. Blocks."""
        self.stop(can_obey=False)
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, *, can_obey: bool) -> None:
        """Ends it. Blocks.

        Args:
            can_obey: it has a shutdown frame and is in a state to read it; it is ended by a signal
                if it does not.
        """
        if self._has_ended(STOP_TIMEOUT_S if can_obey else 0.0):
            return
        self._process.terminate()
        if not self._has_ended(KILL_AFTER_S):
            self._process.kill()
            self._process.wait()

    def _has_ended(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
