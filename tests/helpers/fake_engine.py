"""A scripted engine and a byte tokenizer, for tests of the server without a model.

`FakeEngine` answers each request with the tokens its `reply` function gives, at its own pace; it
records what was submitted and aborted and can be killed. `ByteTokenizer` has one id for each byte,
so that any text, and any cut through a character, can be scripted.
"""

from __future__ import annotations

import asyncio
import codecs
import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from compiled_engine.chat_template import ChatTemplates
from compiled_engine.errors import EngineError, EngineUnavailableError, InvalidRequestError
from compiled_engine.ipc import ControlAction, ControlResult, EngineStatus
from compiled_engine.request import ModelLimits, Request, TokenEvent

BOS, EOS = 256, 257
LIMITS = ModelLimits(max_model_len=512, vocab_size=258, max_total_tokens=4096)


class ByteDetokenizer:
    """Holds back the bytes of a character that is not complete."""

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        texts = []
        for token_id in ids:
            if token_id < 256:
                texts.append(self._decoder.decode(bytes([token_id])))
            elif not self._skip:
                texts.append({BOS: "<bos>", EOS: "<eos>"}[token_id])
        return "".join(texts)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One id for each byte of UTF-8, a begin token and an end token."""

    eos_token_ids: tuple[int, ...] = (EOS,)
    vocab_size = 258
    special_token_ids = frozenset({BOS, EOS})
    has_chat_template = True
    chat_template_text = ""
    chat_template_variables: frozenset[str] = frozenset({"messages"})
    is_harmony = False

    def __init__(self, *, adds_bos: bool = False) -> None:
        self._adds_bos = adds_bos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self._adds_bos and add_special_tokens) + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = ByteDetokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])

    def text_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        starts = [i for i, character in enumerate(text) for _ in character.encode()]
        return [0] * (self._adds_bos and add_special_tokens) + starts

    def new_detokenizer(
        self, *, skip_special_tokens: bool = True, kept_tokens: Collection[str] = ()
    ) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt", param="continue_final_message"
            )
        text = "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
        text += "".join(f"{name}={value}\n" for name, value in template_kwargs.items())
        if continue_final_message:
            return text[:-1]
        return text + ("[assistant]" if add_generation_prompt else "")


class TemplateTokenizer(ByteTokenizer):
    """A byte tokenizer whose chats are rendered by a real template."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self._templates = ChatTemplates({"default": template}, {})
        self.chat_template_text = self._templates.text
        self.chat_template_variables = self._templates.variables

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        return self._templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )


def record_of(token_id: int, place: int, num_top: int) -> tuple[float, int, list[int], list[float]]:
    """What the fake model thinks of the token at a place of prompt and answer together.

    The token itself is the second likeliest, and the values are exact in single precision.
    """
    best = -1.0 - place / 8
    ids = [(token_id + 1) % 256, token_id, *((token_id + i) % 256 for i in range(2, 20))]
    return best - 0.5, 2, ids[:num_top], [best - 0.5 * i for i in range(num_top)]


def record_bytes(token_ids: Sequence[int], first: int, num_top: int) -> bytes:
    """The records of tokens that begin at place `first`, as the engine sends them."""
    data = b""
    for place, token_id in enumerate(token_ids, start=first):
        logprob, rank, ids, best = record_of(token_id, place, num_top)
        data += struct.pack(f"=fi{num_top}i{num_top}f", logprob, rank, *ids, *best)
    return data


def text_reply(text: str) -> Callable[[Request], list[int]]:
    """A script that answers every request with `text` and the end token."""
    return lambda request: [*text.encode(), EOS]


