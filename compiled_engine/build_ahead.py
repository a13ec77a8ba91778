"""Makes what a start would compile in several processes beside it, before it asks for it.

A start that finds all it needs in the cache launches none. Whatever a process fails to make, the
start makes itself, and says so.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from compiled_engine.build_parts import list_parts
from compiled_engine.cache_folders import write_problem
from compiled_engine.compile.torch_compat import changed_options
from compiled_engine.config import EngineConfig, config_to_json
from compiled_engine.key_parts import keeps_pieces
from compiled_engine.models import HfModelConfig
from compiled_engine.pieces import layer_versions
from compiled_engine.start_times import StartPhase

logger = logging.getLogger(__name__)

# Processes on a GPU: each holds a context and a layer or two, beside the model itself.
MOST_ON_GPU = 8
CORES_EACH = 2
# The longest that a part takes on a slow machine, and some.
MOST_QUIET_S = 1200.0
POLL_S = 0.02
# A process that was killed is gone by then, and what it had written is read.
LINGER_S = 5.0

Report = Callable[[str, int, int], None]


def num_jobs(config: EngineConfig, device: torch.device) -> int:
    """Processes that compile for a start: as asked for, or what suits the device."""
    # What one process measures the others would disturb.
    if config.kernel_objective == "autotune" or config.kernel_config is not None:
        return 1
    # And a key that hangs on free memory is another one for each process.
    if device.type == "cuda" and config.scheduler == "torch":
        return 1
    if config.compile_jobs is not None:
        return config.compile_jobs
    if device.type != "cuda":
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_ON_GPU, cores // CORES_EACH))


class BuildProcesses:
    """Processes that make everything a start compiles.

    Args:
        config: of the start; `config.model` is a folder.
        device: it is for.
        report: called with (label, done, total), from threads.
        jobs: how many.

    Raises:
        ConfigError: as `build_engine`.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, report: Report, jobs: int
    ) -> None:
        total = _num_parts(config, device)
        jobs = min(jobs, total)
        plain = replace(config, compile_jobs=1, compile_mode="first")
        if device.type == "cpu":  # generated code has the number of threads in it
            plain = replace(plain, num_threads=torch.get_num_threads())
        text = config_to_json(plain)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._workers: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        # Also when nobody closes it: with the object, or with this process.
        self.close = weakref.finalize(self, _close, self._workers, self._readers, self._errors)
        self._counter = counter = _Counter(total, report)
        for index in range(jobs):
            worker = _launch(text, index, jobs, self._errors)
            self._workers.append(worker)
            self._readers.append(threading.Thread(target=counter.read, args=(worker,), daemon=True))
            self._readers[-1].start()

    def is_done(self) -> bool:
        """Whether all of them have ended, or are given up."""
        return self._counter.is_stuck or None not in map(_exit_code, self._workers)

    def wait(self) -> None:
        """Waits until all of them have ended, and says which failed.

        They are given up where none has made anything for `MOST_QUIET_S`.
        """
        while not self.is_done():
            time.sleep(POLL_S)
        codes = [_exit_code(worker) for worker in self._workers]
        for worker in self._workers:
            _kill(worker)
        for reader in self._readers:
            reader.join(LINGER_S)
        if None in codes:
            self._warn(
                codes.count(None), f"have made nothing for {MOST_QUIET_S:.0f} s and are ended"
            )
        num_failed = sum(code not in (0, None) for code in codes)
        if num_failed:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._warn(num_failed, f"failed ({lines[-1] if lines else 'no message'})")

    @property
    def unkept(self) -> frozenset[str]:
        """Pieces that they compiled and that cannot be kept."""
        return frozenset(self._counter.unkept)

    @property
    def phases(self) -> list[StartPhase]:
        """What it cost, sums over those that have ended by themselves."""
        return list(self._counter.phases.values())

    def _warn(self, count: int, what: str) -> None:
        logger.warning(
            "%d of %d processes that compile ahead %s: what they did not make is compiled by the "
            "next start, or by this one if it waits for it",
            count, len(self._workers), what,
        )  # fmt: skip


def _close(
    workers: list[subprocess.Popen[str]], readers: list[threading.Thread], errors: IO[bytes]
) -> None:
    for worker in workers:
        _end(worker)
    for reader in readers:
        if reader is not threading.current_thread():
            reader.join(LINGER_S)
    errors.close()


