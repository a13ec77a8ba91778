"""Statistics on fixed numbers, the load generator against a fake engine, the offline benches."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from compiled_engine import cli
from compiled_engine.bench.load import make_prompts, run_load
from compiled_engine.bench.load_config import LoadConfig
from compiled_engine.bench.report import print_load
from compiled_engine.bench.stats import RequestRecord, percentile, summarize, summarize_load
from compiled_engine.config import ServerConfig
from compiled_engine.errors import ConfigError
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.server_harness import MODEL, Server, with_server
from tests.helpers.tiny_model import write_tiny_model


def _records() -> list[RequestRecord]:
    return [
        RequestRecord(10.0, [10.5, 10.6, 10.8], 10.8, 100, 4, 32),
        RequestRecord(11.0, [11.1], 11.1, 50, 1, 0),
        RequestRecord(11.0, [11.2, 11.3], 14.0, 50, 2, 50, error="HTTP 500: no"),
    ]


def test_percentile_interpolates_between_neighbours():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([7], 99) == 7
    assert percentile(range(101), 95) == 95


def test_summarize_of_nothing_is_nothing():
    assert summarize([]) is None
    summary = summarize([1.0, 2.0, 3.0])
    assert (summary.count, summary.mean, summary.p50) == (3, 2.0, 2.0)


def test_request_record_latencies_follow_their_definitions():
    record, single, _ = _records()
    assert record.ttft_ms == pytest.approx(500)
    assert record.e2el_ms == pytest.approx(800)
    assert record.tpot_ms == pytest.approx(100)
    assert record.itls_ms == pytest.approx([100, 200])
    assert single.tpot_ms is None
    assert RequestRecord(1.0).ttft_ms is None


def test_summarize_load_counts_failed_requests_only_as_failures():
    summary = summarize_load(_records())
    assert (summary.num_done, summary.num_failed) == (2, 1)
    assert summary.errors == {"HTTP 500: no": 1}
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.num_prompt_tokens == 150
    assert summary.num_cached_tokens == 32
    assert summary.output_tokens_per_s == pytest.approx(5 / 4)
    assert summary.total_tokens_per_s == pytest.approx(155 / 4)
    assert summary.tokens_per_chunk == pytest.approx(5 / 4)
    assert summary.ttft_ms.p50 == pytest.approx(300)
    assert summary.tpot_ms.count == 1
    assert summary.itl_ms.count == 2


def test_prompts_share_exactly_their_prefix():
    config = LoadConfig(num_requests=3, input_len=20, shared_prefix_len=12, vocab_size=200)
    prompts = make_prompts(config)
    assert [len(p) for p in prompts] == [20, 20, 20]
    assert prompts[0][:12] == prompts[1][:12] == prompts[2][:12]
    assert prompts[0][12:] != prompts[1][12:]
    assert all(10 <= token < 200 for prompt in prompts for token in prompt)
    assert make_prompts(config) == prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [("concurrency", 0), ("shared_prefix_len", 200), ("vocab_size", 10), ("request_rate", -1.0)],
)
def test_load_config_refuses_what_cannot_work(field, value):
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        LoadConfig(**{field: value})


def _load(engine: FakeEngine, server_config: ServerConfig | None = None, **settings):
    result = []

    async def body(server: Server):
        config = LoadConfig(url=server.url, **settings)
        result.append(await run_load(config, on_done=lambda _: result.append("done")))

    with_server(body, engine=engine, config=server_config)
    records = result.pop()
    assert result == ["done"] * len(records)
    return records


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_run_load_counts_what_the_server_counts(stream, capsys):
    engine = FakeEngine(num_cached_tokens=16)
    records = _load(
        engine, num_requests=12, concurrency=3, input_len=32, output_len=5, stream=stream
    )
    summary = summarize_load(records)
    assert (summary.num_done, summary.num_failed) == (12, 0)
    assert summary.num_prompt_tokens == 12 * 32
    assert summary.num_cached_tokens == 12 * 16
    assert summary.num_output_tokens == 12 * 5
    assert summary.tokens_per_chunk == pytest.approx(1 if stream else 5)
    assert all(r.params.ignore_eos and r.params.temperature == 0 for r in engine.submitted)
    assert sorted(map(tuple, make_prompts(LoadConfig(num_requests=12, input_len=32)))) == sorted(
        tuple(r.prompt_token_ids) for r in engine.submitted
    )
    print_load(summary)
    assert "TPOT" in capsys.readouterr().out


def test_run_load_keeps_to_its_concurrency():
    class Watched(FakeEngine):
        most = 0

        def submit(self, request):
            stream = super().submit(request)
            self.most = max(self.most, self.num_running)
            return stream

    engine = Watched(delay_s=0.005)
    _load(engine, num_requests=20, concurrency=4, input_len=16, output_len=3)
    assert engine.most == 4


def test_run_load_arrivals_follow_the_rate():
    start = time.perf_counter()
    _load(
        FakeEngine(), num_requests=20, concurrency=20, request_rate=50.0, input_len=4, output_len=1
    )
    assert time.perf_counter() - start > 0.1


def test_run_load_records_failures_and_goes_on():
    refused = _load(
        FakeEngine(), num_requests=3, concurrency=1, input_len=600, output_len=5, model=MODEL
    )
    assert [r.error[:8] for r in refused] == ["HTTP 400"] * 3
    engine = FakeEngine(tokens_per_event=2)
    engine.fail_with = "out of luck"
    failed = _load(engine, num_requests=2, concurrency=2, input_len=8, output_len=4)
    assert all(r.error is not None for r in failed)
    summary = summarize_load(failed)
    assert (summary.num_done, summary.ttft_ms) == (0, None)


def test_run_load_refused_key_is_one_clear_error():
    with pytest.raises(ConfigError, match="answered 401"):
        _load(FakeEngine(), ServerConfig(port=0, api_key="key"), num_requests=1)
    records = _load(
        FakeEngine(),
        ServerConfig(port=0, api_key="key"),
        num_requests=1,
        input_len=8,
        output_len=2,
        api_key="key",
    )
    assert records[0].error is None


def test_bench_serve_prints_tables_and_a_json_line(capsys):
    async def body(server: Server):
        argv = ["bench", "serve", "--url", server.url, "--num-requests", "4", "--input-len", "8"]
        argv += ["--output-len", "3", "--api-key", "hidden"]
        assert await asyncio.to_thread(cli.main, argv) == 0

    with_server(body)
    out = capsys.readouterr().out
    assert "TTFT" in out
    assert "hidden" not in out
    document = json.loads(out.splitlines()[-1])
    assert document["num_done"] == 4
    assert document["config"]["output_len"] == 3


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_offline_benches_print_tables_and_a_json_line(kind, tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    argv = ["bench", kind, str(folder), "--enforce-eager", "--device", "cpu"]
    argv += ["--input-len", "8", "--output-len", "6", "--max-num-seqs", "2"]
    argv += ["--cache-dir", str(tmp_path)]
    argv += ["--num-requests", "3"] if kind == "throughput" else ["--batch-size", "2"]
    assert cli.main(argv) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bench"] == kind
    assert document["config"]["max_num_seqs"] == 2
    if kind == "throughput":
        assert document["num_output_tokens"] == 18
        assert document["num_cached_tokens"] == 0
    else:
        (row,) = document["rows"]
        assert row["prefill_ms"]["count"] == 3
        assert row["decode_ms"]["count"] >= 3
        assert cli.main([*argv, "--batch-size", "3"]) == 2
        assert "--batch-size 3 is more than --max-num-seqs 2" in capsys.readouterr().err
