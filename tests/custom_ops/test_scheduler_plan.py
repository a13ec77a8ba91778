"""The CUDA kernel of the scheduler's plan, and of its parts, against the dense form.

They run in the emulator with several block sizes and orders of threads. Every call is checked bit
for bit; random traffic is checked against the oracle on top, as the dense form is.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from compiled_engine.custom_ops import scheduler_args as args
from compiled_engine.custom_ops.cuda_build import CSRC
from compiled_engine.custom_ops.scheduler_ops import check_sizes
from compiled_engine.scheduler.cuda import schedule_plan, shape_sizes, state_tensors
from compiled_engine.scheduler.inbox import Inbox, InboxBuilder
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import (
    ERROR_NO_TOKEN_PAGE,
    GroupState,
    SchedulerShape,
    SchedulerState,
    new_state,
)
from tests.helpers.scheduler_cuda import CheckedPageOps, CheckedPlan, checked_advance, page_kernels
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_traffic import Traffic

NARROW = {"max_tokens": 1, "num_candidates": 1, "max_releases": 1, "num_pages": 6}
CROWDED = {"max_rows": 8, "num_candidates": 8, "num_pages": 12, "page_size": 2, "max_tokens": 16}
COLLIDING = {"key_bits": 3, "index_buckets": 1, "index_ways": 4}
# More rows, releases, candidates and pages than threads: every loop makes several turns.
WIDE = {
    "max_rows": 70, "num_candidates": 40, "max_releases": 36, "num_pages": 200, "page_size": 1,
    "max_submits": 70, "max_pieces": 80, "max_aborts": 70, "max_masks": 70, "max_tokens": 300,
}  # fmt: skip
EDGES: tuple[dict[str, int], ...] = ({}, NARROW, CROWDED, COLLIDING, CROWDED | COLLIDING)


def run_checked(case: tuple[SchedulerShape, Traffic], block: int, order: int) -> None:
    """Runs traffic with the kernels of plan and advance, each beside its dense form."""
    shape, traffic = case
    engine = TensorEngine(shape, CheckedPlan(block, order), checked_advance(shape))
    run(shape, traffic, engine=engine)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed):
    run_checked(random_case(seed), block=(32, 64, 96)[seed % 3], order=seed % 5)


@pytest.mark.parametrize("changes", EDGES[1:], ids=["narrow", "crowded", "colliding", "both"])
def test_random_traffic_at_the_edge(changes):
    for seed in (100, 101, 102):
        run_checked(random_case(seed, **changes), (32, 128, 64)[seed % 3], seed % 4)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_much_random_traffic(group):
    for seed in range(70_000 + 40 * group, 70_000 + 40 * (group + 1)):
        case = random_case(seed, **EDGES[seed % len(EDGES)])
        run_checked(case, (32, 64, 128)[seed % 3], seed % 6)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_more_of_everything_than_threads(order):
    shape = small_shape(**WIDE, token_page_size=4)
    engine = TensorEngine(shape, CheckedPlan(32, order), checked_advance(shape))
    rng = random.Random(order)
    gens = [0] * shape.max_rows
    for step in range(6):
        for row in range(shape.max_rows):
            is_applied = int(engine.state.gen[row]) == gens[row]
            if is_applied and int(engine.state.state[row]) == 0 and rng.random() < 0.8:
                gens[row] += 1
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
                fields = {"priority": rng.randrange(-2, 3), "salt": rng.randrange(2)}
                if rng.random() < 0.2:
                    fields["score_from"] = rng.randrange(len(prompt))
                arrival = step * shape.max_rows + row
                engine.builder.submit(
                    row=row, gen=gens[row], arrival=arrival, prompt=prompt, max_len=16,
                    grammar=rng.random() < 0.3, **fields,
                )  # fmt: skip
            elif rng.random() < 0.3:
                engine.builder.abort(row, gens[row])
            elif rng.random() < 0.5:
                engine.builder.mask(row, gens[row], int(engine.state.num_tokens[row]))
        engine.take()
        planned = engine.plan(rng.choice((40, 300)))
        emits = planned.emit.nonzero().flatten().tolist()
        engine.advance({row: row % 2 for row in emits}, {row: step % 3 == 2 for row in emits})
    assert int(engine.state.num_retractions) > 0 or int(engine.state.groups[0].num_free) > 0


@pytest.mark.parametrize("seed", range(4))
def test_page_operations(seed):
    shape, traffic = random_case(seed + 40)
    engine = TensorEngine(shape)
    with page_kernels(engine.state, CheckedPageOps((32, 64)[seed % 2], seed)):
        run(shape, traffic, engine=engine)


def test_page_operations_compact_the_ring():
    """A hot page behind cold ones leaves a dead entry a request until the ring is rewritten."""
    shape = small_shape(num_pages=32, max_releases=1, max_rows=1, max_model_len=8)
    engine = TensorEngine(shape)
    ops = CheckedPageOps()
    with page_kernels(engine.state, ops):
        pair = Pair(shape, engine)
        for prompt in [[9, 9, 9, 9, 1]] + 50 * [[5, 6, 7, 8, 1]]:
            pair.submit(0, prompt, len(prompt) + 1)
            pair.step()
            pair.step()
        pair.check_idle()
    assert ops.num_compactions > 0


def test_pieces_without_token_pages_are_counted():
    shape = small_shape(num_token_pages=2, max_pieces=8)
    engine = TensorEngine(shape, CheckedPlan())
    engine.builder.submit(
        row=0, gen=1, arrival=0, priority=0, salt=0, prompt=list(range(30)), max_len=31
    )
    engine.take()
    engine.plan(1)
    assert int(engine.state.error[ERROR_NO_TOKEN_PAGE]) == 2


def struct_fields(file: str, struct: str) -> list[tuple[str, bool]]:
    """(name, is a pointer) of the fields of a struct in a CUDA header."""
    text = (CSRC / "scheduler" / file).read_text()
    found = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)
    assert found, struct
    lines = re.sub(r"//.*", "", found[1])
    return [(name, "*" in kind) for kind, name in re.findall(r"(\S+) (\w+);", lines)]


@pytest.mark.parametrize(
    ("file", "struct", "mirror"),
    [
        ("common.cuh", "State", args.StateArgs),
        ("common.cuh", "PlanOut", args.PlanOutArgs),
        ("inbox.cuh", "Inbox", args.InboxArgs),
        ("page_ops.cu", "TakeArgs", args.TakeArgs),
        ("plan.cu", "PlanArgs", args.PlanArgs),
    ],
)
def test_structs_mirror_the_headers(file, struct, mirror):
    fields = struct_fields(file, struct)
    assert [name for name, _ in fields] == [name for name, _ in mirror._fields_]
    pointers = [name for name, kind in mirror._fields_ if kind is args.pointers("x")[0][1]]
    assert [name for name, is_pointer in fields if is_pointer] == pointers


def test_struct_names_are_the_states_and_the_plans():
    names = [name for name in SchedulerState._fields if name != "groups"]
    at = SchedulerState._fields.index("groups")
    assert (*names[:at], *GroupState._fields, *names[at:]) == args.STATE_TENSORS
    assert Plan._fields == args.PLAN_TENSORS
    assert Inbox._fields == args.INBOX_TENSORS


def test_fixed_sizes_mirror_the_headers():
    text = "".join(path.read_text() for path in sorted((CSRC / "scheduler").glob("*.cuh")))
    constants = dict(re.findall(r"constexpr i32 (kMax\w+) = (\d+);", text))
    assert int(constants["kMaxCandidates"]) == args.LIMITS["num_candidates"]
    assert int(constants["kMaxReleases"]) == args.LIMITS["max_releases"]
    assert int(constants["kMaxPieces"]) == args.LIMITS["max_pieces"]
    row_bytes = re.search(r"kRowBytes = ([\d +]+);", text)
    assert row_bytes
    assert args.rows_shared_bytes(33) == 64 * sum(map(int, row_bytes[1].split("+")))


@pytest.mark.parametrize("name", ["num_candidates", "max_releases", "max_pieces"])
def test_sizes_beyond_the_kernel_are_refused(name):
    values: dict[str, Any] = {"max_rows": 4, "max_releases": 4, "num_candidates": 4}
    shape = small_shape(**values | {name: 257})
    with pytest.raises(ValueError, match=f"{name} is 257.*at most 256"):
        check_sizes(shape_sizes(shape), shape.max_pieces)


def test_tensors_that_are_not_contiguous_are_refused():
    shape = small_shape()
    tensors = state_tensors(new_state(shape))
    tensors[0] = torch.zeros(10, 2, dtype=torch.int8)[:, 0]
    with pytest.raises(ValueError, match="state is not contiguous"):
        args.state_args(tensors, shape_sizes(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", EDGES, ids=["any", "narrow", "crowded", "colliding", "both"])
def test_plan_on_a_gpu_equals_the_dense_form(changes):
    for seed in range(200, 204):
        shape, traffic = random_case(seed, **changes)
        engine = TensorEngine(shape, schedule_plan, device="cuda")
        run(shape, traffic, engine=engine)


@pytest.mark.gpu
def test_plan_in_a_graph():
    shape = small_shape()
    state = new_state(shape, "cuda")
    inbox = Inbox(*(part.cuda() for part in InboxBuilder(shape).take()[0]))
    budget = torch.tensor(8, dtype=torch.int32, device="cuda")
    schedule_plan(shape, state, inbox, budget)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned = schedule_plan(shape, state, inbox, budget)
    builder = InboxBuilder(shape)
    builder.submit(row=2, gen=1, arrival=0, priority=0, salt=0, prompt=[1, 2, 3], max_len=9)
    for target, source in zip(inbox, builder.take()[0], strict=True):
        target.copy_(source)
    graph.replay()
    assert planned.give.tolist() == [0, 0, 3, 0, 0]
    assert planned.emit.tolist() == [False, False, True, False, False]
