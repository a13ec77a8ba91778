"""Drives a headless Chromium over its DevTools protocol, with nothing but aiohttp.

Owns starting the browser with a fresh profile and ending it. A tab is driven by JavaScript
expressions; there are no element handles.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

REQUIRED_VARIABLE = "COMPILED_ENGINE_TEST_CHROMIUM"
_KEY_CODES = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
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

    async def press(self, name: str, *, shift: bool = False) -> None:
        """Presses a key of `_KEY_CODES` in the focused element."""
        key = {"key": name, "code": name, "windowsVirtualKeyCode": _KEY_CODES[name]}
        key["modifiers"] = 8 if shift else 0
        if name == "Enter":
            key["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def move_pointer(self, x: float, y: float) -> None:
        """Moves the mouse, in pixels of the window."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def resize(self, width: int, height: int) -> None:
        """Sets the size of the window, in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        """Sets the system's colour scheme: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path) -> None:
        """Writes a PNG of the visible part."""
        result = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(result["data"]))

    async def close(self) -> None:
        """Ends the connection."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()


P = TypeVar("P", bound=Page)


class Browser:
    """A Chromium with a fresh profile, from `running_browser`; tests share it, each with a tab.

    Args:
        port: where it takes commands, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/json"

    @contextlib.asynccontextmanager
    async def page(self, session: aiohttp.ClientSession, kind: type[P]) -> AsyncIterator[P]:
        """A new tab, which is closed with the block."""
        async with session.put(f"{self._url}/new?about:blank") as response:
            target = await response.json(content_type=None)
        page = kind(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        try:
            yield page
        finally:
            await page.close()
            async with session.get(f"{self._url}/close/{target['id']}"):
                pass


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Starts Chromium and ends it with the block; see `find_chromium` for where there is none."""
    path = find_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Browser(_debugging_port(Path(profile)))
        finally:
            process.terminate()
            process.wait()


def _debugging_port(profile: Path) -> int:
    """Chromium writes the port it took into its profile."""
    path = profile / "DevToolsActivePort"
    for _ in range(600):
        if path.exists() and path.read_text().strip():
            return int(path.read_text().split()[0])
        time.sleep(0.05)
    raise AssertionError("Chromium did not open its debugging port within 30 s")
