"""The eighteen traps of the device scheduler, each with the scenario that kills a wrong one.

A scenario runs on the tensors and the oracle side by side. Where a mistake can be written as a
change of one method of the oracle, the test also runs that mutant and asserts the checks catch it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.scheduler.keys import mix, page_key, page_term, place_steps, root_sum
from compiled_engine.scheduler.state import RING_START
from tests.helpers import scheduler_keys
from tests.helpers import scheduler_mutants as mutants
from tests.helpers.python_scheduler import PythonScheduler, RowState
from tests.helpers.scheduler_harness import StuckError, random_case, run, run_both
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_traffic import Request, Traffic

NUM_SEEDS = 300


def make_pair(**changes: Any) -> Pair:
    shape = small_shape(**changes)
    return Pair(shape, TensorEngine(shape))


def killed_seeds(
    mutant: type[PythonScheduler], seeds: range, **changes: Any
) -> dict[int, AssertionError]:
    """Returns the seeds whose random run the mutant fails, with the failure."""
    failures: dict[int, AssertionError] = {}
    for seed in seeds:
        shape, traffic = random_case(seed, **changes)
        try:
            run(shape, traffic, oracle=mutant(shape))
        except AssertionError as error:
            failures[seed] = error
    return failures


def test_trap_01_stale_ring_entries():
    pair = make_pair(num_pages=32, max_releases=1, max_rows=1, max_model_len=8)
    assert pair.engine is not None
    group = pair.engine.state.groups[0]
    assert pair.shape.ring_size == 64

    def cycle(prompt: list[int]) -> None:
        pair.submit(0, prompt, len(prompt) + 1)
        pair.step()
        assert pair.state(0) is RowState.FINISHED
        pair.step()

    cycle([9, 9, 9, 9, 1])  # published once and never used again: the cold page
    cold = pair.oracle.pool.ring[-1]
    cold_places = {int(group.ring_pos[cold])}
    for _ in range(100):  # each leaves one dead entry of the hot page behind the cold one
        cycle([5, 6, 7, 8, 1])
        cold_places.add(int(group.ring_pos[cold]))
    assert pair.oracle.pool.uid[cold] > 0, "the cold page was evicted without need"
    assert len(cold_places) >= 3, "the ring was never compacted"
    assert int(group.tail) - RING_START > 100
    pair.check_idle()


def test_trap_02_ring_window_is_not_pressure():
    told_apart: list[int] = []
    exact, windowed = 0, 0
    for seed in range(NUM_SEEDS):
        shape, traffic = random_case(seed)
        right = run(shape, traffic).retractions
        wrong = run(shape, traffic, oracle=mutants.WindowIsPressure(shape)).retractions
        exact, windowed = exact + right, windowed + wrong
        if right == 0 and wrong > 0:
            told_apart.append(seed)
    assert windowed >= 2 * exact, (windowed, exact)
    for seed in told_apart[:4]:
        assert run_both(*random_case(seed)).retractions == 0


def test_trap_02_dead_entries_at_the_head_are_not_pressure():
    pair = make_pair(
        num_pages=32, max_model_len=80, max_tokens=128, index_buckets=32, max_pieces=16
    )
    first, second = list(range(25)), list(range(100, 125))
    for prompt in (first, second):  # six cached pages each, the oldest of all
        pair.submit(0, prompt, 26)
        pair.step()
        pair.step()
    pair.submit(1, range(200, 273), 76)  # holds every page that caches nothing
    pair.step()
    assert len(pair.oracle.pool.ring) == 12
    leaf = pair.oracle.pool.ring[6]  # the first page behind those of the first prompt
    pair.submit(0, first, 27)
    planned = pair.step()
    assert len(planned.matched[0]) == 6, "six dead entries at the head"
    assert pair.oracle.rows[0].pages[-1] == leaf
    for _ in range(4):
        pair.step()
    assert pair.num_retractions == 0
    pair.check_idle()


def test_trap_03_last_touch_orders_a_joint_release():
    requests = tuple(
        Request(arrival=i, step=0, prompt=(*range(8), 20 + i, 1, 2, 3, 4), max_len=15 - i)
        for i in range(2)
    )
    shape = small_shape(max_tokens=64)
    traffic = Traffic(seed=3, requests=requests, budgets=(64,))
    rings: list[list[int]] = []
    tables: list[list[list[int]]] = []

    def watch(pair: Pair) -> None:
        rings.append(list(pair.oracle.pool.ring))
        tables.append([row.pages for row in pair.oracle.rows if row.pages])

    run_both(shape, traffic, watch=watch)
    low, high = tables[-2]
    assert low[:2] == high[:2], "the requests do not share their first pages"
    assert rings[-1][-4:] == [low[2], high[2], low[1], low[0]]
    with pytest.raises(AssertionError, match="leaves before child"):
        run(shape, traffic, oracle=mutants.FirstTouch(shape))


@pytest.mark.parametrize(
    ("mutant", "fewest"), [(mutants.NoParentCompare, 50), (mutants.NoTokenCompare, 200)]
)
def test_trap_04_tokens_and_parent_are_compared(mutant, fewest):
    failures = killed_seeds(mutant, range(NUM_SEEDS), key_bits=3)
    assert len(failures) >= fewest
    wrong_kv = [seed for seed, error in failures.items() if "foreign KV" in str(error)]
    assert wrong_kv, "no run got someone else's KV"
    for seed in wrong_kv[:3]:
        run_both(*random_case(seed, key_bits=3))


def test_trap_04_publication_numbers_are_never_reused():
    pair = make_pair(num_pages=6, max_rows=1, max_model_len=16)
    seen: set[int] = set()
    for turn in range(12):  # five pages, three taken each time: pages are reused, numbers are not
        pair.submit(0, [turn] * 9, 10)
        for _ in range(3):
            pair.step()
            seen |= {uid for uid in pair.oracle.pool.uid if uid}
    assert len(seen) == 24
    pair.check_idle()


def test_trap_05_duplicates_are_swapped():
    failures = killed_seeds(mutants.KeepDuplicates, range(NUM_SEEDS))
    assert len(failures) >= 3
    for seed in list(failures)[:3]:
        run_both(*random_case(seed))


def test_trap_05_swap_leaves_one_copy():
    pair = make_pair(max_tokens=32)
    pair.submit(0, range(9), 12, priority=1)
    pair.step(2)
    pair.submit(1, range(9), 12)  # ahead of row 0, so it does not wait for row 0's page
    planned = pair.half_step(32)
    assert planned.admitted == [1]
    before = [list(pair.oracle.rows[row].pages) for row in (0, 1)]
    assert not set(before[0]) & set(before[1])
    pair.finish_step({0: 1, 1: 1}, {})
    after = [pair.oracle.rows[row].pages for row in (0, 1)]
    assert after[0][:2] == after[1][:2] == before[0][:2]
    assert pair.oracle.pool.ring[:2] == [before[1][1], before[1][0]], "own copies are reused first"


def budget_before_pages() -> tuple[Any, Traffic]:
    """A low decode row eats every token and at last every page; the row ahead gets nothing."""
    shape = small_shape(page_size=1, num_pages=9, max_model_len=9, max_rows=2)
    requests = (
        Request(arrival=0, step=0, prompt=(1, 2), max_len=9, priority=1),
        Request(arrival=1, step=1, prompt=(5, 6, 7), max_len=5),
    )
    return shape, Traffic(seed=0, requests=requests, budgets=(1,), first_budgets=(2, 2))


def test_trap_06_nothing_granted_is_pressure():
    shape, traffic = budget_before_pages()
    result = run_both(shape, traffic)
    assert result.retractions == 1
    with pytest.raises(StuckError):
        run(shape, traffic, oracle=mutants.NeverStuck(shape))


@pytest.mark.parametrize("seed", range(6))
def test_trap_06_seeds_of_one_token_a_step_end(seed):
    run_both(*random_case(seed, max_tokens=1, num_pages=6, page_size=1))


def test_trap_07_admission_counts_the_whole_prompt_and_the_residents():
    stuck = killed_seeds(mutants.AdmitByChunk, range(60))
    assert all(isinstance(error, StuckError) for error in stuck.values())
    assert len(stuck) >= 3
    for seed in list(stuck)[:2]:
        run_both(*random_case(seed))
    right = wrong = 0
    for seed in range(NUM_SEEDS):
        shape, traffic = random_case(seed)
        right += run(shape, traffic).retractions
        wrong += run(shape, traffic, oracle=mutants.NoReserve(shape)).retractions
    assert wrong >= 2 * right, (wrong, right)


def test_trap_08_matched_free_pages_are_charged():
    stuck = killed_seeds(mutants.MatchedPagesFree, range(NUM_SEEDS))
    assert all(isinstance(error, StuckError) for error in stuck.values())
    assert len(stuck) >= 2
    for seed in list(stuck)[:2]:
        run_both(*random_case(seed))


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_trap_09_request_of_the_whole_pool_is_admitted(page_size):
    shape = small_shape(num_pages=6, page_size=page_size, max_model_len=5 * page_size + 1)
    prompt = tuple(range(5 * page_size))
    request = Request(arrival=0, step=0, prompt=prompt, max_len=len(prompt) + 1)
    traffic = Traffic(seed=0, requests=(request,))
    assert run_both(shape, traffic).retractions == 0
    with pytest.raises(StuckError):
        run(shape, traffic, oracle=mutants.UncappedTarget(shape))


def burst_of_agents(budget: int) -> tuple[Any, Traffic]:
    """Eight agents with a ten-page system prompt and one token of their own, eight answers."""
    system = tuple(range(100, 140))
    requests = tuple(
        Request(arrival=i, step=0, prompt=(*system, i), max_len=49, vocab=50) for i in range(8)
    )
    shape = small_shape(
        max_rows=8,
        num_pages=200,
        max_model_len=64,
        max_tokens=budget,
        num_candidates=8,
        max_releases=8,
        index_buckets=64,
        max_submits=8,
        max_pieces=64,
    )
    return shape, Traffic(seed=0, requests=requests, budgets=(budget,))


@pytest.mark.parametrize(("budget", "most", "early"), [(8, 18, 54), (32, 10, 18), (512, 9, 8)])
def test_trap_10_burst_computes_its_prompt_once(budget, most, early):
    shape, traffic = burst_of_agents(budget)
    result = run_both(shape, traffic)
    assert result.computed_tokens == 104
    assert max(result.finished_step.values()) <= most
    mutant = run(shape, traffic, oracle=mutants.EarlyMatch(shape))
    assert mutant.computed_tokens == 384
    assert max(mutant.finished_step.values()) >= early


def test_trap_11_grammar_row_does_not_stall_others():
    # Row 0's only page needs the token its mask holds back; row 1 starts with the same page.
    shape = small_shape()
    requests = (
        Request(arrival=0, step=0, prompt=(1, 2, 3, 4), max_len=8, grammar=True),
        Request(arrival=1, step=0, prompt=(1, 2, 3, 4, 5), max_len=8),
    )
    traffic = Traffic(seed=0, requests=requests, first_mask_step=40)
    assert run_both(shape, traffic).finished_step[1] == 3
    mutant = run(shape, traffic, oracle=mutants.DeferBehindMask(shape))
    assert mutant.finished_step[1] > 40


def test_trap_11_row_does_not_wait_for_one_of_lower_priority():
    shape = small_shape(max_tokens=32)
    requests = (
        Request(arrival=0, step=0, prompt=tuple(range(9)), max_len=12, priority=1),
        Request(arrival=1, step=1, prompt=tuple(range(9)), max_len=12),
    )
    traffic = Traffic(seed=0, requests=requests, budgets=(32,), first_budgets=(2,))
    right = run_both(shape, traffic).finished_step[1]
    mutant = run(shape, traffic, oracle=mutants.DeferBehindAnyone(shape))
    assert right < mutant.finished_step[1]


def victim_while_release_is_pending(pair: Pair) -> None:
    """Rows 3 and 4 run out of pages while those of row 2 wait behind two empty releases."""
    pair.submit(3, [1, 2], 9)
    pair.submit(4, [3, 4], 9)
    pair.submit(2, [5, 6, 7, 8], 9)
    pair.submit(5, [9, 9], 9, grammar=True)
    pair.step()
    pair.submit(0, [1] * 6, 9)
    pair.submit(1, [2] * 6, 9)
    pair.step(stops=lambda row, position: row == 2)
    assert pair.state(2) is RowState.FINISHED
    pair.abort(0)
    pair.step()
    pair.abort(1)
    pair.step()
    assert pair.oracle.current.unmet_pages > 0
    assert pair.state(2) is RowState.FINISHED
    pair.step()


def test_trap_12_no_victim_while_a_release_is_pending():
    sizes = {
        "page_size": 1,
        "num_pages": 15,
        "max_model_len": 9,
        "max_rows": 6,
        "num_candidates": 6,
        "max_releases": 1,
        "max_tokens": 16,
    }
    pair = make_pair(**sizes)
    victim_while_release_is_pending(pair)
    assert pair.num_retractions == 0
    shape = small_shape(**sizes)
    hasty = Pair(shape, oracle=mutants.HastyVictim(shape))
    victim_while_release_is_pending(hasty)
    assert hasty.num_retractions == 1


def test_trap_13_full_bucket_loses_a_publication_only():
    pair = make_pair(index_buckets=1, index_ways=2, num_pages=6, max_rows=1, max_model_len=16)
    hits = []
    for turn in range(30):  # two of five pages published a turn, the older ones evicted: no residue
        for _ in range(2):
            pair.submit(0, [turn % 7] * 5, 6)
            planned = pair.step()
            hits.append(sum(len(planned.matched[row]) for row in planned.admitted))
            pair.step()
        assert len(pair.oracle.pool.index) <= 2
    assert sum(hits[-20:]) > 0, "publications stopped for good"
    pair.check_idle()


def test_trap_14_old_generations_are_ignored():
    pair = make_pair()
    old = pair.submit(0, [1, 2], 4)
    pair.step(stops=lambda row, position: True)
    pair.step()
    pair.submit(0, [1, 2, 3], 8, grammar=True)
    pair.abort(0, old)
    pair.mask(0, 3, gen=old)
    pair.step()
    row = pair.oracle.rows[0]
    assert (row.state, row.mask_pos, row.num_computed) == (RowState.PREFILL, -1, 2)
    pair.mask(0)
    pair.step()
    assert pair.state(0) is RowState.BLOCKED
    pair.mask(0, 2)  # a position that is past
    pair.step()
    assert pair.state(0) is RowState.BLOCKED


class Accumulations(TorchDispatchMode):
    """Notes the dtype and length of everything an atomic add would go to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        options = kwargs or {}
        is_put = name.startswith("index_put")
        adds = is_put and (args[3] if len(args) > 3 else options.get("accumulate", False))
        if adds or name.startswith(("index_add", "scatter_add")):
            self.seen.append((name, args[0].dtype, args[0]))
        return func(*args, **options)


