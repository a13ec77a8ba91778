"""Drives a headless Chromium over its DevTools protocol, with nothing but aiohttp.

Owns starting the browser with a fresh profile and ending it. A page is driven by JavaScript
expressions; there are no element handles.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

REQUIRED_VARIABLE = "COMPILED_ENGINE_TEST_CHROMIUM"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,800",
    "--remote-debugging-port=0",
)


def find_chromium() -> str:
    """Path of Chromium; skips the test without it, or fails where the environment requires it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    message = "Chromium is not installed"
    if os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(f"{message}, but {REQUIRED_VARIABLE}=required")
    pytest.skip(f"{message}; {REQUIRED_VARIABLE}=required makes this a failure")


class Page:
    """One browser tab.

    Attributes:
        errors: uncaught exceptions, console errors and blocked loads, as text.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded":
                entry = data["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, 20)
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, url: str) -> None:
        """Loads an address and begins to collect errors."""
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """The JSON value of an expression."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 10.0) -> None:
        """Waits until an expression is true."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.value(expression):
            assert asyncio.get_running_loop().time() < deadline, f"never true: {expression}"
            await asyncio.sleep(0.05)

    async def type_text(self, text: str) -> None:
        """Types into the focused element."""
        await self.call("Input.insertText", text=text)

    async def press_enter(self) -> None:
        """Presses Enter in the focused element."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def screenshot(self, path: Path) -> None:
        """Writes a PNG of the visible part."""
        result = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(result["data"]))

    async def close(self) -> None:
        """Ends the connection."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()


@contextlib.asynccontextmanager
async def browser_page(session: aiohttp.ClientSession) -> AsyncIterator[Page]:
    """A tab of a fresh browser, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            find_chromium(),
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _debugging_port(Path(profile))
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                targets = await response.json()
            target = next(t for t in targets if t["type"] == "page")
            page = Page(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
            try:
                yield page
            finally:
                await page.close()
        finally:
            process.terminate()
            await process.wait()


async def _debugging_port(profile: Path) -> int:
    """Chromium writes the port it took into its profile."""
    path = profile / "DevToolsActivePort"
    for _ in range(400):
        if path.exists() and path.read_text().strip():
            return int(path.read_text().split()[0])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not open its debugging port within 20 s")
