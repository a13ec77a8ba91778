"""Thinking budgets in requests: spellings, limits, and what the engine is told."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_engine.config import ServerConfig
from compiled_engine.request import ThinkingBudget
from tests.helpers.fake_engine import FakeEngine, TemplateTokenizer, text_reply
from tests.helpers.server_harness import Server, with_server

USER = [{"role": "user", "content": "hi"}]
# Thinks on its own, in its prompt, or not at all.
TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if thinking is defined %}<think>{% endif %}{% endif %}"""
CHANNELS = "<|start|>assistant<|channel|>analysis<|message|>{{ messages[0].content }}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def sent_budget(template: str = TEMPLATE, **fields: Any) -> ThinkingBudget | None:
    """What the engine is told for a chat with these fields."""
    found: list[ThinkingBudget | None] = []

    async def body(server: Server) -> None:
        status, answer = await server.post("/v1/chat/completions", {"messages": USER, **fields})
        assert status == 200, answer
        found.append(server.engine.submitted[-1].params.thinking)

    with_server(body, engine=FakeEngine(text_reply("x")), tokenizer=TemplateTokenizer(template))
    return found[0]


def refusal(template: str = TEMPLATE, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    found: list[Any] = []

    async def body(server: Server) -> None:
        status, answer = await server.post(path, {"messages": USER, **fields})
        assert status == 400, answer
        found.append(answer["error"])

    config = ServerConfig(port=0)
    with_server(body, tokenizer=TemplateTokenizer(template), config=config)
    return found[0]


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
@pytest.mark.parametrize("limit", [0, 5])
def test_budget_counts_from_the_model_s_own_opening_or_from_the_start(name, limit):
    budget = sent_budget(**{name: limit})
    assert budget is not None
    assert (budget.max_tokens, budget.opening, budget.closing) == (limit, "<think>", "</think>")
    assert bytes(budget.closing_ids) == b"</think>"
    inside = sent_budget(**{name: limit}, chat_template_kwargs={"thinking": True})
    assert inside is not None
    assert (inside.max_tokens, inside.opening) == (limit, "")


def test_no_limit_and_no_thinking_leave_nothing_to_keep():
    assert sent_budget() is None
    assert sent_budget(thinking_token_budget=-1) is None
    assert sent_budget(thinking_token_budget=None, thinking_budget=None) is None
    off = {"enable_thinking": False}
    assert sent_budget(thinking_token_budget=4, chat_template_kwargs=off) is None


def test_continued_thought_is_inside():
    messages = [*USER, {"role": "assistant", "content": "<think>so far"}]
    fields = {"messages": messages, "continue_final_message": True}
    budget = sent_budget(thinking_token_budget=4, **fields)
    assert budget is not None
    assert budget.opening == ""


def test_channels_go_on_to_the_answer_or_leave_the_choice():
    budget = sent_budget(CHANNELS, thinking_token_budget=4)
    assert budget is not None
    assert budget.closing == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert budget.reopens
    assert budget.opening == "<|channel|>analysis<|message|>"
    for fields in ({"tools": [TOOL]}, {"guided_regex": "a"}):
        budget = sent_budget(CHANNELS, thinking_token_budget=4, **fields)
        assert budget is not None
        assert budget.closing == "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"thinking_token_budget": -2}, "-1"),
        ({"thinking_budget": 2**40}, "thinking_budget is"),
        ({"thinking_token_budget": 3, "thinking_budget": 4}, "give one of them"),
        ({"thinking_token_budget": "3"}, "int"),
        ({"thinking_token_budget": 1.5}, "int"),
    ],
)
def test_wrong_budgets_are_refused(fields, word):
    error = refusal(**fields)
    assert word in error["message"]
    assert error["param"] in fields


def test_model_without_a_reasoning_parser_refuses_a_budget():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    error = refusal(plain, thinking_token_budget=4)
    assert error["param"] == "thinking_token_budget"
    assert "reasoning parser" in error["message"]
    assert sent_budget(plain, thinking_token_budget=-1) is None


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_completions_refuse_a_budget(name):
    fields = {"prompt": "a", name: 4}
    error = refusal(path="/v1/completions", **fields)
    assert error["param"] == name
