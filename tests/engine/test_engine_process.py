"""`EngineServer` over a tiny model: control calls, faults on purpose, and what clients are told."""

from __future__ import annotations

import gzip
import json

import msgspec
import pytest

from compiled_engine.errors import ConfigError
from compiled_engine.faults import Fault, fault_of
from compiled_engine.ipc import ClientFrame
from compiled_engine.request import Request, SamplingParams
from tests.helpers.engines import GREEDY, run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.turned_engine import PROMPTS, TurnedEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder) -> dict[int, list[int]]:
    run = run_requests(tiny_engine(folder), PROMPTS)
    return dict(enumerate(run.tokens))


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_pause_holds_every_request_and_loses_none(folder, expected, overlap):
    engine = TurnedEngine(tiny_engine(folder, overlap_schedule=overlap))
    engine.submit()
    engine.turn()
    assert engine.call("pause") == (None, "")
    engine.turn()
    held, steps = {n: list(ids) for n, ids in engine.tokens.items()}, engine.loop.stats.num_steps
    engine.turn(
        ClientFrame(submits=[Request(request_id=9, prompt_token_ids=[3, 4], params=GREEDY)])
    )
    for _ in range(5):
        engine.turn()
    assert engine.tokens == held
    assert engine.loop.stats.num_steps == steps
    assert engine.loop.num_waiting >= 1
    assert engine.call("continue") == (None, "")
    engine.finish(len(PROMPTS) + 1)
    late = engine.tokens.pop(9)
    assert engine.tokens == expected
    assert len(late) == 8
    assert set(engine.queue_s) == {0, 1, 2, 3, 9}
    assert min(engine.queue_s.values()) >= 0.0


def test_abort_while_paused_gives_rows_back(folder):
    engine = TurnedEngine(tiny_engine(folder))
    engine.submit()
    engine.call("pause")
    engine.turn(ClientFrame(aborts=[0, 1, 2, 3]))
    for _ in range(5):
        engine.turn()
    assert not engine.loop.has_work
    assert engine.call("flush_cache") == (None, "")


def test_flush_cache_forgets_prefixes_and_is_refused_while_requests_run(folder, expected):
    engine = TurnedEngine(tiny_engine(folder))
    engine.submit()
    refusal, _ = engine.call("flush_cache")
    assert refusal is not None
    assert "only when there are none" in refusal
    engine.finish()
    cached = []
    for flush in (False, True):
        if flush:
            assert engine.call("flush_cache") == (None, "")
        before = engine.loop.stats.num_cached_tokens
        engine.tokens, engine.ends = {}, {}
        engine.submit()
        engine.finish()
        assert engine.tokens == expected
        cached.append(engine.loop.stats.num_cached_tokens - before)
    assert cached[0] > 0
    assert cached[1] == 0


def test_flush_cache_right_after_the_last_token_waits_for_the_rows(folder):
    engine = TurnedEngine(tiny_engine(folder, overlap_schedule="on"))
    engine.submit(PROMPTS[:1])
    while not engine.ends:
        engine.turn()
    assert engine.call("flush_cache") == (None, "")


