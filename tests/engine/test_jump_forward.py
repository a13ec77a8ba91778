"""Text that a grammar forces is appended at once: the same answers in fewer steps.

The tiny model's tokenizer knows single bytes only, so that its answers can be cut in one way.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models, normalizers

from compiled_engine.engine import Engine
from compiled_engine.faults import Fault
from compiled_engine.jump_forward import (
    MIN_FORCED,
    JumpRule,
    TextEncoder,
    forced_text,
    forced_tokens,
)
from compiled_engine.jump_forward import Answer as AnswerState
from compiled_engine.llm import LLM
from compiled_engine.request import GrammarSpec, Request, SamplingParams, ThinkingBudget
from compiled_engine.scheduler.state import BLOCKED, PREFILL
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import assert_idle, run_requests, tiny_engine
from tests.helpers.grammar_runs import Answer, run_grammars, spec
from tests.helpers.tiny_model import write_tiny_model

NAME, PLACE, UNIT = "get_current_weather", "location_name", "temperature_unit"
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": NAME},
        "arguments": {
            "type": "object",
            "properties": {
                PLACE: {"type": "string", "pattern": "^[a-z]{0,6}$"},
                UNIT: {"enum": ["celsius", "fahrenheit"]},
            },
            "required": [PLACE, UNIT],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
# Forced at the very beginning, in the middle and at the end.
BEGIN, END = "The answer to this is: ", " and nothing beyond it."
WRAPPED = f"{BEGIN}([0-9]{{3}} in numbers|[a-z]{{2}} in letters){END}"
FREE = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def asked(grammar: GrammarSpec | None, seed: int = 0, **options: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 1.0, "max_tokens": 180, "seed": seed}
    return SamplingParams(**{**defaults, **options}, grammar=grammar)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def plain(folder) -> Engine:
    return tiny_engine(folder, jump_forward="off")


@pytest.fixture(scope="module")
def first(folder) -> Engine:
    return tiny_engine(folder)


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request, first) -> Engine:
    return engine_like(first, overlap_schedule=request.param)


def engine_like(first: Engine, **options: Any) -> Engine:
    """Another engine, which shares the compiled grammars of `first`."""
    made = tiny_engine(first.settings.folder, **options)
    made.loop._grammars._service = first.loop._grammars._service
    return made


def without_jumps(engine: Engine) -> Engine:
    """What the flag comes to, over grammars that are shared."""
    engine.loop._grammars._max_forced = 0
    return engine


def run_pair(
    engine: Engine, plain: Engine, params: list[SamplingParams], **options: Any
) -> tuple[list[Answer], int]:
    """Answers, and how many of their tokens took no step; the same ids as token by token."""
    before = engine.loop.stats.num_jumped_tokens
    answers = run_grammars(engine, params, **options)
    expected = run_grammars(plain, params, **options)
    for found, want in zip(answers, expected, strict=True):
        assert found.error is None
        assert (found.tokens, found.reason) == (want.tokens, want.reason)
    assert plain.loop.stats.num_jumped_tokens == 0
    return answers, engine.loop.stats.num_jumped_tokens - before


def test_same_answers_in_fewer_steps(engine, plain, tokenizer):
    answers, num_jumped = run_pair(engine, plain, [asked(spec("json_schema", CALL))])
    answer = json.loads(tokenizer.decode(answers[0].tokens))
    jsonschema.validate(answer, CALL)
    assert num_jumped > len(NAME + PLACE + UNIT)
    num_events = len(set(answers[0].steps))
    assert num_events == len(answers[0].tokens) - num_jumped


def test_text_forced_at_the_beginning_and_up_to_the_end(engine, plain, tokenizer):
    before = engine.loop.stats.num_generated_tokens
    answers, num_jumped = run_pair(engine, plain, [asked(spec("regex", WRAPPED))])
    assert re.fullmatch(WRAPPED, tokenizer.decode(answers[0].tokens))
    assert answers[0].reason == "stop"
    # The first event has all of the beginning but its last token, which was sampled.
    assert answers[0].steps.count(answers[0].steps[0]) == len(BEGIN)
    assert num_jumped >= len(BEGIN) + len(END) - 2
    assert engine.loop.stats.num_generated_tokens - before == len(answers[0].tokens)


def test_a_long_forced_text_comes_in_several_parts(engine, plain):
    most = engine.loop.executor.shape.max_forced
    text = "all work and no play " * 7
    answers, num_jumped = run_pair(engine, plain, [asked(spec("regex", text))])
    parts = [answers[0].steps.count(step) for step in sorted(set(answers[0].steps))]
    assert max(parts) == most + 1
    assert len(parts) == -(-len(text) // (most + 1)) + 1
    assert num_jumped == len(answers[0].tokens) - len(parts)


def test_short_forced_texts_are_sampled(engine, plain):
    """So many tokens and the one that is left to the model."""
    pattern = "([a-c]xy){6}"
    assert len("xy") == MIN_FORCED
    _, num_jumped = run_pair(engine, plain, [asked(spec("regex", pattern))])
    assert num_jumped == 0
    _, num_jumped = run_pair(engine, plain, [asked(spec("regex", pattern.replace("xy", "xyz")))])
    assert num_jumped == 6 * MIN_FORCED


def test_rows_beside_a_jumping_one_keep_their_tokens(engine, plain):
    params = [FREE, asked(spec("json_schema", CALL)), asked(spec("regex", "[a-z]{40}"), 1), FREE]
    params += [asked(spec("regex", WRAPPED), seed) for seed in range(2, 6)]
    _, num_jumped = run_pair(engine, plain, params)
    assert num_jumped > 0


def test_pages_and_token_pages_are_crossed(first):
    """Prompts of all lengths around the ends of both, of 4 and 256 tokens."""
    lengths = [*range(1, 6), 8, 9, *range(228, 260, 5), 255, 256, 257]
    prompts = [[(7 * i + n) % 90 + 40 for i in range(n)] for n in lengths]
    params = [asked(spec("regex", WRAPPED), n) for n in lengths]
    options = {"max_model_len": 400, "max_num_seqs": 30}
    plain = without_jumps(engine_like(first, **options))
    for caching in (True, False):
        made = engine_like(first, enable_prefix_caching=caching, **options)
        _, num_jumped = run_pair(made, plain, params, prompts=prompts)
        assert num_jumped > len(params) * len(BEGIN)


def test_pages_of_forced_text_are_reused_and_never_counted_as_the_prompts(first):
    made = engine_like(first)
    prompt = list(range(40, 50))  # two pages and a half
    params = asked(spec("regex", WRAPPED), max_tokens=80)
    (answer,) = run_requests(made, [prompt], params).tokens
    again = run_requests(made, [prompt], params)
    assert again.tokens == [answer]
    assert again.cached[0] <= len(prompt)
    known = prompt + answer
    later = run_requests(made, [[*known, 40]], FREE)
    assert later.cached[0] >= len(known) // 4 * 4 - 4
    assert later.tokens == run_requests(engine_like(first), [[*known, 40]], FREE).tokens


def test_page_pressure_retracts_rows_that_jump(first, plain):
    made = engine_like(first, max_total_tokens=160, max_model_len=128)
    params = [asked(spec("regex", WRAPPED), seed, max_tokens=90) for seed in range(6)]
    prompts = [list(range(40 + n, 60 + n)) for n in range(6)]
    _, num_jumped = run_pair(made, plain, params, prompts=prompts)
    assert made.loop.stats.num_retractions > 0
    assert num_jumped > 0


@pytest.mark.parametrize("step", [1, 2, 3, 6, 9])
def test_a_row_may_be_retracted_at_any_step(engine, plain, step):
    params = [asked(spec("regex", WRAPPED), seed) for seed in range(3)]
    fault = Fault("retract", step=engine.loop.stats.num_steps + step)
    before = engine.loop.stats.num_retractions
    answers = run_grammars(engine, params, after_step=lambda *_: fault.before_step(engine.loop))
    expected = run_grammars(plain, params)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert engine.loop.stats.num_retractions <= before + 1


def test_length_may_end_the_answer_inside_forced_text(engine, plain):
    params = [asked(spec("regex", WRAPPED), 1, max_tokens=n) for n in range(1, 20)]
    answers, num_jumped = run_pair(engine, plain, params)
    assert [len(answer.tokens) for answer in answers] == list(range(1, 20))
    assert {answer.reason for answer in answers} == {"length"}
    assert num_jumped > 0


def test_stop_tokens_inside_forced_text_end_the_answer(engine, plain, tokenizer):
    stops = [tokenizer.encode(character)[0] for character in BEGIN[:12]]
    params = [asked(spec("regex", WRAPPED), stop_token_ids=(stop,)) for stop in stops]
    answers, _ = run_pair(engine, plain, params)
    assert [a.reason for a in answers] == ["stop"] * len(stops)
    assert all(answer.tokens[-1] == stop for answer, stop in zip(answers, stops, strict=True))


def test_stop_strings_inside_forced_text_cut_text_and_tokens(first, folder):
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "device": "cpu"}
    stops = (("answer",), ("is: ",), ("in letters and", "in numbers"), ("zzz",))
    params = [asked(spec("regex", WRAPPED), stop=stop) for stop in stops]
    found = []
    for jumps in (True, False):
        with LLM(str(folder), max_model_len=256, max_num_seqs=4, **options) as llm:
            llm.engine.loop._grammars._service = first.loop._grammars._service
            if not jumps:
                without_jumps(llm.engine)
            outputs = llm.generate([[50, 51, 52]] * len(params), params)
            assert bool(llm.engine.loop.stats.num_jumped_tokens) == jumps
            assert_idle(llm.engine)
        found.append([(o.text, o.token_ids, o.finish_reason) for o in outputs])
    assert found[0] == found[1]
    assert found[0][0][0] == "The "


def test_aborts_at_any_step_leave_nothing(engine):
    loop, rng = engine.loop, random.Random(0)
    for number in range(24):
        params = asked(spec("regex", WRAPPED), number)
        for place in range(3):
            prompt = list(range(40 + place, 60))
            loop.submit(Request(request_id=place, prompt_token_ids=prompt, params=params))
        for _ in range(number // 2):
            loop.step()
        ended = rng.sample(range(3), 3)
        for place in ended[: rng.randint(1, 3)]:
            loop.abort(place)
        while loop.has_work:
            loop.step()
        loop.drain()
        assert_idle(engine)
        assert loop._grammars.num_forced == 0


def test_rows_without_valid_logits_fail_alone(first, plain):
    reasons = set()
    expected = run_grammars(plain, [FREE])[0].tokens
    for step in (2, 3, 5):
        made = engine_like(first)
        params = [FREE, asked(spec("regex", WRAPPED))]
        fault = Fault("nan", step=step)

        def act(_: int, __: list[Answer], fault: Fault = fault, made: Engine = made) -> None:
            fault.before_step(made.loop)

        kept, failed = run_grammars(made, params, after_step=act)
        reasons.add(failed.reason)
        assert kept.tokens == expected
    # Where the page at the end is always full, there is nothing to spoil.
    assert "error" in reasons


def test_nothing_of_a_jumping_row_is_in_flight(first, monkeypatch):
    """What is appended finds the row waiting: blocked, or with its prompt not computed."""
    made = engine_like(first, overlap_schedule="on")
    executor = made.loop.executor
    state, launch = executor.state, executor.launch
    seen = []

    def launched(inbox: Any, *args: Any, **options: Any) -> None:
        for real, row, _, position, count in inbox.masks.tolist():
            if real and count:
                seen.append(int(state.state[row]))
                assert not made.loop._unread
                if state.state[row]:
                    assert int(state.num_tokens[row]) + count == position
        launch(inbox, *args, **options)

    monkeypatch.setattr(executor, "launch", launched)
    run_grammars(made, [asked(spec("regex", WRAPPED), seed) for seed in range(3)])
    assert BLOCKED in seen
    assert PREFILL not in seen


def test_rows_that_need_every_tokens_logits_do_not_jump(engine, plain):
    options: list[dict[str, Any]] = [
        {"logprobs": 0}, {"logprobs": 3}, {"prompt_logprobs": 1}, {"logit_bias": {50: 2.0}},
    ]  # fmt: skip
    params = [asked(spec("regex", WRAPPED), **each) for each in options]
    _, num_jumped = run_pair(engine, plain, params)
    assert num_jumped == 0


def test_penalties_count_forced_tokens(engine, plain):
    fields = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    grammar = spec("regex", f"{BEGIN}[a-zA-Z: ]{{30}}")
    params = [asked(grammar, temperature=0.0, **{field: 1.9}) for field in fields]
    answers, num_jumped = run_pair(engine, plain, params)
    assert num_jumped > 0
    assert answers[0].tokens != run_grammars(plain, [asked(grammar, temperature=0.0)])[0].tokens


def budget_of(tokenizer: Tokenizer, max_tokens: int, opening: str) -> ThinkingBudget:
    closing = "</think>"
    ids = tuple(tokenizer.encode(closing, add_special_tokens=False))
    return ThinkingBudget(max_tokens=max_tokens, closing=closing, closing_ids=ids, opening=opening)


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_grammar_behind_a_thinking_budget(engine, plain, tokenizer, opening):
    """Forced text opens the thinking, or follows a forced end; the budget counts it as ever."""
    thought = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": "</think>"}
    answer = {"type": "const_string", "value": "that is my answer"}
    tag = {"type": "sequence", "elements": [thought, answer]}
    grammar = spec("structural_tag", {"type": "structural_tag", "format": tag})
    params = [
        asked(grammar, n, thinking=budget_of(tokenizer, n, opening)) for n in (0, 1, 2, 9, 30)
    ]
    answers, num_jumped = run_pair(engine, plain, params)
    assert num_jumped >= 5 * len("that is my")
    for found in answers:
        text = tokenizer.decode(found.tokens)
        assert text.startswith(opening)
        assert text.endswith("</think>that is my answer")


def test_forced_thinking_ends_with_its_budget(engine, plain, tokenizer):
    """A grammar whose thinking is fixed text: a budget ends it there or breaks it."""
    tag = {"type": "const_string", "value": "<think>I think for long</think>so"}
    grammar = spec("structural_tag", {"type": "structural_tag", "format": tag})
    params = [
        asked(grammar, thinking=budget_of(tokenizer, n, "<think>")) for n in (0, 1, 5, 16, 24, 30)
    ]
    found = [run_grammars(each, params) for each in (engine, plain)]
    for answer, want in zip(*found, strict=True):
        assert answer.reason == want.reason
        if answer.reason == "stop":
            assert tokenizer.decode(answer.tokens) == tag["value"]
    assert [answer.reason for answer in found[0]] == ["error"] * 3 + ["stop"] * 3


def encoder_of(backend: BackendTokenizer, texts: dict[int, bytes]) -> TextEncoder:
    size = backend.get_vocab_size()
    token_bytes = [texts.get(token, b"") for token in range(size)]
    return TextEncoder.from_backend(backend.to_str(), token_bytes, ())


def test_text_is_encoded_as_if_nothing_stood_in_front_of_it():
    """A tokenizer that puts a blank in front of every text, as SentencePiece does."""
    words = ["▁", "\n", "a", "b", "c", "ab", "▁a", "▁ab", "abc"]
    vocab = {word: place for place, word in enumerate(words)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("ab", "c")]
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    texts = {place: word.replace("▁", " ").encode() for word, place in vocab.items()}
    encoder = encoder_of(backend, texts)
    spelled = [texts[token] for token in encoder.tokens("abcab a")]
    assert spelled == [b"abc", b"ab"]
    assert encoder.tokens("ab") == []
    assert [texts[token] for token in encoder.tokens(" abb")] == [b" ab"]
    # A token whose text is unknown ends what can be taken.
    del texts[vocab["ab"]]
    assert [texts[t] for t in encoder_of(backend, texts).tokens("abcab a")] == [b"abc"]


def test_characters_that_are_cut_stay_whole(engine, plain, tokenizer):
    grammar = spec("choice", ["naïve 😀 é", "naïve 😀 è", "naïve 😁"])
    params = [asked(grammar, seed) for seed in range(4)]
    answers, num_jumped = run_pair(engine, plain, params)
    assert num_jumped >= 4 * len("naïve".encode())
    assert {tokenizer.decode(a.tokens) for a in answers} <= {
        "naïve 😀 é", "naïve 😀 è", "naïve 😁",
    }  # fmt: skip


def test_special_tokens_are_never_put_into_text(engine, plain, tokenizer):
    text = f"one {tokenizer.decode([1], skip_special_tokens=False)} two"
    answers, num_jumped = run_pair(engine, plain, [asked(spec("choice", [text]))])
    assert num_jumped > 0
    assert not set(answers[0].tokens[:-1]) & tokenizer.special_token_ids


DOUBLING = "root ::= r0 r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40))


@pytest.mark.parametrize(
    ("grammar", "forced"),
    [
        ('root ::= "ab" root', "ab" * 128),
        (DOUBLING + 'r40 ::= "x"\n', "x" * 256),
        ('root ::= "abc" | "abcd"', "abc"),
        ('root ::= "ab" ("c" | "d") "e"', "ab"),
        ("root ::= [a-z]", None),
        ('root ::= "na" ("ï" | "î")', "na"),
    ],
    ids=["endless", "doubling", "may end", "choice", "class", "part of a character"],
)
def test_forced_text_is_looked_for_within_a_bound(grammar, forced):
    texts = [bytes([value]) for value in range(256)] + [b"ab", b"bc", b"<end>"]
    info = xgrammar.TokenizerInfo(
        texts, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(texts) - 1]
    )
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    tensor = xgrammar.allocate_token_bitmask(1, len(texts))
    encoder = TextEncoder(lambda text: list(text.encode()), texts, [len(texts) - 1])
    rule = JumpRule(max_tokens=32, max_len=10_000, barred_ids=frozenset())
    answer = AnswerState(matcher, tensor, None, 5)
    for _ in range(2):  # the matcher stands where it stood
        assert forced_text(answer, encoder, rule) == forced
    got = forced_tokens(answer, encoder, rule)
    if forced is None:  # the mask that was looked at is the next token's
        looked_at = tensor.clone()
        matcher.fill_next_token_bitmask(tensor.fill_(-1), 0)
        assert got is None
        assert torch.equal(tensor, looked_at)
        return
    wanted = forced.encode()[:-1][:32]
    assert got == tuple(wanted if len(wanted) >= MIN_FORCED else b"")
