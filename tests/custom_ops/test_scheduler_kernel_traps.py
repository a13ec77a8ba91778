"""The named traps, the events and the prefix cases of the scheduler, with its CUDA kernels.

The tests are those of tests/engine; here every plan and every advance of theirs runs in the
emulator with the dense form beside it.
"""

from __future__ import annotations

import pytest

from tests.engine.test_scheduler_events import *  # noqa: F403
from tests.engine.test_scheduler_prefix import *  # noqa: F403
from tests.engine.test_scheduler_traps import *  # noqa: F403
from tests.helpers.scheduler_cuda import CheckedPlan, checked_advance
from tests.helpers.scheduler_pair import TensorEngine


@pytest.fixture(autouse=True)
def kernels_for_the_dense_form(monkeypatch: pytest.MonkeyPatch):
    """A `TensorEngine` uses the kernels unless it is told otherwise."""
    new = TensorEngine.__init__

    def with_kernels(self, shape, plan_fn=None, advance_fn=None, device="cpu"):
        plan_fn = plan_fn or CheckedPlan(32, shape.max_rows)
        new(self, shape, plan_fn, advance_fn or checked_advance(shape), device)

    monkeypatch.setattr(TensorEngine, "__init__", with_kernels)


# These watch what the dense form asks of torch,
del test_trap_15_masked_lanes_leave_page_zero_alone  # noqa: F821
del test_trap_16_reference_counts_are_int32  # noqa: F821
# and these are about wrong oracles, or are random traffic, of which there is more elsewhere.
del test_colliding_keys_never_give_wrong_kv  # noqa: F821
del test_trap_02_ring_window_is_not_pressure  # noqa: F821
del test_trap_04_tokens_and_parent_are_compared  # noqa: F821
del test_trap_05_duplicates_are_swapped  # noqa: F821
del test_trap_07_admission_counts_the_whole_prompt_and_the_residents  # noqa: F821
del test_trap_08_matched_free_pages_are_charged  # noqa: F821
