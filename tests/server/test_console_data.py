"""`/console/data`: recent requests, samples, and who sees what of them."""

import asyncio
import json
import logging

import pytest

from compiled_engine.config import ServerConfig
from compiled_engine.ipc import EngineStatus
from compiled_engine.server.admission import Admission
from compiled_engine.server.console import HISTORY
from compiled_engine.server.history import MAX_SAMPLES, History
from compiled_engine.server.metrics import MAX_FIRST_TOKENS, ServerMetrics
from compiled_engine.server.recent import MAX_ENDED, MAX_SHOWN, RecentRequests
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

SECRET = "attack at dawn"


async def _data(server: Server, query: str = "", key: str = "") -> dict:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, data = await server.get(f"/console/data{query}", headers=headers)
    assert status == 200, data
    return data


async def _complete(server: Server, name: str, key: str = "", **fields) -> tuple[int, dict]:
    headers = {"X-Request-ID": name} | ({"Authorization": f"Bearer {key}"} if key else {})
    return await server.post("/v1/completions", {"prompt": SECRET, **fields}, headers=headers)


def test_rows_tell_what_ended_sequences_cost_and_no_text():
    async def body(server: Server):
        assert (await _data(server))["requests"] == []
        await _complete(server, "both", n=2)
        await _complete(server, "short", max_tokens=2)
        server.engine.fail_with = "out of luck"
        await _complete(server, "failed")
        data = await _data(server)
        assert SECRET not in json.dumps(data)
        assert "hello" not in json.dumps(data)
        rows = {row["id"]: row for row in data["requests"]}
        assert next(iter(rows)) == "failed[0]"
        assert set(rows) == {"failed[0]", "short[0]", "both[0]", "both[1]"}
        assert {row["state"] for row in rows.values()} == {"ended"}
        reasons = {name: row["finish_reason"] for name, row in rows.items()}
        assert reasons == {
            "failed[0]": "error",
            "short[0]": "length",
            "both[0]": "stop",
            "both[1]": "stop",
        }
        row = rows["both[0]"]
        assert (row["prompt_tokens"], row["cached_tokens"]) == (len(SECRET), 3)
        assert row["output_tokens"] == 6
        assert row["route"] == "POST /v1/completions"
        assert row["queue_ms"] == 1.0
        assert 0 < row["ttft_ms"] <= row["age_s"] * 1e3 + 1
        assert row["tokens_per_s"] > 0
        assert rows["short[0]"]["output_tokens"] == 2
        assert data["num_running"] == 0

    with_server(body, engine=FakeEngine(num_cached_tokens=3, delay_s=0.002))


def test_rows_show_running_sequences_before_ended_ones():
    async def body(server: Server):
        await _complete(server, "first", max_tokens=1)
        task = asyncio.create_task(_complete(server, "second"))
        await eventually(lambda: server.engine.num_tokens_sent >= 4)
        data = await _data(server)
        running, ended = data["requests"]
        assert (running["id"], running["state"]) == ("second[0]", "running")
        assert running["finish_reason"] is None
        assert running["output_tokens"] >= 2
        assert ended["id"] == "first[0]"
        assert data["num_running"] == 1
        server.engine.kill("a reason")
        await task
        data = await _data(server)
        assert (data["failure"], data["is_dead"], data["num_running"]) == ("a reason", True, 0)
        assert data["requests"][0]["finish_reason"] == "error"

    with_server(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.02))


def test_a_sequence_waits_then_prefills_then_runs():
    async def body(server: Server):
        server.engine.delay_s = 30
        task = asyncio.create_task(_complete(server, "one"))
        await eventually(lambda: server.engine.num_running == 1)
        (stream,) = server.engine._running.values()
        stream.queue_s = None
        assert (await _data(server))["requests"][0]["state"] == "waiting"
        stream.queue_s = 0.25
        (row,) = (await _data(server))["requests"]
        assert (row["state"], row["queue_ms"]) == ("prefill", 250.0)
        assert (row["ttft_ms"], row["tokens_per_s"]) == (None, None)
        await server.post("/abort_request", {"rid": "one"})
        await task
        assert (await _data(server))["requests"][0]["finish_reason"] == "abort"

    with_server(body)


