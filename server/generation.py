"""From valid prompts to text pieces: the part that completions and chat completions share.

Owns building engine requests, merging the choices of one call, and its usage. Does not own JSON
shapes, nor how one choice's tokens become text (`choice`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from compiled_engine.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
)
from compiled_engine.request import ModelLimits, Request, TokenEvent, validate_request
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.choice import AnswerFormat, ChoiceRun, Piece
from compiled_engine.server.engine_client import TokenStream
from compiled_engine.server.protocol import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from compiled_engine.server.request_stats import SequenceStats
from compiled_engine.server.shortcut import Shortcut
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import Sampling, parse_request

S = TypeVar("S", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 120.0
# Truncation needs all tokens of a text: one with more than this many times what fits is refused.
MAX_TRUNCATION = 16
MAX_LOGGED_BODY_BYTES = 64 * 1024
# Parsing more than this would hold up the other calls, so it is done in a text thread.
_PARSED_AT_ONCE_BYTES = 64 * 1024
_MASK_64 = 2**64 - 1


def build_runs(
    state: ServerState,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    *,
    permit: Permit,
    limits: ModelLimits,
    default_max_tokens: int | None,
    prompt_field: str,
    answer: AnswerFormat | None = None,
) -> list[ChoiceRun]:
    """The sequences of one call, prompt by prompt, n for each; the permit grows to their tokens.

    Raises:
        InvalidRequestError: a prompt or a value does not fit the model; names the field.
        OverloadedError: too many prompt tokens are unfinished.
    """
    longest = min(limits.max_model_len, limits.max_total_tokens)
    kept = [kept_tokens(token_ids, sampling, longest, default_max_tokens) for token_ids in prompts]
    permit.extend_tokens(sum(map(len, kept)) * sampling.n)
    runs = []
    for prompt_index, token_ids in enumerate(kept):
        params = sampling.params
        if params.max_tokens is None and default_max_tokens is not None:
            room = longest - len(token_ids)
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
            run = ChoiceRun(index, request, state.tokenizer, sampling, answer)
            if sampling.truncate_prompt_tokens is not None:
                run.num_truncated_tokens = len(prompts[prompt_index]) - len(token_ids)
            runs.append(run)
    return runs


def kept_tokens(
    token_ids: list[int], sampling: Sampling, longest: int, default_max_tokens: int | None
) -> list[int]:
    """The prompt, or the end of it where the client asked for truncation.

    -1 keeps what fits beside `max_tokens`.
    """
    num_kept = sampling.truncate_prompt_tokens
    if num_kept == -1:
        num_kept = longest - (sampling.params.max_tokens or default_max_tokens or 1)
    if num_kept is None or num_kept <= 0:
        return token_ids  # what is too long is refused
    return token_ids[-num_kept:]


def encode_bound(limits: ModelLimits, sampling: Sampling) -> int:
    """Tokens beyond which a text is refused from its beginning alone, without tokenising it all."""
    longest = min(limits.max_model_len, limits.max_total_tokens)
    return longest * MAX_TRUNCATION if sampling.truncate_prompt_tokens is not None else longest


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
    details = PromptTokensDetails(cached_tokens=cached)
    truncated = [run.num_truncated_tokens for run in runs[::n]]
    if truncated and truncated[0] is not None:
        details.truncated_tokens = sum(number or 0 for number in truncated)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=details,
        completion_tokens_details=(
            CompletionTokensDetails(sum(run.num_reasoning_tokens for run in runs))
            if any(run.has_parser for run in runs)
            else UNSET
        ),
    )


@contextlib.contextmanager
def _traced(request: web.Request) -> Iterator[None]:
    """Records the call while the block runs, if calls are recorded."""
    tracing, caller = request.app[STATE].tracing, request[CALLER]
    if tracing is None:
        yield
        return
    trace = tracing.begin(
        request.headers,
        path=request.path,
        request_id=caller.request_id,
        started_s=caller.started_s,
    )
    request[CALLER] = dataclasses.replace(caller, trace=trace)
    try:
        yield
    except BaseException as error:
        trace.fail(error)
        raise
    finally:
        trace.end()


@contextlib.asynccontextmanager
async def call_scope(request: web.Request) -> AsyncIterator[Permit]:
    """Everything a call holds while it runs: a permit, a place in the drain, and its trace.

    Raises:
        EngineUnavailableError: draining, or the engine is not ready.
        OverloadedError: too many unfinished requests.
    """
    state = request.app[STATE]
    try:
        if state.engine.dead_reason is not None:
            raise EngineUnavailableError(state.engine.dead_reason)
        with _traced(request), state.drain.counted():
            state.require_limits()
            with state.admission.enter(request[CALLER].key_name) as permit:
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
    if state.config.log_prompts:
        shown = raw[:MAX_LOGGED_BODY_BYTES].decode("utf-8", "backslashreplace")
        logger.info("request=%s body=%r", request[CALLER].request_id, shown)
    if len(raw) <= _PARSED_AT_ONCE_BYTES:
        body, unknown = parse_request(raw, kind)
    else:
        body, unknown = await state.in_text_pool(partial(parse_request, raw, kind))
    state.note_unknown_fields(unknown)
    return body


@contextlib.asynccontextmanager
async def generate(
    state: ServerState,
    runs: Sequence[ChoiceRun],
    caller: Caller,
    shortcut: Shortcut | None = None,
) -> AsyncIterator[AsyncIterator[Piece]]:
    """Submits all sequences at once; yields their merged pieces; aborts what runs at the end.

    Args:
        state: the server.
        runs: from `build_runs`.
        caller: the call they belong to.
        shortcut: may take pieces of a single sequence instead, while the reader waits for them.

    Raises:
        EngineUnavailableError: also out of the pieces.
    """
    sources: list[_Source] = []
    failure = "abort"
    if caller.trace is not None:
        caller.trace.describe(state.model_name, [run.request for run in runs])
    try:
        for run in runs:
            # Not a comprehension: when one is refused, those before it must be aborted.
            stats = SequenceStats(
                state.metrics,
                caller,
                run.index,
                len(run.request.prompt_token_ids),
                run.cache_key,
            )
            stream = state.engine.submit(run.request)
            state.recent.start(run.request.request_id, stats, stream)
            sources.append(_Source(run, stream, stats))
        if shortcut is not None and len(sources) == 1 and runs[0].is_ended_by_engine:
            sources[0].stream.listen(partial(_send, sources[0], shortcut))
        merged = _merge(sources) if len(sources) > 1 else _pieces(sources[0])
        with state.calls.listed(caller, [run.request.request_id for run in runs]):
            async with state.drain.interruptible(), contextlib.aclosing(merged) as pieces:
                yield pieces
    except EngineError as error:
        failure = "abort" if isinstance(error, RequestAbortedError) else "error"
        if caller.trace is not None:
            caller.trace.fail(error)  # inside a stream nobody else hears of it
        raise
    finally:
        for source in sources:
            await source.stream.aclose()
            source.end(failure)
            state.recent.end(source.run.request.request_id)


@dataclass(frozen=True, slots=True)
class _Source:
    """One submitted sequence: its text, its events, what it costs."""

    run: ChoiceRun
    stream: TokenStream
    stats: SequenceStats

    def end(self, reason: str) -> None:
        self.stats.end(
            reason,
            num_tokens=self.run.num_tokens,
            num_cached_tokens=self.run.num_cached_tokens,
            num_retractions=self.stream.num_retractions,
        )


def _send(source: _Source, shortcut: Shortcut, event: TokenEvent) -> bool:
    """Takes an event in the middle of an answer, if its reader keeps up."""
    if event.finish_reason is not None or not shortcut.is_open:
        return False
    source.stats.take(event, source.stream.queue_s)
    shortcut.send(source.run.feed(event))
    return True


async def _merge(sources: Sequence[_Source]) -> AsyncGenerator[Piece, None]:
    # Bounded: a reader that is slow makes events wait, merged, at the engine client.
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(sources))

    async def pump(source: _Source) -> None:
        try:
            async with contextlib.aclosing(_pieces(source)) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
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


async def _pieces(source: _Source) -> AsyncGenerator[Piece, None]:
    run, stream = source.run, source.stream
    async for event in stream:
        source.stats.take(event, stream.queue_s, stream.grammar_s)
        piece = run.feed(event)
        if piece.finish_reason is not None:
            await stream.aclose()
            # That the answer ended in calls is known to the client only; the sequence just stopped.
            source.end("length" if piece.finish_reason == "length" else "stop")
            yield piece
            return
        yield piece
    raise EngineUnavailableError("the engine ended the request without a reason")
