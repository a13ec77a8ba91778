"""The report as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from perf import plots
from perf.judge import Expectation, judge, read_expectations, read_recorded
from perf.page_style import STYLE
from perf.report import newest_of
from perf.rows import Row, read_rows

SECTIONS = (
    ("Latency and throughput", plots.latency, "Numbers are requests or rows at the same time."),
    ("Roofline", plots.roofline, "The line is what this device gave in its newest run."),
    ("Start", plots.start, "From the process to the first token."),
)


def write_page(path: Path, results: Path) -> None:
    """Writes the page of all machines below `results`."""
    machines = [p for p in sorted(results.iterdir()) if p.is_dir()]
    body = "\n".join(part for folder in machines for part in _machine(folder))
    links = " ".join(f'<a href="#{m.name}">{escape(m.name)}</a>' for m in machines)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Measurements</title>\n<style>{STYLE}</style></head>\n"
        f'<body><main><h1>Measurements</h1>\n<p class="facts">{links}</p>\n{body}\n'
        "</main></body></html>\n"
    )


def _machine(folder: Path) -> Iterator[str]:
    rows = read_rows(folder)
    if not rows:
        return
    newest = newest_of(rows)
    expectations = read_expectations()
    yield f'<section id="{escape(folder.name, quote=True)}"><h2>{escape(folder.name)}</h2>'
    last = max(rows, key=lambda row: row.run_id)
    num_runs = len({row.run_id for row in rows})
    facts = f"{num_runs} runs, the newest {last.run_id} on {last.environment['device']}"
    yield f'<p class="facts">{escape(facts)}</p>'
    for title, plot, about in SECTIONS:
        drawing = plot(newest)
        if drawing:
            yield f'<h3>{title}</h3><p class="facts">{about}</p><div class="plot">{drawing}</div>'
    yield from _history(rows, expectations)
    yield from _table(folder.name, newest, expectations)
    yield "</section>"


def _history(
    rows: Sequence[Row], expectations: Mapping[str, Mapping[str, Expectation]]
) -> Iterator[str]:
    guarded = [(scenario, key) for scenario, found in expectations.items() for key in found]
    drawn = plots.histories(rows, guarded)
    if not drawn:
        return
    yield '<h3>History</h3><p class="facts">Committed runs in their order, with their spread.</p>'
    yield '<div class="many">'
    for title, plot in drawn:
        yield f"<figure><figcaption>{escape(title)}</figcaption>{plot}</figure>"
    yield "</div>"


def _table(
    machine: str, newest: plots.Newest, expectations: Mapping[str, Mapping[str, Expectation]]
) -> Iterator[str]:
    recorded = read_recorded(machine)
    yield '<details><summary>All newest values</summary><div class="wide"><table><thead><tr>'
    yield "".join(
        f"<th>{name}</th>"
        for name in ("scenario", "metric", "value", "spread", "n", "target", "verdict", "commit")
    )
    yield "</tr></thead><tbody>"
    for row in newest.values():
        expected = expectations.get(row.scenario, {}).get(row.key)
        verdict = judge(row, expected, recorded.get(row.scenario, {}).get(row.key))
        kind = "bad" if verdict.has_failed else "quiet" if not verdict.is_guarded else ""
        low, high = row.spread
        cells = (
            row.scenario,
            row.key,
            f"{row.value:.4g} {row.unit}",
            f"{low:.4g} to {high:.4g}",
            str(row.n),
            str(expected or ""),
            verdict.text,
            row.commit,
        )
        yield f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
    yield "</tbody></table></div></details>"
