"""The report as one HTML file by itself: the graph drawn, a bar a kernel, and the reasons.

Light or dark as the reader's system is. The graph and the bars are one SVG a piece: rows run from
top to bottom in the order in which they run, lines are what a row reads from another.
"""

from __future__ import annotations

from html import escape

from compiled_engine.explain.page_style import STYLE
from compiled_engine.explain.report import KernelRow, PieceReport, Report
from compiled_engine.explain.text import (
    amount,
    microseconds,
    pass_line,
    piece_title,
    why_lines,
)

# Of the drawing, in pixels of its own coordinates.
ROW, BOX = 46, 34
LEFT, BOX_WIDTH = 92, 330
BAR_LEFT, BAR_WIDTH, LABEL_WIDTH = 440, 330, 130
WIDTH = BAR_LEFT + BAR_WIDTH + LABEL_WIDTH
MAX_NAME, MAX_DETAIL = 34, 52


def render_page(report: Report) -> str:
    """The whole file."""
    kind = "decode" if report.is_decode else "prompt"
    title = f"{report.model}: a {kind} step of {report.num_tokens} tokens"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            _summary(report),
            *(_piece(piece, number) for number, piece in enumerate(report.pieces)),
            "<h2>Notes</h2>",
            _items(report.notes),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _summary(report: Report) -> str:
    totals = report.totals
    tiles = [
        ("kernels a step", str(totals.num_kernels)),
        ("written by Inductor", str(totals.num_generated)),
        ("graph breaks", str(totals.num_graph_breaks)),
        ("moved", f"{amount(totals.num_bytes)}B"),
        ("computed", f"{amount(totals.num_flops)}FLOP"),
        ("floor", _with_unit(totals.floor_us)),
        ("measured one by one", _with_unit(totals.measured_us)),
    ]
    shown = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in tiles
        if value
    )
    facts = [
        f"{report.architecture}, {report.num_layers} layers, {report.dtype}",
        f"{report.device} ({report.target})",
        f"kernels chosen for {report.objective}",
    ]
    if report.is_decode:
        facts.append(f"{report.context} tokens of KV a row")
    if report.read_tb_s is not None and report.matmul_tflop_s is not None:
        facts.append(
            f"ceilings, {report.ceilings_from}: {report.read_tb_s * 1e3:.4g} GB/s read, "
            f"{report.matmul_tflop_s:.4g} TFLOP/s"
        )
    else:
        facts.append(f"ceilings {report.ceilings_from}")
    return (
        f'<p class="facts">{escape("; ".join(facts))}</p>\n<div class="tiles">{shown}</div>\n'
        f"{_legend()}"
    )


def _legend() -> str:
    entries = (
        ("ours", "op with a kernel of ours or a plugin's"),
        ("generated", "kernel written by Inductor"),
        ("library", "op of torch"),
        ("floor", "floor: least time on this device"),
        ("measured", "measured"),
    )
    items = "".join(f'<li><i class="{name}"></i>{escape(text)}</li>' for name, text in entries)
    return f'<ul class="legend">{items}</ul>'


def _piece(piece: PieceReport, number: int) -> str:
    breaks = f", {piece.num_graph_breaks} graph breaks" * bool(piece.num_graph_breaks)
    facts = piece_title(piece).removeprefix(piece.name).removeprefix(", ") + breaks
    return "\n".join(
        [
            f'<section id="piece-{number}">',
            f"<h2>{escape(piece.name)}</h2>",
            f'<p class="facts">{escape(facts)}</p>',
            f'<div class="drawing">{_drawing(piece)}</div>',
            f'<p class="facts">passes: {escape(pass_line(piece))}</p>',
            _table(piece),
            "</section>",
        ]
    )