def test_rows_are_bounded():
    async def body(server: Server):
        await _complete(server, "many", n=16)
        for number in range(MAX_ENDED // 16):
            await _complete(server, f"more-{number}", n=16)
        assert len((await _data(server))["requests"]) == MAX_SHOWN
        recent = server.state.recent
        assert len(recent._ended) == MAX_ENDED
        assert len(recent._running) == 0

    with_server(body, engine=FakeEngine(text_reply("x")))


def test_a_named_key_sees_its_own_requests(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("anna key-a\nben key-b\n")
    config = ServerConfig(port=0, api_key="root", api_key_file=keys)

    async def body(server: Server):
        for key in ("key-a", "key-b", "root"):
            await _complete(server, f"of-{key}", key)
        assert (await server.get("/console/data"))[0] == 401
        seen = {}
        for key in ("key-a", "key-b", "root"):
            rows = (await _data(server, key=key))["requests"]
            seen[key] = [row["id"] for row in rows]
        assert seen == {
            "key-a": ["of-key-a[0]"],
            "key-b": ["of-key-b[0]"],
            "root": ["of-root[0]", "of-key-b[0]", "of-key-a[0]"],
        }
        assert [row["key"] for row in (await _data(server, key="root"))["requests"]] == [
            "",
            "ben",
            "anna",
        ]

    with_server(body, config=config)


def test_samples_after_a_number_are_given():
    async def body(server: Server):
        data = await _data(server)
        assert (data["model"], data["max_model_len"]) == (MODEL, 512)
        assert (data["tool_parser"], data["failure"]) == ("hermes", None)
        for _ in range(3):
            server.app[HISTORY].take_sample()
        samples = (await _data(server))["samples"]
        assert [sample["number"] for sample in samples][:3] == [1, 2, 3]
        assert samples[0]["num_pages_active"] == 25
        newest = samples[-1]["number"]
        later = (await _data(server, f"?since={newest - 1}"))["samples"]
        assert later[0]["number"] == newest
        # A page that is older than the server gets everything.
        assert (await _data(server, "?since=999"))["samples"][0]["number"] == 1

    with_server(body)


@pytest.mark.parametrize("given", ["-1", "one", "1.5", "٣", "", "9" * 400])
def test_a_number_that_is_none_is_refused(given):
    async def body(server: Server):
        status, answer = await server.get("/console/data", params={"since": given})
        assert (status, answer["error"]["param"]) == (400, "since")

    with_server(body)


def test_polling_leaves_no_line_in_the_log(caplog):
    async def body(server: Server):
        await _data(server)
        await server.get("/version")

    caplog.set_level(logging.INFO)
    with_server(body)
    access = [r for r in caplog.records if r.name == "compiled_engine.server.access"]
    assert len(access) == 1


def _history(engine: FakeEngine) -> tuple[History, ServerMetrics]:
    admission = Admission(max_requests=8, max_tokens=100)
    metrics = ServerMetrics(MODEL, engine, admission)
    return History(engine, admission, metrics), metrics


def test_samples_hold_rates_since_the_sample_before():
    engine = FakeEngine()
    history, metrics = _history(engine)
    engine.status = EngineStatus(
        num_steps=5, num_prompt_tokens=100, num_cached_tokens=25, num_generated_tokens=40
    )
    for seconds in (0.1, 0.3, 0.2):
        metrics.note_first_token(seconds)
    history.take_sample()
    history.take_sample()
    first, second = history.since(0)
    assert first.cache_hit_rate == 0.25
    assert first.generated_tokens_per_s > 0
    assert first.prompt_tokens_per_s == pytest.approx(2.5 * first.generated_tokens_per_s, rel=0.01)
    assert (first.ttft_p50_ms, first.ttft_p95_ms) == (200.0, 300.0)
    assert (second.generated_tokens_per_s, second.cache_hit_rate) == (0.0, None)
    assert (second.ttft_p50_ms, second.ttft_p95_ms) == (None, None)


def test_samples_of_an_engine_that_started_again_have_no_negative_rates():
    engine = FakeEngine()
    history, _ = _history(engine)
    engine.status = EngineStatus(num_steps=50, num_prompt_tokens=900, num_generated_tokens=900)
    history.take_sample()
    engine.status = EngineStatus(num_steps=2, num_prompt_tokens=10, num_generated_tokens=3)
    history.take_sample()
    _, second = history.since(0)
    assert second.generated_tokens_per_s > 0
    assert second.prompt_tokens_per_s > 0


def test_samples_see_a_status_that_is_changed_in_place():
    engine = FakeEngine()
    history, _ = _history(engine)
    history.take_sample()
    engine.status.num_generated_tokens += 7
    history.take_sample()
    assert history.since(1)[0].generated_tokens_per_s > 0


def test_samples_and_first_tokens_are_bounded():
    history, metrics = _history(FakeEngine())
    for _ in range(MAX_SAMPLES + 7):
        history.take_sample()
    assert len(history.since(0)) == MAX_SAMPLES
    assert history.since(0)[-1].number == MAX_SAMPLES + 7
    for _ in range(MAX_FIRST_TOKENS + 7):
        metrics.note_first_token(1.0)
    assert len(metrics.first_tokens_s) == MAX_FIRST_TOKENS


def test_an_unknown_sequence_ends_without_an_error():
    recent = RecentRequests()
    recent.end(7)
    assert recent.rows("") == []
