"""Settings of every test: seeds, threads, one compile cache, a limit on compilations, GPU skips.

The default tier may cause at most `MAX_COMPILES` Inductor compilations (cache misses); a run that
causes more fails at its end. Compilations in child processes are not counted; those of the workers
that share the tests among them are. The cache is a fresh folder, or `COMPILED_ENGINE_TEST_CACHE`
where that names one to keep between runs.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compiled_engine import build_ahead
from compiled_engine.cache_folders import VARIABLES, place_caches

MAX_COMPILES = 12
CACHE_VARIABLE = "COMPILED_ENGINE_TEST_CACHE"
# Read when torch is imported: threads that spin while they wait slow everything on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass
class CompileCount:
    """Inductor compilations of this run."""

    num_misses: int = 0
    is_limited: bool = True

    @property
    def is_exceeded(self) -> bool:
        return self.is_limited and self.num_misses > MAX_COMPILES


COUNT = pytest.StashKey[CompileCount]()
CACHE = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Makes the run's one compile cache; workers are told it by the process that starts them."""
    kept = os.environ.get(CACHE_VARIABLE)
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="compiled-engine-tests-"))
    os.environ[CACHE_VARIABLE] = str(folder)
    place_caches(folder)
    config.stash[CACHE] = folder
    config.stash[COUNT] = CompileCount()
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True, scope="session")
def _one_process_compiles() -> Iterator[None]:
    """Engines on a GPU compile by themselves: the workers that share the tests fill the machine."""
    with mock.patch.object(build_ahead, "MOST_ON_GPU", 1):
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Limits compilations in the default tier, and skips `gpu` tests where torch sees no GPU."""
    has_slow = any(item.get_closest_marker("slow") for item in session.items)
    on_gpu = [item for item in session.items if item.get_closest_marker("gpu")]
    count = session.config.stash[COUNT]
    count.is_limited = count.is_limited and not has_slow and not on_gpu
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says how many compilations there were."""
    count = config.stash[COUNT]
    limit = f", at most {MAX_COMPILES} are allowed" if count.is_limited else ""
    terminalreporter.write_line(f"Inductor compilations: {count.num_misses}{limit}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Adds a worker's compilations to the run's."""
    found, count = getattr(node, "workeroutput", {}), node.config.stash[COUNT]
    count.num_misses += found.get("num_misses", 0)
    count.is_limited = count.is_limited and found.get("is_limited", True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run with too many compilations; a worker reports its own."""
    count = session.config.stash[COUNT]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {
            "num_misses": count.num_misses,
            "is_limited": count.is_limited,
        }
        return
    if count.is_exceeded and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def num_cache_misses() -> int:
    """Inductor's own count in this process; 0 while torch's compiler is not even imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["inductor"]["fxgraph_cache_miss"]) if utils else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Adds a test's compilations, its fixtures' included, to the run's; puts the cache back."""
    before, places = num_cache_misses(), {name: os.environ[name] for name in VARIABLES}
    result = yield
    after = num_cache_misses()
    # A test may have cleared torch's counters.
    item.config.stash[COUNT].num_misses += after - before if after >= before else after
    os.environ |= places
    return result


@pytest.fixture(scope="session")
def engine_cache_dir(pytestconfig: pytest.Config) -> Path:
    """`cache_dir` for engines in tests: its compiled code is the run's one compile cache."""
    return pytestconfig.stash[CACHE]


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> None:
    """At most two torch threads, what the smallest machine that runs these tests has: of all
    workers together."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(2, torch.get_num_threads()) // workers))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in any order of tests."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def nan_filled_empty() -> Iterator[None]:
    """`torch.empty` and its kin hand out NaN (integers: the largest), so unwritten output shows."""
    import torch

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Only the filling is wanted: ops without a deterministic form warn, and the warning is dropped.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch's default has changed"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determinis")
        yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
