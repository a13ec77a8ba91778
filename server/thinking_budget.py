"""A request's limit on reasoning: its spellings, and the markers that the engine needs to keep it.

vLLM calls it `thinking_token_budget`, where -1 is no limit; Alibaba's and SiliconFlow's APIs say
`thinking_budget`; `/v1/messages` has `thinking.budget_tokens` and comes here by the first name.
"""

from __future__ import annotations

from compiled_engine.errors import InvalidRequestError
from compiled_engine.request import ThinkingBudget
from compiled_engine.server.parsers import gpt_oss, qwen3_coder
from compiled_engine.server.parsers.registry import ChatFormat
from compiled_engine.server.protocol import ChatRequest
from compiled_engine.tokenizer import Tokenizer

FIELD = "thinking_token_budget"
_OTHER = "thinking_budget"


def thinking_limit(request: ChatRequest) -> int | None:
    """Tokens that the answer may think; None for any number.

    Raises:
        InvalidRequestError: below -1, or given twice with different values.
    """
    given = request.thinking_token_budget
    other = request.thinking_budget
    field = FIELD if given is not None else _OTHER
    if given is not None and other is not None and given != other:
        raise InvalidRequestError(
            f"{FIELD} is {given} but {_OTHER} is {other}; give one of them", param=FIELD
        )
    limit = other if given is None else given
    if limit is not None and not -1 <= limit < 2**30:
        raise InvalidRequestError(
            f"{field} is {limit}; allowed is -1, which is no limit, to {2**30 - 1}", param=field
        )
    return None if limit == -1 else limit


def thinking_budget(
    limit: int | None,
    chat_format: ChatFormat,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    continued: str | None,
    is_bound: bool,
) -> ThinkingBudget | None:
    """What the engine must know to keep the limit; None where there is nothing to limit.

    Args:
        limit: from `thinking_limit`.
        chat_format: of the served model.
        tokenizer: of the served model.
        prompt: the rendered prompt.
        continued: the message at its end that the answer continues.
        is_bound: a grammar or tools say what follows the reasoning.

    Raises:
        InvalidRequestError: the model has no reasoning parser.
    """
    if limit is None:
        return None
    if chat_format.reasoning is None:
        raise InvalidRequestError(
            f"{FIELD} needs a reasoning parser, and this model has none (--reasoning-parser); "
            "leave it out",
            param=FIELD,
        )
    tags = chat_format.reasoning.tags
    enders: tuple[str, ...]
    if tags is None:
        # Behind tools or a grammar another channel may follow.
        closing = f"{gpt_oss.END}{gpt_oss.START}assistant"
        if not is_bound:
            closing += f"{gpt_oss.CHANNEL}final{gpt_oss.MESSAGE}"
        opening = f"{gpt_oss.CHANNEL}analysis{gpt_oss.MESSAGE}"
        enders, reopens = (gpt_oss.END, gpt_oss.CALL, gpt_oss.RETURN), True
    else:
        place = tags.place(prompt, continued)
        if place == "after":
            return None
        closing, opening = tags.closing, "" if place == "inside" else tags.opening
        enders, reopens = tags.enders, False
        if chat_format.tools is not None and chat_format.tools.ends_reasoning:
            enders = (*enders, qwen3_coder.CALL_BEGIN)
    return ThinkingBudget(
        max_tokens=limit,
        closing=closing,
        closing_ids=tuple(tokenizer.encode(closing, add_special_tokens=False)),
        opening=opening,
        enders=enders,
        reopens=reopens,
    )
