"""Tool calls of every format: one result for every split, and the traps users have met."""

from __future__ import annotations

import json

import pytest

from compiled_engine.server.parsers.events import CallArguments
from compiled_engine.server.parsers.registry import TOOL_FORMATS
from tests.helpers.parsed import gathered, parse, parse_every_split

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "id": {},
            "a": {"type": "integer"},
            "text": {"type": "string"},
            "flag": {"type": ["boolean", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def _dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_dumps(arguments)}}}\n</tool_call>\n'


def _kimi(name, arguments):
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_dumps(arguments)}"
        "<|tool_call_end|>"
    )


def _qwen3_coder(name, arguments):
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"


def _glm45(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else _dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def _deepseek(name, arguments, *, is_v3):
    body = f"function<｜tool▁sep｜>{name}\n```json\n" if is_v3 else f"{name}<｜tool▁sep｜>"
    end = "\n```" if is_v3 else ""
    return f"<｜tool▁call▁begin｜>{body}{_dumps(arguments)}{end}<｜tool▁call▁end｜>"


def _pythonic(calls):
    items = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(items)}]"


def _objects(calls, key="arguments"):
    return [_dumps({"name": name, key: arguments}) for name, arguments in calls]


WRITERS = {
    "hermes": lambda calls: "".join(_hermes(*call) for call in calls),
    "qwen3_coder": lambda calls: "".join(_qwen3_coder(*call) for call in calls),
    "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "json": lambda calls: f"[{', '.join(_objects(calls))}]",
    "pythonic": _pythonic,
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{_dumps(a)}" for n, a in calls),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(_deepseek(*call, is_v3=True) for call in calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(_deepseek(*call, is_v3=False) for call in calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(_kimi(*call) for call in calls)
        + "<|tool_calls_section_end|>"
    ),
    "glm45": lambda calls: "\n".join(_glm45(*call) for call in calls),
    "gpt_oss": lambda calls: "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_dumps(a)}"
        for n, a in calls
    ),
}
VALUES = [42, True, None, 1.5, [1, {"a": 2}], {"a": {}}, -1e-7, "x", [], {}]


def test_every_format_has_a_writer():
    assert WRITERS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_last_value_of_any_type_is_whole(name, value):
    found = parse_every_split(WRITERS[name]([("f", {"id": value})]), name, schemas=SCHEMAS)
    assert found.ended == [("f", {"id": value})]
    assert found.content == ""


@pytest.mark.parametrize("name", WRITERS)
def test_no_arguments_and_parallel_calls(name):
    calls = [("now", {}), ("f", {"a": 1}), ("f", {"a": 2, "text": 'ü "x" \\ \n {}'})]
    found = parse_every_split(WRITERS[name](calls), name, schemas=SCHEMAS)
    assert found.ended == calls
    assert found.calls[0].arguments == "{}"
    assert len(found.calls) == 3


@pytest.mark.parametrize("name", WRITERS)
def test_without_schemas_names_and_objects_survive(name):
    calls = [("f", {"a": 1, "b": {"c": [True]}})]
    assert parse_every_split(WRITERS[name](calls), name).ended == calls


@pytest.mark.parametrize("name", WRITERS)
def test_cut_anywhere_never_ends_a_call_twice_and_never_fails(name):
    text = WRITERS[name]([("f", {"a": 1, "text": "abc"}), ("now", {})])
    for end in range(len(text)):
        whole = parse([text[:end]], name, schemas=SCHEMAS)
        found = gathered(whole)
        assert parse(list(text[:end]), name, schemas=SCHEMAS) == whole
        assert all(call in [("f", {"a": 1, "text": "abc"}), ("now", {})] for call in found.ended)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "text", ["Hello, world!", "a < b\n\n", '{"a": 1} is a dict', "[x](y)", "  \n", "x <tool_c", ""]
)
def test_text_without_calls_is_untouched(name, text):
    prompt = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt_oss" else ""
    found = parse_every_split(text, name, schemas=SCHEMAS, prompt=prompt)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    "written",
    [
        '{"city":"Münster","note":"你好 \\"x\\" \\\\ \\n é 😀"}',
        '{"city":"M\\u00fcnster","note":"\\u4f60\\u597d \\"x\\" \\\\ \\n \\u00e9 \\ud83d\\ude00"}',
    ],
    ids=["raw", "escaped"],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "kimi_k2", "gpt_oss"])