@contextmanager
def building_ahead(
    config: EngineConfig,
    device: torch.device,
    report: Report,
    on_missing: Callable[[list[tuple[str, str]]], None] = lambda _: None,
    on_made: Callable[[list[StartPhase]], None] = lambda _: None,
) -> Iterator[Callable[[], None]]:
    """Processes that make what `config` needs, if it takes more than one and something is missing.

    Yields a function that waits for them; `report` is called with (label, done, total) meanwhile,
    `on_missing` before with what they make and why, and `on_made` once they have been waited for
    with what that cost. They are ended with the block.

    Raises:
        ConfigError: as `build_engine`.
    """
    jobs = num_jobs(config, device)
    problems = [] if config.compile_mode != "first" or jobs == 1 else missing_parts(config)
    # Layers of a foreign model are known once transformers has built it.
    if not problems or _is_foreign(config):
        yield lambda: None
        return
    on_missing(problems)
    processes = BuildProcesses(config, device, report, jobs)

    def wait() -> None:
        processes.wait()
        on_made(processes.phases)

    try:
        yield wait
    finally:
        processes.close()


def is_missing(config: EngineConfig) -> bool:
    """Whether a start would make something that can be kept, and made by another process."""
    return bool(missing_parts(config))


def missing_parts(config: EngineConfig) -> list[tuple[str, str]]:
    """What a start would make that can be kept, and made by another process, and why.

    Nothing where this process has set options of the compilers: another one does not have them.
    """
    if not keeps_pieces(config) or changed_options() or write_problem(Path(config.cache_dir)):
        return []
    from compiled_engine.start_check import check_start

    return list(check_start(config).missing)


def _is_foreign(config: EngineConfig) -> bool:
    from compiled_engine.settings import ANY_PAGES, preview

    return isinstance(preview(config, num_pages=ANY_PAGES)[1], HfModelConfig)


def _num_parts(config: EngineConfig, device: torch.device) -> int:
    from compiled_engine.settings import ANY_PAGES, preview

    settings, _ = preview(config, num_pages=ANY_PAGES)
    is_gpu = device.type == "cuda"
    versions = layer_versions(
        settings.chunked_prefill_size, settings.max_num_seqs, is_gpu=is_gpu, has_last=is_gpu
    )
    return len(list_parts(versions, is_gpu=is_gpu, scheduler=settings.scheduler))


def _launch(text: str, index: int, count: int, errors: IO[bytes]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compiled_engine.build_worker", text, str(index), str(count)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        stdin=subprocess.PIPE,  # closes with this process, however that ends
        text=True,
        start_new_session=True,
        # Each compiles by itself: compilers of their own would be more than there are cores.
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )


def _exit_code(worker: subprocess.Popen[str]) -> int | None:
    """Of a process that has ended, negative for a signal; None while it runs.

    The process stays to be waited for, so that its number does not become another's.
    """
    try:
        found = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # signals of children are ignored here: nobody waits for them
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill(worker: subprocess.Popen[str]) -> None:
    """Kills a process and the compilers that it has launched, which hold its output open.

    Whoever has waited for the process must not call it: its number may be another's by now.
    """
    assert worker.returncode is None, "was waited for"
    with suppress(ProcessLookupError, ChildProcessError):
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        os.killpg(worker.pid, signal.SIGKILL)


def _end(worker: subprocess.Popen[str]) -> None:
    _kill(worker)
    with suppress(subprocess.TimeoutExpired):  # the kernel may hold it
        worker.wait(LINGER_S)
    if worker.stdin is not None:
        worker.stdin.close()


class _Counter:
    """Counts parts as processes report them."""

    def __init__(self, total: int, report: Report) -> None:
        self.unkept: set[str] = set()
        self.phases: dict[str, StartPhase] = {}
        self._done = 0
        self._total = total
        self._report = report
        self._lock = threading.Lock()
        self._last = time.monotonic()
        report("pieces, in processes", 0, total)

    @property
    def is_stuck(self) -> bool:
        """Nothing was made for too long."""
        return time.monotonic() - self._last > MOST_QUIET_S

    def read(self, worker: subprocess.Popen[str]) -> None:
        """Reads a process to its end, whatever it writes."""
        assert worker.stdout is not None
        with worker.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self._count(line)

    def _count(self, line: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            try:
                made = json.loads(line)
                if "phases" in made:
                    self._add(StartPhase(**phase) for phase in made["phases"])
                    return
                self._done += 1
                done = min(self._done, self._total)
                self.unkept.update(made.get("unkept", ()))
                self._report(f"{made['part']}, in a process", done, self._total)
            except Exception:
                logger.exception("a compiled part could not be reported")

    def _add(self, phases: Iterable[StartPhase]) -> None:
        for phase in phases:
            before = self.phases.get(phase.name, StartPhase(name=phase.name, seconds=0.0))
            self.phases[phase.name] = replace(
                before,
                seconds=before.seconds + phase.seconds,
                num_hits=before.num_hits + phase.num_hits,
                num_misses=before.num_misses + phase.num_misses,
                num_bytes=before.num_bytes + phase.num_bytes,
            )
