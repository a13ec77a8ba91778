"""What the server costs by itself: an engine without a model behind it, and vLLM's beside it.

Throughput: the engine gives the next step as soon as every stream has taken the last one; counted
are streamed tokens for each second of processor time that the server's process takes, so that the
client does not matter. The two servers take turns on one processor, the client has the others. vLLM
keeps all of its API process; only the client of its engine core is replaced (`peers/vllm_instant`).

Delay: the engine is a process that gives a step every 20 ms; from its send to the client's receive,
for each token.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from compiled_engine.bench.load import run_load
from compiled_engine.bench.load_config import LoadConfig
from compiled_engine.bench.stats import percentile
from compiled_engine.config import DEFAULT_MODEL, default_cache_dir
from compiled_engine.models.source import resolve_model
from compiled_engine.tokenizer import Tokenizer
from perf.receipts import Receipts, read_streams
from perf.rows import Measured, Outcome
from perf.servers import ServerProcess

NAME = "server_overhead"
STREAMS = (64, 256)
DELAY_STREAMS = 256
STEP_MS = 20.0
INPUT_LEN = 16
MAX_MODEL_LEN = 2048
NUM_TOKEN_IDS = 10_000
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# Steps of a stream's beginning, while others are still admitted.
NUM_FIRST_STEPS = 20
MIN_CLEAR_SHARE = 0.9

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id; only its tokenizer is used.
        vllm_python: interpreter of an environment with vLLM; None leaves it out.
        num_repeats: turns that count, after one that does not.
        output_len: tokens of each answer.
    """

    model: str = DEFAULT_MODEL
    vllm_python: str | None = None
    num_repeats: int = 5
    output_len: int = 512


