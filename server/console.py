"""The page at `/` and `/console/data`, the numbers it draws.

Owns how the page is put together from `static/` and what it may do (its content policy). The data
come from what the engine sent last: asking for them costs the engine nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

from compiled_engine import __version__
from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.calls import CALLER
from compiled_engine.server.console_protocol import ConsoleData
from compiled_engine.server.control import readiness_failure
from compiled_engine.server.history import History
from compiled_engine.server.sse import json_response
from compiled_engine.server.state import STATE, ServerState

HISTORY = web.AppKey("history", History)
_MAX_SINCE_DIGITS = 15
# An element of `index.html` that stands for a file beside it.
_PART = re.compile(r'<(style|script) data-file="([\w.]+)"></\1>')


class ConsolePage:
    """The page: one answer that holds all of its styles and scripts; it has nothing secret."""

    def __init__(self) -> None:
        self._body, self._headers = _load_page()

    def response(self, status: int = 200) -> web.Response:
        """The page with its headers."""
        return web.Response(body=self._body, status=status, headers=self._headers)

    async def get(self, request: web.Request) -> web.Response:
        """`GET /`."""
        return self.response()


def _load_page() -> tuple[bytes, dict[str, str]]:
    """The page with its files put in, and its headers.

    The content policy allows exactly these files and requests to this server. It also forbids the
    page's own scripts to turn text into markup.
    """
    folder = resources.files("compiled_engine.server").joinpath("static")
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def put_in(found: re.Match[str]) -> str:
        kind, name = found.groups()
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert f"</{kind}" not in text.lower(), f"{name} would end its own element"
        hashes[kind].append(_source_hash(text))
        return f"<{kind}>{text}</{kind}>"

    index = folder.joinpath("index.html").read_text(encoding="utf-8")
    page = _PART.sub(put_in, index)
    policy = (
        f"default-src 'none'; style-src {' '.join(hashes['style'])}; "
        f"script-src {' '.join(hashes['script'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _since(request: web.Request) -> int:
    text = request.query.get("since", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_SINCE_DIGITS):
        raise InvalidRequestError(
            f"since is {text[:64]!r}; it must be the number of a sample, 0 or more", param="since"
        )
    return int(text)


async def get_console_data(request: web.Request) -> web.Response:
    """`GET /console/data?since=NUMBER`: state, recent requests, and the samples after a number.

    A key that is not the operator's sees its own requests only.
    """
    state, key_name = request.app[STATE], request[CALLER].key_name
    samples = request.app[HISTORY].since(_since(request))
    status, limits = state.engine.status, state.engine.limits
    num_prompt = status.num_prompt_tokens
    tool_parser, reasoning_parser = _parsers(state)
    data = ConsoleData(
        version=__version__,
        model=state.model_name,
        started_s=state.created,
        max_model_len=limits.max_model_len if limits else None,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        phase=status.phase,
        phase_detail=status.phase_detail,
        failure=readiness_failure(state),
        is_dead=state.engine.is_dead,
        is_paused=status.is_paused,
        step_age_s=round(state.engine.step_age_s, 3),
        device_note=status.device_note,
        num_steps=status.num_steps,
        num_pages_total=status.num_pages_total,
        num_prompt_tokens=num_prompt,
        num_generated_tokens=status.num_generated_tokens,
        num_retractions=status.num_retractions,
        num_recompiles=status.num_recompiles,
        num_scheduler_errors=status.num_scheduler_errors,
        cache_hit_rate=round(status.num_cached_tokens / num_prompt, 4) if num_prompt else 0.0,
        num_running=state.recent.num_running(key_name),
        requests=state.recent.rows(key_name),
        samples=samples,
    )
    return json_response(data, headers={"Cache-Control": "no-store"})


def _parsers(state: ServerState) -> tuple[str | None, str | None]:
    """Names of the parsers of tool calls and of reasoning, once the chat template is known."""
    if state.loaded_tokenizer is None:
        return None, None
    tools, reasoning = state.chat_format.tools, state.chat_format.reasoning
    return tools.name if tools else None, reasoning.name if reasoning else None
