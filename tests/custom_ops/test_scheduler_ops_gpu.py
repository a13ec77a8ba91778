"""Every CUDA op of the scheduler: what torch's own check says, and each page op by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_engine.outbox import RingOutbox
from compiled_engine.scheduler.cuda import shape_sizes, state_tensors
from compiled_engine.scheduler.inbox import apply_inbox
from tests.helpers.scheduler_gpu import PAGE_OPS, GpuOps, checked_op
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_pair import TensorEngine, small_shape

# More rows, candidates, releases and pages than threads of a warp, and none of them even.
ODD = {
    "max_rows": 37, "num_candidates": 35, "max_releases": 33, "num_pages": 331, "page_size": 3,
    "max_submits": 7, "max_pieces": 13, "max_tokens": 67, "index_buckets": 16, "index_ways": 5,
    "token_page_size": 9,
}  # fmt: skip
CROWDED = {"max_rows": 7, "num_candidates": 5, "num_pages": 13, "page_size": 2, "max_tokens": 15}
COLLIDING = {"key_bits": 3, "index_buckets": 1, "index_ways": 5}
CASES: dict[str, dict[str, int]] = {
    "any": {},
    "odd": ODD,
    "crowded": CROWDED,
    "colliding": CROWDED | COLLIDING,
}


def check_alone(name: str, changes: dict[str, int], device: str) -> tuple[int, int]:
    """Runs seeded traffic; the op's calls, and what it admitted or published."""
    num_calls = num_done = 0
    for seed in range(300, 303):
        shape, traffic = random_case(seed, prefix_caching=True, **changes)
        engine, ops = TensorEngine(shape), GpuOps(shape, device)
        with checked_op(name, engine.state, ops) as checked:
            run(shape, traffic, engine=engine)
        num_calls += ops.num_calls
        num_done += getattr(checked, "num_admitted", 1) * getattr(checked, "num_published", 1)
    return num_calls, num_done


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", PAGE_OPS)
def test_gpu_page_op_alone_equals_the_dense_form(name, changes):
    num_calls, num_done = check_alone(name, changes, "cuda")
    assert num_calls > 50
    assert num_done > 0


def names_of_ops() -> set[str]:
    return {
        name.removeprefix("ce::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("ce::scheduler_")
    }


def arguments_of_ops(device: str) -> dict[str, tuple[Any, ...]]:
    """Name -> arguments before `sizes`: in one row a prompt waits, or is planned."""

    def engine_with_prompt() -> TensorEngine:
        engine = TensorEngine(small_shape(), device=device)
        fields = {"gen": 1, "arrival": 0, "priority": 0, "salt": 0}
        engine.builder.submit(row=1, prompt=[5, 6, 7, 8, 9], max_len=30, **fields)
        engine.take()
        return engine

    fresh, waiting, planned = (engine_with_prompt() for _ in range(3))
    shape = fresh.shape
    apply_inbox(shape, waiting.state, waiting._inbox)
    planned.plan(8)
    assert planned.last_plan is not None
    rows = shape.max_rows + 1
    new, old, due = (state_tensors(engine.state) for engine in (fresh, waiting, planned))
    inbox, plan = list(fresh._inbox), list(planned.last_plan)
    budget = torch.tensor(8, dtype=torch.int32, device=device)
    counts = torch.zeros(2, rows, dtype=torch.int32, device=device)
    counts[1, 2] = 3  # pages for a row that has none
    first, last = torch.zeros(2, rows, dtype=torch.int64, device=device)
    last[1] = 1  # the prompt's one full page
    found = torch.full((shape.num_candidates,), shape.max_rows, device=device)
    found[0] = 1
    tokens = torch.full((rows, 1), 42, dtype=torch.int32, device=device)
    # opcheck copies its arguments, and a copy of the pinned ring would not be pinned.
    ring = [part.to(device) for part in RingOutbox(rows, torch.device(device)).ring]
    return {
        "scheduler_plan": (new, inbox, budget),
        "scheduler_apply_inbox": (new, inbox),
        "scheduler_page_release": (due,),
        "scheduler_page_take": (due, counts[0].clone(), counts[1].clone()),
        "scheduler_prefix_match": (old, found),
        "scheduler_admit": (old, budget),
        "scheduler_prefix_publish": (due, first.clone(), last.clone()),
        "scheduler_layout": (due, plan, 8),
        "scheduler_advance": (due, plan, tokens, torch.zeros_like(tokens, dtype=torch.bool), ring),
    }


def test_every_op_of_the_scheduler_has_arguments_here():
    assert set(arguments_of_ops("cpu")) == names_of_ops()


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(names_of_ops()))
def test_gpu_opcheck(name):
    """Schemas say what is written, and fakes look like what is made."""
    op, sizes = getattr(torch.ops.ce, name).default, shape_sizes(small_shape())
    arguments = (*arguments_of_ops("cuda")[name], sizes)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
