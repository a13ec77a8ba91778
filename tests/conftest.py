"""Settings of every test: seeds, threads, one compile cache, a limit on compilations, GPU skips.

The default tier may cause at most `MAX_COMPILES` distinct Inductor compilations; the run that makes
one more fails at its end. Compilations in child processes are not counted.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest

MAX_COMPILES = 12
# Set before torch is imported: threads that spin while they wait slow everything on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    """One Inductor cache for the whole run, empty at its start so that compilations are counted."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # Lives as long as pytest's own temporary folders: the last three runs.
        folder = config._tmp_path_factory.mktemp("inductor")  # type: ignore[attr-defined]
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> None:
    """At most two torch threads: what the smallest machine that runs these tests has."""
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))


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

    with torch.utils.deterministic.DeterministicFill() if False else _deterministic_fill():
        yield


class _deterministic_fill:  # noqa: N801 - used as a with-block
    """Torch's own filling of uninitialised memory, which needs its deterministic mode."""

    def __enter__(self) -> None:
        import torch

        self.before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        import torch

        enabled, warn_only, fill = self.before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
