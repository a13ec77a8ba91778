"""Structured output through the real server: answers, refusals, and streams beside hostile ones."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
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
