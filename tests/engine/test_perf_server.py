"""The scenarios that measure the server: their engine, their client, and what they count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from compiled_engine.bench.stats import RequestRecord
from compiled_engine.ipc import ClientFrame, EngineFrame
from compiled_engine.request import Request, SamplingParams
from compiled_engine.tokenizer import Tokenizer
from perf.instant_engine import InstantEngine
from perf.overload import RAMP_S, rate
from perf.receipts import FIRST_TOKEN_ID, read_streams
from perf.rows import Measured
from perf.server_overhead import (
    Options,
    TokensTogetherError,
    delays_ms,
    plain_tokens,
    run,
    tokens_per_processor_s,
)
from perf.servers import ServerProcess
from tests.helpers.tiny_model import write_tiny_model


def _frame(**fields) -> bytes:
    return msgspec.msgpack.encode(ClientFrame(**fields))


def _request(request_id: int, first: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=request_id, prompt_token_ids=[first, 5], params=params)


def test_the_instant_engine_gives_every_request_a_token_a_step():
    engine = InstantEngine([10, 11, 12], 20)
    engine.take(_frame(submits=[_request(1, 3, 4), _request(2, 1, 2)]))
    frames = [msgspec.msgpack.decode(engine.step(), type=EngineFrame) for _ in range(2)]
    events = [(e.request_id, e.token_ids, e.finish_reason) for f in frames for e in f.tokens]
    assert events == [(1, [10], None), (2, [11], None), (1, [11], None), (2, [12], "length")]
    assert engine.running == [3]
    engine.take(_frame(aborts=[1]))
    assert not engine.has_work
    last = msgspec.msgpack.decode(engine.step(), type=EngineFrame)
    assert (last.tokens, last.status.num_steps, last.status.num_requests_running) == (None, 3, 0)
    engine.take(_frame(shutdown=True))
    assert engine.is_stopping


def test_delays_leave_beginnings_and_merged_streams_out():
    sent = {str(name): [i * 1.0 for i in range(22)] for name in range(10)}
    received = {name: [i + 0.001 * (name + 1) for i in range(22)] for name in range(10)}
    received[9] = received[9][:-1]
    delays = delays_ms(sent, received)
    assert delays == pytest.approx([name + 1 for name in range(9) for _ in range(2)])
    received[8] = received[8][:-1]
    with pytest.raises(TokensTogetherError, match="in 2 streams"):
        delays_ms(sent, received)


def test_rates_are_kept_where_a_busy_machine_hides_the_delays(monkeypatch: pytest.MonkeyPatch):
    rate = Measured(metric="tokens_per_core_s", unit="tokens/s", values=[1.0])

    def hidden(*_: object) -> list[Measured]:
        raise TokensTogetherError("in 41 streams tokens came together")

    place = "perf.server_overhead."
    monkeypatch.setattr(f"{place}resolve_model", lambda *_: Path())
    monkeypatch.setattr(f"{place}Tokenizer.from_folder", lambda _: None)
    monkeypatch.setattr(f"{place}plain_tokens", lambda _: {})
    monkeypatch.setattr(f"{place}_throughput", lambda *_: [rate])
    monkeypatch.setattr(f"{place}_delay", hidden)
    outcome = run(Options(), print)
    assert outcome.measured == [rate]
    assert outcome.failures == ["emit_to_client_ms: in 41 streams tokens came together"]


def test_a_rate_counts_whole_answers_while_requests_come():
    def record(sent_s: float, end_s: float, error: str | None = None) -> RequestRecord:
        return RequestRecord(sent_s=sent_s, end_s=end_s, error=error)

    start, end = 100.0, 110.0 + RAMP_S
    records = [record(start, start + 1), record(end, end + 5)]
    records += [record(start + 1, start + RAMP_S + 1 + i) for i in range(5)]
    records += [record(start + 1, start + RAMP_S + 2, "HTTP 429: full")]
    assert rate(records) == pytest.approx(0.5)
    with pytest.raises(SystemExit, match="too few"):
        rate([record(1.0, 2.0), record(2.0, 3.0)])


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("instant")
    model = write_tiny_model(folder / "model")
    tokens = folder / "tokens.json"
    given = plain_tokens(Tokenizer.from_folder(model))
    assert len(given["token_ids"]) > 5
    tokens.write_text(json.dumps({**given, "vocab_size": 50_000}))
    return [sys.executable, "-m", "perf.instant_server", "{port}", str(model), str(tokens)]


def test_streamed_tokens_are_counted_against_the_servers_own_time(command):
    with ServerProcess("ours", command, ready_path="/ready") as server:
        server.pause()
        first = tokens_per_processor_s(server, 8, 400)
        assert 500 < first < 1e6
        assert 500 < tokens_per_processor_s(server, 3, 1000) < 1e6


def test_tokens_of_a_paced_engine_arrive_after_they_were_sent(command, tmp_path: Path):
    log = tmp_path / "sent.json"
    paced = [*command, "5", str(log)]
    with ServerProcess("ours", paced, ready_path="/ready") as server:
        receipts = read_streams(server.port, 3, 4, 60)
    assert receipts.keys() == {FIRST_TOKEN_ID + i for i in range(3)}
    sent = json.loads(log.read_text())
    for name, received in receipts.items():
        given = sent[str(name)]
        assert len(given) == 60
        assert 10 < len(received) <= 60  # a busy machine may bring the first ones together
        assert received == sorted(received)
        assert given[0] < received[0] < given[0] + 30
        assert given[-1] < received[-1] < given[-1] + 30


def test_a_server_that_does_not_start_shows_what_it_wrote():
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')", "{port}"]
    with pytest.raises(SystemExit, match="no such thing"), ServerProcess("broken", command):
        pass
