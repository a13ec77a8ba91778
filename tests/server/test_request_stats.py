"""The log lines of a call, what they never hold, and the fields of one call's limits."""

import logging
import re

import pytest

from compiled_engine.config import ServerConfig
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import Server, with_server

SECRET = "attack at dawn"
ACCESS, REQUESTS = "compiled_engine.server.access", "compiled_engine.server.requests"


def _lines(caplog, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=('[^']*'|\S+)", line))


def test_a_call_logs_one_line_and_each_sequence_one_with_its_costs(caplog):
    async def body(server: Server):
        request = {"prompt": SECRET, "n": 2, "prompt_cache_key": "agents"}
        await server.post("/v1/completions", request, headers={"X-Request-ID": "call-1"})
        await server.get("/health")

    caplog.set_level(logging.INFO)
    with_server(body, engine=FakeEngine(num_cached_tokens=3, delay_s=0.002))
    (access,) = _lines(caplog, ACCESS)
    fields = _fields(access)
    assert float(fields.pop("ms")) > 0
    assert fields == {
        "request": "call-1",
        "key": "-",
        "route": "'POST /v1/completions'",
        "status": "200",
    }
    lines = [_fields(line) for line in _lines(caplog, REQUESTS)]
    assert sorted(line["request"] for line in lines) == ["call-1[0]", "call-1[1]"]
    for line in lines:
        times = {name: float(line.pop(name)) for name in list(line) if name.endswith("_ms")}
        assert set(times) == {
            "queue_ms",
            "prefill_ms",
            "ttft_ms",
            "inter_token_ms",
            "longest_gap_ms",
            "total_ms",
        }
        assert times["queue_ms"] == 1.0
        assert times["ttft_ms"] <= times["total_ms"]
        assert times["longest_gap_ms"] >= times["inter_token_ms"]
        del line["request"]
        assert line == {
            "cache_key": "'agents'",
            "finish": "stop",
            "prompt_tokens": str(len(SECRET)),
            "cached_tokens": "3",
            "generated_tokens": "6",
            "retracted": "0",
        }
    assert SECRET not in caplog.text


def test_retractions_of_a_sequence_are_logged_and_counted(caplog):
    async def body(server: Server):
        await server.post("/v1/completions", {"prompt": "a", "n": 2})
        server.engine.num_retractions = 0
        await server.post("/v1/completions", {"prompt": "a", "stream": True})
        _, text = await server.get("/metrics")
        assert re.search(r"^compiled_engine:retracted_requests_total 2\.0$", text, re.M)

    caplog.set_level(logging.INFO)
    with_server(body, engine=FakeEngine(num_retractions=3))
    lines = [_fields(line) for line in _lines(caplog, REQUESTS)]
    assert [line["retracted"] for line in lines] == ["3", "3", "0"]


def test_the_wait_for_a_grammar_is_logged_apart_from_the_queue(caplog):
    async def body(server: Server):
        request = {"prompt": "a", "guided_regex": "[a-z]+"}
        await server.post("/v1/completions", request)

    caplog.set_level(logging.INFO)
    with_server(body, engine=FakeEngine(delay_s=0.05))
    (line,) = _lines(caplog, REQUESTS)
    fields = _fields(line)
    assert (fields["queue_ms"], fields["grammar_ms"]) == ("1.00", "2.00")
    assert 0.0 < float(fields["prefill_ms"]) < float(fields["ttft_ms"]) - 2.9


def test_failed_and_aborted_sequences_are_logged_too(caplog):
    async def body(server: Server):
        server.engine.fail_with = "out of luck"
        await server.post("/v1/completions", {"prompt": SECRET})
        await server.post("/v1/completions", {"prompt": SECRET, "temperature": -1})

    caplog.set_level(logging.INFO)
    with_server(body)
    (line,) = _lines(caplog, REQUESTS)
    assert _fields(line)["finish"] == "error"
    assert "inter_token_ms" not in line
    assert [_fields(line)["status"] for line in _lines(caplog, ACCESS)] == ["500", "400"]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("flags", "access", "prompts"),
    [({"access_log": False}, 0, False), ({"log_prompts": True}, 1, True)],
)
def test_flags_choose_what_is_logged(caplog, flags, access, prompts):
    async def body(server: Server):
        await server.post("/v1/completions", {"prompt": SECRET})

    caplog.set_level(logging.INFO)
    with_server(body, config=ServerConfig(port=0, **flags))
    assert len(_lines(caplog, ACCESS)) == access
    assert len(_lines(caplog, REQUESTS)) == access
    assert (SECRET in caplog.text) is prompts


