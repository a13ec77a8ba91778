"""The page at `/`, in a real headless Chromium: live numbers, faults, and use by anyone."""

from __future__ import annotations

import math

import pytest

from compiled_engine.request import ModelLimits
from compiled_engine.server.console import HISTORY
from tests.helpers.console import LOW_CONTRAST, OVERFLOW, Console, open_console
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import Server, with_server
from tests.server.test_page import ATTACK, CALL, WITH_PARSERS

LIMITS = ModelLimits(max_model_len=16_384, vocab_size=258, max_total_tokens=65_536)


def _play(server: Server, seconds: int) -> None:
    """Samples of a server whose load swells and falls, as if so many seconds had passed."""
    status, history = server.engine.status, server.app[HISTORY]
    for second in range(seconds):
        load = 0.5 - 0.5 * math.cos(second / 25)
        status.num_steps += 20
        status.num_requests_running = round(48 * load)
        status.num_requests_waiting = round(max(0.0, load - 0.7) * 60)
        status.num_generated_tokens += round(1900 * load)
        status.num_prompt_tokens += round(5000 * load)
        status.num_cached_tokens += round(5000 * load * (0.4 + 0.2 * math.sin(second / 9)))
        status.num_pages_total = 4000
        status.num_pages_active = round(2600 * load)
        status.num_pages_cached = min(4000 - status.num_pages_active, 8 * second)
        status.num_pages_free = 4000 - status.num_pages_active - status.num_pages_cached
        if second % 3 == 0:
            for share in (0.8, 1.0, 1.7):
                server.state.metrics.note_first_token(0.03 + share * 0.2 * load)
        history._last_s -= 1
        history.take_sample()


async def _value(page: Console, title: str) -> str:
    return await page.text(f"[aria-label='{title}'] .value")


