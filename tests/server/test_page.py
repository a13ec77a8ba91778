"""The chat page at `/`, in a real headless Chromium."""

import os
from pathlib import Path

import pytest

from compiled_engine.config import ServerConfig
from tests.helpers.browser import browser_page, find_chromium
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

pytestmark = pytest.mark.slow

ANSWER = "Grüße! <b>not bold</b> & 天气 👩‍👩‍👧\n\n" + "A second paragraph. " * 6
SCREENSHOTS = os.environ.get("COMPILED_ENGINE_TEST_SCREENSHOTS")


async def _shot(page, name: str) -> None:
    if SCREENSHOTS:
        await page.screenshot(Path(SCREENSHOTS) / f"{name}.png")


async def _send(page, text: str) -> None:
    await page.value("document.getElementById('input').focus()")
    await page.type_text(text)
    await page.press_enter()


def test_page_chats_streams_and_stops():
    find_chromium()

    async def body(server: Server):
        async with browser_page(server.session) as page:
            await page.open(server.url + "/")
            await page.until(f"document.getElementById('model').textContent === '{MODEL}'")
            await _shot(page, "empty")
            await _send(page, "Hello there")
            await page.until("document.querySelector('.assistant')?.textContent.length > 5")
            assert await page.value("document.querySelector('.assistant.running') !== null")
            await page.until("document.querySelector('.running') === null")
            text = await page.value("document.querySelector('.assistant').textContent")
            assert text == ANSWER
            assert await page.value("document.querySelector('.assistant b')") is None
            stats = await page.value("document.getElementById('stats').textContent")
            assert f"{len(ANSWER.encode()) + 1} tokens" in stats
            assert "end: stop" in stats
            await _shot(page, "answered")

            server.engine.delay_s = 0.05
            await _send(page, "And again")
            await page.until("document.querySelectorAll('.assistant')[1]?.textContent.length > 2")
            await page.value("document.getElementById('stop').click()")
            await page.until("document.querySelector('.running') === null")
            await eventually(lambda: server.engine.num_running == 0)
            assert len(server.engine.aborted) == 1
            assert "stopped by you" in await page.value(
                "document.getElementById('stats').textContent"
            )
            prompt = bytes(server.engine.submitted[1].prompt_token_ids).decode()
            assert prompt.startswith(f"[user]Hello there\n[assistant]{ANSWER}\n[user]And again")
            await page.value("document.getElementById('new').click()")
            assert await page.value("document.querySelectorAll('.message').length") == 0

            server.engine.fail_with = "out of luck"
            await _send(page, "Fail")
            await page.until("document.querySelector('.error')?.textContent === 'out of luck'")
            refused = [e for e in page.errors if "status of 500" not in e]
            assert refused == []

    engine = FakeEngine(text_reply(ANSWER), delay_s=0.004, tokens_per_event=1)
    with_server(body, engine=engine)


def test_page_asks_for_the_api_key():
    find_chromium()

    async def body(server: Server):
        async with browser_page(server.session) as page:
            await page.open(server.url + "/")
            await page.until("!document.getElementById('key-form').hidden")
            await _shot(page, "locked")
            await page.value("document.getElementById('key').focus()")
            await page.type_text("sesame")
            await page.press_enter()
            await page.until(f"document.getElementById('model').textContent === '{MODEL}'")
            assert await page.value("document.getElementById('key-form').hidden")
            await _send(page, "Hi")
            await page.until("document.querySelector('.assistant')?.textContent === 'hello'")

    with_server(body, config=ServerConfig(port=0, api_key="sesame"))
