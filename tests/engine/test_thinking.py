"""Thinking budgets: what counts, which tokens are forced, and that nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from compiled_engine import grammar_rows
from compiled_engine.engine import Engine
from compiled_engine.errors import InvalidRequestError
from compiled_engine.faults import Fault
from compiled_engine.request import (
    MAX_CLOSING_TOKENS,
    Request,
    SamplingParams,
    ThinkingBudget,
    validate_request,
)
from compiled_engine.thinking import WITHOUT_END, ThinkingState
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import assert_idle, tiny_engine
from tests.helpers.grammar_runs import Answer, run_grammars, spec
from tests.helpers.tiny_model import write_tiny_model

OPENING, CLOSING = "<think>", "</think>"
NUM_PROMPTS = 6


def state_of(max_tokens: int, texts: list[bytes], **fields: Any) -> ThinkingState:
    budget = ThinkingBudget(max_tokens=max_tokens, closing=CLOSING, closing_ids=(90, 91), **fields)
    return ThinkingState(budget, texts)


def cuts_of(text: str, rng: random.Random) -> list[bytes]:
    """The text's bytes in pieces of one to five."""
    rest, parts = text.encode(), []
    while rest:
        size = rng.randint(1, 5)
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_markers_count_however_they_are_cut_into_tokens(seed):
    rng = random.Random(seed)
    thought = cuts_of("Hm, 5 < 6 </thin, naïve", rng)
    texts = [*cuts_of(f" \n{OPENING}", rng), *thought, *cuts_of(f"{CLOSING}4 <think>", rng)]
    num_before = texts.index(thought[0])
    state = state_of(len(thought) + 5, texts, opening=OPENING)
    for token in range(num_before):
        assert state.num_free >= len(thought) + 6
        state.take(token)
    for index, token in enumerate(range(num_before, num_before + len(thought))):
        assert state.num_free == len(thought) + 5 - index
        assert state.forced is None
        state.take(token)
    for token in range(num_before + len(thought), len(texts)):
        assert state.forced is None
        state.take(token)
    assert state.num_free == WITHOUT_END
    assert state.forced is None


def test_closing_is_forced_token_by_token_and_once():
    state = state_of(2, [b"a"] * 100)
    assert (state.forced, state.num_free) == (None, 2)
    state.take(0)
    assert (state.forced, state.num_free) == (None, 1)
    state.take(0)
    assert state.forced == 90
    state.take(90)
    assert state.forced == 91
    state.take(91)
    assert (state.forced, state.num_free) == (None, WITHOUT_END)


def test_budget_of_nothing_forces_at_once():
    assert state_of(0, [b"a"]).forced == 90
    state = state_of(0, [b"<thi", b"nk>", b"x"], opening=OPENING)
    for token, free in ((0, 1), (1, 1)):
        assert (state.forced, state.num_free) == (None, free)
        state.take(token)
    assert state.forced == 90


@pytest.mark.parametrize("text", ["so <think>", "<thin air>", "x", "<<think>"])
def test_opening_counts_at_the_start_only(text):
    state = state_of(0, [bytes([byte]) for byte in text.encode()], opening=OPENING)
    for token in range(len(text)):
        state.take(token)
    assert (state.forced, state.num_free) == (None, WITHOUT_END)


def test_other_ends_of_thinking():
    state = state_of(9, [b"a", b"\n<tool", b"_call>"], enders=("<tool_call>",))
    for token in range(3):
        state.take(token)
    assert state.num_free == WITHOUT_END


def test_thinking_that_reopens_has_one_budget():
    texts = [b"<an>", b"x", b"<end>", b"between"]
    fields = {"opening": "<an>", "enders": ("<end>",), "reopens": True}
    state = state_of(3, texts, **fields)
    for token in (3, 0, 1, 2):
        assert state.forced is None
        state.take(token)
    # The end marker counts, as it is only seen behind it.
    assert state.num_free == 2
    for token in (3, 3, 0, 1):
        state.take(token)
    assert state.forced == 90
    state.take(90)
    state.take(91)
    assert state.forced is None
    state.take(0)
    assert state.forced == 90


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"max_tokens": 2**31},
        {"closing": ""},
        {"closing_ids": ()},
        {"closing_ids": (1,) * (MAX_CLOSING_TOKENS + 1)},
    ],
)
def test_wrong_budgets_are_refused(fields):
    good = {"max_tokens": 1, "closing": "x", "closing_ids": (1,)}
    with pytest.raises(InvalidRequestError):
        ThinkingBudget(**{**good, **fields})


