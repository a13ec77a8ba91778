"""Loops of steps on the device: the same tokens as without, and every reason to leave one.

The model is in fp32: its tokens do not depend on the size of the step that computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from compiled_engine.engine import Engine
from compiled_engine.loop import LOOP_STEPS
from compiled_engine.outbox import MIN_FREE_RECORDS, RING_RECORDS
from compiled_engine.request import Request, SamplingParams
from tests.helpers.engines import assert_idle, run_requests
from tests.helpers.gpu_engine import LENGTHS, agents, exact_engine, prompts_of, write_exact_model

pytestmark = pytest.mark.gpu

MAX_ROWS = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3, ignore_eos=True, max_tokens=100)
# A loop is launched when each of its rows has two tokens: of its prompt's step, and of the one that
# was in flight then.
NUM_BEFORE = 2
SLEEP_CYCLES = 2_000_000_000  # a second


class LoopSpy:
    """Writes down the loops of an engine.

    Attributes:
        lengths: steps of each loop that has ended.
        has_waiting: whether requests waited when it was launched.
        cycles: what the device sleeps before the next loop.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = engine.loop.executor
        self.lengths: list[int] = []
        self.has_waiting: list[bool] = []
        self.cycles = 0
        self._start: int | None = None
        self._launch: Callable[..., bool] = self.executor.launch_loop
        monkeypatch.setattr(self.executor, "launch_loop", self._spied)

    def _spied(self, key: Any, *, max_steps: int, has_waiting: bool) -> bool:
        self.finish()
        self._start = self.executor.outbox._num_read
        self.has_waiting.append(has_waiting)
        if self.cycles:
            torch.cuda._sleep(self.cycles)
            self.cycles = 0
        is_launched = self._launch(key, max_steps=max_steps, has_waiting=has_waiting)
        assert is_launched
        return is_launched

    def finish(self) -> None:
        """The last loop has ended."""
        if self._start is None:
            return
        control = self.executor.loop_control
        assert control is not None
        assert control.ended_at is not None, "a loop is running"
        self.lengths.append(control.ended_at - self._start)
        self._start = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact_model(tmp_path_factory.mktemp("gpu-loop") / "qwen3")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    """The host launches every step."""
    return exact_engine(folder, max_num_seqs=MAX_ROWS)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """With a loop made for every number of rows: making one takes longer than a step."""
    made = exact_engine(folder, max_num_seqs=MAX_ROWS, device_loop=True)
    for count in range(1, MAX_ROWS + 1):
        run_requests(made, prompts_of(50 + count, *[20] * count), GREEDY)
    return made


@pytest.fixture
def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> LoopSpy:
    return LoopSpy(engine, monkeypatch)


def params_of(base: SamplingParams, *max_tokens: int) -> list[SamplingParams]:
    return [msgspec.structs.replace(base, max_tokens=n) for n in max_tokens]


def collect(tokens: dict[int, list[int]], events: Any) -> None:
    for event in events:
        tokens.setdefault(event.request_id, []).extend(event.token_ids)


def submit(engine: Engine, index: int, prompt: list[int], params: SamplingParams) -> None:
    engine.loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))


def step_until_looping(engine: Engine, tokens: dict[int, list[int]]) -> None:
    """Steps until a loop was launched, of which nothing was read yet."""
    for _ in range(20):
        collect(tokens, engine.loop.step())
        if engine.loop._is_looping:
            return
    raise AssertionError("no loop was launched")


def step_to_the_end(engine: Engine, tokens: dict[int, list[int]]) -> None:
    loop = engine.loop
    for _ in range(5000):
        if not loop.has_work:
            break
        collect(tokens, loop.step())
    collect(tokens, loop.drain())
    assert_idle(engine)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("stagger", [0, 1, 3, 11])
