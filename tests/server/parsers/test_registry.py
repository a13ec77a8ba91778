"""Which parser a model gets: by name, by alias, or by its chat template."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from compiled_engine.config import ServerConfig
from compiled_engine.errors import ConfigError
from compiled_engine.server.parsers.registry import choose_format
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.server_harness import with_server


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|im_start|> <tool_call> <think>", "hermes", "qwen3"),
        ("<tool_call>", "hermes", None),
        ("<tool_call> <function= <parameter= </think>", "qwen3_coder", "qwen3"),
        ("<tool_call> <arg_key> <think>", "glm45", "glm45"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜> ```json <think>", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "deepseek_r1"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|python_tag|>", "llama3_json", None),
        ("<|python_start|>", "pythonic", None),
        ("<|channel|> <|message|>", "gpt_oss", "gpt_oss"),
        ("tools in no known form", "json", None),
    ],
)
def test_auto_goes_by_the_template(template, tools, reasoning):
    found = choose_format(template, has_tools_branch=True)
    assert found.tools is not None
    assert found.tools.name == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_template_without_tools_gets_the_hermes_form():
    found = choose_format("{{ messages }}", has_tools_branch=False)
    assert found.tools is not None
    assert (found.tools.name, found.reasoning, found.has_tools_branch) == ("hermes", None, False)


@pytest.mark.parametrize("template", ["", "<tool_call> <think>", "<|channel|> <|message|>"])
def test_a_vocabulary_of_the_harmony_form_decides_before_the_template(template):
    found = choose_format(template, has_tools_branch=True, is_harmony=True)
    assert found.uses_channels
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.name, found.reasoning.name) == ("gpt_oss", "gpt_oss")
    options = {"tool_parser": "hermes", "reasoning_parser": "none"}
    asked = choose_format(template, has_tools_branch=True, is_harmony=True, **options)
    assert asked.tools is not None
    assert (asked.tools.name, asked.reasoning) == ("hermes", None)


def test_names_aliases_and_none():
    options = {"tool_parser": "qwen", "reasoning_parser": "passthrough"}
    found = choose_format("<|channel|>", has_tools_branch=True, **options)
    assert found.tools is not None
    assert (found.tools.name, found.reasoning) == ("hermes", None)
    off = choose_format("<tool_call>", has_tools_branch=True, tool_parser="none")
    assert off.tools is None
    assert off.new_parser({}) is None


def test_unknown_name_ends_the_start():
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} is 'frob'") as caught:
            with_server(None, config=ServerConfig(port=0, **{field: "frob"}))
        assert caught.value.param == field


def test_special_tokens_that_are_markers_stay_in_the_text():
    backend = BackendTokenizer(models.BPE(vocab={"a": 0, "<end>": 1, "[TOOL_CALLS]": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "[TOOL_CALLS]"])
    tokenizer = Tokenizer(backend)
    kept = choose_format("[TOOL_CALLS]", has_tools_branch=True).markers(with_tools=True)
    assert tokenizer.new_detokenizer().push([0, 2, 1]) == "a"
    assert tokenizer.new_detokenizer(kept_tokens=kept).push([0, 2, 1]) == "a[TOOL_CALLS]"