# --- in an engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def simple(folder) -> Engine:
    return tiny_engine(folder)


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request, simple) -> Engine:
    made = tiny_engine(simple.settings.folder, overlap_schedule=request.param)
    made.loop._grammars._service = simple.loop._grammars._service
    return made


def budget_of(tokenizer: Tokenizer, max_tokens: int, opening: str = "") -> ThinkingBudget:
    closing_ids = tuple(tokenizer.encode(CLOSING, add_special_tokens=False))
    return ThinkingBudget(
        max_tokens=max_tokens, closing=CLOSING, closing_ids=closing_ids, opening=opening
    )


def drawn(seed: int, thinking: ThinkingBudget | None, **options: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    return SamplingParams(**{**defaults, **options}, seed=seed, thinking=thinking)


def test_budget_ends_thinking_exactly_and_changes_nothing_before(engine, tokenizer):
    budgets = (0, 1, 2, 7, 20, 41)
    plain = run_grammars(engine, [drawn(i, None) for i in range(len(budgets) + 1)])
    params = [drawn(i, budget_of(tokenizer, n)) for i, n in enumerate(budgets)]
    answers = run_grammars(engine, [*params, drawn(len(budgets), None)])
    closing = list(params[0].thinking.closing_ids)
    assert len(closing) > 1
    for answer, free, n in zip(answers, plain, budgets, strict=False):
        assert answer.tokens[:n] == free.tokens[:n]
        assert answer.tokens[n : n + len(closing)] == closing
        assert len(answer.tokens) == 60
        assert answer.reason == "length"
    assert answers[-1].tokens == plain[-1].tokens
    assert not engine.loop._grammars.rows


def test_request_without_thinking_and_one_with_room_are_as_without_a_budget(engine, tokenizer):
    plain = run_grammars(engine, [drawn(i, None) for i in range(3)])
    params = [
        drawn(0, budget_of(tokenizer, 0, OPENING)),
        drawn(1, budget_of(tokenizer, 60)),
        drawn(2, budget_of(tokenizer, 2, OPENING)),
    ]
    for answer, free in zip(run_grammars(engine, params), plain, strict=True):
        assert answer.tokens == free.tokens


def test_length_may_end_the_answer_inside_the_marker(engine, tokenizer):
    params = drawn(0, budget_of(tokenizer, 3), max_tokens=5)
    (answer,) = run_grammars(engine, [params])
    assert answer.reason == "length"
    assert answer.tokens[3:] == list(params.thinking.closing_ids[:2])


def test_grammar_follows_behind_a_forced_end(engine, tokenizer):
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": CLOSING}
    answer = {"type": "regex", "pattern": "[a-c]{3}x"}
    tag = {"type": "sequence", "elements": [thought, answer]}
    grammar = spec("structural_tag", {"type": "structural_tag", "format": tag})
    params = [
        drawn(seed, budget_of(tokenizer, n), grammar=grammar, ignore_eos=False)
        for seed, n in enumerate((0, 1, 9, 30))
    ]
    for answer, param in zip(run_grammars(engine, params), params, strict=True):
        assert answer.error is None
        assert answer.reason == "stop"
        n = param.thinking.max_tokens
        closing = param.thinking.closing_ids
        assert tuple(answer.tokens[n : n + len(closing)]) == closing
        text = tokenizer.decode(answer.tokens[n + len(closing) :])
        assert text[3] == "x"
        assert set(text[:3]) <= set("abc")


def test_optional_thinking_under_a_grammar_is_limited_too(engine, tokenizer):
    thought = {"type": "tag", "begin": OPENING, "content": {"type": "any_text"}, "end": CLOSING}
    tag = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "yes"}]}
    grammar = spec("structural_tag", {"type": "structural_tag", "format": tag})
    params = [
        drawn(i, budget_of(tokenizer, i, OPENING), grammar=grammar, ignore_eos=False)
        for i in range(5)
    ]
    for n, answer in enumerate(run_grammars(engine, params)):
        text = tokenizer.decode(answer.tokens)
        assert text.startswith(OPENING)
        assert text.endswith(f"{CLOSING}yes")
        inner = answer.tokens[len(tokenizer.encode(OPENING, add_special_tokens=False)) :]
        closing = list(tokenizer.encode(CLOSING, add_special_tokens=False))
        assert inner[n : n + len(closing)] == closing or tokenizer.decode(inner[:n]).count(CLOSING)


