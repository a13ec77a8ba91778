"""The page at `/`, in a real headless Chromium: the chat."""

from __future__ import annotations

import json
import shlex

from compiled_engine.config import ServerConfig
from compiled_engine.request import ModelLimits
from tests.helpers.console import open_console
from tests.helpers.fake_engine import EOS, FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

ANSWER = "Grüße! **bold** <b>not bold</b> & 天气 👩‍👩‍👧\n\n" + "A second paragraph. " * 6
WITH_PARSERS = ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="qwen3")
LIMITS = ModelLimits(max_model_len=16_384, vocab_size=258, max_total_tokens=65_536)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "<i>Paris</i>"}}</tool_call>'
ATTACK = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\n\n"
    "[click](javascript:window.pwned=3) [data](data:text/html,<script>window.pwned=4</script>) "
    "[sly]( javascript:window.pwned=5) ![shot](https://evil.example/pixel.png) "
    "[good](https://example.com/a?b=1)\n\n"
    "| <svg onload=window.pwned=6> | b |\n|---|---|\n| [x](JaVaScRiPt:window.pwned=7) | c |\n\n"
    "- <iframe src='javascript:window.pwned=8'></iframe>\n\n"
    "```html\n<script>window.pwned = 9</script>\n```\n"
)


def _prompt(server: Server, number: int) -> str:
    return bytes(server.engine.submitted[number].prompt_token_ids).decode()


def _reply_in_turn(*texts: str):
    rest = list(texts)
    return lambda request: [*rest.pop(0).encode(), EOS]


