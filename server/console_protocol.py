"""The JSON of `/console/data`, which the page at `/` draws; no text of a prompt or an answer in it.

Owns the shapes only. Times are in the unit their name says; None is "not known", never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

RequestState = Literal["waiting", "prefill", "running", "ended"]


class Sample(msgspec.Struct, kw_only=True):
    """The engine at one moment, and what it did since the sample before.

    Attributes:
        number: counts samples from 1 on; gaps mean samples that are not kept any more.
        time_s: Unix time.
        num_running: sequences with a row.
        num_waiting: sequences in the engine without a row.
        num_queued_tokens: prompt tokens of all unfinished sequences.
        prompt_tokens_per_s: prompt tokens of admitted sequences; cached ones count.
        generated_tokens_per_s: sampled tokens.
        cache_hit_rate: share of those prompt tokens that the prefix cache had, 0 to 1; None
            without prompt tokens.
        ttft_p50_ms: median time to the first token; None where no sequence got its first.
        ttft_p95_ms: likewise, 95th percentile.
    """

    number: int
    time_s: float
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_pages_active: int
    num_pages_cached: int
    num_pages_free: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    cache_hit_rate: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


class RequestRow(msgspec.Struct, kw_only=True):
    """What one sequence has cost so far.

    Attributes:
        id: the call's `X-Request-ID` and, in brackets, the number of the sequence within it.
        key: name of the API key it came with; "" for the operator's, or where none is asked.
        route: method and path of the call.
        state: "waiting" for a row, "prefill" until its first token, "running", "ended".
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        output_tokens: generated tokens.
        queue_ms: wait for a row.
        ttft_ms: from the call's head to the first token.
        tokens_per_s: output tokens after the first one by the time they took.
        age_s: since the call came in; of an ended one, how long it took in all.
    """

    id: str
    key: str
    route: str
    state: RequestState
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    tokens_per_s: float | None
    age_s: float


class ConsoleData(msgspec.Struct, kw_only=True):
    """Answer of `/console/data`.

    Attributes:
        failure: why no requests are taken, in words; None if they are.
        is_dead: the engine is gone for good, unless the server starts it again.
        tool_parser: how calls are found in answers; None if they are not, or before loading.
        reasoning_parser: likewise for reasoning.
        cache_hit_rate: share of all prompt tokens since the engine's start, 0 to 1.
        num_running: unfinished sequences of the caller's key, or of all for the operator.
        requests: running sequences, then ended ones, newest first; both bounded.
        samples: those with a number above the given `since`, oldest first.
    """

    version: str
    model: str
    started_s: float
    max_model_len: int | None
    tool_parser: str | None
    reasoning_parser: str | None
    phase: str
    phase_detail: str
    failure: str | None
    is_dead: bool
    is_paused: bool
    step_age_s: float
    device_note: str
    num_steps: int
    num_pages_total: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_retractions: int
    num_recompiles: int
    num_scheduler_errors: int
    cache_hit_rate: float
    num_running: int
    requests: list[RequestRow]
    samples: list[Sample]
