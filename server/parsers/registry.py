"""Which parsers there are, and which one suits a model: by name, or by its chat template.

Owns the names of `--tool-call-parser` and `--reasoning-parser` and building a parser for one
answer. Nothing here looks at weights or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from compiled_engine.errors import ConfigError
from compiled_engine.server.parsers import (
    bare_json,
    deepseek,
    glm45,
    gpt_oss,
    hermes,
    kimi_k2,
    mistral,
    pythonic,
    qwen3_coder,
)
from compiled_engine.server.parsers.answer import AnswerParser, Parser
from compiled_engine.server.parsers.machine import Pattern, ToolParser, ToolSchemas
from compiled_engine.server.parsers.think import ThinkParser, ThinkTags

AUTO, NONE = "auto", "none"
# What a chat template may ask of the ids of earlier calls.
CallIdForm = Literal["any", "kimi_k2", "mistral"]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls.

    Attributes:
        name: of the parser.
        make: builds a parser for one answer; None where channels carry the calls.
        markers: special tokens that must stay in the text.
        call_id_form: of ids in the prompt.
        ends_reasoning: beginnings of calls, behind a line break, that end reasoning.
    """

    name: str
    make: Callable[[ToolSchemas], ToolParser] | None
    markers: tuple[str, ...] = ()
    call_id_form: CallIdForm = "any"
    ends_reasoning: tuple[Pattern, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model family marks reasoning.

    Attributes:
        name: of the parser.
        tags: None where channels carry reasoning.
    """

    name: str
    tags: ThinkTags | None


_TAGS = (hermes.OPENING, hermes.CLOSING)
GPT_OSS = "gpt_oss"
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat(name="hermes", make=hermes.HermesParser, markers=_TAGS),
        ToolFormat(
            name="qwen3_coder",
            make=qwen3_coder.Qwen3CoderParser,
            markers=_TAGS,
            ends_reasoning=qwen3_coder.CALL_BEGINS,
        ),
        ToolFormat(
            name="llama3_json",
            make=bare_json.Llama3JsonParser,
            markers=(bare_json.PYTHON_TAG,),
        ),
        ToolFormat(
            name="pythonic",
            make=pythonic.PythonicParser,
            markers=(pythonic.PYTHON_START, pythonic.PYTHON_END),
        ),
        ToolFormat(
            name="mistral",
            make=mistral.MistralParser,
            markers=mistral.MARKERS,
            call_id_form="mistral",
        ),
        ToolFormat(name="deepseek_v3", make=deepseek.DeepSeekV3Parser, markers=deepseek.MARKERS),
        ToolFormat(name="deepseek_v31", make=deepseek.DeepSeekV31Parser, markers=deepseek.MARKERS),
        ToolFormat(
            name="kimi_k2",
            make=kimi_k2.KimiK2Parser,
            markers=kimi_k2.MARKERS,
            call_id_form="kimi_k2",
        ),
        ToolFormat(name="glm45", make=glm45.Glm45Parser, markers=_TAGS),
        ToolFormat(name=GPT_OSS, make=None, markers=gpt_oss.MARKERS),
        ToolFormat(name="json", make=bare_json.JsonParser),
    )
}
_TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
    "kimik2": "kimi_k2",
    "glm47": "glm45",
    "glm47_moe": "glm45",
    "openai": GPT_OSS,
    "gpt-oss": GPT_OSS,
    "passthrough": NONE,
}
_THINK = ThinkTags()
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    format.name: format
    for format in (
        ReasoningFormat(name="base", tags=_THINK),
        ReasoningFormat(name="deepseek_r1", tags=_THINK),
        ReasoningFormat(name="qwen3", tags=_THINK),
        ReasoningFormat(name="glm45", tags=_THINK),
        ReasoningFormat(name="kimi_k2", tags=ThinkTags(enders=(kimi_k2.SECTION,))),
        ReasoningFormat(name="mistral", tags=ThinkTags("[THINK]", "[/THINK]")),
        ReasoningFormat(name=GPT_OSS, tags=None),
    )
}
_REASONING_ALIASES = {
    "qwen3_thinking": "qwen3",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_r1",
    "kimi": "kimi_k2",
    "openai": GPT_OSS,
    "gpt-oss": GPT_OSS,
    "passthrough": NONE,
}
# Text of a chat template -> the format it is written for; the first that holds all decides.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((gpt_oss.CHANNEL, gpt_oss.MESSAGE), GPT_OSS),
    ((kimi_k2.SECTION,), "kimi_k2"),
    ((deepseek.SECTION, "```json"), "deepseek_v3"),
    ((deepseek.SECTION,), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    ((mistral.CALLS,), "mistral"),
    ((hermes.OPENING,), "hermes"),
    ((pythonic.PYTHON_START,), "pythonic"),
    ((bare_json.PYTHON_TAG,), "llama3_json"),
    (("ipython", '"parameters"'), "llama3_json"),
)
_REASONING_OF_TOOLS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_r1",
    "kimi_k2": "kimi_k2",
    "glm45": "glm45",
}


@dataclass(frozen=True)
class ChatFormat:
    """The parsers of one served model.

    Attributes:
        tools: None where tool calls are switched off.
        reasoning: None where the model's text is not searched for reasoning.
        has_tools_branch: whether the chat template renders tools by itself.
        template: text of the chat templates.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    has_tools_branch: bool
    template: str = field(default="", repr=False)

    @property
    def uses_channels(self) -> bool:
        """Whether all text comes as messages on channels."""
        return any(
            part is not None and part.name == GPT_OSS for part in (self.tools, self.reasoning)
        )

    def markers(self, *, with_tools: bool) -> frozenset[str]:
        """Special tokens that must stay in the text for the parsers to see."""
        if self.uses_channels:
            return frozenset(gpt_oss.MARKERS)
        found: set[str] = set()
        if self.reasoning is not None and self.reasoning.tags is not None:
            tags = self.reasoning.tags
            found |= {tags.opening, tags.closing, *(tags.enders if with_tools else ())}
        if self.tools is not None and with_tools:
            found |= set(self.tools.markers)
        return frozenset(found)

    def new_parser(
        self, tools: ToolSchemas | None, *, prompt: str = "", continued: str | None = None
    ) -> Parser | None:
        """A parser for one answer; None where its text needs none.

        Args:
            tools: name -> JSON schema of the arguments; None if the answer may hold no calls.
            prompt: the rendered prompt, or its end.
            continued: the message at its end that the answer continues, if it does.
        """
        if self.uses_channels:
            start = max(prompt.rfind(gpt_oss.START), 0)
            return gpt_oss.GptOssParser(tools, prefix=prompt[start:])
        calls = None
        enders: tuple[Pattern, ...] = ()
        if tools is not None and self.tools is not None and self.tools.make is not None:
            calls = self.tools.make(tools)
            enders = self.tools.ends_reasoning
        think = None
        if self.reasoning is not None and self.reasoning.tags is not None:
            tags = self.reasoning.tags
            place = tags.place(prompt, continued)
            think = ThinkParser(tags, place=place, call_patterns=enders)
        return AnswerParser(think, calls) if think or calls else None


def choose_format(
    template: str,
    *,
    has_tools_branch: bool,
    is_harmony: bool = False,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ChatFormat:
    """The parsers for a model.

    Args:
        template: text of its chat templates.
        has_tools_branch: whether they read the variable `tools`.
        is_harmony: whether its vocabulary has the markers of the Harmony form, which then is what
            it writes, whatever its templates look like.
        tool_parser: a name, "auto" or "none".
        reasoning_parser: the same.

    Raises:
        ConfigError: a name that does not exist.
    """
    if is_harmony:
        tool_parser = GPT_OSS if tool_parser == AUTO else tool_parser
        reasoning_parser = GPT_OSS if reasoning_parser == AUTO else reasoning_parser
    if tool_parser == AUTO:
        tool_parser = _tools_of_template(template, has_tools_branch=has_tools_branch)
    tool_parser = tool_parser_name(tool_parser)
    if reasoning_parser == AUTO:
        reasoning_parser = _reasoning_of_template(template, tool_parser)
    reasoning_parser = reasoning_parser_name(reasoning_parser)
    return ChatFormat(
        tools=None if tool_parser == NONE else TOOL_FORMATS[tool_parser],
        reasoning=None if reasoning_parser == NONE else REASONING_FORMATS[reasoning_parser],
        has_tools_branch=has_tools_branch,
        template=template,
    )


def tool_parser_name(name: str) -> str:
    """The name of a tool parser without aliases.

    Raises:
        ConfigError: there is no such parser.
    """
    return _known(name, _TOOL_ALIASES, TOOL_FORMATS, "tool_call_parser")


def reasoning_parser_name(name: str) -> str:
    """The name of a reasoning parser without aliases.

    Raises:
        ConfigError: there is no such parser.
    """
    return _known(name, _REASONING_ALIASES, REASONING_FORMATS, "reasoning_parser")


def _known(
    name: str, aliases: Mapping[str, str], formats: Mapping[str, object], config_field: str
) -> str:
    name = aliases.get(name, name)
    if name not in (AUTO, NONE) and name not in formats:
        flag = f"--{config_field.replace('_', '-')}"
        allowed = ", ".join((AUTO, NONE, *formats))
        raise ConfigError(f"{flag} is {name!r}; allowed are {allowed}", param=config_field)
    return name


def _tools_of_template(template: str, *, has_tools_branch: bool) -> str:
    if not has_tools_branch and gpt_oss.CHANNEL not in template:
        return "hermes"
    for signs, name in _TOOL_SIGNS:
        if all(sign in template for sign in signs):
            return name
    return "json"


def _reasoning_of_template(template: str, tool_parser: str) -> str:
    if gpt_oss.CHANNEL in template and gpt_oss.MESSAGE in template:
        return GPT_OSS
    if "[THINK]" in template:
        return "mistral"
    if "<think>" in template or "</think>" in template:
        return _REASONING_OF_TOOLS.get(tool_parser, "base")
    return NONE