def test_charts_show_the_last_minutes_by_pointer_and_by_key(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await page.until("document.querySelectorAll('.chart').length === 6")
            assert await _value(page, "Time to first token") == "–"
            await page.shot("live-empty")
            _play(server, 290)
            await page.until(
                "document.querySelector('[aria-label=\"Rows in use\"] .value')"
                f".textContent === '{server.engine.status.num_requests_running} running'"
            )
            assert await _value(page, "KV pages") == (
                f"{server.engine.status.num_pages_active:,} pages active"
            )
            labels = await page.value(
                "[...document.querySelectorAll('[aria-label=\"KV pages\"] text')]"
                ".map((each) => each.textContent)"
            )
            assert labels == ["0", "2,000", "4,000", "5 min ago", "now"]
            box = await page.value(
                "(() => { const { left, top, width, height } = document.querySelector("
                "'[aria-label=\"KV pages\"] svg').getBoundingClientRect();"
                "return [left + width / 2, top + height / 2]; })()"
            )
            await page.move_pointer(*box)
            await page.until("!document.querySelector('[aria-label=\"KV pages\"] .tip').hidden")
            tip = await page.text("[aria-label='KV pages'] .tip")
            words = tip.splitlines()[1].replace(",", "").split()
            assert [word for word in words if word.isalpha()][:3] == ["active", "cached", "free"]
            assert sum(int(word) for word in words if word.isdigit()) == 4000
            await page.shot("live-busy")
            await page.value("document.querySelector('[aria-label=\"Rows in use\"] svg').focus()")
            await page.press("ArrowLeft")
            first = await page.text("#announce")
            assert "rows" in first
            await page.press("ArrowLeft")
            assert await page.text("#announce") != first
            await page.press("Escape")
            assert await page.value(
                "document.querySelector('[aria-label=\"Rows in use\"] .tip').hidden"
            )
            assert page.errors == []

    with_server(body)


def test_table_of_requests_marks_the_ones_of_this_page(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-ID": "<b>1"})
            server.engine.delay_s = 0.05
            await page.send("Hi")
            await page.until("document.querySelector('#requests .mine .badge') !== null")
            assert await page.text("#requests .mine .badge") == "running"
            await page.until(
                "document.querySelector('#requests .mine .badge').textContent === 'stop'"
            )
            cells = await page.value(
                "[...document.querySelectorAll('#requests tr:last-child td')]"
                ".map((each) => each.textContent)"
            )
            assert cells[:5] == ["<b>1[0]", "length", "1", "0", "16"]
            assert cells[-1] == "completions"
            assert await page.count("#requests b") == 0

    with_server(body, engine=FakeEngine(text_reply("x" * 40), delay_s=0.001))


def test_loading_pause_death_and_silence_are_said_in_a_banner(browser):
    async def banner(page: Console, text: str) -> None:
        await page.until(f"document.getElementById('banner').textContent.includes({text!r})")

    async def body(server: Server):
        engine = server.engine
        async with open_console(browser, server.session, server.url) as page:
            engine.status.phase, engine.status.phase_detail = "loading", "weights (3/8)"
            limits, engine.limits = engine.limits, None
            await banner(page, "weights (3/8)")
            await page.shot("loading")
            engine.status.phase, engine.limits = "ready", limits
            await page.until("document.getElementById('banner').hidden")
            engine.status.is_paused = True
            await banner(page, "paused")
            engine.status.is_paused = False
            engine.step_age_s = 9.0
            await banner(page, "no step for 9.0 s")
            engine.step_age_s = 0.0
            engine.delay_s = 5
            await page.send("Hi")
            await page.until("document.querySelector('.running') !== null")
            engine.kill("the engine process has ended (exit code -9)")
            await banner(page, "exit code -9")
            assert await page.value("document.getElementById('banner').role") == "alert"
            assert await page.text("#status-text") == "engine dead"
            await page.until("document.querySelector('.message.error') !== null")
            assert "503" in await page.text(".message.error")
            assert (await page.value(LOW_CONTRAST))["found"] == []
            await page.shot("dead")
            await page.call("Network.enable")
            offline = {"offline": True, "latency": 0, "downloadThroughput": 0}
            await page.call("Network.emulateNetworkConditions", uploadThroughput=0, **offline)
            await banner(page, "No answer from the server")
            assert await page.text("#status-text") == "unreachable"

    with_server(body)


async def _fill_all(page: Console) -> None:
    """Brings as many parts of the page into view as there are."""
    await page.click("#tools-example")
    await page.fill("#format", "json_schema")
    await page.fill("#schema", "{")
    await page.fill("#format", "text")
    await page.send("Show everything")
    await page.answered()
    await page.value("document.querySelector('.reasoning').open = true")
    await page.click("#key-open")
    await page.until("document.querySelectorAll('#requests tr').length > 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough_and_nothing_sticks_out(browser, scheme):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            other = "dark" if scheme == "light" else "light"
            # The system's scheme holds, and the switch is above it.
            await page.prefer(scheme)
            ground = "getComputedStyle(document.body).backgroundColor"
            by_system = await page.value(ground)
            await page.prefer(other)
            assert await page.value(ground) != by_system
            await page.fill("#theme", scheme)
            assert await page.value(ground) == by_system
            _play(server, 200)
            await _fill_all(page)
            server.engine.fail_with = "no luck"
            for width, height in ((1440, 900), (1100, 800), (390, 844), (320, 640)):
                await page.resize(width, height)
                for view in ("chat", "live"):
                    await page.click(f"#view-{view}")
                    result = await page.value(LOW_CONTRAST)
                    assert result["found"] == [], (width, view)
                    assert result["count"] > 30
                    assert await page.value(OVERFLOW) == [], (width, view)
                    await page.shot(f"{scheme}-{width}-{view}")
                await page.click("#view-chat")
            await page.click("#settings-open")
            assert (await page.value(LOW_CONTRAST))["found"] == []
            assert await page.value(OVERFLOW) == []
            await page.shot(f"{scheme}-settings")
            await page.press("Escape")
            assert await page.value("document.activeElement.id") == "settings-open"

    text = f"<think>Let me think.</think>{ATTACK}\n\n> a quote\n\n# Title\n\n1. one\n2. two\n{CALL}"
    engine = FakeEngine(text_reply(text), tokens_per_event=9, limits=LIMITS)
    with_server(body, engine=engine, config=WITH_PARSERS)


def test_everything_has_a_name_and_is_reached_by_tab(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await _fill_all(page)
            await page.call("Accessibility.enable")
            tree = await page.call("Accessibility.getFullAXTree")
            roles = {"button", "textbox", "combobox", "spinbutton", "region", "img", "log", "form"}
            nodes = [
                node
                for node in tree["nodes"]
                if not node["ignored"] and node["role"]["value"] in roles - {"form"}
            ]
            assert len(nodes) > 30
            unnamed = [n["role"]["value"] for n in nodes if not n.get("name", {}).get("value")]
            assert unnamed == []

            await page.value("document.querySelector('.skip').focus()")
            reached, hidden_focus = [], []
            for _ in range(90):
                at = await page.value(
                    "(() => { const node = document.activeElement;"
                    "const styles = [node, node.closest('.composer')].filter(Boolean)"
                    ".map((each) => getComputedStyle(each));"
                    "const box = node.getBoundingClientRect();"
                    "const name = node.id || node.textContent.trim().slice(0, 30);"
                    "const id = name || node.ariaLabel || node.localName;"
                    "return { id: node === document.body ? null : id,"
                    "  isSeen: box.width > 1 && box.right > 0 && box.bottom > 0 &&"
                    "    styles.some((each) => each.outlineStyle !== 'none') }; })()"
                )
                if at["id"] is None:
                    break
                reached.append(at["id"])
                if not at["isSeen"]:
                    hidden_focus.append(at["id"])
                await page.press("Tab")
            assert hidden_focus == []
            assert reached[0].startswith("Skip to the message")
            order = ["key-open", "theme", "key", "copy-next", "system", "tools", "extra", "new"]
            order += ["messages", "input", "send"]
            assert [name for name in reached if name in order] == order
            focusable = await page.value(
                "[...document.querySelectorAll("
                "'button, input, select, textarea, summary, a[href], [tabindex]')]"
                ".filter((each) => each.checkVisibility() && !each.disabled).length"
            )
            assert len(reached) >= focusable

    text = f"<think>Let me think.</think>Hello.{CALL}"
    engine = FakeEngine(text_reply(text), tokens_per_event=9, limits=LIMITS)
    with_server(body, engine=engine, config=WITH_PARSERS)
