"""What the load generator is told. Standard library only: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.errors import ConfigError

# Below it lie special tokens in most vocabularies.
FIRST_TOKEN_ID = 10


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What to ask for.

    Attributes:
        url: base address of the server, without /v1.
        num_requests: in all.
        concurrency: requests in flight at most.
        request_rate: mean arrivals per second, at random times; 0 sends as soon as one of
            `concurrency` places is free.
        input_len: prompt tokens, shared prefix included.
        output_len: tokens of each answer; end tokens are ignored.
        shared_prefix_len: first tokens of the prompt that all requests have in common.
        vocab_size: prompt ids are drawn from 10 up to this.
        temperature: of sampling; 0 is greedy.
        stream: ask for a stream; without one there is no TTFT before the end.
        model: name to ask for; None takes the first one the server lists.
        api_key: sent as bearer token.
        seed: of prompts and arrivals.
        timeout_s: for one request.
    """

    url: str = "http://127.0.0.1:8000"
    num_requests: int = 100
    concurrency: int = 8
    request_rate: float = 0.0
    input_len: int = 128
    output_len: int = 64
    shared_prefix_len: int = 0
    vocab_size: int = 256
    temperature: float = 0.0
    stream: bool = True
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "at least 1")
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise _refuse("shared_prefix_len", self.shared_prefix_len, "0 to --input-len")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise _refuse("vocab_size", self.vocab_size, f"more than {FIRST_TOKEN_ID}")
        if self.request_rate < 0 or self.timeout_s <= 0:
            raise ConfigError("--request-rate and --timeout-s must be positive")


def _refuse(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} is {value}; allowed is {allowed}", param=name)
