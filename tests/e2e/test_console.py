"""The page at `/` against a real server with the real small model: tools, numbers, a death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from compiled_engine.models.source import DEFAULT_MODEL
from tests.helpers.browser import Browser, running_browser
from tests.helpers.console import open_console
from tests.helpers.serve_process import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ANSWER_TIMEOUT_S = 240.0


async def _use(browser: Browser, server: ServeProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        open_console(browser, session, server.url, model=DEFAULT_MODEL) as page,
    ):
        await page.until("document.getElementById('status-text').textContent === 'ready'")
        await page.fill("#temperature", "0")
        await page.fill("#max-tokens", "160")
        await page.click("#tools-example")
        await page.fill("#tool-choice", "name:get_weather")
        await page.send("What is the weather in Paris?")
        await page.answered(timeout_s=ANSWER_TIMEOUT_S)
        assert await page.text(".call .name") == "get_weather"
        assert '"city":' in await page.text(".call pre")
        await page.fill(".call textarea", '{"temperature": 21}')
        await page.fill("#tool-choice", "none")
        await page.fill("#max-tokens", "24")
        await page.click(".continue button")
        await page.answered(2, timeout_s=ANSWER_TIMEOUT_S)
        answer = "document.querySelectorAll('.assistant')[1]"
        assert await page.value(f"{answer}.querySelector('.text').textContent.length") > 0
        assert "cached" in await page.value(f"{answer}.querySelector('.stats').textContent")
        # The second request, as the server counted it.
        await page.until("document.querySelectorAll('#requests .mine').length === 2")
        await page.until("document.querySelectorAll('#requests .badge[data-state]').length === 2")
        pages = "document.querySelector('[aria-label=\"KV pages\"] .key.amber').textContent"
        await page.until(f"/cached [1-9]/.test({pages})")
        tokens = "document.querySelector('[aria-label=\"Generated tokens\"] .area')"
        await page.until(f"{tokens} !== null")
        await page.shot("real")
        assert page.errors == []
        server.engine().kill()
        await page.until("document.getElementById('banner').dataset.kind === 'bad'")
        await page.until("!document.getElementById('banner').hidden")
        # The server goes, too, after a while; the page stays and says so.
        await page.until("document.getElementById('status-text').textContent === 'unreachable'", 30)
        await page.shot("real-dead")


def test_console_of_a_real_server(tmp_path: Path) -> None:
    flags = ("--enforce-eager", "--max-model-len", "2048", "--max-total-tokens", "8192")
    with (
        running_browser() as browser,
        ServeProcess(Path(DEFAULT_MODEL), tmp_path / "log", flags=flags) as server,
    ):
        server.wait_for("/ready", 200, timeout_s=300.0)
        asyncio.run(_use(browser, server))
