"""Answers under grammars on a tiny model: shape, isolation, faults, races."""

from __future__ import annotations

import itertools
import json
import random
import re
import select
import time
from datetime import datetime

import jsonschema
import numpy as np
import pytest

from compiled_engine import grammar_compiler, grammar_rows
from compiled_engine.engine import Engine
from compiled_engine.errors import InvalidRequestError
from compiled_engine.grammar import GrammarService, TrialProcess
from compiled_engine.grammar_compiler import (
    MAX_WHITESPACE,
    STRICT_FORMATS,
    WALL_LIMIT_S,
    Trial,
    strict_formats,
)
from compiled_engine.request import MAX_GRAMMAR_CHARS, GrammarSpec, Request, SamplingParams
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import assert_idle, tiny_engine
from tests.helpers.grammar_runs import run_grammars, spec
from tests.helpers.tiny_model import write_tiny_model

# A model of random weights also writes halves of surrogate pairs, which no text can hold; so the
# characters of its strings are limited.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zäö ]{0,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "c": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["v", "c"],
        }
    },
    "$ref": "#/$defs/node",
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "<call>"}}
FREE = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def drawn(grammar: GrammarSpec | None, seed: int = 0, **options) -> SamplingParams:
    """Sampled, so that a mask that is not applied shows at once."""
    defaults = {"temperature": 1.0, "max_tokens": 200, "seed": seed}
    return SamplingParams(**{**defaults, **options}, grammar=grammar)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def simple(folder) -> Engine:
    return tiny_engine(folder)


def engine_like(simple: Engine, **options) -> Engine:
    """Another engine, which shares the compiled grammars of `simple`."""
    made = tiny_engine(simple.settings.folder, **options)
    made.loop._grammars._service = simple.loop._grammars._service
    return made


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request, simple) -> Engine:
    return engine_like(simple, overlap_schedule=request.param)


def test_every_kind_gives_what_it_says_beside_free_rows(engine, tokenizer):
    alone = run_grammars(engine, [FREE])[0].tokens
    params = [
        FREE,
        *(drawn(spec("json_schema", PERSON), seed) for seed in range(4)),
        drawn(spec("json_schema", TREE), max_tokens=240),
        drawn(spec("json_object"), seed=3),
        drawn(spec("regex", "[a-c]{3,5}x")),
        drawn(spec("choice", ["yes", "no", 'naïve "q"\n\x01😀'])),
        drawn(spec("grammar", 'root ::= "a" root | "b"')),
        drawn(spec("structural_tag", TAG)),
        drawn(spec("json_schema", {"type": "string", "format": "date-time"})),
    ]
    prompts = [list(range(10, 20))] + [list(range(10 + i, 30)) for i in range(len(params) - 1)]
    answers = run_grammars(engine, params, prompts=prompts)
    assert answers[0].tokens == alone
    texts = [tokenizer.decode(answer.tokens) for answer in answers]
    for text, answer in list(zip(texts, answers, strict=True))[1:5]:
        assert answer.reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)
    if answers[5].reason == "stop":
        jsonschema.validate(json.loads(texts[5]), TREE)
    if answers[6].reason == "stop":
        assert isinstance(json.loads(texts[6]), dict)
    assert re.fullmatch("[a-c]{3,5}x", texts[7])
    assert texts[8] in ("yes", "no", 'naïve "q"\n\x01😀')
    assert re.fullmatch("a*b", texts[9])
    assert texts[10] == "<call>"
    datetime.fromisoformat(json.loads(texts[11]).replace("Z", "+00:00"))
    assert {a.reason for a in answers} <= {"stop", "length"}


def test_both_loops_give_the_same_tokens(simple):
    params = [drawn(spec("json_schema", PERSON), seed) for seed in range(3)]
    params += [drawn(None, 7, max_tokens=30), drawn(spec("regex", "[0-9]{20}"), logit_bias={7: 1})]
    runs = []
    for overlap in ("off", "on"):
        made = engine_like(simple, overlap_schedule=overlap)
        runs.append([answer.tokens for answer in run_grammars(made, params)])
    assert runs[0] == runs[1]


