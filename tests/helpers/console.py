"""The page at `/` as a test drives it, and checks that hold for any page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers.browser import Browser, Page
from tests.helpers.server_harness import MODEL

SCREENSHOTS = os.environ.get("COMPILED_ENGINE_TEST_SCREENSHOTS")

# Texts whose colour is too near to what is behind them. Backgrounds that let something through are
# laid over what is below.
LOW_CONTRAST = """
(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const background = (node) => {
    const layers = [];
    for (let each = node; each; each = each.parentElement) {
      layers.push(rgba(getComputedStyle(each).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  let count = 0;
  const check = (node, color, what) => {
    const behind = background(node);
    let opacity = 1;
    for (let each = node; each; each = each.parentElement) {
      opacity *= getComputedStyle(each).opacity;
    }
    const ink = rgba(color);
    ink[3] *= opacity;
    const value = ratio(over(ink, behind), behind);
    count += 1;
    if (value < 4.5) found.push(`${what}: ${value.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.matches("script, style, option")) continue;
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    check(node, node.ownerSVGElement ? style.fill : style.color, walker.currentNode.data.trim());
  }
  for (const node of document.querySelectorAll("input, textarea, select")) {
    if (!node.checkVisibility()) continue;
    check(node, getComputedStyle(node).color, "#" + node.id);
    if (!node.placeholder) continue;
    check(node, getComputedStyle(node, "::placeholder").color, "placeholder of #" + node.id);
  }
  return { count, found };
})()
"""

# What lies outside of the window at its right or left, though nothing scrolls there.
OVERFLOW = """
[...document.querySelectorAll("body *")].filter((node) => {
  if (!node.checkVisibility({ visibilityProperty: true })) return false;
  if (node.closest(".table-scroll, .hidden, .skip, pre")) return false;
  const box = node.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map((node) => node.tagName + "#" + node.id + "." + node.className)
"""


class Console(Page):
    """The open page, with the steps that tests repeat."""

    async def text(self, selector: str) -> str | None:
        """Text of the first element that fits; None without one."""
        return await self.value(f"document.querySelector({selector!r})?.textContent ?? null")

    async def count(self, selector: str) -> int:
        """Number of elements that fit."""
        return await self.value(f"document.querySelectorAll({selector!r}).length")

    async def click(self, selector: str, number: int = 0) -> None:
        """Clicks one of the elements that fit."""
        await self.value(f"document.querySelectorAll({selector!r})[{number}].click()")

    async def fill(self, selector: str, text: Any) -> None:
        """Replaces what stands in a field, as typing does; for a select its value."""
        await self.value(
            f"(() => {{ const field = document.querySelector({selector!r}); field.focus();"
            f"field.value = ''; if (field.select) field.select(); }})()"
        )
        if await self.value(f"document.querySelector({selector!r}).tagName") == "SELECT":
            await self.value(
                f"(() => {{ const field = document.querySelector({selector!r});"
                f"field.value = {text!r}; field.dispatchEvent(new Event('change')); }})()"
            )
        else:
            await self.type_text(str(text))

    async def send(self, text: str) -> None:
        """Types a message and sends it with Enter."""
        await self.value("document.getElementById('input').focus()")
        await self.type_text(text)
        await self.press("Enter")

    async def answered(self, number: int = 1, *, timeout_s: float = 10.0) -> None:
        """Waits until there are so many answers and none is running."""
        await self.until(
            f"document.querySelectorAll('.assistant').length === {number} && "
            "document.querySelector('.running') === null",
            timeout_s,
        )

    async def shot(self, name: str) -> None:
        """Writes a screenshot where the environment asks for them."""
        if SCREENSHOTS:
            await self.screenshot(Path(SCREENSHOTS) / f"{name}.png")


@contextlib.asynccontextmanager
async def open_console(
    browser: Browser, session: aiohttp.ClientSession, url: str, *, model: str = MODEL
) -> AsyncIterator[Console]:
    """The page of a server, connected, in a window of 1440 by 900."""
    async with browser.page(session, Console) as page:
        await page.resize(1440, 900)
        await page.open(url + "/")
        await page.until(f"document.getElementById('model').textContent === {model!r}")
        yield page