def _drawing(piece: PieceReport) -> str:
    height = ROW * len(piece.kernels) + 10
    times = [t for row in piece.kernels for t in (row.floor_us, row.measured_us) if t is not None]
    longest = max(times, default=0.0) or 1.0
    parts = [_edges(piece.kernels)]
    for index, row in enumerate(piece.kernels):
        parts.append(_box(row, index))
        parts.append(_bars(row, index, longest))
    label = escape(f"Graph of {piece.name}: {len(piece.kernels)} rows")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _edges(rows: tuple[KernelRow, ...]) -> str:
    """A line from each row down to those that read it; longer ones bend out to the left."""
    parts = []
    for index, row in enumerate(rows):
        top = index * ROW + 5
        for source in row.inputs:
            bottom = source * ROW + 5 + BOX
            if source == index - 1:
                middle = LEFT + BOX_WIDTH / 2
                path = f"M{middle} {bottom}V{top}"
            else:
                bend = max(6, LEFT - 14 - 10 * min(index - source, 7))
                start, end = bottom - BOX / 2, top + BOX / 2
                path = f"M{LEFT} {start}C{bend} {start} {bend} {end} {LEFT} {end}"
            parts.append(f'<path class="edge" d="{path}"/>')
    return "".join(parts)


def _box(row: KernelRow, index: int) -> str:
    top = index * ROW + 5
    detail = row.kernel if row.kernel != row.name else ""
    detail = ", ".join(part for part in (detail, row.shape, " + ".join(row.made_by)) if part)
    name = ", ".join(dict.fromkeys(c.partition(".")[2] for c in row.covers)) or row.name
    return (
        f'<g><rect class="{_kind(row)}" x="{LEFT}" y="{top}" width="{BOX_WIDTH}" height="{BOX}" '
        f'rx="5"/><text class="name" x="{LEFT + 10}" y="{top + 14}">'
        f"{index}  {escape(_cut(name, MAX_NAME))}</text>"
        f'<text class="detail" x="{LEFT + 10}" y="{top + 28}">'
        f"{escape(_cut(detail, MAX_DETAIL))}</text>"
        f"<title>{escape(chr(10).join([name, *why_lines(row)]))}</title></g>"
    )


def _bars(row: KernelRow, index: int, longest: float) -> str:
    top = index * ROW + 5
    parts = []
    for offset, kind, value in ((3, "floor", row.floor_us), (18, "measured", row.measured_us)):
        if value is None:
            continue
        width = max(1.0, value / longest * BAR_WIDTH)
        parts.append(
            f'<rect class="{kind}" x="{BAR_LEFT}" y="{top + offset}" width="{width:.1f}" '
            f'height="12" rx="2"/><text class="value" x="{BAR_LEFT + width + 6:.1f}" '
            f'y="{top + offset + 10}">{escape(_with_unit(value))}'
            f"{_share(row) if kind == 'measured' else ''}</text>"
        )
    return "".join(parts)


def _share(row: KernelRow) -> str:
    if row.floor_us is None or not row.measured_us:
        return ""
    return f" ({row.floor_us / row.measured_us:.0%})"


def _table(piece: PieceReport) -> str:
    heads = ("", "op", "result", "made by", "kernel", "kernels", "bytes", "FLOP", "floor µs", "µs")
    rows = []
    for index, row in enumerate(piece.kernels):
        cells = (
            str(index),
            row.name,
            row.shape,
            ", ".join(row.made_by) or "model",
            row.kernel,
            str(row.num_kernels or "?"),
            amount(row.num_bytes),
            amount(row.num_flops) if row.num_flops else "",
            microseconds(row.floor_us),
            microseconds(row.measured_us),
        )
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        why = _items(tuple(line for line in why_lines(row) if line))
        rows.append(f'<tr>{shown}</tr><tr class="why"><td></td><td colspan="9">{why}</td></tr>')
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        "<details><summary>Numbers and reasons</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _kind(row: KernelRow) -> str:
    if row.covers:
        return "generated"
    return "library" if row.kernel == "library" else "ours"


def _items(lines: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _with_unit(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e3:.3g} ms" if value >= 1000 else f"{microseconds(value)} µs"