def busy_step(engine: TensorEngine) -> Accumulations:
    """Runs a step with a release, a match, an admission and a publication."""
    pair = Pair(engine.shape, engine)
    pair.submit(0, range(9), 10)
    pair.step(64)
    pair.submit(1, range(9), 12)
    with Accumulations() as noted:
        pair.step(64)
    assert pair.oracle.current.released == [0]
    assert pair.oracle.current.admitted == [1]
    return noted


def test_trap_15_masked_lanes_leave_page_zero_alone():
    engine = TensorEngine(small_shape(max_tokens=64))
    busy_step(engine)
    group = engine.state.groups[0]
    assert int(group.ref[0]) == 1
    assert int(group.ring_pos[0]) == -1
    assert int(group.index_slot[0]) == -1
    assert int(engine.state.state[-1]) == RowState.FREE
    assert int(group.owned[-1]) == 0


def test_trap_16_reference_counts_are_int32():
    engine = TensorEngine(small_shape(max_tokens=64))
    noted = busy_step(engine)
    assert engine.state.groups[0].ref.dtype == torch.int32
    wide = [name for name, dtype, _ in noted.seen if dtype == torch.int64]
    assert not wide, f"atomic adds to int64: {wide}"
    state = engine.state
    narrow = (state.num_tokens, state.num_computed, state.groups[0].owned, state.error)
    assert all(tensor.dtype == torch.int32 for tensor in narrow)
    assert state.groups[0].block_table.dtype == torch.int32


