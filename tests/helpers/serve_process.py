"""A real `compiled-engine serve` in a process of its own, with a free port and a log file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

READY_TIMEOUT_S = 300.0
POLL_S = 0.05


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServeProcess:
    """Starts at once; ended with the block at the latest.

    Args:
        model: folder.
        log: file that takes standard error.
        port: None takes a free one.
        flags: further ones.
        environment: further variables.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        port: int | None = None,
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [sys.executable, "-m", "compiled_engine.cli", "serve", str(model)]
        command += ["--port", str(self.port), "--device", "cpu", *flags]
        variables = os.environ | {"COMPILED_ENGINE_CACHE": str(log.parent / "cache")}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stderr=file, env=variables | dict(environment or {})
            )

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children()
            self.process.kill()
            for child in children:
                if child.is_running():
                    child.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text()

    def status(self, path: str) -> int | None:
        """HTTP status of a GET; None where nobody listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return None

    def wait_for(self, path: str, status: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until a GET answers `status`."""
        deadline = time.monotonic() + timeout_s
        while self.status(path) != status:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{path} never answered {status}:\n{self.log}"
            time.sleep(POLL_S)

    def engine(self) -> psutil.Process:
        """The engine process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Sends a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)