def test_thinking_rows_sleep_until_their_budget_ends(engine, tokenizer, monkeypatch):
    """Two masks and one for each token of the marker, however long the thinking is."""
    made: list[int] = []
    advance = grammar_rows._advance

    def counted(row: Any, service: Any) -> None:
        made.append(row.row)
        advance(row, service)

    monkeypatch.setattr(grammar_rows, "_advance", counted)
    params = drawn(0, budget_of(tokenizer, 40), max_tokens=80)
    masked: list[bool] = []
    launch = engine.loop.executor.launch

    def launched(*args: Any, **options: Any) -> None:
        masked.append(args[2].is_masked)
        launch(*args, **options)

    monkeypatch.setattr(engine.loop.executor, "launch", launched)
    (answer,) = run_grammars(engine, [params])
    assert len(answer.tokens) == 80
    assert len(made) == 2 + len(params.thinking.closing_ids)
    assert sum(masked) <= 3 * len(params.thinking.closing_ids)


def test_rows_beside_grammars_keep_their_tokens(engine, tokenizer):
    """Every row alone gives what it gives among others, asleep and awake by turns."""
    grammar = spec("regex", "[a-f]{30,50}")
    params = [
        drawn(0, budget_of(tokenizer, 11)),
        drawn(1, None, grammar=grammar, ignore_eos=False),
        drawn(2, budget_of(tokenizer, 0, OPENING)),
        drawn(3, budget_of(tokenizer, 30)),
        drawn(4, None),
    ]
    prompts = [list(range(10 + i, 40)) for i in range(len(params))]
    together = run_grammars(engine, params, prompts=prompts)
    for index, param in enumerate(params):
        (alone,) = run_grammars(engine, [param], prompts=[prompts[index]])
        assert alone.tokens == together[index].tokens


@pytest.mark.parametrize("step", [4, 9, 14])
def test_retraction_while_thinking_changes_no_token(engine, tokenizer, step):
    params = [drawn(i, budget_of(tokenizer, 8 + i)) for i in range(3)]
    expected = run_grammars(engine, params)
    fault = Fault("retract", step=engine.loop.stats.num_steps + step)

    def act(_: int, __: list[Answer]) -> None:
        fault.before_step(engine.loop)

    before = engine.loop.stats.num_retractions
    got = run_grammars(engine, params, after_step=act)
    assert [a.tokens for a in got] == [a.tokens for a in expected]
    assert engine.loop.stats.num_retractions == before + 1


def test_abort_at_any_step_leaves_nothing_behind(engine, tokenizer):
    for step in range(1, 20, 3):
        loop = engine.loop
        for index in range(NUM_PROMPTS):
            params = drawn(index, budget_of(tokenizer, index))
            prompt = list(range(10, 20 + index))
            loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))
        for _ in range(step):
            loop.step()
        for index in range(NUM_PROMPTS):
            loop.abort(index)
        while loop.has_work:
            loop.step()
        loop.drain()
        assert_idle(engine)
        assert not loop._grammars.rows
        assert not loop._grammars.awake


def test_waits_for_grammars_are_told_apart_from_the_queue(engine, tokenizer):
    params = [drawn(0, None), drawn(1, budget_of(tokenizer, 2)), drawn(2, None, max_tokens=3)]
    engine.loop.take_grammar_waits()
    run_grammars(engine, params)
    waits = engine.loop.take_grammar_waits()
    assert set(waits) == {1}
    assert 0 < waits[1] < 30
    assert engine.loop.take_grammar_waits() == {}


def test_closing_ids_must_exist(engine):
    thinking = ThinkingBudget(max_tokens=1, closing="x", closing_ids=(10**6,))
    request = Request(request_id=1, prompt_token_ids=[1], params=drawn(0, thinking))
    with pytest.raises(InvalidRequestError, match=r"thinking\.closing_ids"):
        validate_request(request, engine.limits)
