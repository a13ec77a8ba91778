"""Charts of the report: their text has the size that room was made for."""

from __future__ import annotations

import re

import pytest

from perf import plots, svg
from perf.page_style import STYLE
from perf.rows import Measured


@pytest.mark.parametrize("sizes", [svg.TEXT_SIZES, svg.SMALL_CHART_SIZES])
def test_a_note_has_the_room_of_its_size(sizes):
    label = "a note of some words"
    points = [(0.0, 0.0), (1.0, 1.0)]
    series = svg.Series(name="s", points=points, labels=["", label], has_line=False)
    drawn = svg.chart(svg.Axis(label="x"), svg.Axis(label="y"), [series], title="t", sizes=sizes)
    assert f"--text-size: {sizes.text}px; --note-size: {sizes.note}px" in drawn
    begin = float(re.search(r'class="note" x="([0-9.]+)"', drawn)[1])
    point = [float(x) for x in re.findall(r'cx="([0-9.]+)"', drawn)][1]
    end = begin + svg.CHARACTER_SHARE * sizes.note * len(label)
    assert end < point, "it stands left of the last point and does not cover it"


def test_small_charts_are_drawn_and_styled_with_their_own_sizes():
    rows = [
        Measured(metric="m", unit="ms", values=[value]).row(
            scenario="gpu_step", run_id=f"run-{value}", commit="c", command="c", environment={}
        )
        for value in (1.0, 2.0)
    ]
    ((_, drawn),) = plots.histories(rows, [("gpu_step", "m")])
    assert svg.SMALL_CHART_SIZES.style in drawn
    in_charts = [line for line in STYLE.splitlines() if "svg text" in line or "svg .note" in line]
    assert in_charts
    assert not re.search(r"[0-9]px", " ".join(in_charts)), "sizes are the drawing's alone"
