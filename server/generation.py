"""From valid prompts to text pieces: the part that completions and chat completions share.

Owns building engine requests, turning token events into text (detokenising, stop strings, the end
token), merging the choices of one call, and its usage. Does not own JSON shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from compiled_engine.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
)
from compiled_engine.request import ModelLimits, Request, TokenEvent, validate_request
from compiled_engine.server.admission import Permit
from compiled_engine.server.engine_client import TokenStream
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.protocol import ChoiceFinishReason, PromptTokensDetails, Usage
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.stop_strings import StopMatcher
from compiled_engine.server.validation import Sampling, parse_request
from compiled_engine.tokenizer import Tokenizer

S = TypeVar("S", bound=msgspec.Struct)

BODY_TIMEOUT_S = 120.0
# Parsing more than this would hold up the other calls, so it is done in a text thread.
_PARSED_AT_ONCE_BYTES = 64 * 1024
_MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event added to one choice; the one with a finish reason is the choice's last."""

    index: int
    text: str
    finish_reason: ChoiceFinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceRun:
    """One sampled sequence: engine events in, text that is safe to send out.

    Attributes:
        request: what the engine is given.
        num_tokens: generated tokens, up to and including the one that ended the answer.
        num_cached_tokens: prompt tokens found in the prefix cache.
        is_finished: whether the last piece was made.
    """

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, sampling: Sampling
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.is_finished = False
        self._include_stop = sampling.include_stop
        self._end_token_ids = {*params.stop_token_ids, *tokenizer.eos_token_ids}
        self._detokenizer = tokenizer.new_detokenizer(
            skip_special_tokens=sampling.skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop, include_stop=sampling.include_stop)

    def feed(self, event: TokenEvent) -> Piece:
        """Takes one event.

        Raises:
            EngineUnavailableError: the engine gave the request up.
            EngineError: the engine failed on this request.
        """
        if event.finish_reason == "error":
            raise EngineError(event.error or "the engine failed on this request")
        if event.finish_reason == "abort":
            raise EngineUnavailableError(event.error or "the engine gave the request up")
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        texts: list[str] = []
        matched = self._push_tokens(event, texts)
        if matched is None and event.finish_reason is not None:
            matched = self._push_text(self._detokenizer.finish(), texts)
            if matched is None:
                texts.append(self._matcher.flush())
        finish_reason = "stop" if matched is not None else event.finish_reason
        self.is_finished = finish_reason is not None
        stop_reason = matched if matched is not None else self._stop_token(event)
        return Piece(self.index, "".join(texts), finish_reason, stop_reason)

    def _push_tokens(self, event: TokenEvent, texts: list[str]) -> str | None:
        """Adds the event's text to `texts`; returns the stop string that ended the answer."""
        token_ids = event.token_ids
        num_shown = len(token_ids)
        if self._ended_by_token(event) and not self._include_stop:
            num_shown -= 1
        if not self.request.params.stop:
            texts.append(self._detokenizer.push(token_ids[:num_shown]))
            self.num_tokens += len(token_ids)
            return None
        for token_id in token_ids[:num_shown]:
            # One by one, since usage counts tokens up to the match.
            self.num_tokens += 1
            matched = self._push_text(self._detokenizer.push([token_id]), texts)
            if matched is not None:
                return matched
        self.num_tokens += len(token_ids) - num_shown
        return None

    def _push_text(self, text: str, texts: list[str]) -> str | None:
        if self.num_tokens <= self.request.params.min_tokens:
            texts.append(self._matcher.skip(text))
            return None
        result = self._matcher.push(text)
        texts.append(result.text)
        return result.matched

    def _ended_by_token(self, event: TokenEvent) -> bool:
        token_ids = event.token_ids
        return (
            event.finish_reason == "stop"
            and bool(token_ids)
            and token_ids[-1] in self._end_token_ids
        )

    def _stop_token(self, event: TokenEvent) -> int | None:
        """The client's own stop token that ended the answer; the model's end token is not told."""
        if not self._ended_by_token(event):
            return None
        token_id = event.token_ids[-1]
        return token_id if token_id in self.request.params.stop_token_ids else None


def build_runs(
    state: ServerState,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    *,
    limits: ModelLimits,
    default_max_tokens: int | None,
    prompt_field: str,
) -> list[ChoiceRun]:
    """The sequences of one call, prompt by prompt, n for each.

    Raises:
        InvalidRequestError: a prompt or a value does not fit the model; names the field.
    """
    runs = []
    for prompt_index, token_ids in enumerate(prompts):
        params = sampling.params
        if params.max_tokens is None and default_max_tokens is not None:
            room = min(limits.max_model_len, limits.max_total_tokens) - len(token_ids)
            params = msgspec.structs.replace(
                params, max_tokens=max(1, min(default_max_tokens, room))
            )
        for choice in range(sampling.n):
            request = Request(
                request_id=next(state.request_ids),
                prompt_token_ids=token_ids,
                params=msgspec.structs.replace(params, seed=_choice_seed(params.seed, choice)),
                priority=sampling.priority,
                cache_salt=sampling.cache_salt,
            )
            if choice == 0:
                path = prompt_field if len(prompts) == 1 else f"{prompt_field}[{prompt_index}]"
                with field_called("prompt", path):
                    validate_request(request, limits)
            index = prompt_index * sampling.n + choice
            runs.append(ChoiceRun(index, request, state.tokenizer, sampling))
    return runs


