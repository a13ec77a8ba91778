"""The report of the committed results, as a page in a real browser: complete, and of one file."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import aiohttp
import pytest

from perf.page import write_page
from perf.rows import ROOT, Measured, write_rows
from perf.svg import Axis, Series, chart, waterfall
from tests.helpers.browser import Page, running_browser

pytestmark = pytest.mark.e2e

SHOTS = "COMPILED_ENGINE_TEST_SCREENSHOTS"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("perf") / "report.html"
    write_page(path, ROOT / "results")
    return path


def test_the_page_loads_nothing_from_elsewhere(page_file: Path):
    text = page_file.read_text()
    assert not re.search(r"(src|href)=\"(?!#)|url\(|@import|<script", text)
    for title in ("Latency and throughput", "Roofline", "History", "All newest values"):
        assert title in text


def test_machines_and_values_are_shown_as_text(tmp_path: Path):
    entry = Measured(metric="<b>speed</b>", unit="ms", values=[1.0])
    origin = {"run_id": "r", "commit": "c", "command": "", "environment": {"device": "<i>box</i>"}}
    write_rows([entry.row(scenario="gpu_step", **origin)], tmp_path / "results" / "box")
    write_page(tmp_path / "page.html", tmp_path / "results")
    text = (tmp_path / "page.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;speed&lt;/b&gt;" in text
    assert "&lt;i&gt;box" in text


def test_points_lie_where_their_values_say():
    series = [Series(name="a", points=[(1.0, 10.0), (10.0, 100.0)], labels=["low", "high"])]
    text = chart(Axis(label="x", is_log=True), Axis(label="y", is_log=True), series, title="t")
    places = [tuple(map(float, p)) for p in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', text)]
    (left, lower), (right, upper) = places
    assert left < right
    assert lower > upper, "larger values stand higher"
    assert text.count('<text class="note"') == 2


def test_bars_begin_where_the_one_before_ends():
    text = waterfall([("cold", [("load", 1.0), ("compile", 3.0)])], title="t")
    (first, width), (second, longer) = [
        tuple(map(float, found))
        for found in re.findall(r'<rect x="([\d.]+)" y="6" width="([\d.]+)"', text)
    ]
    assert second == pytest.approx(first + width, abs=0.2)
    assert longer == pytest.approx(3 * width, abs=0.2)


# Pairs of texts of one drawing that cover each other, and texts beyond their drawing.
COVERED = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const found = [...svg.querySelectorAll('text')].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  const outside = found.filter(([_, box]) => box.left < frame.left - 1 || box.right >
    frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1).map(f => f[0]);
  const covered = found.flatMap(([one, a], n) => found.slice(n + 1).filter(([_, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2
  ).map(([other]) => one + ' / ' + other));
  return [...outside, ...covered];
})"""


def test_no_text_covers_another(page_file: Path, tmp_path: Path):
    """Of the committed results, and of points that lie upon each other."""
    crowd = Series(
        name="many",
        points=[(1.0 + n / 50, 5.0 + n / 50) for n in range(8)] + [(2.0, 9.0)],
        labels=[f"a label of some length {n}" for n in range(8)] + ["elsewhere"],
    )
    numbers = Series(name="close", points=[(1.0, 1.00001), (2.0, 1.00002)])
    x, y = Axis(label="x"), Axis(label="ratio")
    page_text, marks = page_file.read_text(), "</main>"
    assert marks in page_text
    planted = "<svg viewBox='0 0 50 20'><text y='15'>one</text><text y='16'>two</text></svg>"
    charts = chart(x, y, [crowd], title="t") + chart(x, y, [numbers], title="t")
    crowded, broken = tmp_path / "crowded.html", tmp_path / "broken.html"
    crowded.write_text(page_text.replace(marks, f'<div class="plot">{charts}</div>{marks}'))
    broken.write_text(page_text.replace(marks, f'<div class="plot">{planted}</div>{marks}'))

    async def look() -> None:
        async with aiohttp.ClientSession() as session, browser.page(session, Page) as page:
            await page.resize(1000, 1200)
            for path, expected in ((crowded, []), (broken, ["one / two"])):
                await page.open(path.as_uri())
                assert await page.value(COVERED) == expected

    with running_browser() as browser:
        asyncio.run(look())


def test_the_page_fits_narrow_windows_in_light_and_dark(page_file: Path):
    async def look() -> None:
        async with aiohttp.ClientSession() as session, browser.page(session, Page) as page:
            for scheme in ("light", "dark"):
                for width in (1000, 420):
                    await page.prefer(scheme)
                    await page.resize(width, 1200)
                    await page.open(page_file.as_uri())
                    assert await page.value("document.documentElement.scrollWidth") <= width
                    assert await page.value("document.querySelectorAll('svg').length") >= 5
                    if os.environ.get(SHOTS):
                        folder = Path(os.environ[SHOTS])
                        await page.screenshot(folder / f"perf_{scheme}_{width}.png")
            assert page.errors == []

    with running_browser() as browser:
        asyncio.run(look())
