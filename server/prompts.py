"""Text and chats to prompt token ids, with work bounded by the model's length.

Runs in the text threads; owns no state. The tokenizer and its templates are in `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.parsers.registry import ChatFormat
from compiled_engine.server.tool_prompt import with_call_ids, with_tools_as_text
from compiled_engine.tokenizer import Tokenizer

# A text longer than this many characters a token is first judged by its beginning.
_CHARS_PER_TOKEN = 16


def encode_text(
    tokenizer: Tokenizer, text: str, *, max_tokens: int, add_special_tokens: bool
) -> list[int]:
    """Token ids of `text`, or a refusal that does not cost the tokenising of all of it.

    Raises:
        InvalidRequestError: the beginning alone has twice the tokens that fit.
    """
    beginning = max_tokens * _CHARS_PER_TOKEN
    if len(text) > beginning:
        num_tokens = len(tokenizer.encode(text[:beginning], add_special_tokens=False))
        if num_tokens > 2 * max_tokens:
            raise InvalidRequestError(
                f"prompt has more than {num_tokens} tokens ({len(text)} characters); at most "
                f"{max_tokens - 1} tokens fit",
                param="prompt",
                code="context_length_exceeded",
            )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    *,
    max_tokens: int,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        InvalidRequestError: a prompt has no tokens, or far too many; names the item of a list.
    """
    results = []
    for index, prompt in enumerate(prompts):
        path = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            token_ids = encode_text(
                tokenizer, prompt, max_tokens=max_tokens, add_special_tokens=add_special_tokens
            )
        else:
            token_ids = prompt
        if not token_ids:
            raise InvalidRequestError(f"{path} is empty: at least one token is needed", param=path)
        results.append(token_ids)
    return results


def render_chat(
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """The prompt text of a chat; tools in the template's own form or, without one, as text.

    Raises:
        InvalidRequestError: the template refuses the messages.
    """
    if chat_format.tools is not None:
        messages = with_call_ids(messages, chat_format.tools.call_id_form)
    options = dict(template_kwargs)
    if not chat_format.has_tools_branch:
        try:
            messages = with_tools_as_text(messages, tools)
        except RecursionError as error:
            raise InvalidRequestError(
                "tools, or arguments of earlier calls, are nested too deeply", param="tools"
            ) from error
    elif tools:
        options["tools"] = list(tools)
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **options,
    )


def encode_rendered(
    tokenizer: Tokenizer, text: str, *, max_tokens: int, add_special_tokens: bool
) -> list[int]:
    """Token ids of a rendered chat.

    Raises:
        InvalidRequestError: the prompt is far too long, or empty.
    """
    try:
        token_ids = encode_text(
            tokenizer, text, max_tokens=max_tokens, add_special_tokens=add_special_tokens
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param="messages", code=error.code) from error
    if not token_ids:
        raise InvalidRequestError("messages render to no tokens", param="messages")
    return token_ids
