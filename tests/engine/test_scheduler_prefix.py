"""Prefix reuse: what is found again, what is never found, and what is evicted first."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from compiled_engine.scheduler.keys import page_key, page_term, place_steps, root_sum, salt_of
from tests.helpers.python_scheduler import NO_SCORES, PythonPlan, RowState
from tests.helpers.scheduler_harness import random_case, run, run_both
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_traffic import Request, Traffic
from tests.helpers.source_tree import ROOT


def make_pair(**changes: Any) -> Pair:
    values = {"max_model_len": 64, "max_tokens": 64, "num_pages": 32, "index_buckets": 32}
    shape = small_shape(**values | changes)
    return Pair(shape, TensorEngine(shape))


def serve(pair: Pair, prompt: list[int], max_len: int, row: int = 0, **fields: Any) -> PythonPlan:
    """Runs one request alone to its release; returns the plan that admitted it."""
    pair.submit(row, prompt, max_len, **fields)
    admitted = pair.step()
    while pair.state(row) is not RowState.FREE:
        pair.step()
    return admitted


def num_hits(planned: PythonPlan, row: int = 0) -> int:
    assert row in planned.admitted
    return len(planned.matched[row])


def test_same_prompt_is_found_again():
    pair = make_pair()
    prompt = list(range(11))
    assert num_hits(serve(pair, prompt, 12)) == 0
    assert num_hits(serve(pair, prompt, 12)) == 2
    assert num_hits(serve(pair, [*prompt[:4], 99, *prompt[5:]], 12)) == 1
    assert num_hits(serve(pair, [99, *prompt[1:]], 12)) == 0, "a page depends on all before it"


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_last_prompt_token_is_always_computed(num_pages):
    pair = make_pair()
    prompt = list(range(4 * num_pages))
    serve(pair, prompt, 30)
    planned = serve(pair, prompt, 30)
    assert num_hits(planned) == num_pages - 1
    assert planned.give[0] == 4


def test_n_rows_of_one_prompt_compute_it_once():
    prompt = tuple(range(15))
    requests = tuple(Request(arrival=i, step=0, prompt=prompt, max_len=16) for i in range(4))
    shape = small_shape(max_tokens=64, num_pages=32, index_buckets=32)
    result = run_both(shape, Traffic(seed=0, requests=requests, budgets=(64,)))
    assert result.computed_tokens == 15 + 3 * ((15 - 1) % 4 + 1)


def test_burst_meets_page_by_page_under_a_small_budget():
    prompt = tuple(range(33))
    requests = tuple(Request(arrival=i, step=i, prompt=(*prompt, i), max_len=36) for i in range(4))
    shape = small_shape(max_tokens=8, num_pages=64, index_buckets=32, max_model_len=36)
    result = run_both(shape, Traffic(seed=0, requests=requests, budgets=(8,)))
    assert result.computed_tokens == 34 + 3 * 2 + 4  # each row also computes one sampled token


def test_follow_up_turn_reuses_decode_filled_pages():
    pair = make_pair()
    prompt = [1, 2, 3, 4, 5]
    serve(pair, prompt, 14)  # samples nine ones; the last one is never computed
    turn = [*prompt, *([1] * 9), 7, 8]
    planned = serve(pair, turn, 20)
    assert num_hits(planned) == 13 // 4
    assert planned.give[0] == len(turn) - 12


def test_retracted_row_resumes_by_prefix_hits():
    shape = small_shape(max_rows=2, num_pages=9, max_tokens=16, num_candidates=2)
    pair = Pair(shape, TensorEngine(shape))
    pair.submit(0, range(9), 25)
    pair.submit(1, range(50, 59), 25)
    while pair.state(1) is not RowState.RETRACTED:
        pair.step()
    computed = pair.oracle.rows[1].num_computed
    cached = pair.oracle.rows[1].num_cached
    planned = pair.step(stops=lambda row, position: row == 0)
    while 1 not in planned.admitted:
        planned = pair.step()
    assert computed > 9
    assert 0 < num_hits(planned, 1) <= computed // 4
    assert pair.oracle.rows[1].num_cached == cached, "hits of a resume are no prompt hits"
    while not pair.is_idle:
        pair.step()
    pair.check_idle()


def test_num_cached_counts_prompt_tokens_of_the_first_admission():
    pair = make_pair()
    serve(pair, list(range(11)), 12)
    pair.submit(1, range(11), 14)
    pair.step()
    assert pair.engine is not None
    assert int(pair.engine.state.num_cached[1]) == 8


@pytest.mark.parametrize("key_bits", [3, 64])
def test_salts_never_share(key_bits):
    pair = make_pair(key_bits=key_bits)
    prompt = list(range(11))
    assert num_hits(serve(pair, prompt, 12, salt=1)) == 0
    assert num_hits(serve(pair, prompt, 12, salt=2)) == 0
    assert num_hits(serve(pair, prompt, 12, salt=1)) == 2


def test_salts_never_share_in_a_burst():
    requests = tuple(
        Request(arrival=i, step=0, prompt=tuple(range(11)), max_len=12, salt=i) for i in range(4)
    )
    shape = small_shape(max_tokens=64, num_pages=32, index_buckets=32)
    result = run_both(shape, Traffic(seed=0, requests=requests, budgets=(64,)))
    assert result.computed_tokens == 44
    assert result.hit_pages == 0


def _keys(tokens: list[int], salt: str = "", page_size: int = 4) -> list[int]:
    """Keys of the whole pages of a prompt."""
    shape = small_shape(page_size=page_size)
    pages = torch.tensor(tokens, dtype=torch.int32).view(-1, page_size)
    terms = page_term(pages, torch.arange(len(pages)), place_steps(page_size, "cpu"))
    chain = root_sum(torch.tensor(salt_of(salt))) + terms.cumsum(0)
    keys: list[int] = page_key(shape, chain).tolist()
    return keys


def test_keys_differ_wherever_content_place_parent_or_salt_differ():
    prompt = list(range(8))
    first, second = _keys(prompt)
    different = [
        first,
        second,
        _keys([1, 23, 4, 5])[0],
        _keys([12, 3, 4, 5])[0],
        _keys([1, 2, 3, 45])[0],
        _keys([0, 2, 1, 3])[0],  # the same tokens in another order
        *_keys(prompt[4:]),  # the second page's tokens under no parent
        _keys([9, *prompt[1:]])[1],  # and under another one
        _keys(prompt[:4] * 2)[1],  # the first page again, as the second
        *_keys(prompt, page_size=2),
        *_keys(prompt[1:5]),  # the border moved by one token
        *(_keys(prompt[:4], salt)[0] for salt in ("1", " 1", "True", "-1", "-2", "a", "ä", "é")),
        _keys([0] * 4)[0],
        _keys([0] * 4, "0")[0],
    ]
    assert len(set(different)) == len(different)
    assert _keys([*prompt, 1, 1, 1, 1])[:2] == [first, second]


def test_keys_are_the_same_in_every_process():
    """Nothing of them comes from Python's `hash`, whose start value differs, or once did not."""
    code = (
        "from tests.engine.test_scheduler_prefix import _keys\n"
        "print(_keys(list(range(8)), 'tenant'))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    shown = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=ROOT)
    assert shown.decode().strip() == f"{_keys(list(range(8)), 'tenant')}"


def test_without_prefix_caching_nothing_is_shared():
    pair = make_pair(prefix_caching=False)
    prompt = list(range(11))
    serve(pair, prompt, 12)
    assert num_hits(serve(pair, prompt, 12)) == 0
    assert not pair.oracle.pool.index
    pair.submit(0, prompt, 12)
    pair.submit(1, prompt, 12)
    assert pair.step().admitted == [0, 1], "nothing is deferred"


def test_eviction_takes_unpublished_pages_first_then_leaves_of_the_oldest():
    pair = make_pair(num_pages=16)
    pool = pair.oracle.pool
    serve(pair, list(range(9)), 10)  # two cached pages, one unpublished
    old = [pool.ring[-1], pool.ring[-2]]
    serve(pair, list(range(20, 29)), 10)
    new = [pool.ring[-1], pool.ring[-2]]
    uid = list(pool.uid)
    assert pool.ring[-4:] == [old[1], old[0], new[1], new[0]], "tail before head, oldest first"
    serve(pair, list(range(100, 141)), 44)  # eleven pages: exactly those that cache nothing
    assert pool.evicted == []
    serve(pair, list(range(200, 247)), 52)  # thirteen: two more
    order = [uid[page] for page in (old[1], old[0], new[1], new[0])]
    assert pool.evicted[: len(order)] == order[: len(pool.evicted)]
    assert len(pool.evicted) >= 2


def test_a_hit_makes_pages_young_again():
    pair = make_pair(num_pages=16)
    pool = pair.oracle.pool
    first, second = list(range(9)), list(range(20, 29))
    serve(pair, first, 10)
    serve(pair, second, 10)
    young = pool.ring[-2:]
    serve(pair, first, 10)
    assert pool.ring[-4:-2] == young
    serve(pair, list(range(100, 147)), 52)
    assert num_hits(serve(pair, first, 10)) == 2
    assert num_hits(serve(pair, second, 10)) < 2


def test_colliding_keys_never_give_wrong_kv():
    broken = 0

    def watch(pair: Pair) -> None:
        nonlocal broken
        residents = [row for row in pair.oracle.rows if row.state is RowState.DECODE]
        broken += sum(not row.pub_ok for row in residents)

    for seed in range(300, 312):
        shape, traffic = random_case(seed, key_bits=3, prefix_caching=True, index_buckets=4)
        run_both(shape, traffic, watch=watch)
    assert broken > 20, "hardly a key collided"


def test_cold_and_warm_runs_give_equal_texts():
    for seed in (3, 8, 15):
        shape, traffic = random_case(seed, prefix_caching=True)
        cold_shape, _ = random_case(seed, prefix_caching=False)
        calm = Traffic(seed=seed, requests=traffic.requests, budgets=traffic.budgets)
        assert run(shape, calm).finished == run(cold_shape, calm).finished


def test_scored_row_computes_what_it_scores():
    """It reuses whole pages up to its first scored position, and shares what it computed anew."""
    pair = make_pair()
    prompt = list(range(10, 23))
    serve(pair, prompt, 14)
    for score_from, num_cached in ((0, 0), (7, 4), (8, 8), (12, 12), (NO_SCORES, 12)):
        plan = serve(pair, prompt, 14, score_from=score_from)
        assert plan.give[0] == len(prompt) - num_cached
    num_published = sum(uid > 0 for uid in pair.oracle.pool.uid)
    assert num_published == 3, "pages computed twice must be kept once"