@contextlib.contextmanager
def field_called(field: str, given: str) -> Iterator[None]:
    """Errors about `field` in the block name the field that the client used for it, `given`."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != field or field == given:
            raise
        # The prompt is also what "prompt and answer" is about: only its first mention is the field.
        count = 1 if field == "prompt" else 0
        message = re.sub(rf"\b{field}\b", lambda _: given, error.message, count=count)
        raise InvalidRequestError(message, param=given, code=error.code) from error


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """A seed for each choice: the client's own for the first, different but repeatable ones after.

    Source: the finalizer of SplitMix64.
    """
    if seed is None or choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def usage_of(runs: Sequence[ChoiceRun], n: int) -> Usage:
    """Usage of a call so far.

    A prompt counts once. Its cached tokens are those that none of its n sequences computed.
    """
    firsts = range(0, len(runs), n)
    prompt_tokens = sum(len(runs[i].request.prompt_token_ids) for i in firsts)
    cached = sum(min(run.num_cached_tokens for run in runs[i : i + n]) for i in firsts)
    completion_tokens = sum(run.num_tokens for run in runs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


@contextlib.asynccontextmanager
async def call_scope(state: ServerState) -> AsyncIterator[Permit]:
    """Everything a call holds while it runs: a permit and a place in the drain.

    Raises:
        EngineUnavailableError: draining, or the engine is not ready.
        OverloadedError: too many unfinished requests.
    """
    try:
        if state.engine.dead_reason is not None:
            raise EngineUnavailableError(state.engine.dead_reason)
        with state.drain.counted():
            state.require_limits()
            with state.admission.enter() as permit:
                yield permit
    except (asyncio.CancelledError, ConnectionResetError):
        state.metrics.num_aborted.inc()
        raise


async def read_body(request: web.Request) -> bytes:
    """The body, at most `max_body_bytes` after decompression.

    Raises:
        web.HTTPRequestEntityTooLarge: larger; nothing is read where its length was announced.
        web.HTTPRequestTimeout: it did not arrive in time.
        InvalidRequestError: it cannot be decompressed.
    """
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(
            text=f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
        ) from error
    except web.RequestPayloadError as error:
        # aiohttp would otherwise try to read the rest and meet the same error without a handler.
        request.content.feed_eof()
        raise InvalidRequestError(f"the request body cannot be read: {error}") from error


async def read_request(request: web.Request, kind: type[S]) -> S:
    """The valid body as a record of type `kind`; unknown fields are noted.

    Raises:
        InvalidRequestError: not valid, or a known field that cannot be honoured.
        web.HTTPException: see `read_body`.
    """
    state = request.app[STATE]
    raw = await read_body(request)
    if len(raw) <= _PARSED_AT_ONCE_BYTES:
        body, unknown = parse_request(raw, kind)
    else:
        body, unknown = await state.in_text_pool(partial(parse_request, raw, kind))
    state.note_unknown_fields(unknown)
    return body


@contextlib.asynccontextmanager
async def generate(
    state: ServerState, runs: Sequence[ChoiceRun], started_s: float
) -> AsyncIterator[AsyncIterator[Piece]]:
    """Submits all sequences at once; yields their merged pieces; aborts what runs at the end.

    Args:
        state: the server.
        runs: from `build_runs`.
        started_s: `time.perf_counter()` when the call arrived.

    Raises:
        EngineUnavailableError: also out of the pieces.
    """
    streams: list[TokenStream] = []
    failure = "abort"
    try:
        for run in runs:
            # Not a comprehension: when one is refused, those before it must be aborted.
            streams.append(state.engine.submit(run.request))  # noqa: PERF401
        pairs = list(zip(runs, streams, strict=True))
        merged = (
            _merge(pairs, state.metrics, started_s)
            if len(pairs) > 1
            else _pieces(*pairs[0], state.metrics, started_s)
        )
        async with state.drain.interruptible(), contextlib.aclosing(merged) as pieces:
            yield pieces
    except EngineError:
        failure = "error"
        raise
    finally:
        for stream in streams:
            await stream.aclose()
        for run in runs[: len(streams)]:
            if not run.is_finished:
                state.metrics.count_finish(failure)


async def _merge(
    pairs: Sequence[tuple[ChoiceRun, TokenStream]], metrics: ServerMetrics, started_s: float
) -> AsyncGenerator[Piece, None]:
    # Bounded: a reader that is slow makes events wait, merged, at the engine client.
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(pairs))

    async def pump(run: ChoiceRun, stream: TokenStream) -> None:
        try:
            async with contextlib.aclosing(_pieces(run, stream, metrics, started_s)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(run, stream)) for run, stream in pairs]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_running -= item.finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pieces(
    run: ChoiceRun, stream: TokenStream, metrics: ServerMetrics, started_s: float
) -> AsyncGenerator[Piece, None]:
    first_s = last_s = 0.0
    async for event in stream:
        now_s = time.perf_counter()
        if not first_s:
            first_s = now_s
            metrics.ttft_s.observe(now_s - started_s)
        elif event.token_ids:
            metrics.inter_token_s.observe((now_s - last_s) / len(event.token_ids))
        last_s = now_s
        piece = run.feed(event)
        if piece.finish_reason is not None:
            await stream.aclose()
            _observe_finish(run, piece.finish_reason, metrics, (started_s, first_s, now_s))
            yield piece
            return
        yield piece
    raise EngineUnavailableError("the engine ended the request without a reason")


def _observe_finish(
    run: ChoiceRun,
    reason: ChoiceFinishReason,
    metrics: ServerMetrics,
    times_s: tuple[float, float, float],
) -> None:
    started_s, first_s, last_s = times_s
    metrics.count_finish(reason)
    metrics.e2e_s.observe(last_s - started_s)
    metrics.prompt_tokens.observe(len(run.request.prompt_token_ids))
    metrics.generation_tokens.observe(run.num_tokens)
    if run.num_tokens > 1:
        metrics.per_output_token_s.observe((last_s - first_s) / (run.num_tokens - 1))