class TokensTogetherError(RuntimeError):
    """Several tokens of a stream reached the client in one piece."""


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if a server fails, and then nothing is recorded.

    Delays that a busy machine hides are a failure beside the rates, which it does not.
    """
    folder = resolve_model(options.model, default_cache_dir())
    with tempfile.TemporaryDirectory() as place, _other_processors():
        tokens = Path(place) / "tokens.json"
        tokens.write_text(json.dumps(plain_tokens(Tokenizer.from_folder(folder))))
        ours = [sys.executable, "-m", "perf.instant_server", "{port}", str(folder), str(tokens)]
        measured = _throughput(options, ours, _vllm(options, folder, tokens), note)
        failures = []
        try:
            measured += _delay(options, ours, Path(place) / "sent.json", note)
        except TokensTogetherError as error:
            failures.append(f"emit_to_client_ms: {error}")
    return Outcome(measured=measured, failures=failures)


def plain_tokens(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """What `instant_engine` reads: ids of tokens that are words of ASCII letters, each a text."""
    found: list[int] = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        if text.isascii() and text.strip().isalpha():
            found.append(token_id)
    return {"token_ids": found[-NUM_TOKEN_IDS:], "vocab_size": tokenizer.vocab_size}


@contextmanager
def _other_processors() -> Iterator[None]:
    """This process leaves the first processor to the servers."""
    before = os.sched_getaffinity(0)
    if len(before - {0}) == 0:
        raise SystemExit("server_overhead needs two processors, one for the server alone")
    os.sched_setaffinity(0, before - {0})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _vllm(options: Options, folder: Path, tokens: Path) -> list[str] | None:
    if options.vllm_python is None:
        return None
    script = Path(__file__).with_name("peers") / "vllm_instant.py"
    flags = ["--model", str(folder), "--port", "{port}", "--max-model-len", str(MAX_MODEL_LEN)]
    return [options.vllm_python, str(script), str(tokens), *flags]


def _server(name: str, command: Sequence[str]) -> ServerProcess:
    ready_path = "/ready" if name == "ours" else "/health"
    return ServerProcess(
        name, command, processors={0}, environment=ENVIRONMENT, ready_path=ready_path
    )


def _throughput(
    options: Options, ours: Sequence[str], vllm: Sequence[str] | None, note: Note
) -> list[Measured]:
    commands = {"ours": ours} | ({} if vllm is None else {"vllm": vllm})
    measured = []
    with ExitStack() as stack:
        servers = {}
        for name, command in commands.items():
            note(f"starting {name}")
            servers[name] = stack.enter_context(_server(name, command))
            servers[name].pause()
        for num_streams in STREAMS:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for repeat in range(options.num_repeats + 1):
                for name, server in servers.items():
                    rate = tokens_per_processor_s(server, num_streams, options.output_len)
                    note(f"{num_streams} streams, {name}: {rate:.0f} tokens for each second")
                    if repeat:
                        rates[name].append(rate)
            measured += _rows(num_streams, rates)
    return measured


def _rows(num_streams: int, rates: dict[str, list[float]]) -> list[Measured]:
    def row(metric: str, unit: str, values: Sequence[float], case: str = "") -> Measured:
        return Measured(metric=metric, unit=unit, values=values, batch=num_streams, case=case)

    rows = [row("tokens_per_core_s", "tokens/s", v, name) for name, v in rates.items()]
    if "vllm" in rates:
        ratios = [a / b for a, b in zip(rates["ours"], rates["vllm"], strict=True)]
        rows.append(row("tokens_per_core_vs_vllm", "ratio", ratios))
    return rows


def tokens_per_processor_s(server: ServerProcess, num_streams: int, output_len: int) -> float:
    """All streams at once.

    Raises:
        SystemExit: a request failed, or tokens came together.
    """
    config = LoadConfig(
        url=server.url,
        num_requests=num_streams,
        concurrency=num_streams,
        input_len=INPUT_LEN,
        output_len=output_len,
        vocab_size=NUM_TOKEN_IDS,
    )
    with server.turn():
        start_s = server.processor_s
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records = runner.run(run_load(config))
        taken_s = server.processor_s - start_s
    for record in records:
        if record.error is not None or len(record.chunk_times_s) != output_len:
            raise SystemExit(f"{server.name}: {record.error or 'a chunk held more than one token'}")
    return num_streams * output_len / taken_s


def _delay(options: Options, ours: Sequence[str], log: Path, note: Note) -> list[Measured]:
    medians, tails = [], []
    for repeat in range(options.num_repeats + 1):
        with _server("ours", [*ours, str(STEP_MS), str(log)]) as server:
            receipts = read_streams(server.port, DELAY_STREAMS, INPUT_LEN, options.output_len)
        delays = delays_ms(json.loads(log.read_text()), receipts)
        note(f"from engine to client: {statistics.median(delays):.2f} ms at the median")
        if repeat:
            medians.append(statistics.median(delays))
            tails.append(percentile(delays, 95))
    return [
        Measured(metric="emit_to_client_ms", unit="ms", values=v, batch=DELAY_STREAMS, case=case)
        for case, v in (("p50", medians), ("p95", tails))
    ]


def delays_ms(sent: dict[str, list[float]], receipts: Receipts) -> list[float]:
    """Milliseconds from send to receive for each token, without the first ones of each stream.

    Args:
        sent: first token of the prompt -> times at which the engine sent its tokens.
        receipts: first token of the prompt -> times at which its chunks were complete.

    Raises:
        TokensTogetherError: in so many streams that the rest says little: the machine was busy.
    """
    delays = []
    # Where tokens came together, chunks cannot be told apart.
    clear = {name: times for name, times in receipts.items() if len(times) == len(sent[str(name)])}
    if len(clear) < MIN_CLEAR_SHARE * len(receipts):
        raise TokensTogetherError(f"in {len(receipts) - len(clear)} streams tokens came together")
    for name, received in clear.items():
        given = sent[str(name)]
        pairs = list(zip(given, received, strict=True))[NUM_FIRST_STEPS:]
        delays += [(there - here) * 1e3 for here, there in pairs]
    return delays
