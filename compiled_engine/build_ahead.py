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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO

import torch

from compiled_engine.build_parts import list_parts
from compiled_engine.config import EngineConfig, config_to_json
from compiled_engine.key_parts import keeps_pieces
from compiled_engine.models import HfModelConfig
from compiled_engine.pieces import layer_versions

logger = logging.getLogger(__name__)

# Processes on a GPU: each holds a context and a layer or two, beside the model itself.
MOST_ON_GPU = 8
CORES_EACH = 2

Report = Callable[[str, int, int], None]


def num_jobs(config: EngineConfig, device: torch.device) -> int:
    """Processes that compile for a start: as asked for, or what suits the device."""
    # What one process measures the others would disturb.
    if config.kernel_objective == "autotune" or config.kernel_config is not None:
        return 1
    if config.compile_jobs is not None:
        return config.compile_jobs
    if device.type != "cuda":
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_ON_GPU, cores // CORES_EACH))


@contextmanager
def building_ahead(
    config: EngineConfig, device: torch.device, report: Report
) -> Iterator[Callable[[], None]]:
    """Processes that make what `config` needs, if it takes more than one and something is missing.

    Yields a function that waits for them; `report` is called with (label, done, total) meanwhile.
    They are ended with the block.

    Raises:
        ConfigError: as `build_engine`.
    """
    jobs = num_jobs(config, device)
    if jobs == 1 or not keeps_pieces(config) or not _is_missing(config):
        yield lambda: None
        return
    total = _num_parts(config, device)
    jobs = min(jobs, total)
    text = config_to_json(replace(config, compile_jobs=1))
    with tempfile.TemporaryFile() as errors, ThreadPoolExecutor(jobs) as pool:
        workers = [_launch(text, index, jobs, errors) for index in range(jobs)]
        try:
            counter = _Counter(total, report)
            readers = [pool.submit(counter.read, worker) for worker in workers]
            yield lambda: _wait(workers, [reader.result for reader in readers], errors)
        finally:
            for worker in workers:
                _end(worker)


def _is_missing(config: EngineConfig) -> bool:
    from compiled_engine.start_check import check_start

    return bool(check_start(config).problems)


def _num_parts(config: EngineConfig, device: torch.device) -> int:
    from compiled_engine.settings import preview

    settings, model_config = preview(config)
    if isinstance(model_config, HfModelConfig):
        return 1
    is_gpu = device.type == "cuda"
    versions = layer_versions(
        settings.chunked_prefill_size, settings.max_num_seqs, is_gpu=is_gpu, has_last=is_gpu
    )
    return len(list_parts(versions, is_gpu=is_gpu))


def _launch(text: str, index: int, count: int, errors: IO[bytes]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compiled_engine.build_worker", text, str(index), str(count)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # Each compiles by itself: compilers of their own would be more than there are cores.
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )


def _end(worker: subprocess.Popen[str]) -> None:
    """Ends a process and the compilers that it has launched, which hold its output open."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


class _Counter:
    """Counts parts as processes report them."""

    def __init__(self, total: int, report: Report) -> None:
        self._done = 0
        self._total = total
        self._report = report
        report("pieces, in processes", 0, total)

    def read(self, worker: subprocess.Popen[str]) -> None:
        """Reads a process to its end."""
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.startswith("{"):
                continue
            self._done += 1
            label = f"{json.loads(line)['part']}, in a process"
            self._report(label, min(self._done, self._total), self._total)
        worker.stdout.close()


def _wait(
    workers: list[subprocess.Popen[str]], read: list[Callable[[], None]], errors: IO[bytes]
) -> None:
    for wait in read:
        wait()
    failed = [worker.wait() for worker in workers]
    if any(failed):
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        logger.warning(
            "%d of %d processes that compile ahead failed (%s): the start compiles what is missing",
            sum(code != 0 for code in failed),
            len(failed),
            lines[-1] if lines else "no message",
        )
