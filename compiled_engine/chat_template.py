"""Renders chat messages into a prompt with the model's own Jinja template, in a sandbox.

Owns the Jinja environment (what templates may call) and cutting for a continued last message. Does
not own where templates are stored (`tokenizer.py`). Templates come from the model folder only, and
still run in Jinja's immutable sandbox, since a model folder is downloaded data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compiled_engine.errors import ConfigError, InvalidRequestError

# Private-use characters: marks the end of a message that the model is to continue.
_END_MARK = "\ue0f1\ue0f2\ue0f3"

_RENDER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what training counts as the answer; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - read by Jinja on the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """The compiled templates of one model: "default" and others such as "tool_use".

    Attributes:
        text: of all templates.
        variables: names that they read from outside, such as `messages` and `tools`.

    Args:
        sources: template name -> Jinja text.
        special_tokens: `bos_token`, `eos_token` and so on, as templates see them.

    Raises:
        ConfigError: a template is no valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self.text = "\n".join(sources.values())
        self.variables: frozenset[str] = frozenset()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                names = jinja2.meta.find_undeclared_variables(environment.parse(source))
                self.variables |= names - environment.globals.keys()
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f'chat template "{name}" of the model folder is no valid Jinja: {error}',
                    param="chat_template",
                ) from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt text; see `Tokenizer.apply_chat_template`."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message cannot be used together with add_generation_prompt",
                param="continue_final_message",
            )
        if continue_final_message:
            messages = _mark_final_message(messages)
        context = {
            **self._special_tokens,
            **template_kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._choose(has_tools=bool(template_kwargs.get("tools")))
        try:
            text = template.render(context)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                error.message or "the chat template cannot render these messages",
                param="messages",
            ) from error
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequestError(
            "the model has no chat template; use /v1/completions", param="messages"
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _mark_final_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the end mark behind the last one's text."""
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**final, "content": content + _END_MARK}]
    if isinstance(content, list) and content and "text" in content[-1]:
        part = {**content[-1], "text": content[-1]["text"] + _END_MARK}
        return [*messages[:-1], {**final, "content": [*content[:-1], part]}]
    raise InvalidRequestError(
        "continue_final_message needs a last message that ends in text",
        param="continue_final_message",
    )


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_END_MARK)
    if position < 0:
        raise InvalidRequestError(
            "the chat template leaves out the last message, which therefore cannot be continued",
            param="continue_final_message",
        )
    return text[:position]
