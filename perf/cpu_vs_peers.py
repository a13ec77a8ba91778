"""SmolLM2 in bf16 on a CPU: this engine against transformers and, if it is installed, vLLM.

Decode of one stream counts tokens after the first over the time after the first. Totals count all
tokens over all time, prompts included. Engines take turns within a run and only ratios are kept,
since the same job differs by a factor of several on a shared machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from compiled_engine.config import DEFAULT_MODEL, default_cache_dir
from compiled_engine.models.source import resolve_model
from perf.rows import Measured, Outcome

NAME = "cpu_vs_peers"
INPUT_LEN = 32
NUM_STREAMS = 8
WARMUP = (sys.executable, "-m", "compiled_engine.cli", "warmup")

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id.
        vllm_python: interpreter of an environment with vLLM; None leaves it out.
        num_repeats: turns that count, after one that does not.
        output_len: tokens of each answer.
        with_start: also measure the first and the second start.
    """

    model: str = DEFAULT_MODEL
    vllm_python: str | None = None
    num_repeats: int = 5
    output_len: int = 64
    with_start: bool = True


class Worker:
    """A running `perf/worker.py`, stopped with all its processes while it is not asked.

    Some engines poll while they are idle; on a small machine that would slow the one whose turn it
    is.
    """

    def __init__(self, kind: str, model: Path, python: str) -> None:
        # Threads wait as each engine has them wait by itself: they stop spinning milliseconds after
        # their last work, and engines take turns that are far longer.
        environment = os.environ | {
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        self._kind = kind
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("worker.py")), kind, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._read()
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def decode_tokens_per_s(self, output_len: int) -> float:
        """One stream, after its first token."""
        answer = self._ask(1, output_len)
        return (output_len - 1) / (answer["last_s"] - answer["first_s"])

    def total_tokens_per_s(self, batch_size: int, output_len: int) -> float:
        """All output tokens over all time."""
        return batch_size * output_len / self._ask(batch_size, output_len)["last_s"]

    def _ask(self, batch_size: int, output_len: int) -> dict[str, float]:
        task = {"batch_size": batch_size, "input_len": INPUT_LEN, "output_len": output_len}
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(task), file=self._process.stdin, flush=True)
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self._kind} worker ended (exit code {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if a worker fails, and then nothing is recorded."""
    folder = resolve_model(options.model, default_cache_dir())
    measured = _measure_start(folder, note) if options.with_start else []
    length = options.output_len
    kinds = {"ours": sys.executable, "transformers": sys.executable}
    if options.vllm_python is not None:
        kinds["vllm"] = options.vllm_python
    with ExitStack() as stack:
        workers = {}
        for kind, python in kinds.items():
            note(f"starting {kind}")
            workers[kind] = stack.enter_context(Worker(kind, folder, python))
        ours = workers.pop("ours")
        decode = [partial(w.decode_tokens_per_s, length) for w in (ours, workers["transformers"])]
        name = "decode_1_stream_vs_transformers"
        measured.append(_take_turns(name, decode, options.num_repeats, note))
        for kind, worker in workers.items():
            total = [partial(w.total_tokens_per_s, NUM_STREAMS, length) for w in (ours, worker)]
            name = f"total_{NUM_STREAMS}_streams_vs_{kind}"
            measured.append(_take_turns(name, total, options.num_repeats, note))
    return Outcome(measured=measured)


def _take_turns(
    metric: str, engines: Sequence[Callable[[], float]], num_repeats: int, note: Note
) -> Measured:
    """Ratios of the first engine to the second, one for each repeat; the first pair warms up."""
    ratios = []
    for repeat in range(num_repeats + 1):
        one, other = (tokens_per_s() for tokens_per_s in engines)
        note(f"{metric}: {one:.1f} and {other:.1f} tokens/s in this run")
        if repeat:
            ratios.append(one / other)
    return Measured(metric=metric, unit="ratio", values=ratios)


def _measure_start(folder: Path, note: Note) -> list[Measured]:
    """`warmup` twice over an empty cache: the ratio of wall times, and what compiling cost."""
    seconds, counters = [], []
    with tempfile.TemporaryDirectory(prefix="compiled-engine-perf-") as cache:
        for which in ("first", "second"):
            begin = time.perf_counter()
            result = subprocess.run(
                [*WARMUP, str(folder), "--cache-dir", cache],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if result.returncode:
                raise SystemExit(f"warmup failed with exit code {result.returncode}")
            seconds.append(time.perf_counter() - begin)
            counters.append(json.loads(result.stdout.splitlines()[-1])["counters"])
            note(f"{which} start: {seconds[-1]:.1f} s in this run")

    def count(metric: str, value: int) -> Measured:
        return Measured(metric=metric, unit="count", values=[value])

    first, second = counters
    return [
        Measured(metric="second_start_vs_first", unit="ratio", values=[seconds[1] / seconds[0]]),
        count("graph_breaks", first["num_graph_breaks"]),
        count("recompiles", first["num_recompiles"]),
        count("first_start_compiles", first["num_inductor_compiles"]),
        count("kernels", first["num_kernels"]),
        count("second_start_compiles", second["num_inductor_compiles"]),
    ]
