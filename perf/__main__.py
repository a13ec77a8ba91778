"""`python -m perf run | check | compare | report`: measure, judge and show.

run      measures a scenario and appends its rows to perf/results/<machine>/
check    exit code 1 if the newest run breaks perf/expected.json; lists metrics without a guard
compare  two runs side by side
report   the newest run of each scenario; --markdown writes perf/README.md
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from perf import (
    cpu_vs_peers,
    device_parity,
    gpu_models,
    gpu_step,
    op_bench,
    overload,
    server_overhead,
)
from perf.machine import commit, environment, idle_percent, machine_name
from perf.report import compare_runs, report, show, write_markdown
from perf.rows import ROOT, Outcome, Row, newest_run, read_expectations, read_rows, write_rows

SCENARIOS: dict[str, Any] = {
    module.NAME: module
    for module in (
        cpu_vs_peers,
        device_parity,
        gpu_models,
        gpu_step,
        op_bench,
        overload,
        server_overhead,
    )
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all four."""
    parser = argparse.ArgumentParser(
        prog="python -m perf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR")
    parser.add_argument("--machine", help="folder below DIR (default: this machine's)")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False)
    run.add_argument("scenario", choices=SCENARIOS)
    run.add_argument("--model", help="folder, GGUF file or id, or shapes of gpu_models")
    run.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    run.add_argument("--num-repeats", type=int, metavar="N", help="turns that count")
    run.add_argument("--output-len", type=int, metavar="N", help="tokens an answer")
    run.add_argument(
        "--no-start", dest="with_start", action="store_false", help="leave the two starts out"
    )
    run.add_argument("--only", metavar="PART,PART", help="parts of a GPU scenario")
    run.add_argument("--commit", metavar="ID", help="where the files are no checkout of their own")
    commands.add_parser("check").add_argument("scenario", choices=SCENARIOS)
    compare = commands.add_parser("compare")
    compare.add_argument("run_ids", nargs=2, metavar="RUN_ID")
    shown = commands.add_parser("report")
    shown.add_argument("--markdown", type=Path, metavar="FILE", help="all machines, as a document")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    args = build_parser().parse_args(argv)
    folder = args.results / (args.machine or machine_name())
    if args.command == "run":
        return run_scenario(args, folder)
    if args.command == "report" and args.markdown is not None:
        write_markdown(args.markdown, args.results)
        return 0
    rows = read_rows(folder)
    if args.command == "check":
        return check(newest_run(rows, args.scenario))
    if args.command == "compare":
        return compare_runs(rows, *args.run_ids)
    report(rows)
    return 0


def run_scenario(args: argparse.Namespace, folder: Path) -> int:
    """Measures, appends and shows the rows of one run."""
    if args.num_repeats is not None and args.num_repeats < 1:
        raise SystemExit(f"--num-repeats is {args.num_repeats}; allowed is at least 1")
    if args.output_len is not None and args.output_len < 2:
        raise SystemExit(f"--output-len is {args.output_len}; allowed is at least 2")
    scenario = SCENARIOS[args.scenario]
    names = [f.name for f in fields(scenario.Options)]
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    idle_before = idle_percent()
    outcome: Outcome = scenario.run(
        scenario.Options(**given), lambda text: print(text, file=sys.stderr, flush=True)
    )
    idle = {"idle_percent_before": idle_before, "idle_percent_after": idle_percent()}
    made_at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    made_from = args.commit or commit()
    rows = [
        entry.row(
            scenario=args.scenario,
            run_id=f"{made_at}-{made_from}",
            commit=made_from,
            command=shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
            environment=environment() | dict(outcome.environment) | idle,
            void=outcome.void,
        )
        for entry in outcome.measured
    ]
    if rows:
        print(f"appended to {write_rows(rows, folder)}", file=sys.stderr)
        for name, text in outcome.documents.items():
            (folder / name).write_text(f"Run `{rows[0].run_id}`.\n\n{text}")
        show(rows)
    for failure in outcome.failures:
        print(f"not measured: {failure}", file=sys.stderr)
    return int(bool(outcome.failures))


def check(rows: Sequence[Row]) -> int:
    """Judges one run against the expectations."""
    if not rows:
        print("no run to check", file=sys.stderr)
        return 1
    expectations = read_expectations().get(rows[0].scenario, {})
    has_failed = rows[0].void
    if has_failed:
        print(f"run {rows[0].run_id} is void: the device gave less than it should")
    for row in rows:
        expected = expectations.get(row.key)
        failure = expected.failure(row.value) if expected else None
        has_failed = has_failed or failure is not None
        verdict = "no guard" if expected is None else failure or "ok"
        print(f"{row.key}: {row.value:.4g} {row.unit}: {verdict}")
    for missing in sorted(expectations.keys() - {row.key for row in rows}):
        print(f"{missing}: not measured")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
