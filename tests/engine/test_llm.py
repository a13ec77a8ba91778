"""The Python API: `LLM` over a tiny model."""

from __future__ import annotations

import pytest

import compiled_engine
from compiled_engine import LLM, SamplingParams
from compiled_engine.errors import InvalidRequestError
from compiled_engine.llm import _Collector
from compiled_engine.request import Request, TokenEvent
from tests.helpers.fake_engine import ByteTokenizer
from tests.helpers.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    base = tmp_path_factory.mktemp("llm")
    options = {"device": "cpu", "enforce_eager": True, "max_num_seqs": 4, "cache_dir": base}
    with LLM(str(write_tiny_model(base / "model")), chunked_prefill_size=32, **options) as made:
        yield made


def _collect(pieces: list[bytes], **params) -> _Collector:
    request = Request(request_id=1, prompt_token_ids=[1], params=SamplingParams(**params))
    collector = _Collector(request, ByteTokenizer())
    for index, piece in enumerate(pieces):
        reason = "length" if index == len(pieces) - 1 else None
        if collector.add(TokenEvent(1, list(piece), reason)):
            break
    return collector


def test_names_of_the_package_are_the_api():
    assert set(compiled_engine.__all__) >= {"LLM", "SamplingParams"}


def test_generate_takes_texts_and_ids_and_answers_in_order(llm: LLM):
    ids = llm.tokenizer.encode("abc")
    outputs = llm.generate(["abc", ids, "xyz"], GREEDY)
    assert outputs[0].token_ids == outputs[1].token_ids == llm.generate("abc", GREEDY)[0].token_ids
    assert outputs[0].token_ids != outputs[2].token_ids
    for output in outputs:
        assert (output.finish_reason, len(output.token_ids)) == ("length", 6)
        assert output.num_prompt_tokens == 3
        assert output.text == llm.tokenizer.decode(output.token_ids)


def test_chat_is_generate_of_the_rendered_template(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.tokenizer.apply_chat_template(messages)
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    assert llm.chat(messages, GREEDY).token_ids == llm.generate([ids], GREEDY)[0].token_ids


def test_one_bad_prompt_runs_nothing(llm: LLM):
    for prompts, params in ((["a", ""], GREEDY), (["a", [10_000]], GREEDY), (["a", "b"], [GREEDY])):
        with pytest.raises(InvalidRequestError):
            llm.generate(prompts, params)
        assert not llm.engine.loop.has_work


@pytest.mark.parametrize(
    ("pieces", "params", "text"),
    [
        ([b"a", b"b", b"c"], {"stop": ("b",)}, "a"),
        ([b"a", b"b", b"c", b"d"], {"stop": ("bc",)}, "a"),
        ([b"a", b"b", b"c", b"d"], {"stop": ("bcd", "bc")}, "a"),
        # Both complete in one piece: the one that is complete first wins, as on the server.
        ([b"abcd", b"e"], {"stop": ("bcd", "c")}, "ab"),
        ([b"a", b"b", b"a", b"c"], {"stop": ("a",), "min_tokens": 1}, "ab"),
        ([b"a", b"b", b"a", b"c"], {"stop": ("a",), "min_tokens": 3}, "abac"),
        ([b"a", b"b", b"c"], {"stop": ("bx",)}, "abc"),
    ],
)
def test_stop_strings_as_on_the_server(pieces, params, text):
    collector = _collect(pieces, **params)
    assert collector.text == text
    assert collector.finish_reason == ("stop" if text != b"".join(pieces).decode() else "length")


def test_end_token_alone_is_left_out_of_the_text():
    request = Request(request_id=1, prompt_token_ids=[1], params=SamplingParams())
    collector = _Collector(request, ByteTokenizer())
    collector.add(TokenEvent(1, [*b"ab", 257], "stop"))
    assert collector.text == "ab"
    assert collector.token_ids == [*b"ab", 257]


def test_logprobs_come_with_every_token(llm: LLM):
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    output = llm.generate("abcd", params)[0]
    assert [record.token_id for record in output.logprobs] == output.token_ids
    assert [record.token_id for record in output.prompt_logprobs] == llm.tokenizer.encode("abcd")[
        1:
    ]
    for record in output.logprobs:
        assert record.top[0] == (record.token_id, record.logprob)
        assert record.rank == 1
    plain = llm.generate("abcd", GREEDY)[0]
    assert plain.token_ids == output.token_ids
    assert plain.logprobs == plain.prompt_logprobs == []