def test_a_wrong_grammar_ends_its_own_request_only(engine):
    wrong = [
        spec("regex", "("),
        spec("regex", "foo**"),
        spec("regex", "[z-a]"),
        spec("regex", "(?<=x)y"),
        spec("grammar", "root ::= undefined"),
        spec("json_schema", {"type": "frob"}),
        spec("json_schema", "not json"),
        spec("json_schema", {"$ref": "#"}),
        spec("structural_tag", {"type": "structural_tag", "format": {"type": "frob"}}),
    ]
    answers = run_grammars(engine, [FREE, *(drawn(each) for each in wrong), FREE])
    for answer in answers[1:-1]:
        assert answer.reason == "error"
        assert answer.error.is_refusal
        assert answer.error.error
        assert not answer.tokens
    assert all(len(answers[i].tokens) == FREE.max_tokens for i in (0, -1))


def test_a_grammar_that_compiles_for_ever_is_given_up_while_others_run(simple):
    integers = {f"a{i}": {"type": "integer"} for i in range(300)}
    heavy = {"type": "object", "properties": integers, "minProperties": 150, "maxProperties": 160}
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    run_grammars(simple, [drawn(spec("json_object"))])  # everything is loaded
    start = time.monotonic()
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    params = [drawn(spec("json_schema", heavy)), drawn(spec("json_schema", deep)), long]
    answers = run_grammars(simple, params)
    assert time.monotonic() - start < 2 * WALL_LIMIT_S
    for answer in answers[:2]:
        assert "too complex" in answer.error.error
        assert answer.error.is_refusal
    assert len(answers[2].tokens) == 200


class _Waiting:
    """Stands for the compiler: waits, or works, for as many seconds as the text says."""

    memory_size_bytes = 0

    def compile(self, given):
        seconds = float(given.text)
        time.sleep(max(0.0, seconds))
        while seconds < 0:
            pass
        return self

    def new_mask(self):
        return np.ones(1)

    def new_matcher(self, compiled):
        return self

    def fill_next_token_bitmask(self, mask, index):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_time_is_the_processors_so_that_a_busy_machine_refuses_nobody(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "TIME_LIMIT_S", 1)
    forks = grammar_compiler._Forks(_Waiting())
    for number, seconds in enumerate(("1.3", "-1")):
        forks.start(Trial(number, spec("regex", seconds)))
    verdicts = {}
    while forks.pipes:
        ready, _, _ = select.select(forks.pipes, [], [], forks.timeout_s())
        found = [forks.read(pipe) for pipe in ready]
        verdicts |= {verdict.number: verdict.error for verdict in found if verdict is not None}
    assert verdicts[0] is None
    assert "too complex" in verdicts[1]


def test_end_is_forced_and_length_still_ends(simple, tokenizer):
    exact = spec("regex", "abc")
    answers = run_grammars(
        simple,
        [
            drawn(exact, ignore_eos=True),
            drawn(exact, max_tokens=2),
            drawn(exact, logit_bias={2: 100.0, 3: 100.0}),  # the end token, another special one
        ],
    )
    assert [a.reason for a in answers] == ["stop", "length", "stop"]
    assert [tokenizer.decode(a.tokens) for a in answers] == ["abc", "ab", "abc"]
    assert answers[0].tokens[-1] == 2


def test_white_space_is_bounded_and_strings_hold_no_control_characters(simple, tokenizer):
    (space,), (newline,) = tokenizer.encode(" "), tokenizer.encode("\n")
    text = {"type": "string", "maxLength": 8}
    schema = {"type": "object", "properties": {"a": text, "b": text}, "required": ["a", "b"]}
    bias = {space: 100.0, newline: 100.0}
    loving = drawn(spec("json_schema", schema), logit_bias=bias, max_tokens=220)
    texts = []
    controls = {tokenizer.encode(chr(c))[0]: 20.0 for c in range(32) if c not in (10, 13)}
    controls |= {tokenizer.encode(chr(c))[0]: 10.0 for c in range(32, 127)}
    for seed in range(3):
        hostile = drawn(spec("json_schema", schema), seed, logit_bias=controls, max_tokens=220)
        answers = run_grammars(simple, [loving, hostile])
        texts += [tokenizer.decode(a.tokens) for a in answers if a.reason == "stop"]
    assert len(texts) >= 4
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        outside = re.sub(r'"[^"]*"', '""', text)
        assert max(map(len, re.findall(r"\s+", outside)), default=0) <= MAX_WHITESPACE