def test_page_chats_streams_and_stops(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await page.shot("empty")
            await page.send("Hello there")
            await page.until("document.querySelector('.assistant .text')?.textContent.length > 5")
            assert await page.count(".assistant.running") == 1
            assert await page.value("document.querySelector('.assistant').ariaBusy") == "true"
            await page.answered()
            assert await page.text(".assistant strong") == "bold"
            assert await page.count(".assistant .text b") == 0
            assert await page.count(".assistant .text p") == 2
            await page.click(".assistant .actions button", 1)
            assert await page.text(".assistant .text") == ANSWER
            stats = await page.text(".stats")
            assert f"output {len(ANSWER.encode()) + 1} tokens" in stats
            for part in ("first token ", " tok/s", "cached 3", "end stop"):
                assert part in stats
            assert "Answer complete" in await page.text("#announce")

            server.engine.delay_s = 0.05
            await page.send("And again")
            await page.until("document.querySelectorAll('.assistant .text')[1]?.textContent")
            await page.press("Escape")
            await page.answered(2)
            await eventually(lambda: server.engine.num_running == 0)
            assert len(server.engine.aborted) == 1
            assert "stopped by you" in await page.value(
                "document.querySelectorAll('.stats')[1].textContent"
            )
            assert _prompt(server, 1) == (
                f"[user]Hello there\n[assistant]{ANSWER}\n[user]And again\n[assistant]"
            )
            server.engine.delay_s = 0.001
            await page.click(".assistant .actions button", 3)
            await page.answered(1)
            assert _prompt(server, 2) == "[user]Hello there\n[assistant]"
            await page.click("#new")
            assert await page.count(".message") == 0
            assert page.errors == []

    engine = FakeEngine(text_reply(ANSWER), delay_s=0.003, tokens_per_event=1, num_cached_tokens=3)
    with_server(body, engine=engine)


def test_page_shows_errors_and_asks_again(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            server.engine.fail_with = "out of luck"
            await page.send("Fail")
            await page.until("document.querySelector('.message.error') !== null")
            error = await page.text(".message.error")
            assert "500" in error
            assert "out of luck" in error
            server.engine.fail_with = None
            await page.click(".message.error button")
            await page.answered()
            assert await page.count(".message.error") == 0
            await page.fill("#temperature", "-1")
            await page.send("Too cold")
            await page.until("document.querySelector('.message.error') !== null")
            await page.shot("refused")
            error = await page.text(".message.error")
            assert "400 invalid_request_error" in error
            assert "field: temperature" in error

    with_server(body)


def test_page_asks_for_the_api_key_and_forgets_it(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url, model="locked") as page:
            await page.until("!document.getElementById('key-form').hidden")
            await page.shot("locked")
            assert await page.value("document.activeElement.id") == "key"
            await page.type_text("wrong")
            await page.press("Enter")
            await page.until(
                "document.getElementById('key-label').textContent === 'This key is not taken.'"
            )
            await page.fill("#key", "sësame")
            await page.press("Enter")
            await page.until(f"document.getElementById('model').textContent === '{MODEL}'")
            assert await page.value("document.getElementById('key-form').hidden")
            assert await page.text("#key-open") == "API key set"
            await page.send("Hi")
            await page.answered()
            assert await page.text(".assistant .text") == "hello"
            stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
            assert await page.value(stored) == '[{},{},""]'
            assert "sësame" not in await page.value("document.documentElement.outerHTML")
            await page.value("navigator.clipboard.writeText = () => Promise.reject()")
            await page.click("#copy-next")
            await page.until("document.getElementById('copy-dialog').open")
            command = await page.value("document.getElementById('copy-text').value")
            assert '-H "Authorization: Bearer $API_KEY"' in command
            await page.open(server.url + "/")
            await page.until("!document.getElementById('key-form').hidden")

    with_server(body, config=ServerConfig(port=0, api_key="sësame"))


def test_page_keeps_reasoning_apart_and_goes_on_after_tool_calls(browser):
    thoughts = "<think>I need the weather.</think>"

    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await page.click("#tools-example")
            await page.fill("#tool-choice", "name:get_weather")
            await page.fill("#tool-choice", "auto")
            await page.send("Weather?")
            await page.answered()
            assert await page.text(".reasoning .text") == "I need the weather."
            assert not await page.value("document.querySelector('.reasoning').open")
            assert "think" not in (await page.text(".assistant .body > .text"))
            assert await page.text(".call .name") == "get_weather"
            shown = json.loads(await page.text(".call pre"))
            assert shown == {"city": "<i>Paris</i>"}
            assert await page.count(".call i") == 0
            assert "end tool_calls" in await page.text(".stats")
            await page.shot("tools")
            await page.send("I shall not answer")
            assert len(server.engine.submitted) == 1
            await page.fill(".call textarea", '{"temperature": 21}')
            await page.click(".continue button")
            await page.answered(2)
            assert '{"temperature": 21}' in _prompt(server, 1)
            assert await page.count(".call textarea") == 0
            assert await page.value(
                "document.querySelectorAll('.assistant .text p')[0].textContent"
            )
            assert "get_weather" in _prompt(server, 0)
            assert page.errors == []

    reply = _reply_in_turn(f"{thoughts}{CALL}", "<think></think>It is warm.")
    engine = FakeEngine(reply, delay_s=0.001, limits=LIMITS)
    with_server(body, engine=engine, config=WITH_PARSERS)


def test_nothing_that_a_model_writes_runs(browser):
    evil_call = json.dumps({"name": "<img src=x onerror=pwned=1>", "arguments": {"a": ATTACK}})

    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await page.click("#tools-example")
            await page.send("Attack <script>window.pwned = 0</script>")
            await page.answered()
            await page.value("document.querySelectorAll('.message a').forEach((a) => a.click())")
            elements = await page.value(
                "[...document.querySelectorAll('.messages *')].map((each) => each.localName)"
            )
            assert not {"script", "img", "svg", "iframe", "i", "b"} & set(elements)
            assert await page.value("typeof window.pwned") == "undefined"
            links = await page.value(
                "[...document.querySelectorAll('.messages a')]"
                ".map((a) => [a.href, a.rel, a.target])"
            )
            wanted = ["https://example.com/a?b=1", "noopener noreferrer nofollow", "_blank"]
            assert links == [wanted]
            assert "window.pwned = 9" in await page.text(".messages pre code")
            attributes = await page.value(
                "[...document.querySelectorAll('.messages *')]"
                ".flatMap((each) => each.getAttributeNames())"
                ".filter((name) => /^on|^style$/.test(name))"
            )
            assert attributes == []
            await page.shot("attack")
            # Nothing was even tried: a blocked load or script would be an error.
            assert page.errors == []
            # The end of the answer is in view, however fast it came.
            rest = "(() => { const list = document.getElementById('messages');"
            rest += "return list.scrollHeight - list.scrollTop - list.clientHeight; })()"
            assert await page.value(rest) < 2
            # A text never takes long to show, however it is made.
            hostile = "x " + "`" * 20_000, "*a" * 9_000, "[" * 20_000, "[a](" * 5_000, "**a" * 7_000
            hostile += (
                "a|b\n-" + " " * 20_000 + "x",
                "- " * 9_000 + "x",
                "\n".join(["- a"] * 5_000),
            )
            for text in hostile:
                view = "new MarkdownView(document.createElement('div'))"
                await page.value(f"{view}.show({json.dumps(text)})")
            # Text cannot become markup on this page.
            attempt = "(() => {{ try {{ {}; }} catch (error) {{ return error.name; }} }})()"
            into_markup = attempt.format("document.body.innerHTML = '<b>x</b>'")
            assert await page.value(into_markup) == "TypeError"
            into_script = attempt.format("document.createElement('script').text = '1'")
            assert await page.value(into_script) == "TypeError"

    text = f"<think>{ATTACK}</think>{ATTACK}<tool_call>{evil_call}</tool_call>"
    engine = FakeEngine(text_reply(text), tokens_per_event=7, limits=LIMITS)
    with_server(body, engine=engine, config=WITH_PARSERS)


def test_settings_become_the_request_and_the_command(browser):
    async def body(server: Server):
        async with open_console(browser, server.session, server.url) as page:
            await page.fill("#system", "Be brief, don't shout.")
            await page.fill("#temperature", "0.5")
            await page.fill("#top-p", "0.9")
            await page.fill("#max-tokens", "40")
            await page.fill("#seed", "7")
            await page.fill("#extra", '{"top_k": 5}')
            await page.fill("#format", "json_schema")
            await page.send("Give me 'JSON'")
            # No schema yet: nothing is sent, and the field says why.
            assert "Give a JSON schema" in await page.text("#schema-error")
            assert await page.value("document.activeElement.id") == "schema"
            await page.fill("#schema", "{")
            assert "no JSON" in await page.text("#schema-error")
            assert await page.value("document.getElementById('schema').ariaInvalid") == "true"
            await page.click("#schema-example")
            assert await page.text("#schema-error") == ""
            await page.value("document.getElementById('input').focus()")
            await page.press("Enter")
            await page.answered()
            (request,) = server.engine.submitted
            params = request.params
            assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 5)
            assert (params.max_tokens, params.seed) == (40, 7)
            assert "population" in params.grammar.text
            assert _prompt(server, 0).startswith("[system]Be brief, don't shout.\n[user]Give")
            await page.value("navigator.clipboard.writeText = () => Promise.reject()")
            await page.click(".assistant .actions button", 1)
            await page.until("document.getElementById('copy-dialog').open")
            words = shlex.split(await page.value("document.getElementById('copy-text').value"))
            assert words[:3] == ["curl", "-N", f"{server.url}/v1/chat/completions"]
            sent = json.loads(words[words.index("-d") + 1])
            await server.stream("/v1/chat/completions", sent)
            first, second = server.engine.submitted
            assert second.params == first.params
            assert second.prompt_token_ids == first.prompt_token_ids
            assert page.errors == []

    with_server(body, engine=FakeEngine(text_reply('{"name": "x", "population": 1}')))