def test_escapes_stay_as_the_model_wrote_them(name, written):
    text = WRITERS[name]([("f", {"MARK": 1})]).replace('{"MARK": 1}', written)
    found = parse_every_split(text, name)
    assert found.calls[0].arguments == written
    assert found.ended == [("f", {"city": "Münster", "note": '你好 "x" \\ \n é 😀'})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": "\\d"}', {"a": "\\d"}),
        ('{"a": "\\u12"}', {"a": "\\u12"}),
        ('{"a": True, "b": None,}', {"a": True, "b": None}),
        ('{"a": [1, 2, ] , }', {"a": [1, 2]}),
        ('{"a": NaN}', {"a": None}),
    ],
)
def test_small_slips_become_valid_json(written, value):
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert parse_every_split(text, "hermes").ended == [("f", value)]


@pytest.mark.parametrize(
    "body",
    ["not json", '{"x": 1}', '{"name": 5, "arguments": {}}', "[1]", '{"name": "f" "a"}', "{]"],
)
def test_hermes_tag_without_a_call_is_text(body):
    text = f"a <tool_call>{body}</tool_call> b"
    found = parse_every_split(text, "hermes")
    if not found.calls:
        assert found.content == text
    else:
        assert found.ended == []


def test_hermes_arguments_before_name_and_as_a_string():
    text = '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>'
    assert parse_every_split(text, "hermes").ended == [("f", {"a": 1})]


def test_text_around_calls_keeps_its_inner_space():
    text = "before \n" + _hermes("now", {}) + " after"
    found = parse_every_split(text, "hermes")
    assert found.content == "before \n\n after"
    assert parse_every_split("before \n" + _hermes("now", {}), "hermes").content == "before"


def test_bare_json_that_names_no_tool_is_text():
    text = '{"name": "Ann", "arguments": {"a": 1}}'
    for name in ("llama3_json", "json"):
        assert parse_every_split(text, name, schemas=SCHEMAS).content == text


def test_json_in_a_code_fence():
    text = '```json\n{"name": "f", "arguments": {"a": 1}}\n```'
    assert parse_every_split(text, "json", schemas=SCHEMAS).ended == [("f", {"a": 1})]
    other = '```json\n{"a": 1}\n```'
    assert parse_every_split(other, "json", schemas=SCHEMAS).content == other


def test_values_that_hold_the_tags_themselves():
    text = "<parameter=a> </parameter> and </function> </tool_call>; <arg_key> </arg_value>"
    for name in ("qwen3_coder", "glm45"):
        found = parse_every_split(WRITERS[name]([("f", {"text": text})]), name, schemas=SCHEMAS)
        assert found.ended == [("f", {"text": text})]


def test_types_come_from_the_schema():
    given = {"a": 7, "text": "7", "flag": True}
    for name in ("qwen3_coder", "glm45"):
        assert parse_every_split(WRITERS[name]([("f", given)]), name, schemas=SCHEMAS).ended == [
            ("f", given)
        ]


def test_arguments_come_in_pieces_while_the_model_writes():
    long = "x" * 1000
    for name in set(WRITERS) - {"pythonic"}:
        text = WRITERS[name]([("f", {"text": long})])
        events = parse(list(text), name, schemas=SCHEMAS)
        assert sum(isinstance(event, CallArguments) for event in events) == 1
        held = _most_held(name, text)
        assert held < 40, name


def _most_held(name: str, text: str) -> int:
    """Most characters of the long argument that a parser kept back."""
    from compiled_engine.server.parsers.registry import choose_format

    parser = choose_format("", has_tools_branch=True, tool_parser=name).new_parser(SCHEMAS)
    given = sent = most = 0
    for character in text:
        given += character == "x"
        for event in parser.feed(character):
            sent += event.text.count("x") if isinstance(event, CallArguments) else 0
        most = max(most, given - sent)
    return most


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "value",
    ["[" * 50_000, '{"a":' * 50_000, "9" * 50_000, "\\" * 50_000, "-" * 50_000, "(" * 50_000],
    ids=["lists", "objects", "digits", "escapes", "signs", "brackets"],
)
def test_hostile_values_end_in_some_result(name, value):
    mark = '"MARK"'
    text = WRITERS[name]([("f", {"id": "MARK"})])
    for shown in (mark, "'MARK'", "MARK"):
        if shown in text:
            hostile = text.replace(shown, value)
            assert parse([hostile], name, schemas=SCHEMAS) is not None
            break
    as_name = f'<tool_call>{{"name": {value}'
    assert gathered(parse([as_name], "hermes")).calls == []


def test_gpt_oss_without_channels_is_plain_text():
    assert parse_every_split("Hello there", "gpt_oss", "gpt_oss").content == "Hello there"
