"""Answer one prompt and print the answer as it is made.

Owns the sampling flags. The answer goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import sys
import typing
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.defaults import default_sampling
from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    attribute_texts,
    config_from_args,
)
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.request import Request, SamplingParams, validate_request

if TYPE_CHECKING:
    from compiled_engine.engine import Engine
    from compiled_engine.tokenizer import Tokenizer

_REPEATABLE = {
    "stop": ("--stop", str, "TEXT"),
    "stop_token_ids": ("--stop-token-id", int, "ID"),
    "logit_bias": ("--logit-bias", str, "ID=VALUE"),
}
# The engine's own --seed makes a single answer repeatable.
_WITHOUT_FLAG = frozenset({"seed"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, prompt, sampling and engine settings."""
    add_model_argument(parser)
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="what to answer (default: standard input)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the plain prompt, without the chat template"
    )
    _add_sampling_arguments(parser)
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Generates one answer."""
    config = config_from_args(EngineConfig, args)
    given = _given_sampling(args)
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise ConfigError(error.message, param=error.param) from error
    if args.raw and args.system is not None:
        raise ConfigError("--system has no place in a --raw prompt", param="system")
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    from compiled_engine.commands.local import open_engine
    from compiled_engine.tokenizer import Tokenizer

    engine = open_engine(config, is_quiet=True)
    folder = engine.settings.folder
    tokenizer = Tokenizer.from_folder(
        engine.settings.tokenizer_folder, trust_remote_code=config.trust_remote_code
    )
    params = SamplingParams(**(default_sampling(folder) | given))
    token_ids = _encode(tokenizer, prompt, system=args.system, is_raw=args.raw)
    request = Request(request_id=1, prompt_token_ids=token_ids, params=params)
    validate_request(request, engine.limits)
    _print_answer(engine, tokenizer, request)
    return 0


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling (default: what the model's generation_config.json says)"
    )
    texts = attribute_texts(SamplingParams)
    hints = typing.get_type_hints(SamplingParams)
    for name in SamplingParams.__struct_fields__:
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        options["help"] = texts[name].rstrip(".").replace("%", "%%")
        if name in _WITHOUT_FLAG:
            continue
        if name in _REPEATABLE:
            flag, kind, metavar = _REPEATABLE[name]
            options["help"] += "; may be repeated"
            group.add_argument(flag, action="append", type=kind, metavar=metavar, **options)
        elif hints[name] is bool:
            group.add_argument(_flag(name), action="store_true", **options)
        else:
            kind = float if hints[name] is float else int
            metavar = "X" if kind is float else "N"
            group.add_argument(_flag(name), type=kind, metavar=metavar, **options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {n: getattr(args, n) for n in SamplingParams.__struct_fields__ if n in args}
    given.pop("seed", None)
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError as error:
        raise ConfigError(
            f"--logit-bias {text}: expected ID=VALUE, such as 42=-5", param="logit_bias"
        ) from error


def _encode(tokenizer: Tokenizer, prompt: str, *, system: str | None, is_raw: bool) -> list[int]:
    if is_raw:
        return tokenizer.encode(prompt)
    if not tokenizer.has_chat_template:
        raise ConfigError("this model has no chat template; pass --raw", param="raw")
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _print_answer(engine: Engine, tokenizer: Tokenizer, request: Request) -> None:
    from compiled_engine.commands.local import run_loop
    from compiled_engine.server.stop_strings import StopMatcher

    detokenizer = tokenizer.new_detokenizer()
    matcher = StopMatcher(request.params.stop)
    num_tokens = 0

    def show(text: str) -> bool:
        # As on the server: text before `min_tokens` can hold no stop string.
        if num_tokens <= request.params.min_tokens:
            _write(matcher.skip(text))
            return False
        result = matcher.push(text)
        _write(result.text)
        return result.matched is not None

    engine.loop.submit(request)
    is_stopped = False
    for event in run_loop(engine.loop):
        if is_stopped:
            continue
        num_tokens += len(event.token_ids)
        is_over = event.finish_reason is not None
        shown = event.token_ids[:-1] if event.finish_reason == "stop" else event.token_ids
        text = detokenizer.push(shown) + (detokenizer.finish() if is_over else "")
        is_stopped = show(text)
        if is_stopped and not is_over:
            engine.loop.abort(request.request_id)
    if not is_stopped:
        _write(matcher.flush())
    _write("\n")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
