"""What a client asks for and what it gets back, as plain typed records (no torch).

Owns the sampling parameters with their limits, the request, and the per-step token event. The
server
builds these from JSON; the engine process receives them through `ipc`; `LLM` builds them directly.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from compiled_engine.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 16
MAX_TOP_K = 2**31 - 1
MAX_GRAMMAR_CHARS = 128 * 1024
MAX_CLOSING_TOKENS = 64
MAX_LOGPROBS = 20
# Of one prompt: entries of all its positions together, the token's own included.
MAX_PROMPT_LOGPROB_ENTRIES = 1 << 18
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**15), 2**15 - 1


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like. Lengths are checked on construction, the rest when it is used.

    Attributes:
        kind: of the text: a JSON Schema, nothing (any JSON object), a regular expression that the
            whole answer matches, a JSON list of texts of which it is one, an EBNF grammar with the
            rule "root", or a structural tag in JSON.
        text: empty for "json_object" only.

    Raises:
        InvalidRequestError: the text is empty or too long.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        _check_length(self.kind, len(self.text), MAX_GRAMMAR_CHARS, unit="characters")
        if not self.text and self.kind != "json_object":
            raise InvalidRequestError(f"{self.kind} is empty", param=self.kind)


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How much an answer may think; then the tokens that end thinking are forced on it.

    Attributes:
        max_tokens: between the markers, which do not count; 0 and more.
        closing: text that ends thinking.
        closing_ids: its tokens, at most `MAX_CLOSING_TOKENS`.
        opening: text that begins it, at the answer's start; empty where the prompt has begun it.
        enders: further texts that end it.
        reopens: the opening counts anywhere, and again after an end; all of it is one budget.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    max_tokens: int
    closing: str
    closing_ids: tuple[int, ...]
    opening: str = ""
    enders: tuple[str, ...] = ()
    reopens: bool = False

    def __post_init__(self) -> None:
        _check_range("thinking_token_budget", self.max_tokens, 0, 2**30)
        _check_length("thinking.closing_ids", len(self.closing_ids), MAX_CLOSING_TOKENS)
        if not (self.closing and self.closing_ids):
            raise InvalidRequestError("thinking.closing is empty", param="thinking_token_budget")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens of one request are chosen and when it ends. Checked on construction.

    Attributes:
        temperature: 0 is greedy; at most 100.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches top_p; in (0, 1].
        min_p: drop tokens below min_p times the largest probability; in [0, 1].
        frequency_penalty: subtracted once per earlier *generated* occurrence; in [-2, 2].
        presence_penalty: subtracted if the token was *generated* before; in [-2, 2].
        repetition_penalty: divides (or multiplies, if negative) logits of tokens in prompt or
            output; in [0.001, 10], as a smaller one makes infinities.
        logit_bias: token id -> value added to its logit; values in [-100, 100].
        seed: makes the draw a function of (seed, position); None takes a fresh one.
        stop: strings that end the answer; found by the server in detokenised text.
        stop_token_ids: token ids that end the answer.
        min_tokens: no end token is chosen before this many generated tokens.
        max_tokens: generated tokens at most; None means up to the model's length.
        ignore_eos: end-of-sequence tokens do not end the answer, unless a grammar is given.
        grammar: what the answer must look like; it also decides where the answer may end.
        thinking: how much the answer may think; None for any amount.
        logprobs: with each generated token its log probability and those of so many likeliest ones,
            in [0, 20]; None for none. They are the model's own: before temperature, penalties, bias
            and grammar.
        prompt_logprobs: the same for the prompt's tokens.
        logprob_start: the prompt's tokens behind this position are meant; those up to it may come
            from the prefix cache. Only with `prompt_logprobs`.

    Raises:
        InvalidRequestError: a value is out of range; names the field, the value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, -1, MAX_TOP_K)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.001, 10.0)
        if self.seed is not None:
            _check_range("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens = {self.max_tokens}",
                param="min_tokens",
            )
        if self.grammar is not None and self.min_tokens:
            raise InvalidRequestError(
                "min_tokens cannot be combined with a grammar, which decides where the answer ends",
                param="min_tokens",
            )
        self._check_logprobs()
        self._check_lists()

    @property
    def is_masked(self) -> bool:
        """Tokens are chosen under masks that the host makes."""
        return self.grammar is not None or self.thinking is not None

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_range("logprob_start", self.logprob_start, 0, 2**31 - 1)
        if self.logprob_start and self.prompt_logprobs is None:
            raise InvalidRequestError("logprob_start needs prompt_logprobs", param="logprob_start")

    def _check_lists(self) -> None:
        _check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if isinstance(self.stop, str):
            # It would be taken for a list of one-character strings.
            raise InvalidRequestError(
                f"stop is the string {self.stop!r}; a tuple of strings is meant", param="stop"
            )
        _check_length("stop", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            if not text:
                raise InvalidRequestError("stop must not hold an empty string", param="stop")
            _check_length("stop", len(text), MAX_STOP_STRING_CHARS, unit="characters")
        _check_length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may ask of the loaded model; the engine publishes it once it is ready.

    Attributes:
        max_model_len: prompt plus generated tokens at most.
        vocab_size: token ids below this exist; padding of the embedding does not count.
        max_total_tokens: tokens the KV pool holds; one request must fit into it.
    """

    max_model_len: int
    vocab_size: int
    max_total_tokens: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence (a client's `n` makes n of these).

    Attributes:
        request_id: chosen by the submitting process, never reused by it.
        prompt_token_ids: at least one token.
        priority: lower values run first; first come first served within a value.
        cache_salt: prefix pages are shared only between requests with the same salt.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """Tokens one request gained in one step, and its end if it ended.

    Attributes:
        request_id: the request's own id.
        token_ids: new tokens in order; the end token that stopped the request is included.
        finish_reason: None while it runs.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        error: message for the client where finish_reason is "error".
        is_refusal: the error is the client's: the request cannot be honoured as it stands.
        logprobs: a `logprob_data` record for each of `token_ids`, if the request asked for them.
        prompt_logprobs: likewise for the prompt behind `logprob_start`; all with the first token.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    is_refusal: bool = False
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


def validate_request(request: Request, limits: ModelLimits) -> None:
    """Checks one request against the model's limits.

    Raises:
        InvalidRequestError: names the field and both numbers.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    params = request.params
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt is empty: at least one token is needed", param="prompt")
    longest = min(limits.max_model_len, limits.max_total_tokens)
    if num_prompt_tokens >= longest:
        raise InvalidRequestError(
            f"prompt has {num_prompt_tokens} tokens; at most {longest - 1} fit, because prompt and "
            f"answer share {longest} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and num_prompt_tokens + params.max_tokens > longest:
        raise InvalidRequestError(
            f"prompt ({num_prompt_tokens} tokens) plus max_tokens ({params.max_tokens}) is more "
            f"than the {longest} tokens that fit; max_tokens can be at most "
            f"{longest - num_prompt_tokens}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    _check_range("priority", request.priority, PRIORITY_MIN, PRIORITY_MAX)
    _check_prompt_logprobs(params, num_prompt_tokens)
    check_token_ids("prompt", request.prompt_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", params.logit_bias, limits.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if params.thinking is not None:
        check_token_ids("thinking.closing_ids", params.thinking.closing_ids, limits.vocab_size)


def _check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    if params.logprob_start >= num_prompt_tokens:
        raise InvalidRequestError(
            f"logprob_start is {params.logprob_start}, but the prompt has {num_prompt_tokens} "
            "tokens",
            param="logprob_start",
        )
    num_entries = (num_prompt_tokens - params.logprob_start) * (params.prompt_logprobs + 1)
    if num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"prompt_logprobs is {params.prompt_logprobs} for {num_prompt_tokens} prompt tokens: "
            f"{num_entries} entries, of at most {MAX_PROMPT_LOGPROB_ENTRIES} that are allowed",
            param="prompt_logprobs",
        )


def check_token_ids(
    field: str, token_ids: list[int] | tuple[int, ...] | dict[int, float], vocab_size: int
) -> None:
    """Raises InvalidRequestError for the first id outside [0, vocab_size)."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field} holds token id {token_id}; ids run from 0 to {vocab_size - 1}",
                param=field,
            )


def _check_range(
    field: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    # Comparisons only: they are false for NaN, and an int of any size can be compared.
    is_above = value > low if open_low else value >= low
    if not (is_above and value <= high):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(
            f"{field} is {value}; allowed is {bracket}{_number(low)}, {_number(high)}]",
            param=field.split("[")[0],
        )


def _number(value: float) -> str:
    """An int with all its digits, a float as short as it can be."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_length(field: str, length: int, limit: int, *, unit: str = "entries") -> None:
    if length > limit:
        raise InvalidRequestError(
            f"{field} has {length} {unit}; at most {limit} are allowed", param=field
        )
