"""Reasoning: where it starts comes from the prompt, and only its own tags end it."""

from __future__ import annotations

import time

import pytest

from compiled_engine.server.parsers.registry import REASONING_FORMATS, choose_format
from tests.helpers.parsed import gathered, parse, parse_every_split

TAGGED = {name: entry.tags for name, entry in REASONING_FORMATS.items() if entry.tags is not None}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("name", TAGGED)
def test_near_misses_and_literal_tags(name):
    opening, closing = TAGGED[name].opening, TAGGED[name].closing
    miss = f"{closing[:-3]} {closing[-3:]}"
    text = f"{opening}a < b {miss} c{closing}\n\nAnswer {opening} literal"
    found = parse_every_split(text, "none", name)
    assert found.reasoning == f"a < b {miss} c"
    assert found.content == f"Answer {opening} literal"


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("{o}\n", "why{c}\nAnswer", "why", "Answer"),
        ("x{o}", "{o}why{c}Answer", "why", "Answer"),
        ("{o}\n\n{c}\n\n", "Answer {c}", "", "Answer {c}"),
        ("{o}{c}", "{o}text", "", "{o}text"),
        ("", "\n{o}\nwhy\n{c}\n\nAnswer\n", "why", "Answer\n"),
        ("", "Answer alone", "", "Answer alone"),
        ("", "{o}{c}Answer", "", "Answer"),
        ("", "{o}cut off", "cut off", ""),
        ("", "{o}cut inside {c_cut}", "cut inside {c_cut}", ""),
        ("", "{o_cut}", "", "{o_cut}"),
        ("user: {o} what is this?\nassistant:", "Answer", "", "Answer"),
    ],
)
def test_start_state_comes_from_the_prompt(name, prompt, text, reasoning, content):
    tags = TAGGED[name]
    parts = {
        "o": tags.opening,
        "c": tags.closing,
        "o_cut": tags.opening[:4],
        "c_cut": tags.closing[:4],
    }
    found = parse_every_split(text.format(**parts), "none", name, prompt=prompt.format(**parts))
    assert found.reasoning == reasoning.format(**parts)
    assert found.content == content.format(**parts)


@pytest.mark.parametrize("prompt", ["<think>\n", "<think>\n\n</think>\n\n", ""])
@pytest.mark.parametrize("name", ["base", "deepseek_r1", "qwen3", "glm45", "kimi_k2"])
def test_calls_after_reasoning_in_every_start_state(name, prompt):
    for thinks in (True, False):
        if prompt == "<think>\n" and not thinks:
            continue
        text = {"<think>\n": "why</think>\n\n", "": "<think>why</think>"}.get(prompt, "")
        text = text if thinks else ""
        found = parse_every_split(text + CALL, "hermes", name, prompt=prompt)
        assert found.ended == [("f", {"a": 1})]
        assert found.reasoning == ("why" if text else "")
        assert found.content == ""


def test_continued_reasoning_is_still_reasoning():
    options = {"prompt": "assistant: <think>one", "continued": "<think>one"}
    found = parse_every_split(" two</think>Answer", "none", "qwen3", **options)
    assert (found.reasoning, found.content) == ("two", "Answer")
    done = {"prompt": "<think>one</think>An", "continued": "<think>one</think>An"}
    assert parse_every_split("swer <think>", "none", "qwen3", **done).content == "swer <think>"


def test_kimi_call_ends_reasoning_without_its_tag():
    text = (
        "why<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    )
    found = parse_every_split(text, "kimi_k2", "kimi_k2", prompt="<think>")
    assert (found.reasoning, found.ended) == ("why", [("f", {"a": 1})])


def test_only_a_possible_tag_is_held_back():
    parser = choose_format("", has_tools_branch=True, reasoning_parser="base").new_parser(None)
    assert parser is not None
    assert gathered(parser.feed("<think>a </thi")).reasoning == "a"
    assert parser.is_reasoning
    assert gathered(parser.feed("n b")).reasoning == " </thin b"
    assert gathered(parser.feed("</think>x <")).content == "x <"
    assert not parser.is_reasoning


def test_gpt_oss_starts_where_the_prompt_ends():
    text = "Hi<|end|>"
    prompt = "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>"
    assert parse_every_split(text, "gpt_oss", "gpt_oss", prompt=prompt).content == "Hi"
    thinking = prompt.replace("final", "analysis")
    assert parse_every_split(text, "gpt_oss", "gpt_oss", prompt=thinking).reasoning == "Hi"


def test_gpt_oss_without_tools_gives_no_calls():
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse([text], "none", "gpt_oss") == []


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_cost_of_a_piece_does_not_grow_with_the_answer(name):
    """Ten times the text takes about ten times as long; quadratic work would take a hundred."""

    def seconds(num_pieces: int) -> float:
        text = "<|channel|>final<|message|>" if name == "gpt_oss" else "<think>"
        pieces = [text, *["word <\n"] * num_pieces]
        tools = "gpt_oss" if name == "gpt_oss" else "hermes"
        start = time.process_time()
        parse(pieces, tools, name)
        return time.process_time() - start

    seconds(1000)
    assert seconds(20_000) < 40 * max(seconds(2_000), 1e-3)
