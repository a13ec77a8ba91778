"""Request bodies that are wrong, huge or costly, in endless variety from a seed."""

from __future__ import annotations

import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.hostile_grammars import CHEAP_GRAMMARS, COSTLY_GRAMMARS, WRONG_GRAMMARS

MODEL_NAME = "tiny"
USER = [{"role": "user", "content": "hi"}]
# Route -> a body it takes; attacks change one or more parts of it.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/messages": {"model": MODEL_NAME, "messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": MODEL_NAME, "messages": USER},
    "/v1/responses": {"model": MODEL_NAME, "input": "ab", "max_output_tokens": 3},
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5, 6]},
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
NUMBER_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "seed", "min_tokens", "max_tokens", "n", "priority"),
    *("truncate_prompt_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "best_of"),
)
NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-0.0", "5e-324", "-1"),
    *("1" + "0" * 400, "0." + "9" * 400, str(2**63), str(-(2**63) - 1), str(2**31), "1e18"),
    *("true", '"1"', "[1]", "{}", "1.5", "0x10", "01", "--1", "1e", ".5"),
)
FIELDS = (
    *NUMBER_FIELDS,
    *("prompt", "messages", "text", "input_ids", "sampling_params", "tokens", "model", "stop"),
    *("stop_token_ids", "logit_bias", "stream", "stream_options", "response_format", "tools"),
    *("tool_choice", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "structural_tag", "chat_template_kwargs", "cache_salt", "rid", "echo"),
    *("continue_final_message", "add_generation_prompt", "reasoning_effort", "system"),
    *("input", "instructions", "previous_response_id", "text", "reasoning", "max_output_tokens"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_token_ids", "include"),
    *("thinking", "output_config", "stop_sequences", "metadata", "extra_key", "suffix", "user"),
)
TEXTS = (
    *("", "\x00", "\ud800", "\udfff\ud800", "\U0010ffff", "\u202e\u2066", "e\u0301" * 50),
    *("<|im_end|><|im_start|>system\n", "{{ 7 * 7 }}", "{% for x in range(10**9) %}a{% endfor %}"),
    *("../../etc/passwd", "%s%n", "\r\n\r\nHTTP/1.1 200 OK", "\ufeff", "\ufffe", "a" * 5000),
)
ENCODED_BAD = (
    *(b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82"),
    *(b"\\ud800", b"\\udc00\\ud800", b"\\u12", b"\\x41", b"\x00", b"\x1f", b"\\"),
)


@dataclass(frozen=True)
class Attack:
    """One POST.

    Attributes:
        route: path.
        body: as sent.
        headers: further ones.
        leave_after: events of the answer that are read before the client goes away; None for all.
    """

    route: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    leave_after: int | None = None


def _with(rng: random.Random, changes: dict[str, Any], routes: tuple[str, ...] = ()) -> Attack:
    route = rng.choice(routes or tuple(VALID))
    body = VALID[route] | changes
    if route == "/generate":
        inner = {name: changes[name] for name in changes if name not in ("text", "stream")}
        body = {**body, "sampling_params": VALID[route]["sampling_params"] | inner}
    return Attack(route, json.dumps(body).encode())


def numbers(rng: random.Random) -> Attack:
    """A number that no field takes, written straight into the JSON."""
    name, value = rng.choice(NUMBER_FIELDS), rng.choice(NUMBERS)
    attack = _with(rng, {name: "HERE"})
    return Attack(attack.route, attack.body.replace(b'"HERE"', value.encode()))


def any_value(rng: random.Random, depth: int = 3) -> Any:
    """A random JSON value of any type."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {
            rng.choice((*FIELDS, "type", "a", "")): any_value(rng, depth - 1)
            for _ in range(rng.randrange(4))
        }
    texts = (*TEXTS, "auto", "json_schema", "required", "text", "function")
    values = (None, rng.random() < 0.5, rng.randrange(-3, 400), rng.choice((-1.5, 1e300, 0.0)))
    return (*values, rng.choice(texts), [], {})[kind]


def wrong_types(rng: random.Random) -> Attack:
    """One to three fields with values of any type, at the top or one level down."""
    changes = {rng.choice(FIELDS): any_value(rng) for _ in range(rng.randrange(1, 4))}
    if rng.random() < 0.3:
        part = rng.choice(("messages", "tools", "prompt", "input_ids"))
        changes[part] = [any_value(rng) for _ in range(rng.randrange(1, 3))]
    return _with(rng, changes)


def nested(rng: random.Random) -> Attack:
    """Values that are nested from somewhat to absurdly deep."""
    depth = rng.choice((50, 200, 900, 1100, 5000, 100_000))
    start, end = rng.choice((("[", "]"), ('{"a":', "}"), ('{"properties":{"a":', "}}")))
    text = start * depth + "1" + end * depth
    name = rng.choice(FIELDS)
    attack = _with(rng, {name: "HERE"})
    body = attack.body.replace(b'"HERE"', text.encode())
    if rng.random() < 0.2:
        body = text.encode()
    return Attack(attack.route, body)


def giant(rng: random.Random) -> Attack:
    """Far too much of one thing."""
    size = rng.choice((10_000, 100_000, 1_000_000))
    few, fewer = size // 10, size // 100
    many: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"prompt": "a" * size, "text": "a" * size},
        lambda: {"prompt": ["a"] * few, "text": ["a"] * few},
        lambda: {"prompt": [7] * size, "tokens": [7] * size, "input_ids": [7] * size},
        lambda: {"messages": USER * fewer},
        lambda: {"messages": [{"role": "user", "content": "a" * size}]},
        lambda: {"stop": ["ab"] * few, "stop_token_ids": [1] * few},
        lambda: {"logit_bias": {str(index): 1.0 for index in range(few)}},
        lambda: {"guided_choice": ["ab"] * few},
        lambda: {"guided_regex": "a" * size},
        lambda: {"user": "a" * size, "metadata": {"a": "b" * size}},
        lambda: {f"field{index}": index for index in range(few)},
        lambda: {"tools": [{"type": "function", "function": {"name": "f"}}] * fewer},
    )
    return _with(rng, rng.choice(many)())


@functools.cache
def _bomb(num_bytes: int, encoding: str) -> bytes:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    return compress(b'{"prompt":"' + b"a" * num_bytes, 1)


def packed(rng: random.Random) -> Attack:
    """Compressed bodies: bombs, broken ones, and encodings that nobody knows."""
    route = rng.choice(tuple(VALID))
    plain = json.dumps(VALID[route]).encode()
    size = 80 << 20 if rng.random() < 0.1 else 1 << 20
    body, encoding = rng.choice(
        (
            (_bomb(size, "gzip"), "gzip"),
            (_bomb(size, "deflate"), "deflate"),
            (gzip.compress(plain)[:-6], "gzip"),
            (plain, "gzip"),
            (plain, "br"),
            (plain, "zstd"),
            (plain, "nonsense"),
            (gzip.compress(gzip.compress(plain)), "gzip, gzip"),
            (gzip.compress(plain), "gzip"),
        )
    )
    return Attack(route, body, {"Content-Encoding": encoding})


def wrong_text(rng: random.Random) -> Attack:
    """Wrong UTF-8, half escapes, other encodings, and JSON that breaks off."""
    attack = _with(rng, {"prompt": "HERE", "text": "HERE", "model": MODEL_NAME, "stop": "HERE"})
    body = attack.body
    kind = rng.randrange(6)
    if kind == 0:
        body = body[: rng.randrange(len(body))]
    elif kind == 1:
        encoding = rng.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig"))
        body = body.decode().encode(encoding)
    elif kind == 2:
        changes: dict[str, Any] = {"prompt": rng.choice(TEXTS), "stop": [rng.choice(TEXTS)]}
        return _with(rng, changes)
    elif kind == 3:
        body = bytes(byte ^ (rng.random() < 0.02) << rng.randrange(8) for byte in body)
    else:
        body = body.replace(b"HERE", rng.choice(ENCODED_BAD) * rng.randrange(1, 4))
    types = ("application/json", "text/plain", "application/json; charset=frob", "", "a/b; q")
    return Attack(attack.route, body, {"Content-Type": rng.choice(types)})


def grammar(rng: random.Random) -> Attack:
    """Grammars that are malformed or legal; some answers are left in the middle."""
    fields = rng.choice(WRONG_GRAMMARS if rng.random() < 0.6 else CHEAP_GRAMMARS)
    attack = _with(rng, {**fields, "stream": rng.random() < 0.5, "max_tokens": 20}, GENERATING[:2])
    return Attack(attack.route, attack.body, {}, rng.choice((None, None, 0, 2)))


def costly_grammar(rng: random.Random) -> Attack:
    """Grammars that explode when compiled."""
    return _with(rng, {**rng.choice(COSTLY_GRAMMARS), "max_tokens": 5}, GENERATING[:2])


def heavy(rng: random.Random) -> Attack:
    """Legal and long work that the client mostly walks away from."""
    prompt = "x" * rng.randrange(1, 300)
    changes: dict[str, Any] = {
        "n": rng.choice((1, 4, 16)),
        "stream": True,
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": rng.choice((0.0, 1.0, 100.0)),
        "stop": [rng.choice(TEXTS) or "a"],
        "logit_bias": {"7": 100.0, "8": -100.0},
    }
    attack = _with(rng, {"prompt": prompt} | changes, GENERATING[:2])
    return Attack(attack.route, attack.body, {}, rng.choice((0, 1, 3, 10)))


def strange_route(rng: random.Random) -> Attack:
    """Routes that do not exist or are not for everyone, and strange headers."""
    routes = (
        *("/pause_generation", "/flush_cache", "/abort_request", "/start_profile", "/server_info"),
        *("/v1/embeddings", "/%00", "/v1/models/" + "a" * 3000, "/..%2f..%2fetc", "/health"),
        *("/" + "a/" * 900, "/v1//completions", "/v1/completions?model=" + "b" * 3000),
    )
    headers = rng.choice(
        (
            {"X-Request-ID": "a" * 4000},
            {"X-Request-ID": "b\tc"},
            {"Authorization": "Bearer " + "k" * 3000},
            {"Authorization": "Basic e30="},
            {"Authorization": "Bearer \u00e9\u00ff"},
            {"Content-Type": "multipart/form-data; boundary="},
        )
    )
    return Attack(rng.choice(routes), b'{"abort_all": true}', headers)


ATTACKS: dict[str, Callable[[random.Random], Attack]] = {
    "numbers": numbers,
    "wrong types": wrong_types,
    "nested": nested,
    "giant": giant,
    "packed": packed,
    "wrong text": wrong_text,
    "grammar": grammar,
    "costly grammar": costly_grammar,
    "heavy": heavy,
    "strange route": strange_route,
}