def test_profile_writes_one_whole_trace(folder, tmp_path):
    engine = TurnedEngine(tiny_engine(folder))
    assert engine.call("stop_profile")[0] == "no profile runs"
    refusal, path = engine.call("start_profile", folder=str(tmp_path / "traces"))
    assert refusal is None
    assert engine.call("start_profile", folder=str(tmp_path))[0] == "a profile runs already"
    engine.submit(PROMPTS[:1])
    engine.finish(1)
    assert engine.call("stop_profile") == (None, path)
    with gzip.open(path, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names or "aten::linear" in names
    assert [str(p) for p in (tmp_path / "traces").iterdir()] == [path]
    (tmp_path / "file").touch()
    refusal, _ = engine.call("start_profile", folder=str(tmp_path / "file"))
    assert refusal is not None
    assert "cannot be written to" in refusal


def test_profile_of_some_steps_ends_by_itself(folder, tmp_path):
    engine = TurnedEngine(tiny_engine(folder))
    _, path = engine.call("start_profile", folder=str(tmp_path), num_steps=2)
    engine.submit(PROMPTS[:1])
    engine.finish(1)
    assert engine.call("stop_profile")[0] == "no profile runs"
    with gzip.open(path, "rt") as file:
        assert json.load(file)["traceEvents"]


# A prompt of two chunks: the second one is computed while the four short ones decode.
LONG = [[*range(20, 120)]]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_out_of_memory_ends_the_prompts_of_the_step_and_nothing_else(folder, expected, overlap):
    engine = TurnedEngine(tiny_engine(folder, overlap_schedule=overlap), Fault("oom", step=4))
    engine.submit()
    engine.turn()
    engine.turn(
        ClientFrame(submits=[Request(request_id=9, prompt_token_ids=LONG[0], params=GREEDY)])
    )
    engine.finish(5)
    failed = engine.ends.pop(9)
    assert failed.finish_reason == "error"
    assert "ran out of memory" in failed.error
    assert {end.finish_reason for end in engine.ends.values()} == {"length"}
    engine.tokens.pop(9)
    assert engine.tokens == expected
    _is_whole(engine)


def test_out_of_memory_while_all_decode_ends_the_newest(folder, expected):
    engine = TurnedEngine(tiny_engine(folder), Fault("oom", step=3))
    engine.submit()
    engine.finish()
    assert [n for n, end in engine.ends.items() if end.finish_reason == "error"] == [3]
    for number in (0, 1, 2):
        assert engine.tokens[number] == expected[number]
    _is_whole(engine)


def _is_whole(engine: TurnedEngine) -> None:
    """No page is lost, no illegal transition was counted, and answers are right afterwards."""
    stats = engine.loop.stats
    assert stats.num_scheduler_errors == 0
    assert stats.num_pages_active == 0
    engine.tokens, engine.ends = {}, {}
    engine.submit(LONG)
    engine.finish(1)
    again = dict(engine.tokens)
    assert engine.call("flush_cache") == (None, "")
    engine.tokens, engine.ends = {}, {}
    engine.submit(LONG)
    engine.finish(1)
    assert engine.tokens == again


def test_abort_fault_gives_every_request_up(folder):
    engine = TurnedEngine(tiny_engine(folder), Fault("abort", step=3))
    engine.submit()
    engine.finish()
    assert {end.finish_reason for end in engine.ends.values()} == {"abort"}
    _is_whole(engine)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_retraction_at_any_step_changes_no_token(folder, expected, overlap):
    for step in (2, 3, 5):
        engine = TurnedEngine(
            tiny_engine(folder, overlap_schedule=overlap), Fault("retract", step=step)
        )
        engine.submit()
        engine.finish()
        assert engine.tokens == expected
        assert engine.loop.stats.num_retractions == 1
        assert engine.retracted == {len(PROMPTS) - 1: 1}  # the newest
        _is_whole(engine)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_nan_ends_one_request_with_an_error_and_leaves_the_others_alone(folder, expected, overlap):
    """At steps at which the spoilt page is new, half full and complete."""
    for step in range(3, 8):
        engine = TurnedEngine(
            tiny_engine(folder, overlap_schedule=overlap), Fault("nan", step=step)
        )
        engine.submit()
        engine.finish()
        failed = engine.ends.pop(3)
        assert (failed.finish_reason, failed.is_refusal) == ("error", False)
        assert "NaN" in str(failed.error)
        ids = engine.tokens.pop(3)
        assert ids == expected[3][: len(ids)]
        assert 0 < len(ids) < len(expected[3])
        assert engine.tokens == {n: expected[n] for n in range(3)}
        assert {end.finish_reason for end in engine.ends.values()} == {"length"}
        assert engine.loop.stats.num_scheduler_errors == 0
        engine.tokens, engine.ends = {}, {}
        # What it left in the cache is what a run without the fault would have left.
        engine.submit()
        engine.finish()
        assert engine.tokens == expected
        _is_whole(engine)


def test_nan_in_the_middle_of_a_prompt_publishes_nothing_of_that_step(folder):
    clean = TurnedEngine(tiny_engine(folder))
    short, long = [*range(3, 66)], [*range(20, 250)]
    clean.submit([short, long])
    clean.finish(2)
    # Chunks of the long prompt end at 1, 64 and 127: the page there is the first that is not full.
    engine = TurnedEngine(tiny_engine(folder), Fault("nan", step=3))
    engine.submit([short, long])
    engine.finish(2)
    assert engine.ends[1].finish_reason == "error"
    assert engine.tokens == {0: clean.tokens[0], 1: []}
    expected = clean.tokens[1]
    engine.tokens, engine.ends = {}, {}
    engine.submit([long])
    engine.finish(1)
    assert engine.tokens[0] == expected
    assert engine.ends[0].num_cached_tokens == 124


def test_nan_ends_a_request_that_asked_for_log_probabilities(folder, expected):
    engine = TurnedEngine(tiny_engine(folder), Fault("nan", step=4))
    engine.submit(params=msgspec.structs.replace(GREEDY, logprobs=2))
    engine.finish()
    assert engine.ends.pop(3).finish_reason == "error"
    assert {end.finish_reason for end in engine.ends.values()} == {"length"}
    del engine.tokens[3]
    assert engine.tokens == {n: expected[n] for n in range(3)}


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_id_that_no_token_has_ends_one_request_and_leaves_the_others_alone(
    folder, expected, overlap
):
    made = []
    for step in range(1, 8):
        engine = TurnedEngine(
            tiny_engine(folder, overlap_schedule=overlap), Fault("token", step=step)
        )
        vocab_size = engine.loop.executor.pieces.vocab_size
        engine.submit(params=msgspec.structs.replace(GREEDY, logprobs=2))
        engine.finish()
        failed = engine.ends.pop(3)
        assert (failed.finish_reason, failed.is_refusal) == ("error", False)
        assert f"token {vocab_size}" in str(failed.error)
        ids = engine.tokens.pop(3)
        assert ids == expected[3][: len(ids)]
        made.append(len(ids))
        assert engine.tokens == {n: expected[n] for n in range(3)}
        assert {end.finish_reason for end in engine.ends.values()} == {"length"}
        assert engine.loop.stats.num_scheduler_errors == 0
        engine.tokens, engine.ends = {}, {}
        engine.submit()
        engine.finish()
        assert engine.tokens == expected
        _is_whole(engine)
    assert min(made) == 1
    assert max(made) > 4


def test_pages_of_a_step_that_gave_no_token_are_never_cached(folder):
    """In the middle of a prompt, of which 64 tokens are a step."""
    prompt, cached = list(range(3, 203)), []
    engine = TurnedEngine(tiny_engine(folder), Fault("token", step=2))
    engine.submit([prompt])
    engine.finish(1)
    assert engine.ends[0].finish_reason == "error"
    assert engine.tokens == {0: []}
    for _ in range(2):
        engine.tokens, engine.ends = {}, {}
        engine.submit([prompt])
        engine.finish(1)
        cached.append(engine.ends[0].num_cached_tokens)
    # The step before left its pages, and a run without the fault those of the whole prompt.
    assert cached == [64, 196]
    _is_whole(engine)


def test_raise_fault_leaves_the_loop(folder):
    engine = TurnedEngine(tiny_engine(folder), Fault("raise", step=2))
    engine.submit()
    with pytest.raises(RuntimeError, match="fault on purpose at step 2"):
        engine.finish()


def test_seeds_give_the_same_tokens_alone_and_under_load(folder):
    engine = tiny_engine(folder)
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=11)
    alone = run_requests(engine, PROMPTS[:1], sampled).tokens[0]
    noise = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    for stagger in (0, 2):
        prompts = [*PROMPTS[1:], PROMPTS[0], *PROMPTS[1:]]
        params = [noise, noise, noise, sampled, noise, noise, noise]
        assert run_requests(engine, prompts, params, stagger=stagger).tokens[3] == alone


@pytest.mark.parametrize("text", ["boom@1", "raise", "sleep@x", "raise@1:2:3"])
def test_fault_of_refuses_what_it_does_not_know(text):
    with pytest.raises(ConfigError, match="COMPILED_ENGINE_FAULT"):
        fault_of(text)


def test_fault_of_reads_kind_step_and_seconds():
    assert fault_of(None) is None
    fault = fault_of("sleep@7:0.5")
    assert fault is not None
    assert (fault.kind, fault.step, fault.seconds) == ("sleep", 7, 0.5)
