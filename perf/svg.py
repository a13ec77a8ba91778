"""Plots as inline SVG: points and lines over linear or logarithmic axes, and bars end to end.

Colours are CSS variables of the page (`--series-0` and on): light and dark share a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 44
NUM_COLOURS = 6
BAR_HEIGHT, LABEL_WIDTH = 24, 190
CHARACTER_WIDTH = 6.2  # of the notes, about

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour.

    Attributes:
        name: in the legend.
        points: (x, y), in the order in which a line joins them.
        labels: beside the points; empty for none.
        spreads: smallest and largest y of each point; empty for none.
        has_line, has_points: what is drawn.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    spreads: Sequence[Point] = ()
    has_line: bool = True
    has_points: bool = True


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: what it says, how it is scaled, and whether only whole numbers have a tick."""

    label: str
    is_log: bool = False
    is_whole: bool = False


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    is_log: bool
    is_whole: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, in the drawing's units."""
        low, high, at = (self._at(v) for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def _at(self, value: float) -> float:
        return math.log10(max(value, 1e-30)) if self.is_log else value

    def ticks(self) -> list[float]:
        """Round values within the scale."""
        if not self.is_log:
            ticks = _linear_ticks(self.low, self.high)
            return [t for t in ticks if not self.is_whole or t == round(t)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) < 5 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in ticks if self.low <= tick * 1.001 and tick <= self.high * 1.001]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(x: Axis, y: Axis, series: Sequence[Series], *, title: str) -> str:
    """A chart with its legend; `title` is read to those who do not see it."""
    xs = [p[0] for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points] + [
        v for s in series for p in s.spreads for v in p
    ]
    across = _scale(xs, x, LEFT, WIDTH - RIGHT)
    up = _scale(ys, y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        *_grid(across, up),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.label)}</text>',
        f'<text class="axis" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(y.label)}</text>',
    ]
    for number, entry in enumerate(series):
        parts += _drawn(entry, number % NUM_COLOURS, across, up)
    parts.append("</svg>")
    return "\n".join(parts) + (legend([s.name for s in series]) if len(series) > 1 else "")


def _scale(values: Sequence[float], axis: Axis, start: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    if axis.is_log:
        return _Scale(low / 1.35, high * 1.35, start, end, is_log=True)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return _Scale(low - room, high + room, start, end, is_log=False, is_whole=axis.is_whole)


def _grid(across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in up.ticks():
        at = f"{up.place(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">'
            f"{short(tick)}</text>"
        )
    for tick in across.ticks():
        at = f"{across.place(tick):.1f}"
        parts.append(f'<line class="grid" y1="{TOP}" y2="{bottom}" x1="{at}" x2="{at}"/>')
        parts.append(
            f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">'
            f"{short(tick)}</text>"
        )
    return parts


def _drawn(entry: Series, colour: int, across: _Scale, up: _Scale) -> list[str]:
    places = [(across.place(px), up.place(py)) for px, py in entry.points]
    style = f'style="--c: var(--series-{colour})"'
    parts = [f"<g {style}>"]
    if entry.has_line and len(places) > 1:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(f'<polyline class="line" points="{path}"/>')
    for (px, _), (low, high) in zip(places, entry.spreads, strict=False):
        ends = f'y1="{up.place(low):.1f}" y2="{up.place(high):.1f}"'
        parts.append(f'<line class="line" x1="{px:.1f}" x2="{px:.1f}" {ends}/>')
    if entry.has_points:
        for number, (px, py) in enumerate(places):
            label = entry.labels[number] if entry.labels else ""
            told = escape(label or entry.name)
            parts.append(
                f'<circle class="point" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                f"<title>{told}: {short(entry.points[number][0])}, "
                f"{short(entry.points[number][1])}</title></circle>"
            )
            if label:
                is_right = px + CHARACTER_WIDTH * len(label) + 8 > WIDTH
                anchor, at, up_by = ("end", px - 8, -15) if is_right else ("start", px + 8, 7)
                parts.append(
                    f'<text class="note" x="{at:.1f}" y="{py - up_by:.1f}" text-anchor="{anchor}">'
                    f"{escape(label)}</text>"
                )
    return [*parts, "</g>"]


def legend(names: Sequence[str]) -> str:
    """A list of colours and names."""
    items = (
        f'<li><i style="background: var(--series-{n % NUM_COLOURS})"></i>{escape(name)}</li>'
        for n, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def waterfall(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, title: str) -> str:
    """Rows of bars, each beginning where the one before ends; parts of one name share a colour.

    Args:
        rows: label, and (part, seconds) in their order.
        title: read to those who do not see it.
    """
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    longest = max(sum(seconds for _, seconds in parts) for _, parts in rows)
    height = len(rows) * (BAR_HEIGHT + 12) + 30
    room = WIDTH - LABEL_WIDTH - 70
    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for number, (label, parts) in enumerate(rows):
        top = 6 + number * (BAR_HEIGHT + 12)
        middle = top + BAR_HEIGHT / 2
        drawn.append(
            f'<text class="note" x="{LABEL_WIDTH - 8}" y="{middle:.0f}" dy="4" text-anchor="end">'
            f"{escape(label)}</text>"
        )
        at = float(LABEL_WIDTH)
        for name, seconds in parts:
            width = seconds / longest * room
            colour = names.index(name) % NUM_COLOURS
            drawn.append(
                f'<rect x="{at:.1f}" y="{top}" width="{max(width, 0.5):.1f}" '
                f'height="{BAR_HEIGHT}" style="fill: var(--series-{colour})">'
                f"<title>{escape(name)}: {seconds:.2f} s</title></rect>"
            )
            at += width
        total = sum(seconds for _, seconds in parts)
        drawn.append(
            f'<text class="note" x="{at + 6:.1f}" y="{middle:.0f}" dy="4">{total:.1f} s</text>'
        )
    drawn.append("</svg>")
    return "\n".join(drawn) + legend(names)


def short(value: float) -> str:
    """A number in few characters."""
    for size, sign in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {sign}"
    return f"{value:.4g}"
