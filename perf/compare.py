"""Two runs side by side: by run id, commit, or file of rows; a change within noise is none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perf.judge import change, read_recorded
from perf.rows import Row, read_file, read_rows

# Machine, scenario, row key.
Key = tuple[str, str, str]


def compare_runs(results: Path, machine: str | None, first: str, second: str) -> int:
    """Shows what became of each metric; exit code 1 if one of the two is not there.

    Args:
        results: folder of all machines.
        machine: the only one to look at; None for all.
        first: run id, commit, or file of rows.
        second: likewise.
    """
    folders = [p for p in sorted(results.iterdir()) if p.is_dir() and machine in (None, p.name)]
    rows = {folder.name: read_rows(folder) for folder in folders}
    sides = []
    for name in (first, second):
        side = find(name, rows)
        if not side:
            known = dict.fromkeys(r.run_id for found in rows.values() for r in found)
            print(f"no run {name}; there are: {', '.join(known) or 'none'}", file=sys.stderr)
            return 1
        sides.append(side)
    table = Table("metric", first, second, "ratio", "noise-aware verdict")
    tally: Counter[str] = Counter()
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = sides[0].get(key), sides[1].get(key)
        shown = [f"{row.value:.4g}" if row else "-" for row in (before, after)]
        ratio = verdict = ""
        if before and after:
            known_here = read_recorded(key[0]).get(key[1], {}).get(key[2])
            verdict = change(before, after, known_here)
            ratio = f"x {after.value / before.value:.3f}" if before.value else ""
            tally[verdict] += 1
        table.add_row(escape(f"{key[1]}: {key[2]}"), *shown, ratio, verdict)
    Console(highlight=False).print(table)
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in tally.items()) or "nothing in common"
    )
    return 0


def find(name: str, rows: dict[str, list[Row]]) -> dict[Key, Row]:
    """The rows that a run id, a commit or a file means; of several runs the newest of each row."""
    path = Path(name)
    if path.is_file():
        return _by_key(path.parent.name, read_file(path))
    found: dict[Key, Row] = {}
    for machine, own in rows.items():
        found |= _by_key(machine, [r for r in own if name in (r.run_id, r.commit.rstrip("+"))])
    return found


def _by_key(machine: str, rows: Sequence[Row]) -> dict[Key, Row]:
    return {(machine, row.scenario, row.key): row for row in rows}
