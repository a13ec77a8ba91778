"""How a bench shows its result: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from compiled_engine.bench.stats import PERCENTILES, LoadSummary, Summary


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, soft_wrap=True).print(table)


def print_document(document: dict[str, Any]) -> None:
    """The last line of standard output."""
    print(json.dumps(document), flush=True)


def summary_row(name: str, summary: Summary | None) -> list[str]:
    """Name, mean, percentiles and count; dashes where nothing was measured."""
    if summary is None:
        return [name, *("-" for _ in range(len(PERCENTILES) + 1)), "0"]
    values = (summary.mean, summary.p50, summary.p95, summary.p99)
    return [name, *(f"{value:.2f}" for value in values), str(summary.count)]


def print_load(summary: LoadSummary) -> None:
    """Both tables of `bench serve`."""
    print_table(
        "load",
        ("", "value"),
        [
            ("requests done", str(summary.num_done)),
            ("requests failed", str(summary.num_failed)),
            ("duration, s", f"{summary.duration_s:.2f}"),
            ("requests / s", f"{summary.requests_per_s:.2f}"),
            ("output tokens / s", f"{summary.output_tokens_per_s:.1f}"),
            ("prompt + output tokens / s", f"{summary.total_tokens_per_s:.1f}"),
            ("prompt tokens", str(summary.num_prompt_tokens)),
            ("of them cached", str(summary.num_cached_tokens)),
            ("output tokens", str(summary.num_output_tokens)),
            ("tokens / chunk", f"{summary.tokens_per_chunk:.2f}"),
            *((f"failed: {message}", str(count)) for message, count in summary.errors.items()),
        ],
    )
    print_table(
        "latency, ms",
        ("", "mean", *(f"p{p}" for p in PERCENTILES), "count"),
        [
            summary_row("TTFT", summary.ttft_ms),
            summary_row("TPOT", summary.tpot_ms),
            summary_row("ITL", summary.itl_ms),
            summary_row("E2EL", summary.e2el_ms),
        ],
    )
