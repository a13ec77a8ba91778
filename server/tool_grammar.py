"""The grammar of an answer that must hold tool calls, or whose constraint starts after reasoning.

Owns how each format of tool calls is written as a structural tag, for tool_choice "required" and
named, for strict tools, and around other constraints where the model thinks first. Whether a schema
can be enforced is said by `schema_check`, and the engine compiles the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from compiled_engine.errors import InvalidRequestError
from compiled_engine.request import MAX_GRAMMAR_CHARS, GrammarSpec
from compiled_engine.server.chat_request import ToolUse
from compiled_engine.server.parsers import deepseek, gpt_oss, hermes, kimi_k2, mistral
from compiled_engine.server.parsers.registry import ChatFormat
from compiled_engine.server.python_call import Format, rest_of_call
from compiled_engine.server.schema_check import check_schema

Style = Literal["json", "qwen_xml", "glm_xml", "python"]

# White space between two tokens of JSON, as for all other grammars.
MAX_WHITESPACE = 8
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_LINE_BREAKS: Format = {"type": "regex", "pattern": r"\n{0,2}"}
_ANALYSIS = f"{gpt_oss.CHANNEL}analysis{gpt_oss.MESSAGE}"
_NEXT_MESSAGE = f"{gpt_oss.END}{gpt_oss.START}assistant"
_FINAL = f"{gpt_oss.CHANNEL}final{gpt_oss.MESSAGE}"


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How one call and a row of calls are written.

    Attributes:
        begin: of a call, with its name.
        end: of a call.
        style: of the arguments.
        trigger: text that only a call begins with; the beginning of every `begin`. Empty where
            there is none, so that calls cannot be told from prose.
        opening: before the first call.
        separator: between two calls.
        closing: after the last call.
    """

    begin: Callable[[str], str]
    end: str
    trigger: str
    style: Style = "json"
    opening: str = ""
    separator: str = "\n"
    closing: str = ""


def _name(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


_FORMS: Mapping[str, _Form] = {
    "hermes": _Form(
        begin=lambda name: f'{hermes.OPENING}\n{{"name": {_name(name)}, "arguments": ',
        end=f"}}\n{hermes.CLOSING}",
        trigger=hermes.OPENING,
    ),
    "qwen3_coder": _Form(
        begin=lambda name: f"{hermes.OPENING}\n<function={name}>\n",
        end=f"\n</function>\n{hermes.CLOSING}",
        trigger=hermes.OPENING,
        style="qwen_xml",
    ),
    "glm45": _Form(
        begin=lambda name: f"{hermes.OPENING}{name}\n",
        end=hermes.CLOSING,
        trigger=hermes.OPENING,
        style="glm_xml",
    ),
    "llama3_json": _Form(
        begin=lambda name: f'{{"name": {_name(name)}, "parameters": ',
        end="}",
        trigger='{"name": ',
        separator="; ",
    ),
    "json": _Form(
        begin=lambda name: f'{{"name": {_name(name)}, "arguments": ',
        end="}",
        trigger='{"name": ',
        separator=", ",
    ),
    "pythonic": _Form(
        begin=lambda name: f"{name}(",
        end="",
        trigger="",
        style="python",
        opening="[",
        separator=", ",
        closing="]",
    ),
    "mistral": _Form(
        begin=lambda name: f"{mistral.CALLS}{name}{mistral.ARGUMENTS}",
        end="",
        trigger=mistral.CALLS,
        separator="",
    ),
    "deepseek_v3": _Form(
        begin=lambda name: f"{deepseek.CALL}function{deepseek.SEPARATOR}{name}\n```json\n",
        end=f"\n```{deepseek.CALL_END}",
        trigger=deepseek.CALL,
        opening=deepseek.SECTION,
        closing=deepseek.SECTION_END,
    ),
    "deepseek_v31": _Form(
        begin=lambda name: f"{deepseek.CALL}{name}{deepseek.SEPARATOR}",
        end=deepseek.CALL_END,
        trigger=deepseek.CALL,
        separator="",
        opening=deepseek.SECTION,
        closing=deepseek.SECTION_END,
    ),
    "kimi_k2": _Form(
        begin=lambda name: f"{kimi_k2.CALL}functions.{name}:",
        end=kimi_k2.CALL_END,
        trigger=kimi_k2.CALL,
        opening=kimi_k2.SECTION,
        separator="",
        closing=kimi_k2.SECTION_END,
    ),
    "gpt_oss": _Form(
        begin=lambda name: (
            f"{gpt_oss.CHANNEL}commentary to=functions.{name} {gpt_oss.CONSTRAIN}json"
            f"{gpt_oss.MESSAGE}"
        ),
        end="",
        trigger=f"{gpt_oss.CHANNEL}commentary to=functions.",
        separator=f"{gpt_oss.CALL}{gpt_oss.START}assistant",
    ),
}
# Mistral models before the marker for arguments.
_MISTRAL_LIST = _Form(
    begin=lambda name: f'{{"name": {_name(name)}, "arguments": ',
    end="}",
    trigger='{"name": ',
    opening=f"{mistral.CALLS}[",
    separator=", ",
    closing="]",
)


def answer_grammar(
    given: GrammarSpec | None,
    chat_format: ChatFormat,
    use: ToolUse | None,
    *,
    prompt: str,
    continued: str | None,
) -> GrammarSpec | None:
    """The grammar of the whole answer: reasoning, then what the request asks for.

    Args:
        given: the request's own constraint on the answer's text.
        chat_format: of the served model.
        use: the request's tools.
        prompt: the rendered prompt.
        continued: the message at its end that the answer continues.

    Raises:
        InvalidRequestError: calls that this model's format cannot enforce, a schema that cannot be
            enforced, or a constraint besides enforced calls.
    """
    calls = _calls(chat_format, use) if use is not None else None
    if calls is not None and given is not None:
        raise InvalidRequestError(
            "an answer cannot follow both a tool_choice or strict tools and another constraint",
            param="tool_choice" if use and use.choice != "auto" else "tools",
        )
    if calls is None and given is None:
        return None
    lead_in = _lead_in(chat_format, prompt, continued)
    if calls is None:
        assert given is not None
        if not lead_in and not chat_format.uses_channels:
            return given
        calls = _as_format(given)
        if chat_format.uses_channels:
            calls = {"type": "tag", "begin": _FINAL, "content": calls, "end": ""}
    form = {"type": "sequence", "elements": [*lead_in, calls]} if lead_in else calls
    text = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"the grammar of the tools has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} can "
            "be enforced",
            param="tools",
        )
    return GrammarSpec("structural_tag", text)