def test_client_text_cannot_forge_a_log_line(caplog):
    async def body(server: Server):
        headers = {"X-Request-ID": "x status=200"}
        async with server.session.get(server.url + "/no%0Aroute", headers=headers) as response:
            assert response.headers["X-Request-ID"] != "x status=200"
        request = {"prompt": "a", "prompt_cache_key": "k\nfinish=stop"}
        await server.post("/v1/completions", request)

    caplog.set_level(logging.INFO)
    with_server(body)
    for line in (*_lines(caplog, ACCESS), *_lines(caplog, REQUESTS)):
        assert "\n" not in line


def test_truncation_only_on_request_and_visible():
    text = "0123456789" * 60

    async def body(server: Server):
        status, answer = await server.post("/v1/completions", {"prompt": text})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        for given, kept in ((100, 100), (-1, 512 - 5), (5000, None)):
            request = {"prompt": text, "truncate_prompt_tokens": given, "max_tokens": 5}
            status, answer = await server.post("/v1/completions", request)
            if kept is None:
                assert status == 400
                continue
            assert status == 200
            assert bytes(server.engine.submitted[-1].prompt_token_ids).decode() == text[-kept:]
            usage = answer["usage"]
            assert usage["prompt_tokens"] == kept
            assert usage["prompt_tokens_details"]["truncated_tokens"] == len(text) - kept
        # Text that would take long to tokenise is refused even so.
        request = {"prompt": "x" * 1_000_000, "truncate_prompt_tokens": 100}
        assert (await server.post("/v1/completions", request))[0] == 400
        request = {"prompt": "ab", "truncate_prompt_tokens": 10}
        _, answer = await server.post("/v1/completions", request)
        assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == 0
        _, answer = await server.post("/v1/completions", {"prompt": "ab"})
        assert "truncated_tokens" not in answer["usage"]["prompt_tokens_details"]
        chat = {
            "messages": [{"role": "user", "content": text}],
            "truncate_prompt_tokens": 40,
            "max_tokens": 5,
        }
        _, answer = await server.post("/v1/chat/completions", chat)
        assert answer["usage"]["prompt_tokens"] == 40
        assert bytes(server.engine.submitted[-1].prompt_token_ids).endswith(b"[assistant]")
        for wrong in (0, -2, 1.5, True, "5"):
            request = {"prompt": "ab", "truncate_prompt_tokens": wrong}
            status, answer = await server.post("/v1/completions", request)
            assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")

    with_server(body)


def test_truncation_counts_only_kept_tokens_against_the_limit():
    config = ServerConfig(port=0, max_queued_tokens=50)

    async def body(server: Server):
        request = {"prompt": "x" * 400, "truncate_prompt_tokens": 20, "n": 2}
        assert (await server.post("/v1/completions", request))[0] == 200

    with_server(body, config=config)


@pytest.mark.parametrize("field", ["prompt_cache_key", "cache_salt"])
def test_cache_fields_are_short_texts(field):
    async def body(server: Server):
        for wrong in (1, ["a"], "x" * 257):
            status, answer = await server.post("/v1/completions", {"prompt": "a", field: wrong})
            assert (status, answer["error"]["param"]) == (400, field)
        await server.post("/v1/completions", {"prompt": "a", field: "tenant"})
        salt = server.engine.submitted[-1].cache_salt
        # The key groups requests for whoever routes them; only the salt keeps prefixes apart.
        assert salt == ("tenant" if field == "cache_salt" else "")

    with_server(body, engine=FakeEngine(text_reply("a")))
