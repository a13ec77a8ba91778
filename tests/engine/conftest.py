"""Settings of the engine tests: one torch thread, since the scheduler's tensors are tiny."""

from __future__ import annotations

import pytest
import torch

SINGLE_THREAD = ("test_scheduler", "test_inbox", "test_layout", "test_tune")


@pytest.fixture(autouse=True)
def single_thread_for_tiny_tensors(request: pytest.FixtureRequest):
    """Keeps torch from waking threads for tensors of a few elements."""
    before = torch.get_num_threads()
    if request.module.__name__.rpartition(".")[2].startswith(SINGLE_THREAD):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