def test_special_tokens_never_spell_text(simple, tokenizer):
    answer = run_grammars(
        simple, [drawn(spec("regex", ".{1,20}"), logit_bias={0: 100.0, 1: 100.0, 3: 100.0})]
    )[0]
    assert not {0, 1, 3} & set(answer.tokens)


def test_no_step_is_launched_while_only_grammars_compile(engine, monkeypatch):
    """A row without a grammar ends long before the other one's grammar is there."""
    loop, asked, empty = engine.loop, itertools.count(), []
    launch, take_ready = loop._launch, loop._grammars.take_ready

    def noted() -> None:
        empty.append(not (loop._seats or loop._queue) and loop._grammars.num_compiling > 0)
        launch()

    monkeypatch.setattr(loop, "_launch", noted)
    late = lambda: take_ready() if next(asked) > 40 else []  # noqa: E731
    monkeypatch.setattr(loop._grammars, "take_ready", late)
    params = [drawn(None, max_tokens=1), drawn(spec("regex", "[a-z]{10}"))]
    answers = run_grammars(engine, params)
    assert [len(answer.tokens) for answer in answers] == [1, 11]
    assert sum(empty) <= 1  # the one behind the last token of the first row


def test_a_slow_mask_holds_up_its_own_row_only(simple, monkeypatch):
    advance = grammar_rows._advance

    def slow(row, service):
        if row.request_id == 0:
            time.sleep(0.25)  # far more than a step takes, on a busy machine too
        advance(row, service)

    monkeypatch.setattr(grammar_rows, "_advance", slow)
    ten = spec("regex", "[a-z]{10}")
    params = [drawn(ten), drawn(ten, 1), SamplingParams(temperature=0.0, max_tokens=60)]
    times: list[float] = []
    answers = run_grammars(simple, params, after_step=lambda *_: times.append(time.perf_counter()))
    assert [len(a.tokens) for a in answers[:2]] == [11, 11]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gap > 0.2 for gap in gaps) <= 2, sorted(gaps)[-5:]
    assert answers[1].steps[-1] < answers[0].steps[-1]


def test_a_mask_that_never_comes_ends_its_row(simple, monkeypatch):
    made = engine_like(simple)
    advance = grammar_rows._advance

    def hang(row, service):
        if row.request_id == 0 and row.token is not None:
            time.sleep(1.0)
        advance(row, service)

    monkeypatch.setattr(grammar_rows, "_advance", hang)
    monkeypatch.setattr(grammar_rows, "STUCK_MASK_S", 0.2)
    ten = spec("regex", "[a-z]{10}")
    answers = run_grammars(made, [drawn(ten), drawn(ten, 1)])
    assert answers[0].reason == "error"
    assert answers[0].error.is_refusal
    assert "complex" in answers[0].error.error
    assert len(answers[1].tokens) == 11


def test_a_refused_token_and_a_dead_end_end_the_row(simple, monkeypatch):
    """The first is a fault of ours, the second the grammar's own."""
    advance = grammar_rows._advance

    def broken(row, service):
        if row.request_id == 0 and row.token is not None:
            row.token = 5  # not what was allowed
        advance(row, service)

    monkeypatch.setattr(grammar_rows, "_advance", broken)
    dead_end = spec("grammar", 'root ::= "x" dead\ndead ::= dead "b"')
    grammars = (spec("regex", "[x-z]{9}"), dead_end, spec("regex", "[x-z]{9}"))
    answers = run_grammars(simple, [drawn(grammar, i) for i, grammar in enumerate(grammars)])
    assert [a.reason for a in answers] == ["error", "error", "stop"]
    assert "refuses token 5" in answers[0].error.error
    assert not answers[0].error.is_refusal
    assert "no token to go on with" in answers[1].error.error
    assert answers[1].error.is_refusal


def test_retracted_rows_go_on_under_their_grammar(simple, tokenizer):
    made = engine_like(simple, max_total_tokens=160, max_model_len=128)
    params = [drawn(spec("regex", "[a-z]{60}"), seed) for seed in range(6)]
    answers = run_grammars(made, params, prompts=[list(range(10, 30))] * 6)
    assert made.loop.stats.num_retractions > 0
    for answer in answers:
        assert re.fullmatch("[a-z]{60}", tokenizer.decode(answer.tokens))