def _calls(chat_format: ChatFormat, use: ToolUse) -> Format | None:
    """Calls as the request enforces them; None where it enforces nothing."""
    if use.choice == "auto" and not use.strict:
        return None
    form = _form_of(chat_format)
    name = chat_format.tools.name if chat_format.tools else "none"
    if form is None:
        raise InvalidRequestError(
            f"tool calls cannot be enforced with the tool-call parser {name!r}: tool_choice must "
            "be auto or none, and no tool strict",
            param="tools" if use.choice == "auto" else "tool_choice",
        )
    if use.choice == "auto" and not form.trigger:
        raise InvalidRequestError(
            f"strict tools cannot be enforced beside prose with the tool-call parser {name!r}; a "
            "tool_choice of required, or of one function, can",
            param="tools",
        )
    num_chars = len(msgspec.json.encode(use.schemas))
    if num_chars > MAX_GRAMMAR_CHARS:
        # Before the schemas are looked into, which takes time.
        raise InvalidRequestError(
            f"the parameters of the tools have {num_chars} characters; at most "
            f"{MAX_GRAMMAR_CHARS} can be enforced",
            param="tools",
        )
    tags = [_tag(form, use, name) for name in use.schemas]
    if use.choice == "auto":
        return _optional_calls(form, tags, is_single=not use.is_parallel)
    row: Format = {"type": "or", "elements": tags} if len(tags) > 1 else tags[0]
    if use.is_parallel:
        row = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": True,
        }
    if not form.opening:
        return row
    return {"type": "tag", "begin": form.opening, "content": row, "end": form.closing}


def _form_of(chat_format: ChatFormat) -> _Form | None:
    if chat_format.tools is None:
        return None
    if chat_format.tools.name == "mistral" and mistral.ARGUMENTS not in chat_format.template:
        return _MISTRAL_LIST
    return _FORMS.get(chat_format.tools.name)


def _schema(use: ToolUse, name: str) -> Mapping[str, Any]:
    schema = use.schemas[name]
    if use.choice == "auto" and name not in use.strict:
        return _ANY_OBJECT
    check_schema(schema, _field(use, name))
    return {**schema, "type": "object"}


def _field(use: ToolUse, name: str) -> str:
    index = next(i for i, tool in enumerate(use.tools) if tool["function"]["name"] == name)
    return f"tools[{index}].function.parameters"


def _tag(form: _Form, use: ToolUse, name: str) -> Format:
    schema = _schema(use, name)
    if form.style == "python":
        content = rest_of_call(name, schema, _field(use, name), _json)
    else:
        content = _json(schema, form.style)
    if form.trigger == kimi_k2.CALL:
        marker = {"type": "const_string", "value": kimi_k2.ARGUMENTS}
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        content = {"type": "sequence", "elements": [number, marker, content]}
    return {"type": "tag", "begin": form.begin(name), "content": content, "end": form.end}


def _json(schema: Any, style: Style = "json") -> Format:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def _optional_calls(form: _Form, tags: list[Format], *, is_single: bool) -> Format:
    """Any text, and calls in it that are right."""
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "stop_after_first": is_single,
    }


def _lead_in(chat_format: ChatFormat, prompt: str, continued: str | None) -> list[Format]:
    """Reasoning before the answer, as far as the prompt leaves it to the model."""
    any_text = {"type": "any_text"}
    if chat_format.uses_channels:
        thought = {"type": "tag", "begin": _ANALYSIS, "content": any_text, "end": _NEXT_MESSAGE}
        return [{"type": "optional", "content": thought}]
    if chat_format.reasoning is None or chat_format.reasoning.tags is None:
        return []
    tags = chat_format.reasoning.tags
    place = tags.place(prompt, continued)
    if place == "after":
        return []
    begin = "" if place == "inside" else tags.opening
    thought = {"type": "tag", "begin": begin, "content": any_text, "end": tags.closing}
    whole = {"type": "sequence", "elements": [thought, _LINE_BREAKS]}
    return [whole if place == "inside" else {"type": "optional", "content": whole}]


def _as_format(spec: GrammarSpec) -> Format:
    """A constraint as a part of a structural tag."""
    if spec.kind == "structural_tag":
        form: Format = json.loads(spec.text)["format"]
        return form
    if spec.kind == "json_object":
        return _json(_ANY_OBJECT)
    if spec.kind == "json_schema":
        return _json(json.loads(spec.text))
    if spec.kind == "choice":
        choices = [{"type": "const_string", "value": text} for text in json.loads(spec.text)]
        return {"type": "or", "elements": choices} if len(choices) > 1 else choices[0]
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    return {"type": "grammar", "grammar": spec.text}
