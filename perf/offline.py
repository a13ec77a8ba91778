"""Whole jobs: prefill through the loop, and end to end through the Python API.

`e2e_s` and `agentic_s` are the time around `LLM.generate` with token ids: from the first submit to
the last token that the caller sees, text included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from compiled_engine import SamplingParams
from perf.ceilings import Ceilings
from perf.decode import Driver
from perf.qwen3_8b import Prompts, prefill_flops
from perf.rows import Measured

PREFILL_LENS = [8192] * 8
E2E_BATCH, E2E_INPUT, E2E_OUTPUT = 32, 1024, 256
AGENTIC_BATCH, AGENTIC_SHARED, AGENTIC_OWN, AGENTIC_OUTPUT = 64, 3000, 200, 100


def measure_prefill(
    driver: Driver,
    ceilings: Ceilings,
    num_repeats: int,
    flops: Callable[[list[int]], float] = prefill_flops,
) -> Iterator[Measured]:
    """Eight prompts of 8192 tokens, first submit to the last prompt's only token.

    `flops` are the operations of prompts of such lengths.
    """
    prefill_s(driver)
    seconds = [prefill_s(driver) for _ in range(num_repeats)]
    case: dict[str, Any] = {"batch": len(PREFILL_LENS), "case": str(PREFILL_LENS[0])}
    num_tokens, operations = sum(PREFILL_LENS), flops(PREFILL_LENS)
    yield Measured(
        metric="prefill_tok_s", unit="tokens/s", values=[num_tokens / s for s in seconds], **case
    )
    yield Measured(
        metric="prefill_share_of_matmul",
        unit="ratio",
        values=[operations / s / ceilings.matmul for s in seconds],
        **case,
    )
    yield Measured(
        metric="prefill_share_of_sustained_matmul",
        unit="ratio",
        values=[operations / s / ceilings.sustained for s in seconds],
        **case,
    )


def prefill_s(driver: Driver) -> float:
    """Seconds of eight new prompts, as `measure_prefill` says."""
    prompts = [driver.prompts.one(length) for length in PREFILL_LENS]
    loop = driver.loop
    start = time.perf_counter()
    ids = {driver.submit(prompt, 1) for prompt in prompts}
    left = set(ids)
    while left:
        left -= {event.request_id for event in loop.step()}
    taken = time.perf_counter() - start
    driver.run_out(ids)
    return taken


def measure_e2e(llm: Any, prompts: Prompts, num_repeats: int) -> Iterator[Measured]:
    """32 prompts of 1024 tokens, 256 tokens each, nothing cached."""
    taken = []
    for _ in range(num_repeats + 1):
        batch = prompts.many(E2E_BATCH, E2E_INPUT)
        llm.reset_prefix_cache()
        taken.append(generate_s(llm, batch, E2E_OUTPUT))
    case = f"{E2E_BATCH}x{E2E_INPUT}+{E2E_OUTPUT}"
    yield Measured(metric="e2e_s", unit="s", batch=E2E_BATCH, case=case, values=taken[1:])


def measure_agentic(llm: Any, prompts: Prompts, num_repeats: int) -> Iterator[Measured]:
    """64 requests behind one prefix of 3000 tokens: not cached, then cached by the run before."""
    taken: dict[str, list[float]] = {"cold_prefix": [], "warm_prefix": []}
    for repeat in range(num_repeats + 1):
        shared = prompts.one(AGENTIC_SHARED)
        llm.reset_prefix_cache()
        for case in taken:
            batch = [shared + own for own in prompts.many(AGENTIC_BATCH, AGENTIC_OWN)]
            seconds = generate_s(llm, batch, AGENTIC_OUTPUT)
            if repeat:
                taken[case].append(seconds)
    for case, values in taken.items():
        yield Measured(metric="agentic_s", unit="s", batch=AGENTIC_BATCH, case=case, values=values)


def generate_s(llm: Any, prompts: list[list[int]], output_len: int) -> float:
    """Seconds of one `generate` call; every answer must have all its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    taken = time.perf_counter() - start
    lengths = {len(output.token_ids) for output in outputs}
    assert lengths == {output_len}, f"answers of {lengths} tokens, not {output_len}"
    return taken