def test_gpu_loops_give_equal_tokens_for_staggered_traffic(plain, engine, spy, stagger, params):
    """More requests than rows, of many lengths; every token of every request."""
    for prompts in (prompts_of(100 + stagger, *LENGTHS), agents(200 + stagger)):
        listed = params_of(params, *(3 + 17 * i % 60 for i in range(len(prompts))))
        expected = run_requests(plain, prompts, listed, stagger=stagger).tokens
        spy.lengths.clear()
        assert run_requests(engine, prompts, listed, stagger=stagger).tokens == expected
        spy.finish()
        assert sum(spy.lengths) > 20, spy.lengths
        assert max(spy.lengths) <= LOOP_STEPS


def test_gpu_a_loop_ends_after_its_steps_and_with_its_last_row(engine, spy):
    (prompt,) = prompts_of(1, 20)
    run = run_requests(engine, [prompt], params_of(GREEDY, NUM_BEFORE + 2 * LOOP_STEPS + 5))
    spy.finish()
    assert spy.lengths == [LOOP_STEPS, LOOP_STEPS, 5]
    assert len(run.tokens[0]) == NUM_BEFORE + 2 * LOOP_STEPS + 5


def test_gpu_a_loop_ends_with_a_row_while_a_request_waits(plain, engine, spy):
    prompts = prompts_of(2, 20, 21, 22, 23, 24)
    listed = params_of(GREEDY, NUM_BEFORE + 9, 80, 80, 80, 30)
    expected = run_requests(plain, prompts, listed).tokens
    assert run_requests(engine, prompts, listed).tokens == expected
    spy.finish()
    assert spy.has_waiting[0]
    assert spy.lengths[0] == 9


def test_gpu_a_loop_goes_on_after_a_row_while_nothing_waits(plain, engine, spy):
    prompts = prompts_of(3, 20, 21, 22, 23)
    listed = params_of(GREEDY, NUM_BEFORE + 9, 80, 80, 80)
    expected = run_requests(plain, prompts, listed).tokens
    assert run_requests(engine, prompts, listed).tokens == expected
    spy.finish()
    assert not any(spy.has_waiting)
    assert spy.lengths[0] == LOOP_STEPS


@pytest.mark.parametrize("news", ["submit", "abort"])
def test_gpu_a_loop_ends_when_an_entry_arrives(plain, engine, spy, news):
    """It is interrupted while the device still sleeps: one step, and no other."""
    prompts = prompts_of(4, 20, 30)
    expected = run_requests(plain, prompts, GREEDY).tokens
    tokens: dict[int, list[int]] = {}
    spy.cycles = SLEEP_CYCLES
    submit(engine, 0, prompts[0], GREEDY)
    if news == "abort":
        submit(engine, 1, prompts[1], GREEDY)
    step_until_looping(engine, tokens)
    if news == "abort":
        engine.loop.abort(1)
    else:
        submit(engine, 1, prompts[1], GREEDY)
    step_to_the_end(engine, tokens)
    spy.finish()
    assert spy.lengths[0] == 1
    assert tokens[0] == expected[0]
    if news == "abort":
        assert tokens[1] == expected[1][: len(tokens[1])]
        assert len(tokens[1]) == NUM_BEFORE
    else:
        assert tokens[1] == expected[1]


def test_gpu_a_loop_ends_before_it_overwrites_what_nobody_read(plain, engine, spy, monkeypatch):
    monkeypatch.setattr("compiled_engine.loop.LOOP_STEPS", 1000)
    (prompt,) = prompts_of(5, 20)
    (params,) = params_of(GREEDY, 150)
    expected = run_requests(plain, [prompt], params).tokens
    tokens: dict[int, list[int]] = {}
    submit(engine, 0, prompt, params)
    step_until_looping(engine, tokens)
    torch.cuda.synchronize()
    step_to_the_end(engine, tokens)
    spy.finish()
    assert spy.lengths[0] == RING_RECORDS - MIN_FREE_RECORDS
    assert [tokens[0]] == expected
