"""Untrusted bytes in, a valid request of another type out.

Owns parsing, the rules for fields that cannot be honoured, defaults, and the merge into
`SamplingParams`. Every refusal names the field. Limits that depend on token counts are checked by
`request.validate_request` once the prompt is tokenised.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.request import SamplingParams
from compiled_engine.server.protocol import (
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)
from compiled_engine.server.structured_output import structured_output

S = TypeVar("S", bound=msgspec.Struct)

MAX_CACHE_SALT_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16

# Values that do not change the answer; a field with any other value is refused.
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})

# Known fields that cannot be honoured -> further values that mean the same as leaving them out.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "documents": (),
    "early_stopping": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logit_processors": (),
    "logits_processors": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "no_stop_trim": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "return_hidden_states": (),
    "return_tokens_as_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "store": (),
    "suffix": (),
    "thinking_budget": (-1,),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "use_beam_search": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Known fields that never change the answer.
_WITHOUT_EFFECT = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_retention",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "stream_reasoning",
        "user",
    }
)
_REFUSED_MESSAGE_FIELDS = ("audio", "function_call", "refusal")

_PATH = re.compile(r"(?s)(.*) - at `\$\.?(.*)`$")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; NaN, Infinity and numbers beyond double precision are refused.

    Raises:
        InvalidRequestError: no valid JSON, nested too deeply, or no object.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def convert(value: Any, kind: type[S]) -> S:
    """Checks `value` against a record type; no type is converted into another.

    Raises:
        InvalidRequestError: a field is missing or has the wrong type; names it.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        if match is None:
            missing = re.search(r"missing required field `(\w+)`", str(error))
            field = missing.group(1) if missing else None
            raise InvalidRequestError(str(error), param=field) from error
        # "[...]" stands for the value of some key.
        path = match.group(2).removesuffix("[...]")
        raise InvalidRequestError(f"{path}: {match.group(1)}", param=path) from error


def parse_request(body: bytes, kind: type[S]) -> tuple[S, set[str]]:
    """The typed request and the names of unknown fields.

    Raises:
        InvalidRequestError: not valid, or a known field that cannot be honoured.
    """
    value = parse_object(body)
    known = set(kind.__struct_fields__)
    unknown = value.keys() - known
    for name in sorted(unknown):
        _refuse_unsupported(name, value[name], value)
    if issubclass(kind, GenerationRequest):
        unknown -= {"best_of", "top_logprobs"}
    unknown -= _REFUSED.keys() | _WITHOUT_EFFECT
    messages = value.get("messages")
    if "messages" in known and isinstance(messages, list):
        unknown |= _check_message_fields(messages)
    return convert({name: value[name] for name in value.keys() & known}, kind), unknown


def _is_neutral(value: Any, further: tuple[Any, ...]) -> bool:
    # 0 == False in Python, but where a switch is meant 0 is a mistake.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in (*_NEUTRAL, *further)
    )


def _refuse_unsupported(name: str, value: Any, body: Mapping[str, Any]) -> None:
    if name == "best_of":
        neutral = _is_neutral(value, (body.get("n") or 1,))
    elif name == "top_logprobs":
        neutral = _is_neutral(value, (0,))
    elif name in _REFUSED:
        neutral = _is_neutral(value, _REFUSED.get(name, ()))
    else:
        return
    if not neutral:
        raise InvalidRequestError(
            f"{name} is not supported by this server; leave it out", param=name
        )


def _check_message_fields(messages: list[Any]) -> set[str]:
    """Names of unknown fields in messages; refuses those that would change the prompt."""
    known = set(ChatMessage.__struct_fields__)
    unknown: set[str] = set()
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for name in _REFUSED_MESSAGE_FIELDS:
            if not _is_neutral(message.get(name), ()):
                raise InvalidRequestError(
                    f"messages[{index}].{name} is not supported by this server; leave it out",
                    param=f"messages[{index}].{name}",
                )
        unknown |= {
            f"messages[].{name}"
            for name in message.keys() - known
            if name not in _REFUSED_MESSAGE_FIELDS
        }
    return unknown


