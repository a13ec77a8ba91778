"""The engine on this machine's device: compiled against eager, and the device against the CPU.

Counts differing greedy tokens of the given model in fp32, which must be 0 between eager and
compiled. On a GPU also times decode steps of an 8B-shaped model with random bf16 weights: compiled
over eager, and over the time the device needs just to read the weights once, measured in the run.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_engine.config import DEFAULT_MODEL
from perf.ceilings import read_tb_s
from perf.qwen3_8b import write_folder
from perf.rows import Measured, Outcome

NAME = "device_parity"
Note = Callable[[str], None]

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the planets of the solar system.",
    "Why is the sky blue?",
)
BATCH_SIZES = (1, 8)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id whose answers are compared.
        num_repeats: timings of each decode batch.
        output_len: tokens of each answer.
    """

    model: str = DEFAULT_MODEL
    num_repeats: int = 3
    output_len: int = 48


def run(options: Options, note: Note) -> Outcome:
    """Measures everything; takes minutes."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    answers = {}
    for label, where, eager in (
        ("eager", device, True),
        ("compiled", device, False),
        ("cpu", "cpu", True),
    ):
        answers[label] = _answers(options, where, eager)
        note(f"{label}: {answers[label][0][:12]}")
    measured = [
        _count("tokens_compiled_differ_from_eager", _differing(answers, "compiled", "eager")),
        _count("tokens_device_differ_from_cpu", _differing(answers, "eager", "cpu")),
        _count("tokens_compared", sum(map(len, answers["eager"]))),
    ]
    if device == "cuda":
        measured += _decode_8b(options, note)
    return Outcome(measured=measured)


def _count(metric: str, value: int) -> Measured:
    return Measured(metric=metric, unit="count", values=[value])


def _differing(answers: dict[str, list[list[int]]], first: str, second: str) -> int:
    pairs = zip(answers[first], answers[second], strict=True)
    return sum(x != y for a, b in pairs for x, y in zip(a, b, strict=False))


def _answers(options: Options, device: str, eager: bool) -> list[list[int]]:
    from compiled_engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.output_len)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "chunked_prefill_size": 64,
    }
    with LLM(options.model, device=device, enforce_eager=eager, max_num_seqs=8, **settings) as llm:
        tokenizer = llm.tokenizer
        prompts = [
            tokenizer.encode(
                tokenizer.apply_chat_template([{"role": "user", "content": text}]),
                add_special_tokens=False,
            )
            for text in PROMPTS
        ]
        return [output.token_ids for output in llm.generate(prompts, params)]


def _decode_8b(options: Options, note: Note) -> list[Measured]:
    import torch

    seconds: dict[tuple[bool, int], list[float]] = {}
    weight_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        for eager in (True, False):
            loop, weight_bytes = _dummy_loop(folder, eager)
            for size in BATCH_SIZES:
                _step_seconds(loop, size, options.output_len)
                taken = [
                    _step_seconds(loop, size, options.output_len)
                    for _ in range(options.num_repeats)
                ]
                seconds[eager, size] = taken
                note(f"8B, eager={eager}, batch {size}: {statistics.median(taken) * 1e3:.2f} ms")
            del loop
            gc.collect()
            torch.cuda.empty_cache()
    floor_s = weight_bytes / (statistics.median(read_tb_s(num_repeats=3)) * 1e12)
    measured = []
    for size in BATCH_SIZES:
        fast, plain = seconds[False, size], seconds[True, size]
        ratios = [a / b for a, b in zip(plain, fast, strict=True)]
        measured.append(
            Measured(metric=f"decode_8b_batch_{size}_speedup", unit="ratio", values=ratios)
        )
        over = [value / floor_s for value in fast]
        measured.append(
            Measured(metric=f"decode_8b_batch_{size}_vs_weight_read", unit="ratio", values=over)
        )
    return measured


def _dummy_loop(folder: str, eager: bool) -> tuple[Any, int]:
    from compiled_engine.config import EngineConfig
    from compiled_engine.engine import build_engine

    config = EngineConfig(
        model=folder,
        load_format="dummy",
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=16,
        chunked_prefill_size=64,
    )
    engine = build_engine(config, lambda *_: None)
    model = engine.loop.executor.model
    return engine.loop, sum(p.numel() * p.element_size() for p in model.parameters())


def _step_seconds(loop: Any, batch_size: int, output_len: int) -> float:
    """Mean time of a step while `batch_size` short requests decode, prefill included."""
    import torch

    from compiled_engine.request import Request, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index in range(batch_size):
        prompt = [(7 * index + 3 * j) % 4000 + 10 for j in range(30)]
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))
    torch.cuda.synchronize()
    start, before = time.perf_counter(), loop.stats.num_steps
    while loop.has_work:
        loop.step()
    loop.drain()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (loop.stats.num_steps - before)