def test_aborts_at_any_time_leave_nothing(engine):
    loop, rng = engine.loop, random.Random(1)
    kinds = [spec("json_schema", PERSON), spec("regex", "[a-z]{30}"), spec("regex", "("), None]
    alive = set()
    for number in range(60):
        params = drawn(kinds[number % 4], number, max_tokens=40)
        loop.submit(Request(request_id=number, prompt_token_ids=[5, 6, 7 + number], params=params))
        alive.add(number)
        for _ in range(rng.randrange(4)):
            for event in [*loop.step(), *loop.take_refusals()]:
                assert event.request_id in alive
                if event.finish_reason:
                    alive.discard(event.request_id)
        if rng.random() < 0.7:
            victim = rng.choice(sorted(alive or {number}))
            alive.discard(victim)
            loop.abort(victim)
    while loop.has_work:
        for event in [*loop.step(), *loop.take_refusals()]:
            if event.finish_reason:
                alive.discard(event.request_id)
    for event in loop.drain():
        if event.finish_reason:
            alive.discard(event.request_id)
    assert not alive
    assert_idle(engine)


def test_more_grammar_rows_than_masks_fit_a_step(simple, tokenizer):
    made = engine_like(simple, max_num_seqs=80)
    answers = run_grammars(made, [drawn(spec("regex", "[0-9]{4}"), seed) for seed in range(80)])
    assert all(re.fullmatch("[0-9]{4}", tokenizer.decode(a.tokens)) for a in answers)


def test_compiled_grammars_are_shared_and_refusals_remembered(simple):
    service = simple.loop._grammars._service
    assert isinstance(service, GrammarService)
    one, again = (service.start(spec("regex", "q{7}")) for _ in range(2))
    assert one is again
    one.result(60)
    wrong = service.start(spec("regex", ")"))
    assert isinstance(wrong.exception(60), InvalidRequestError)
    assert service.start(spec("regex", ")")) is wrong


def test_the_trial_process_may_die(simple):
    run_grammars(simple, [drawn(spec("regex", "w{2}"))])
    service = simple.loop._grammars._service
    trials = service._trials
    assert isinstance(trials, TrialProcess)
    trials._process.kill()
    trials._process.wait()
    answer = run_grammars(simple, [drawn(spec("regex", "w{3}"))])[0]
    assert answer.reason == "stop"
    assert service._trials is not trials


def test_grammars_without_a_tokenizer_are_refused(folder):
    made = tiny_engine(folder)
    made.loop._grammars._service = None
    answer = run_grammars(made, [drawn(spec("regex", "a"))])[0]
    assert answer.error.is_refusal


def test_formats_become_patterns_that_hold():
    schema = {
        "a": [{"type": "string", "format": "date"}],
        "const": {"type": "string", "format": "time"},
    }
    made = strict_formats(schema)
    assert made == {"a": [{"type": "string", "pattern": STRICT_FORMATS["date"]}]} | {
        "const": schema["const"]
    }
    good = {
        "date": ["2024-02-28", "1999-12-31", "2001-04-30"],
        "time": ["23:59:59Z", "00:00:00.123+01:30"],
        "date-time": ["2024-02-28T01:02:03Z"],
        "ipv4": ["0.10.255.199"],
    }
    bad = {
        "date": ["2023-02-30", "0000-01-01", "2001-04-31", "2001-13-01"],
        "time": ["24:00:00Z", "01:02:03", "01:02:60Z"],
        "date-time": ["2024-02-28 01:02:03Z"],
        "ipv4": ["1.2.3.256", "01.2.3.4", "1.2.3"],
    }
    for name, pattern in STRICT_FORMATS.items():
        assert all(re.fullmatch(pattern, text) for text in good[name])
        assert not any(re.fullmatch(pattern, text) for text in bad[name])


def test_limits_of_the_record():
    with pytest.raises(InvalidRequestError, match="empty"):
        GrammarSpec("regex", "")
    with pytest.raises(InvalidRequestError, match="characters"):
        GrammarSpec("json_schema", " " * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=1, grammar=GrammarSpec("json_object"))
