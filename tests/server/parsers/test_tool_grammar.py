"""Enforced calls: what the grammar allows is what the parser of the format reads, and no more."""

from __future__ import annotations

import functools
import json

import pytest
import xgrammar

from compiled_engine.errors import InvalidRequestError
from compiled_engine.request import GrammarSpec
from compiled_engine.server.chat_request import ToolUse
from compiled_engine.server.parsers.registry import TOOL_FORMATS, choose_format
from compiled_engine.server.tool_grammar import answer_grammar
from tests.helpers.parsed import gathered

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
FORMATS = [*TOOL_FORMATS, "mistral-list"]
ARGUMENTS = {"city": "Zürich", "days": 2}


def _use(choice, *, names=("weather", "now"), is_parallel=True, strict=()) -> ToolUse:
    schemas = {"weather": CITY, "now": NOW}
    tools = [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()
    ]
    return ToolUse(
        tools=tools,
        schemas={name: schemas[name] for name in names},
        choice=choice,
        is_parallel=is_parallel,
        strict=frozenset(strict),
    )


def _format(name, reasoning="none"):
    template = "[ARGS]" if name == "mistral" else ""
    return choose_format(
        template,
        has_tools_branch=True,
        tool_parser=name.removesuffix("-list"),
        reasoning_parser=reasoning,
    )


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    tokens = [chr(i) for i in range(256)] + ["<end>"]
    info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def _accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether the whole text is an answer that may end there."""
    matcher = xgrammar.GrammarMatcher(_compiler().compile_structural_tag(json.loads(spec.text)))
    return matcher.accept_string(text) and matcher.is_completed()


def _grammar(name, use, *, reasoning="none", given=None, prompt="", continued=None):
    spec = answer_grammar(given, _format(name, reasoning), use, prompt=prompt, continued=continued)
    assert spec is not None
    return spec


def _call(name, arguments, fmt):
    text = json.dumps(arguments, ensure_ascii=False)
    xml = "".join(
        f"<parameter={k}>{v}</parameter>"
        if fmt == "qwen3_coder"
        else f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>"
        for k, v in arguments.items()
    )
    keywords = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    return {
        "pythonic": f"{name}({keywords})",
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{xml}\n</function>\n</tool_call>",
        "glm45": f"<tool_call>{name}\n{xml}</tool_call>",
        "llama3_json": f'{{"name": "{name}", "parameters": {text}}}',
        "json": f'{{"name": "{name}", "arguments": {text}}}',
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{text}",
        "mistral-list": f'{{"name": "{name}", "arguments": {text}}}',
        "deepseek_v3": (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        ),
        "deepseek_v31": f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        "kimi_k2": (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}"
            "<|tool_call_end|>"
        ),
        "gpt_oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}",
    }[fmt]


SECTIONS = {
    "pythonic": ("[", ", ", "]"),
    "mistral-list": ("[TOOL_CALLS][", ", ", "]"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "mistral": ("", "", ""),
    "llama3_json": ("", "; ", ""),
    "json": ("", ", ", ""),
    "gpt_oss": ("", "<|call|><|start|>assistant", ""),
}


def _answer(fmt, *calls):
    opening, separator, closing = SECTIONS.get(fmt, ("", "\n", ""))
    return opening + separator.join(_call(*call, fmt) for call in calls) + closing


WEATHER, OTHER = ("weather", ARGUMENTS), ("now", {})


@pytest.mark.parametrize("fmt", FORMATS)
def test_required_allows_calls_that_the_parser_reads_and_no_prose(fmt):
    spec = _grammar(fmt, _use("required"))
    for calls in ([WEATHER], [OTHER], [WEATHER, OTHER, WEATHER]):
        text = _answer(fmt, *calls)
        assert _accepts(spec, text), text
        parser = _format(fmt).new_parser({"weather": CITY, "now": NOW})
        assert parser is not None
        found = gathered([*parser.feed(text), *parser.finish()])
        assert (found.ended, found.content) == (calls, "")
    assert not _accepts(spec, "")
    assert not _accepts(spec, "I would rather not.")
    assert not _accepts(spec, _answer(fmt, ("weather", {"city": "Zürich", "days": "two"})))
    assert not _accepts(spec, _answer(fmt, ("other", {})))


@pytest.mark.parametrize("fmt", FORMATS)
def test_named_allows_one_call_of_that_function(fmt):
    spec = _grammar(fmt, _use("named", names=("weather",), is_parallel=False))
    assert _accepts(spec, _answer(fmt, WEATHER))
    assert not _accepts(spec, _answer(fmt, OTHER))
    assert not _accepts(spec, _answer(fmt, WEATHER, WEATHER))
    single = _grammar(fmt, _use("required", is_parallel=False))
    assert _accepts(single, _answer(fmt, OTHER))
    assert not _accepts(single, _answer(fmt, OTHER, WEATHER))


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "pythonic"])
def test_strict_tools_leave_prose_free(fmt):
    spec = _grammar(fmt, _use("auto", strict=("weather",)))
    # Channels and sections stand outside of the calls themselves.
    assert _accepts(spec, "Just text, no call.")
    assert _accepts(spec, "Text. " + _answer(fmt, WEATHER))
    assert not _accepts(spec, _answer(fmt, ("weather", {"city": 1})))
    assert answer_grammar(None, _format(fmt), _use("auto"), prompt="", continued=None) is None


def test_reasoning_comes_before_the_calls_as_the_prompt_says():
    call = _answer("hermes", WEATHER)
    inside = _grammar("hermes", _use("required"), reasoning="qwen3", prompt="<think>\n")
    assert _accepts(inside, f"why <tool_call></think>\n\n{call}")
    assert not _accepts(inside, call)
    before = _grammar("hermes", _use("required"), reasoning="qwen3", prompt="assistant\n")
    assert _accepts(before, f"<think>why</think>{call}")
    assert _accepts(before, call)
    after = _grammar("hermes", _use("required"), reasoning="qwen3", prompt="<think>\n</think>\n")
    assert _accepts(after, call)
    assert not _accepts(after, f"<think>why</think>{call}")
    channels = _grammar("gpt_oss", _use("required"), reasoning="gpt_oss")
    thought = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    assert _accepts(channels, thought + _answer("gpt_oss", WEATHER))


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (GrammarSpec("json_schema", json.dumps(CITY)), json.dumps(ARGUMENTS), "{}"),
        (GrammarSpec("json_object"), '{"a": 1}', "[1]"),
        (GrammarSpec("regex", "a+b"), "aab", "ba"),
        (GrammarSpec("choice", '["yes", "no"]'), "no", "maybe"),
        (GrammarSpec("choice", '["yes"]'), "yes", "no"),
        (GrammarSpec("grammar", 'root ::= "x" | "y"'), "y", "z"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_other_constraints_start_after_reasoning(given, right, wrong):
    options = {"given": given, "reasoning": "qwen3"}
    inside = _grammar("hermes", None, prompt="<think>\n", **options)
    assert _accepts(inside, f"why?</think>\n\n{right}")
    assert not _accepts(inside, right)
    assert not _accepts(inside, f"why?</think>{wrong}")
    after = _grammar("hermes", None, prompt="<think>\n\n</think>\n\n", **options)
    assert after is given
    channels = _grammar("gpt_oss", None, given=given, reasoning="gpt_oss")
    assert _accepts(channels, f"<|channel|>final<|message|>{right}")
    assert not _accepts(channels, f"<|channel|>final<|message|>{wrong}")


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
PYTHON = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": ["boolean", "null"]}},
        "exact": {"type": "boolean", "description": "d", "default": True},
        "path": {"$ref": "#/$defs/node"},
        "text": {"type": "string"},
    },
    "required": ["text"],
    "$defs": {"node": NODE},
}


def _python(schema, name="find"):
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    use = ToolUse(tools=tools, schemas={name: schema}, choice="named", is_parallel=False)
    return _grammar("pythonic", use)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('text="a, b) \\" \\u00fc \\ud83d\\ude00"', {"text": 'a, b) " ü 😀'}),
        ('text="", tags=[true, null], exact=False', {"tags": [True, None], "exact": False}),
        ('text="", path={"next": {"next": {}}}', {"path": {"next": {"next": {}}}}),
        ('text="", exact=True, path={}', {"exact": True, "path": {}}),
    ],
)
def test_python_calls_hold_any_value_that_the_schema_allows(written, arguments):
    text = f"[find({written})]"
    assert _accepts(_python(PYTHON), text)
    parser = _format("pythonic").new_parser({"find": PYTHON})
    found = gathered([*parser.feed(text), *parser.finish()])
    assert found.ended == [("find", {"text": "", **arguments})]


def test_python_calls_hold_nothing_else():
    spec = _python(PYTHON)
    for written in (
        *(
            "",
            "exact=True",
            'text="", exact=true',
            'text="", exact=1',
            'text="", path={"other": 1}',
        ),
        *('text="", text=""', 'text="", other=1', 'exact=True, text=""', 'text="" exact=True'),
        *('text="", path={}, tags=[]', "text='a'", '"a"', 'text="",', 'text="", '),
    ):
        assert not _accepts(spec, f"[find({written})]"), written
    free = _python({**PYTHON, "required": []})
    for written in ("", "exact=True", 'exact=True, text="a"', 'text="a"', "tags=[], path={}"):
        assert _accepts(free, f"[find({written})]"), written
    for written in (", exact=True", "exact=True, exact=True", 'text="a", tags=[]'):
        assert not _accepts(free, f"[find({written})]"), written
    assert _accepts(_python({}), "[find()]")
    assert not _accepts(_python({}), "[find(a=1)]")
    open_ended = _python({"properties": {"any": True}, "additionalProperties": True})
    assert _accepts(open_ended, '[find(any={"a": [1]})]')
    assert not _accepts(open_ended, "[find(other=1)]")


@pytest.mark.parametrize(
    ("schema", "name", "said"),
    [
        ({"anyOf": [{}, {}]}, "find", "anyOf cannot be enforced for calls in Python"),
        ({"minProperties": 1}, "find", "minProperties cannot"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, "find", r"\$ref cannot"),
        ({"properties": {"a b": {}}}, "find", "the property 'a b'"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "find", r"into \$defs"),
        ({}, "find/it", "the function 'find/it'"),
    ],
)
def test_what_python_calls_cannot_say_is_refused(schema, name, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        _python(schema, name)
    assert caught.value.param == ("tools" if "/" in name else "tools[0].function.parameters")


def test_what_cannot_be_enforced_is_refused():
    for fmt, use in (
        ("none", _use("required")),
        ("none", _use("auto", strict=("weather",))),
        ("pythonic", _use("auto", strict=("weather",))),
    ):
        with pytest.raises(InvalidRequestError, match="cannot be enforced") as caught:
            _grammar(fmt, use)
        assert caught.value.param == ("tool_choice" if use.choice == "required" else "tools")
    with pytest.raises(InvalidRequestError, match="both") as caught:
        _grammar("hermes", _use("required"), given=GrammarSpec("json_object"))
    assert caught.value.param == "tool_choice"
