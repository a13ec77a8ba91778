"""A server in a process of its own, as the scenarios that measure servers start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class ServerProcess:
    """A server on a free port, up when the block begins and ended with it.

    Args:
        name: for messages.
        command: the port stands in it as `{port}`.
        processors: which it may use; None for all.
        environment: further variables.
        ready_path: answers 200 once it is up.

    Attributes:
        name, port, url: what it is called, where it listens.

    Raises:
        SystemExit: it did not start; shows what it wrote.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        processors: Collection[int] | None = None,
        environment: Mapping[str, str] | None = None,
        ready_path: str = "/health",
    ) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.name = name
        self._ready_path = ready_path
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._process = subprocess.Popen(
            [part.format(port=port) for part in command],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
            preexec_fn=None if processors is None else lambda: os.sched_setaffinity(0, processors),
        )

    def __enter__(self) -> ServerProcess:
        try:
            self._wait_until_up()
        except BaseException:  # also a run that is stopped must leave no server behind
            self._end()
            self._log.close()
            raise
        return self

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise SystemExit(f"the server {self.name} did not start:\n{self.output()[-4000:]}")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._ready_path, timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def output(self) -> str:
        """What it has written so far."""
        # Not by reading the file: its position is the server's as well.
        number = self._log.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def pause(self) -> None:
        """Stops all its processes until its next turn."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets it run during the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    @property
    def processor_s(self) -> float:
        """Processor time of its process so far, kernel included."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
