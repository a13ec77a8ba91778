"""Items of `/v1/responses` beyond one answer: the list of a request's input, and sealed reasoning.

Owns the shapes of `GET /v1/responses/{id}/input_items` and its pages.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from compiled_engine.server.responses_protocol import (
    FunctionCall,
    InputItem,
    InputPart,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from compiled_engine.server.translation import refuse

MAX_PAGE, DEFAULT_PAGE = 100, 20
_SEAL = "ce1."


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text of a message or of a call's result."""

    text: str


class ListedMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message; the assistant's holds output, others input."""

    id: str
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputText | OutputText]
    status: Literal["completed"] = "completed"


class CallResult(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: Literal["completed"] = "completed"


ListedItem = ListedMessage | CallResult | FunctionCall | ReasoningItem


class InputItems(msgspec.Struct, kw_only=True):
    """Answer of `GET /v1/responses/{id}/input_items`; ids are null where there are no items."""

    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def seal(text: str) -> str:
    """Reasoning as a client without state gives it back; hides nothing, since `content` has it."""
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The inverse of `seal`; None for anything else."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        encoded = sealed.removeprefix(_SEAL).encode("ascii")
        return base64.b64decode(encoded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        return None


def listed_items(response_id: str, given: str | Sequence[InputItem]) -> list[ListedItem]:
    """A request's own input as the list shows it.

    Args:
        response_id: ids of the items are made from it.
        given: as parsed; known to be right.
    """
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    suffix = response_id.removeprefix("resp_")
    return [_listed(item, f"{suffix}{index:04x}") for index, item in enumerate(given)]


def _listed(item: InputItem, suffix: str) -> ListedItem:
    if item.type == "function_call":
        return FunctionCall(
            id=f"fc_{suffix}",
            call_id=item.call_id or "",
            name=item.name or "",
            arguments=item.arguments or "{}",
            status="completed",
        )
    if item.type == "function_call_output":
        output = item.output if isinstance(item.output, str) else _texts(item.output)
        return CallResult(f"fco_{suffix}", item.call_id or "", output)
    if item.type == "reasoning":
        parts = _texts(item.content or item.summary)
        thoughts = [ReasoningText(part.text) for part in parts]
        listed = ReasoningItem(f"rs_{suffix}", thoughts, "completed")
        if item.encrypted_content:
            listed.encrypted_content = item.encrypted_content
        return listed
    kind = OutputText if item.role == "assistant" else InputText
    content = [kind(part.text) for part in _texts(item.content)]
    return ListedMessage(f"msg_{suffix}", item.role or "user", content)


def _texts(content: str | Sequence[InputPart] | None) -> list[InputText]:
    if isinstance(content, str):
        return [InputText(content)]
    return [InputText(part.text or "") for part in content or ()]


def page_of(items: Sequence[ListedItem], query: Mapping[str, str]) -> InputItems:
    """One page of a request's input.

    Args:
        items: all of them, as they were given.
        query: `limit`, `order` ("desc", the default, begins with the last item) and `after`, the id
            of an item.

    Raises:
        InvalidRequestError: another field, or a value that cannot be; names it.
    """
    for name in query:
        if name not in ("limit", "order", "after"):
            refuse(name[:64])
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        refuse("limit", f"is {limit[:16]!r}; allowed is 1 to {MAX_PAGE}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", f"is {order[:16]!r}; allowed are asc and desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if "after" in query:
        places = [place for place, item in enumerate(ordered) if item.id == query["after"]]
        if not places:
            refuse("after", "is no item of this response's input")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: int(limit)]
    return InputItems(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(ordered) > len(shown),
    )
