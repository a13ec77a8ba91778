"""One engine in a process of its own, told over pipes when to generate.

Run as `python perf/worker.py KIND MODEL`; KIND is ours, transformers or vllm. It may run under
another project's Python, so nothing of this repository is imported but by `ours`. Each line on
standard input is a task `{"batch_size": B, "input_len": I, "output_len": O}`; each answer line
holds seconds to the last token, and where the engine shows it to the first. An idle worker waits in
a read and takes no processor time, so that two of them can take turns.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

# Prompts -> (seconds to the first token or None, seconds to the last)
Generate = Callable[[list[list[int]], int], "tuple[float | None, float]"]

VOCAB_SIZE = 40_000


def make_ours(model: str) -> Generate:
    """This engine, compiled, greedy."""
    from compiled_engine.config import EngineConfig
    from compiled_engine.engine import build_engine
    from compiled_engine.request import Request, SamplingParams

    config = EngineConfig(model=model, dtype="bfloat16")
    loop = build_engine(config, lambda *_: None).loop
    ids = iter(range(1, sys.maxsize))

    def generate(prompts: list[list[int]], output_len: int) -> tuple[float | None, float]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        first_s = None
        start = time.perf_counter()
        for prompt in prompts:
            loop.submit(Request(request_id=next(ids), prompt_token_ids=prompt, params=params))
        while loop.has_work:
            if loop.step() and first_s is None:
                first_s = time.perf_counter() - start
        loop.drain()
        return first_s, time.perf_counter() - start

    return generate


def make_transformers(model: str) -> Generate:
    """`generate` of transformers, eager, greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    class Clock:
        """A streamer that notes when the first token comes; the prompt comes before it."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], output_len: int) -> tuple[float | None, float]:
        clock = Clock() if len(prompts) == 1 else None
        tokens = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            network.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                streamer=clock,
                pad_token_id=0,
            )
        end = time.perf_counter()
        return (clock.times[1] - start if clock else None), end - start

    return generate


def make_vllm(model: str) -> Generate:
    """vLLM, compiled, greedy."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, disable_log_stats=True)

    def generate(prompts: list[list[int]], output_len: int) -> tuple[float | None, float]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        return None, time.perf_counter() - start

    return generate


MAKERS = {"ours": make_ours, "transformers": make_transformers, "vllm": make_vllm}


def main() -> None:
    """Builds the engine, then answers tasks until standard input ends."""
    kind, model = sys.argv[1:3]
    # Libraries print to standard output; the answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = MAKERS[kind](model)
    random_ids = random.Random(0)
    print(json.dumps({"ready": kind}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        prompts = [
            [random_ids.randrange(10, VOCAB_SIZE) for _ in range(task["input_len"])]
            for _ in range(task["batch_size"])
        ]
        first_s, last_s = generate(prompts, task["output_len"])
        print(json.dumps({"first_s": first_s, "last_s": last_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
