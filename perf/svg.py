"""Plots as inline SVG: points and lines over linear or logarithmic axes, and bars end to end.

Colours are CSS variables of the page (`--series-0` and on): light and dark share a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 330
RIGHT, TOP, BOTTOM = 16, 14, 44
NUM_COLOURS = 6
BAR_HEIGHT, LABEL_WIDTH = 24, 190
CHARACTER_SHARE = 0.6  # of a text's size, about, that a character is wide
POINT_RADIUS = 4
# Lines of notes that one may be moved by so that it covers no other.
MOST_LINES_OFF = 9
# How many lines off a note is as bad as on a series' line, and how that is looked for.
COST_ON_LINE = 3
STEPS_ALONG_LINE = 60

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TextSizes:
    """Of a chart's text, which the page's style takes from the drawing: px in its own units."""

    text: int
    note: int

    @property
    def style(self) -> str:
        """The attribute of the drawing."""
        return f'style="--text-size: {self.text}px; --note-size: {self.note}px"'


TEXT_SIZES = TextSizes(text=12, note=11)
# Of a small chart among many, which the page makes smaller.
SMALL_CHART_SIZES = TextSizes(text=19, note=16)


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


def chart(
    x: Axis, y: Axis, series: Sequence[Series], *, title: str, sizes: TextSizes = TEXT_SIZES
) -> str:
    """A chart with its legend.

    Args:
        x: its axis from left to right.
        y: its axis upwards.
        series: what is drawn, the last on top.
        title: read to those who do not see it.
        sizes: of its text, which must have room.
    """
    xs = [p[0] for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points] + [
        v for s in series for p in s.spreads for v in p
    ]
    up = _scale(ys, y, HEIGHT - BOTTOM, TOP)
    longest = max((len(short(tick)) for tick in up.ticks()), default=0)
    left = round(sizes.text * (1.6 + CHARACTER_SHARE * longest) + 8)
    across = _scale(xs, x, left, WIDTH - RIGHT)
    parts = [
        _opening(HEIGHT, title, sizes),
        *_grid(across, up),
        f'<text class="axis" x="{(left + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.label)}</text>',
        f'<text class="axis" transform="translate({sizes.text + 1} '
        f'{(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>",
    ]
    for number, entry in enumerate(series):
        parts += _drawn(entry, number % NUM_COLOURS, across, up)
    parts += _notes(series, across, up, sizes.note)
    parts.append("</svg>")
    return "\n".join(parts) + (legend([s.name for s in series]) if len(series) > 1 else "")


def _opening(height: int, title: str, sizes: TextSizes) -> str:
    told = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" {sizes.style} role="img" aria-label="{told}">'


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
        parts.append(f'<line class="grid" x1="{across.start}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" x="{across.start - 6}" y="{at}" dy="4" text-anchor="end">'
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
                f'<circle class="point" cx="{px:.1f}" cy="{py:.1f}" r="{POINT_RADIUS}">'
                f"<title>{told}: {short(entry.points[number][0])}, "
                f"{short(entry.points[number][1])}</title></circle>"
            )
    return [*parts, "</g>"]


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, point: Point) -> bool:
        return self.left < point[0] < self.right and self.top < point[1] < self.bottom

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _notes(series: Sequence[Series], across: _Scale, up: _Scale, note_size: int) -> Iterator[str]:
    """The labels of all points, each where it covers no point, no other label and hardly a line."""
    noted = [
        (label, across.place(px), up.place(py))
        for entry in series
        for label, (px, py) in zip(entry.labels, entry.points, strict=False)
        if label
    ]
    radius = POINT_RADIUS
    taken = [_Box(x - radius, y - radius, x + radius, y + radius) for _, x, y in noted]
    lines = [point for entry in series for point in _along(entry, across, up)]
    for label, x, y in noted:
        size = (CHARACTER_SHARE * note_size * len(label), note_size + 2.0)
        at, lines_off = _free_place((x, y), size, across.start, taken, lines)
        taken.append(at)
        if lines_off:
            near = at.left if at.left > x else at.right
            middle = (at.top + at.bottom) / 2
            yield (
                f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{near:.1f}" y2="{middle:.1f}"/>'
            )
        yield f'<text class="note" x="{at.left:.1f}" y="{at.bottom - 2:.1f}">{escape(label)}</text>'


def _along(entry: Series, across: _Scale, up: _Scale) -> Iterator[Point]:
    """Points of the line of a series, close to each other."""
    if entry.has_line:
        places = [(across.place(px), up.place(py)) for px, py in entry.points]
        for (x0, y0), (x1, y1) in pairwise(places):
            for step in range(STEPS_ALONG_LINE + 1):
                share = step / STEPS_ALONG_LINE
                yield x0 + (x1 - x0) * share, y0 + (y1 - y0) * share


def _free_place(
    point: Point, size: Point, edge: float, taken: Sequence[_Box], lines: Sequence[Point]
) -> tuple[_Box, int]:
    """The best free place of a size beside a point, and how many lines off; else the nearest."""
    (x, y), (width, height) = point, size
    places = [
        (_Box(left, top, left + width, top + height), lines_off)
        for lines_off in range(MOST_LINES_OFF + 1)
        for aside in [2 * POINT_RADIUS + 2 * lines_off]
        for top in (y - height - 3 - lines_off * height, y + 3 + lines_off * height)
        for left in (x + aside, x - aside - width)
    ]

    def is_free(box: _Box) -> bool:
        is_inside = box.left > edge and box.right < WIDTH and box.top > 0
        return is_inside and box.bottom < HEIGHT - BOTTOM and not any(map(box.meets, taken))

    def cost(place: tuple[_Box, int]) -> int:
        return place[1] + COST_ON_LINE * any(map(place[0].holds, lines))

    return min((place for place in places if is_free(place[0])), key=cost, default=places[0])


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
    drawn = [_opening(height, title, TEXT_SIZES)]
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