def test_trap_17_idle_only_when_nothing_awaits_release():
    pair = make_pair(max_releases=1, max_tokens=32)
    for row in range(3):
        pair.submit(row, [row + 1] * 3, 4)
    assert not pair.sink.is_empty
    pair.step()
    ended = [pair.state(row) for row in range(3)]
    assert ended == [RowState.FINISHED] * 3, "every request ended in one step"
    for left in (2, 1, 0):
        assert not pair.is_idle
        planned = pair.step()
        assert not any(planned.give.values())
        assert sum(pair.state(row) is RowState.FINISHED for row in range(3)) == left
    pair.check_idle()


def test_trap_18_hash_wraps_like_unsigned_arithmetic():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 2**31 - 1, (64, 4), generator=generator, dtype=torch.int64)
    salts = torch.randint(0, 2**62, (64,), generator=generator, dtype=torch.int64)
    shape = small_shape()
    for row, salt in zip(tokens.tolist(), salts.tolist(), strict=True):
        expected = scheduler_keys.chain_links(salt, row, 4)[0]
        link = root_sum(torch.tensor(salt)) + page_term(
            torch.tensor(row), torch.tensor(0), place_steps(len(row), "cpu")
        )
        assert int(link) == scheduler_keys.to_signed(expected)
        key = scheduler_keys.to_signed(scheduler_keys.page_key(expected, 64))
        assert int(page_key(shape, link)) == key
    values = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    scrambled = [scheduler_keys.to_signed(scheduler_keys.mix(v)) for v in values.tolist()]
    assert mix(values).tolist() == scrambled
