"""Offline use: an engine in this process, without a server.

from compiled_engine import LLM, SamplingParams

with LLM("Qwen/Qwen3-0.6B") as llm:
    print(llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=16))[0].text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from msgspec import structs

from compiled_engine.config import EngineConfig
from compiled_engine.engine import Engine, build_engine
from compiled_engine.errors import EngineError, InvalidRequestError
from compiled_engine.logprob_data import TokenLogprob, read_records
from compiled_engine.models.source import DEFAULT_MODEL
from compiled_engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
    validate_request,
)
from compiled_engine.settings import BuildProgress
from compiled_engine.settings_file import with_file
from compiled_engine.tokenizer import Tokenizer

Prompt = str | list[int]


@dataclass(frozen=True)
class GenerateOutput:
    """What one prompt gave.

    Attributes:
        text: the answer, without the end token and without a matched stop string.
        token_ids: every generated token, the end token included.
        finish_reason: "stop" or "length".
        num_prompt_tokens: of the prompt.
        num_cached_tokens: of them, found in the prefix cache.
        logprobs: of `token_ids`; empty unless the parameters ask for them.
        prompt_logprobs: of the prompt's tokens behind `logprob_start`, likewise.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class LLM:
    """A loaded model.

    Args:
        model: folder, GGUF file or Hugging Face id; None takes the default model.
        progress: called with (phase, label, done, total) while it loads and compiles.
        options: any other field of `EngineConfig`.

    Raises:
        ConfigError: an option or the model folder cannot work.
    """

    def __init__(
        self, model: str | None = None, *, progress: BuildProgress | None = None, **options: Any
    ) -> None:
        self.config = EngineConfig(model=model or DEFAULT_MODEL, **with_file(options))
        self.engine: Engine = build_engine(self.config, progress or (lambda *_: None))
        self.tokenizer = Tokenizer.from_folder(
            self.engine.settings.tokenizer_folder, trust_remote_code=self.config.trust_remote_code
        )
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerateOutput]:
        """Answers every prompt, batched. Blocks until all are done.

        Args:
            prompts: one text or token-id list, or several.
            sampling_params: one for all, or one for each.

        Raises:
            InvalidRequestError: a prompt or parameter cannot be honoured; nothing was run then. Or
                a grammar cannot be compiled or followed; the other answers are lost.
        """
        listed = _as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise InvalidRequestError(
                f"{len(listed)} prompts but {len(params)} sampling_params", param="sampling_params"
            )
        requests = [self._request(*pair) for pair in zip(listed, params, strict=True)]
        for request in requests:
            validate_request(request, self.engine.limits)
        collectors = {r.request_id: _Collector(r, self.tokenizer) for r in requests}
        try:
            for request in requests:
                self.engine.loop.submit(request)
            self._run(collectors)
        finally:
            # Does nothing unless it was interrupted: then nothing of it may run on in a next call.
            for request in requests:
                self.engine.loop.abort(request.request_id)
        return [collectors[request.request_id].output() for request in requests]

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
    ) -> GenerateOutput:
        """Answers one conversation, rendered by the model's chat template."""
        prompt = self.tokenizer.apply_chat_template(messages)
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return self.generate([token_ids], sampling_params)[0]

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: the next prompts are computed from their first token on.

        Only between calls of `generate`, as everything here: no request may be running.

        Raises:
            InvalidRequestError: requests are running.
        """
        loop = self.engine.loop
        if loop.has_work:
            raise InvalidRequestError("requests are running: the prefix cache is in use")
        loop.reset_prefix_cache()

    def close(self) -> None:
        """Frees the model and its caches; may be called twice. Nothing else works afterwards."""
        engine = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._next_id += 1
        return Request(request_id=self._next_id, prompt_token_ids=token_ids, params=params)

    def _run(self, collectors: dict[int, _Collector]) -> None:
        loop = self.engine.loop
        while loop.has_work:
            for event in loop.step():
                self._collect(collectors, event)
            for failure in loop.take_refusals():
                if failure.is_refusal:
                    raise InvalidRequestError(str(failure.error), param="grammar")
                raise EngineError(str(failure.error))
        for event in loop.drain():
            self._collect(collectors, event)

    def _collect(self, collectors: dict[int, _Collector], event: TokenEvent) -> None:
        collector = collectors[event.request_id]
        if any([collector.add(part) for part in _single_tokens(event)]):
            self.engine.loop.abort(event.request_id)


class _Collector:
    """Tokens of one request, and the search for its stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self._logprobs = self._prompt_logprobs = b""
        self._detokenizer = tokenizer.new_detokenizer()
        self._search_from = 0  # where in the text a stop string may begin

    def add(self, event: TokenEvent) -> bool:
        """Takes an event in; True if a stop string ended the request early."""
        if self.finish_reason is not None:
            return False
        self.token_ids.extend(event.token_ids)
        self.num_cached_tokens = event.num_cached_tokens
        self._logprobs += event.logprobs
        self._prompt_logprobs += event.prompt_logprobs
        self.finish_reason = event.finish_reason
        shown = event.token_ids[:-1] if event.finish_reason == "stop" else event.token_ids
        self.text += self._detokenizer.push(shown)
        if event.finish_reason is not None:
            self.text += self._detokenizer.finish()
        if len(self.token_ids) <= self.request.params.min_tokens:
            # As on the server: no stop string begins or ends in this text.
            self._search_from = len(self.text)
            return False
        begin = self._find_stop()
        if begin is None:
            return False
        self.text = self.text[:begin]
        was_running = self.finish_reason is None
        self.finish_reason = "stop"
        return was_running

    def _find_stop(self) -> int | None:
        """Where the stop string begins that completes first, the longest of several; or None."""
        found = []
        for stop in self.request.params.stop:
            begin = self.text.find(stop, self._search_from)
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None

    def output(self) -> GenerateOutput:
        """The finished request."""
        params, prompt = self.request.params, self.request.prompt_token_ids
        logprobs, prompt_logprobs = [], []
        if params.logprobs is not None:
            logprobs = read_records(self._logprobs, self.token_ids, params.logprobs)
        if params.prompt_logprobs is not None:
            scored = prompt[params.logprob_start + 1 :]
            prompt_logprobs = read_records(self._prompt_logprobs, scored, params.prompt_logprobs)
        return GenerateOutput(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _single_tokens(event: TokenEvent) -> list[TokenEvent]:
    """The event in parts, so that an answer ends with the token that completes a stop string."""
    if len(event.token_ids) == 1:
        return [event]
    *forced, last = event.token_ids
    parts = [structs.replace(event, token_ids=[token], finish_reason=None) for token in forced]
    return [*parts, structs.replace(event, token_ids=[last])]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
