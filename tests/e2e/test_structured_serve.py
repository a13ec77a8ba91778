"""Structured output through the real server: answers, refusals, and streams beside hostile ones."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.helpers.serve_process import ServeProcess
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

FLAGS = ("--enforce-eager", "--max-num-seqs", "16", "--chunked-prefill-size", "32")
USER = [{"role": "user", "content": "hi"}]
WRONG: list[dict[str, object]] = [
    *({"guided_regex": r} for r in ("foo**", "(", "[z-a]", "(?<=x)y", "\\p{Foo}", "a{5,2}", "")),
    {"guided_grammar": "root ::= undefined"},
    {"guided_choice": []},
    *({"guided_json": s} for s in ("not json", 5, {"type": "frob"}, {"$ref": "#"})),
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"guided_regex": "(" * 20_000},
    {"guided_json": {"type": "object", "not": {}}},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[OpenAI, str]]:
    folder = tmp_path_factory.mktemp("served")
    model = write_tiny_model(folder / "model", max_position_embeddings=4096)
    with ServeProcess(model, folder / "log", flags=FLAGS) as server:
        server.wait_for("/ready", 200)
        url = f"{server.url}/v1"
        with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=90) as client:
            yield client, str(model)


def ask(client: OpenAI, model: str, **fields):
    stream = fields.pop("stream", False)
    return client.chat.completions.create(
        model=model, messages=USER, max_tokens=200, stream=stream, extra_body=fields
    )


def test_answers_follow_their_grammar(served):
    client, model = served
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
    }
    answer = ask(
        client,
        model,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["a"] <= 9
    assert answer.choices[0].finish_reason == "stop"
    chunks = ask(client, model, guided_choice=["yes", "no"], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) in ("yes", "no")
    both = ask(client, model, structured_outputs={"regex": "[ab]{3}"}, n=2)
    assert all(re.fullmatch("[ab]{3}", c.message.content) for c in both.choices)


def test_wrong_grammars_are_400_and_hold_up_nobody(served):
    client, model = served
    ask(client, model, guided_regex="a")  # everything is loaded
    times: list[float] = []

    def read() -> None:
        stream = client.completions.create(
            model=model, prompt="a", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in stream:
            times.append(time.monotonic())
            if is_done.is_set():
                break
        stream.close()

    is_done = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for index, fields in enumerate(WRONG):
            with pytest.raises(openai.BadRequestError) as caught:
                list(ask(client, model, **fields, stream=bool(index % 2)))
            assert caught.value.body["message"], fields
            assert caught.value.body["param"], fields
    finally:
        is_done.set()
        reader.join()
    assert len(times) > 20
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    assert gaps[-1] < 1.0, gaps[-5:]
    assert ask(client, model, guided_regex="b").choices[0].message.content == "b"


def test_a_heavy_schema_is_given_up_in_time(served):
    client, model = served
    integers = {f"a{i}": {"type": "integer"} for i in range(300)}
    heavy = {"type": "object", "properties": integers, "minProperties": 150, "maxProperties": 160}
    start = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="too complex"):
        ask(client, model, guided_json=heavy)
    assert time.monotonic() - start < 30
    assert ask(client, model, guided_regex="b").choices[0].message.content == "b"


# Forced but for one digit, twice: what stands around it comes at once, not token by token.
SENTENCE = "The quick answer to your question is: [0-9]! Ask again, if it was of any use."
FORCED = re.escape(SENTENCE).replace(re.escape("[0-9]"), "[0-9]").replace("\\ ", " ")


def num_jumped(server_url: str) -> float:
    with urllib.request.urlopen(f"{server_url}/metrics") as answer:
        text = answer.read().decode()
    return float(
        re.search(r"^compiled_engine:jumped_tokens(?:_total)?(?:{.*})? (.+)$", text, re.M)[1]
    )


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["answer"], "The quick "),
        ([" is: "], "The quick answer to your question"),
        (["nowhere", "again, if"], r"The quick answer to your question is: \d! Ask "),
        (["! Ask"], r"The quick answer to your question is: \d"),
        (["nowhere"], re.sub(r"\[0-9\]", r"\\d", re.sub("[.]", "[.]", SENTENCE))),
    ],
)
def test_stop_strings_inside_forced_text(served, stop, expected):
    """Text, reason and count of tokens are the same in one piece and as a stream."""
    client, model = served
    url = str(client.base_url).removesuffix("/v1/")
    fields = {"guided_regex": FORCED, "stop": stop, "temperature": 0.0}
    before = num_jumped(url)
    whole = ask(client, model, **fields)
    text = whole.choices[0].message.content
    assert re.fullmatch(expected, text)
    assert whole.choices[0].finish_reason == "stop"
    assert num_jumped(url) > before, "nothing was forced at once"
    usage = {"include_usage": True}
    chunks = list(ask(client, model, **fields, stream=True, stream_options=usage))
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    kept = ask(client, model, **fields, include_stop_str_in_output=True)
    ending = next((s for s in stop if s in SENTENCE), "")
    assert kept.choices[0].message.content == text + ending
    answer = client.completions.create(
        model=model, prompt="hi", max_tokens=200, stop=stop, temperature=0.0,
        extra_body={"guided_regex": FORCED},
    )  # fmt: skip
    assert re.fullmatch(expected, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def strictly(raw: bytes) -> object:
    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(raw, parse_constant=refuse)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes"]},
        {"guided_regex": FORCED},
        {"top_k": 1, "temperature": 1.0},
        {"top_k": 1, "echo": True},
        {"echo": True, "max_tokens": 0},
        {"logit_bias": {"50": -100}},
    ],
    ids=["one choice", "forced", "top-k", "echo", "prompt alone", "bias"],
)
def test_logprobs_of_what_cannot_be_chosen_are_json(served, fields):
    client, model = served
    url = f"{client.base_url!s}completions"
    body = {"model": model, "prompt": "hi you", "max_tokens": 40, "logprobs": 5, **fields}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as raw:
        (choice,) = strictly(raw.read())["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) > 0
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        if value is None:  # the first of a prompt
            assert top is None
            continue
        assert value <= 0
        assert token in top, "the chosen one is always listed"
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