def default_sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling values for requests that leave them out.

    Args:
        values: names of `SamplingParams` fields; null values are skipped.

    Raises:
        ConfigError: an unknown name, or a value out of range.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(given, SamplingParams, strict=True)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise ConfigError(f"default sampling values of the model: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The part of a valid request that completions and chat share.

    Attributes:
        params: without the default for `max_tokens`, which depends on the prompt's length.
        n: sequences for each prompt.
        priority: lower values run first.
        cache_salt: prefix pages are shared only within one salt.
        stream: whether the answer is a stream.
        include_usage: end a stream with a chunk of usage.
        continuous_usage: put the usage so far into every chunk.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: keep the stop string or stop token in the text.
        truncate_prompt_tokens: keep this many tokens at a prompt's end; -1 keeps what fits.
        grammar_field: the field that says what the answer must look like, "" for none.
        cache_key: the client's `prompt_cache_key`; it is logged and changes no answer.
        return_token_ids: put the ids of prompt and answer beside the text.
        is_prompt_only: no token is wanted; the engine's one token is dropped.
    """

    params: SamplingParams
    n: int
    priority: int
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    skip_special_tokens: bool
    include_stop: bool
    truncate_prompt_tokens: int | None = None
    cache_key: str = ""
    grammar_field: str = ""
    return_token_ids: bool = False
    is_prompt_only: bool = False


def validate_sampling(
    request: GenerationRequest, defaults: SamplingParams, *, max_n: int, max_tokens: int | None
) -> Sampling:
    """Checks and resolves the shared fields.

    Args:
        request: as parsed.
        defaults: values of absent sampling fields.
        max_n: largest `n`.
        max_tokens: the client's limit on generated tokens, or None.

    Raises:
        InvalidRequestError: names the field and the limit.
    """
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_n:
        raise InvalidRequestError(f"n is {n}; allowed is 1 to {max_n}", param="n")
    num_kept = request.truncate_prompt_tokens
    if num_kept is not None and num_kept != -1 and num_kept < 1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {num_kept}; allowed is -1, or 1 and more",
            param="truncate_prompt_tokens",
        )
    stream = bool(request.stream)
    options = request.stream_options
    if options is not None and not stream:
        raise InvalidRequestError(
            "stream_options is allowed only where stream is true", param="stream_options"
        )
    params = _merge_params(request, defaults, max_tokens)
    structure = structured_output(request)
    if structure is not None:
        params = msgspec.structs.replace(params, grammar=structure.spec)
    return Sampling(
        params=params,
        n=n,
        priority=request.priority or 0,
        cache_salt=_short_text("cache_salt", request.cache_salt),
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output),
        truncate_prompt_tokens=num_kept,
        cache_key=_short_text("prompt_cache_key", request.prompt_cache_key),
        grammar_field=structure.field if structure is not None else "",
        return_token_ids=bool(request.return_token_ids),
    )


def with_logprobs(
    sampling: Sampling, *, tokens: int | None, prompt: int | None, start: int = 0
) -> Sampling:
    """The same with log probabilities; see `SamplingParams` for the numbers.

    Raises:
        InvalidRequestError: a number is out of range; names it as `SamplingParams` does.
    """
    params = msgspec.structs.replace(
        sampling.params, logprobs=tokens, prompt_logprobs=prompt, logprob_start=start
    )
    return dataclasses.replace(sampling, params=params)


def refuse_streamed_prompt(request: GenerationRequest) -> None:
    """Raises InvalidRequestError where a stream is asked for `prompt_logprobs`."""
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not available where stream is true", param="prompt_logprobs"
        )


def _short_text(field: str, value: str | None) -> str:
    if value is not None and len(value) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed",
            param=field,
        )
    return value or ""


def _merge_params(
    request: GenerationRequest, defaults: SamplingParams, max_tokens: int | None
) -> SamplingParams:
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "seed",
            "min_tokens",
            "ignore_eos",
        )
    }
    given["max_tokens"] = max_tokens
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    changes = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(defaults, **changes)


def _logit_bias(values: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in values.items():
        if not re.fullmatch(r"-?[0-9]{1,18}", key):
            raise InvalidRequestError(
                f"logit_bias has the key {key[:64]!r}, which is no token id", param="logit_bias"
            )
        biases[int(key)] = float(bias)
    return biases


def num_prompts(request: CompletionRequest) -> int:
    """How many prompts `completion_prompts` will give, at no cost."""
    prompt = request.prompt
    is_list = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    return len(prompt) if is_list else 1


def completion_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, each text or token ids; none is empty.

    Raises:
        InvalidRequestError: another type, or an empty prompt; names the item.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists, "
            "and not empty",
            param="prompt",
        )
    first = prompt[0]
    if isinstance(first, str):
        return _prompt_list(prompt, list[str])
    if isinstance(first, list):
        prompts: list[str | list[int]] = _prompt_list(prompt, list[list[int]])
        for index, token_ids in enumerate(prompts):
            if not token_ids:
                raise InvalidRequestError(
                    f"prompt[{index}] is empty: at least one token is needed",
                    param=f"prompt[{index}]",
                )
        return prompts
    return [_prompt_list(prompt, list[int])]


def _prompt_list(prompt: list[Any], kind: Any) -> Any:
    try:
        return msgspec.convert(prompt, kind, strict=True)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        path = f"prompt{match.group(2)}" if match else "prompt"
        text = match.group(1) if match else str(error)
        raise InvalidRequestError(f"{path}: {text}", param="prompt") from error