class FakeEngine:
    """An `EngineClient` without an engine.

    Attributes:
        submitted: every request, in order.
        aborted: ids of requests that were closed before their end.
        num_tokens_sent: tokens of all events that were read.
        controls: actions asked for, with their options.
        refusal: what `control` is refused with.
        offers_events: streams offer their events to a listener first, as the real ones do.
        num_listened: events that a listener took.
    """

    def __init__(
        self,
        reply: Callable[[Request], list[int]] | None = None,
        *,
        tokens_per_event: int = 1,
        delay_s: float = 0.0,
        num_cached_tokens: int = 0,
        num_retractions: int = 0,
        limits: ModelLimits | None = LIMITS,
    ) -> None:
        self.reply = reply or text_reply("hello")
        self.tokens_per_event = tokens_per_event
        self.delay_s = delay_s
        self.num_cached_tokens = num_cached_tokens
        self.num_retractions = num_retractions
        self.submitted: list[Request] = []
        self.aborted: list[int] = []
        self.num_tokens_sent = 0
        self.fail_with: str | None = None
        self.refuses = False  # the failure is the request's own fault
        self.controls: list[tuple[ControlAction, str, int]] = []
        self.refusal: EngineError | None = None
        self.step_age_s = 0.0
        self.is_closed = False
        self.offers_events = True
        self.num_listened = 0
        self.status = EngineStatus(
            phase="ready" if limits else "loading",
            limits=limits,
            num_pages_total=100,
            num_pages_active=25,
            num_pages_cached=30,
            num_pages_free=45,
        )
        self.limits = limits
        self.dead_reason: str | None = None
        self.is_dead = False
        self._running: dict[int, _FakeStream] = {}

    @property
    def is_ready(self) -> bool:
        return self.limits is not None and self.dead_reason is None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def kill(self, reason: str, *, is_dead: bool = True) -> None:
        """Ends every stream with EngineUnavailableError, now."""
        self.dead_reason = reason
        self.is_dead = is_dead
        for stream in list(self._running.values()):
            stream.broken.set()

    async def start(self) -> None:
        pass

    def submit(self, request: Request) -> _FakeStream:
        if not self.is_ready:
            raise EngineUnavailableError(self.dead_reason or "the engine is not ready")
        self.submitted.append(request)
        stream = _FakeStream(self, request)
        self._running[request.request_id] = stream
        return stream

    def abort(self, request_id: int) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def cancel(self, request_id: int, error: EngineError) -> None:
        stream = self._running.pop(request_id, None)
        if stream is not None:
            self.aborted.append(request_id)
            stream.error = error
            stream.broken.set()

    async def control(
        self, action: ControlAction, *, folder: str = "", num_steps: int = 0
    ) -> ControlResult:
        self.controls.append((action, folder, num_steps))
        if self.refusal is not None:
            raise self.refusal
        return ControlResult(call_id=1, path=f"{folder}/trace" if folder else "")

    def ended(self, request_id: int) -> None:
        self._running.pop(request_id, None)

    async def close(self) -> None:
        self.is_closed = True


class _FakeStream:
    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._rest = deque(engine.reply(request))
        self._num_sent = 0
        self._num_left = request.params.max_tokens or engine.limits.max_model_len - len(
            request.prompt_token_ids
        )
        self._listener: Callable[[TokenEvent], bool] | None = None
        self.broken = asyncio.Event()
        self.error: EngineError | None = None
        self.queue_s = 0.001
        self.num_retractions = engine.num_retractions
        self.grammar_s = 0.002 if request.params.is_masked else None

    def __aiter__(self) -> _FakeStream:
        return self

    def listen(self, listener: Callable[[TokenEvent], bool]) -> None:
        self._listener = listener

    async def __anext__(self) -> TokenEvent:
        while True:
            event = await self._event()
            if self._listener is None or not self._engine.offers_events:
                return event
            if not self._listener(event):
                return event
            self._engine.num_listened += 1

    async def _event(self) -> TokenEvent:
        try:
            await asyncio.wait_for(self.broken.wait(), self._engine.delay_s or 0.0001)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            await self.aclose()
            raise
        request_id = self._request.request_id
        if self.broken.is_set():
            self._engine.ended(request_id)
            raise self.error or EngineUnavailableError(self._engine.dead_reason or "dead")
        if self._engine.fail_with is not None:
            self._engine.ended(request_id)
            error, refuses = self._engine.fail_with, self._engine.refuses
            return TokenEvent(request_id, [], "error", error=error, is_refusal=refuses)
        return self._next_event()

    def _next_event(self) -> TokenEvent:
        request_id = self._request.request_id
        token_ids: list[int] = []
        reason = None
        while reason is None and len(token_ids) < self._engine.tokens_per_event:
            token_id = self._rest.popleft()
            token_ids.append(token_id)
            self._num_left -= 1
            params = self._request.params
            if token_id in params.stop_token_ids or (token_id == EOS and not params.ignore_eos):
                reason = "stop"
            elif self._num_left == 0:
                reason = "length"
            elif not self._rest:
                self._rest.append(EOS)
        self._engine.num_tokens_sent += len(token_ids)
        if reason is not None:
            self._engine.ended(request_id)
        event = TokenEvent(request_id, token_ids, reason, self._engine.num_cached_tokens)
        return self._with_logprobs(event)

    def _with_logprobs(self, event: TokenEvent) -> TokenEvent:
        params, prompt = self._request.params, self._request.prompt_token_ids
        made: dict[str, bytes] = {}
        if params.logprobs is not None:
            first = len(prompt) + self._num_sent
            made["logprobs"] = record_bytes(event.token_ids, first, params.logprobs)
        if params.prompt_logprobs is not None and not self._num_sent:
            first = params.logprob_start + 1
            made["prompt_logprobs"] = record_bytes(prompt[first:], first, params.prompt_logprobs)
        self._num_sent += len(event.token_ids)
        return msgspec.structs.replace(event, **made)

    async def aclose(self) -> None:
        self._engine.abort(self._request.request_id)
