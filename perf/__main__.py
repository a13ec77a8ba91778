"""`python -m perf run | check | record | compare | report`: measure, judge and show.

run      measures a scenario, or a suite of them, and appends rows to perf/results/<machine>/
check    exit code 1 if the newest run of a row is worse, or better, than what was recorded, or
         misses a target where nothing was; lists what is unguarded; --suite ci measures anew,
         others look at what was run on this machine, say what never was, and fail if nothing was
record   makes what runs have reached, and the margin they give, the expectation; --history does
         so for a device with a name, of which few runs of one commit exist, and takes rows that
         are worse than what was recorded only with --accept
compare  two runs side by side, judged by their noise
report   the newest run of each row; --markdown and --html write documents
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from perf.judge import (
    Recorded,
    any_machine,
    judge,
    read_expectations,
    read_recorded,
    record,
    write_recorded,
)
from perf.rows import ROOT, Outcome, Row, newest_runs, read_rows, write_rows
from perf.stopping import Stopped, stoppable
from perf.suites import SUITES, chosen, run_suite

RESULTS = ROOT / "results"
SCENARIOS = (
    "agentic",
    "ci",
    "cpu_ops",
    "cpu_step",
    "cpu_vs_peers",
    "device_parity",
    "gpu_models",
    "gpu_step",
    "op_bench",
    "overload",
    "passes",
    "server_overhead",
    "serving",
    "start",
)


def load_scenario(name: str) -> Any:
    """The module of a scenario; that of `ci` is called `gates`."""
    return importlib.import_module("perf.gates" if name == "ci" else f"perf.{name}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all five."""
    parser = argparse.ArgumentParser(
        prog="python -m perf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--machine", help="folder below DIR (default: this machine's)")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False)
    run.add_argument("scenario", nargs="?", choices=SCENARIOS)
    run.add_argument("--suite", choices=SUITES, help="a list of scenarios instead of one")
    run.add_argument("--only", metavar="PART,PART", help="parts of the scenario or the suite")
    run.add_argument("--model", help="folder, GGUF file or id, or shapes of GPU scenarios")
    run.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    run.add_argument("--num-repeats", type=int, metavar="N", help="turns that count")
    run.add_argument("--output-len", type=int, metavar="N", help="tokens an answer")
    run.add_argument(
        "--no-start", dest="with_start", action="store_false", help="leave the two starts out"
    )
    run.add_argument("--commit", metavar="ID", help="where the files are no checkout of their own")
    run.add_argument("--cache-dir", type=Path, metavar="DIR", help="of `ci`: compiled code")
    checked = commands.add_parser("check", allow_abbrev=False)
    checked.add_argument("scenario", nargs="?", choices=SCENARIOS)
    checked.add_argument("--suite", choices=SUITES, help="all its scenarios; ci measures anew")
    checked.add_argument("--cache-dir", type=Path, metavar="DIR", help="of `ci`: compiled code")
    recorded = commands.add_parser("record", allow_abbrev=False)
    recorded.add_argument("scenario", nargs="?", choices=SCENARIOS)
    recorded.add_argument("--suite", choices=SUITES, help="all its scenarios")
    which = recorded.add_mutually_exclusive_group()
    which.add_argument("--num-runs", type=int, metavar="N", help="newest N runs (default: 1)")
    which.add_argument(
        "--history",
        action="store_true",
        help="the newest run of every row, noise from those before; for a device with a name",
    )
    recorded.add_argument(
        "--accept", action="store_true", help="with --history: regressions and guards lost too"
    )
    compare = commands.add_parser("compare")
    compare.add_argument("runs", nargs=2, metavar="RUN", help="run id, commit, or file of rows")
    shown = commands.add_parser("report")
    shown.add_argument("--markdown", type=Path, metavar="FILE", help="all machines, as a document")
    shown.add_argument("--html", type=Path, metavar="FILE", help="all machines, with plots")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if hasattr(args, "suite") and (args.scenario is None) == (args.suite is None):
        parser.error(f"{args.command}: either a scenario or --suite")
    if args.command == "record" and args.accept and not args.history:
        parser.error("record: --accept belongs to --history")
    if args.command == "record" and args.history:
        names = [args.scenario] if args.scenario else scenarios_of(args.suite)
        if "ci" in names:
            parser.error("record --history: rows of ci belong to any machine: use --num-runs")
    if args.command == "run" and args.suite is not None:
        return run_suite(chosen(args.suite, args.only), *_words(args))
    if args.command == "compare":
        from perf.compare import compare_runs

        return compare_runs(args.results, args.machine, *args.runs)
    if args.command == "report" and (args.markdown or args.html):
        return write_documents(args)
    return _with_rows(args, args.machine or _this_machine())


def _with_rows(args: argparse.Namespace, machine: str) -> int:
    folder = args.results / machine
    if args.command == "run":
        return run_scenario(args, folder)
    rows = read_rows(folder)
    if args.command == "check":
        return check_command(args, rows, read_recorded(machine))
    if args.command == "record":
        if args.scenario:
            return record_command(args, args.scenario, rows, machine)
        ran = [n for n in scenarios_of(args.suite) if any(row.scenario == n for row in rows)]
        return max((record_command(args, name, rows, machine) for name in ran), default=1)
    from perf.report import report

    report(rows)
    return 0


def _this_machine() -> str:
    from perf.machine import machine_name

    return machine_name()


def _words(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The words of a suite's command that hold for every part: before `run`, and behind it."""
    from perf.machine import commit

    words = ["--results", str(args.results)] if args.results != RESULTS else []
    words += ["--machine", args.machine] if args.machine else []
    # Found once: the rows of the first part are changes to the checkout for the second.
    more = ["--commit", args.commit or commit()]
    given = [name for name in ("model", "vllm_python", "output_len") if getattr(args, name)]
    if given:
        raise SystemExit(f"--{given[0].replace('_', '-')}: run the scenario by itself with it")
    more += ["--num-repeats", str(args.num_repeats)] if args.num_repeats else []
    return words, more


def write_documents(args: argparse.Namespace) -> int:
    """The documents of all machines."""
    if args.markdown is not None:
        from perf.report import write_markdown

        write_markdown(args.markdown, args.results)
    if args.html is not None:
        from perf.page import write_page

        write_page(args.html, args.results)
    return 0


def run_scenario(args: argparse.Namespace, folder: Path) -> int:
    """Measures, appends and shows the rows of one run."""
    from perf.report import show

    if args.num_repeats is not None and args.num_repeats < 1:
        raise SystemExit(f"--num-repeats is {args.num_repeats}; allowed is at least 1")
    if args.output_len is not None and args.output_len < 2:
        raise SystemExit(f"--output-len is {args.output_len}; allowed is at least 2")
    try:
        with stoppable():
            rows, outcome = measure(args.scenario, vars(args))
    except Stopped:
        print(f"{args.scenario}: stopped by a signal; nothing of it is kept", file=sys.stderr)
        return 1
    if rows:
        print(f"appended to {write_rows(rows, folder)}", file=sys.stderr)
        for name, text in outcome.documents.items():
            (folder / name).write_text(f"Run `{rows[0].run_id}`.\n\n{text}")
        show(rows)
    for failure in outcome.failures:
        print(f"not measured: {failure}", file=sys.stderr)
    return int(bool(outcome.failures))


def measure(name: str, given: Mapping[str, Any]) -> tuple[list[Row], Outcome]:
    """Runs a scenario; its rows, and what it handed back."""
    from perf.machine import commit, environment, idle_percent

    scenario = load_scenario(name)
    known = [f.name for f in fields(scenario.Options)]
    options = {n: given[n] for n in known if given.get(n) is not None}
    idle_before = idle_percent()
    outcome: Outcome = scenario.run(
        scenario.Options(**options), lambda text: print(text, file=sys.stderr, flush=True)
    )
    idle = {"idle_percent_before": idle_before, "idle_percent_after": idle_percent()}
    made_at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    made_from = given.get("commit") or commit()
    rows = [
        entry.row(
            scenario=name,
            run_id=f"{made_at}-{made_from}",
            commit=made_from,
            command=shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
            environment=environment() | dict(outcome.environment) | idle,
            void=outcome.void,
            seed=outcome.seed,
        )
        for entry in outcome.measured
    ]
    return rows, outcome


def check_command(
    args: argparse.Namespace, rows: Sequence[Row], recorded: Mapping[str, Mapping[str, Recorded]]
) -> int:
    """Judges one scenario, or those of a suite that were run on this machine."""
    if args.suite is None:
        return check(newest(rows, args.scenario), recorded.get(args.scenario, {}))
    failed: list[str] = []
    absent: list[str] = []
    scenarios = scenarios_of(args.suite)
    for scenario in scenarios:
        run = newest(rows, scenario)
        if scenario == "ci":
            run, _ = measure(scenario, vars(args))
        elif not run:
            print(f"{scenario}: never run on this machine")
            absent.append(scenario)
            continue
        print(f"-- {scenario}")
        if check(run, recorded.get(scenario, {}), is_whole=scenario == "ci"):
            failed.append(scenario)
    print(suite_line(args.suite, scenarios, failed, absent))
    return int(bool(failed) or absent == scenarios)


def suite_line(
    suite: str, scenarios: Sequence[str], failed: Sequence[str], absent: Sequence[str]
) -> str:
    """The last line of a suite's check: what failed, and what nobody can have seen fail."""
    num_run = len(scenarios) - len(absent)
    parts = [f"{suite}: {num_run} of {len(scenarios)} scenarios have run on this machine"]
    if num_run:
        parts.append(f"failed: {', '.join(failed) or 'none'}")
    if absent:
        parts.append(f"never run here, so unguarded: {', '.join(absent)}")
    return "; ".join(parts)


def scenarios_of(suite: str) -> list[str]:
    """Its scenarios, each once."""
    return list(dict.fromkeys(part.scenario for part in SUITES[suite]))


def newest(rows: Sequence[Row], scenario: str) -> list[Row]:
    """The newest row of each key; those of the scenario's last run stand last."""
    return list({row.key: row for run in newest_runs(rows, scenario) for row in run}.values())


def check(
    rows: Sequence[Row], recorded: Mapping[str, Recorded] | None = None, *, is_whole: bool = False
) -> int:
    """Judges the newest rows; of a whole run everything that was recorded must be there.

    A line of a row that the last run did not measure ends by the run that did.
    """
    if not rows:
        print("no run to check", file=sys.stderr)
        return 1
    recorded = recorded or {}
    expectations = read_expectations().get(rows[0].scenario, {})
    void = list(dict.fromkeys(row.run_id for row in rows if row.void))
    has_failed = bool(void)
    for run_id in void:
        print(f"run {run_id} is void: the device gave less than it should")
    unguarded = []
    for row in rows:
        verdict = judge(row, expectations.get(row.key), recorded.get(row.key))
        has_failed = has_failed or verdict.has_failed
        if not verdict.is_guarded:
            unguarded.append(row.key)
        run = "" if row.run_id == rows[-1].run_id else f"; of the earlier run {row.run_id}"
        print(f"{row.key}: {row.value:.4g} {row.unit}: {verdict.text}{run}")
    seen = {row.key for row in rows}
    for missing in sorted((expectations.keys() | recorded.keys()) - seen):
        print(f"{missing}: not measured")
        has_failed = has_failed or (is_whole and missing in recorded)
    print(f"{len(unguarded)} of {len(rows)} unguarded: {', '.join(unguarded) or 'none'}")
    return int(has_failed)


def record_command(
    args: argparse.Namespace, scenario: str, rows: Sequence[Row], machine: str
) -> int:
    """Makes the newest runs of a scenario the expectation, with the margin they give."""
    if args.history:
        return record_history(scenario, rows, machine, is_accepted=args.accept)
    num_runs = args.num_runs or 1
    own = [row for row in rows if row.scenario == scenario and not row.void]
    run_ids = list(dict.fromkeys(row.run_id for row in own))[-num_runs:]
    if len(run_ids) < num_runs:
        print(f"{len(run_ids)} runs of {scenario}, not {num_runs}", file=sys.stderr)
        return 1
    runs = [[row for row in own if row.run_id == run_id] for run_id in run_ids]
    entries = record(runs, least_margin_of(scenario))
    write_recorded(any_machine() if scenario == "ci" else machine, scenario, entries)
    print(f"recorded {len(entries)} values of {', '.join(run_ids)}")
    return 0


def least_margin_of(scenario: str) -> Callable[[str], float]:
    """Row key -> the least margin that the scenario gives it."""
    least: Callable[[str], float] = getattr(load_scenario(scenario), "least_margin", lambda _: 0.0)
    return least


def record_history(
    scenario: str, rows: Sequence[Row], machine: str, *, is_accepted: bool = False
) -> int:
    """Makes the newest run of each row the expectation, once what was recorded has judged it.

    Returns:
        1 if there is no run, or if a row is worse than what was recorded or a guard would be lost
        and nobody accepts it: then nothing is written.
    """
    from perf.history import guards, losses, show

    found, missing = guards(rows, scenario, least_margin_of(scenario))
    if not (found or missing):
        print(f"{scenario}: no run of {machine}", file=sys.stderr)
        return 1
    lost = losses(rows, scenario, read_recorded(machine).get(scenario, {}), found)
    for line in lost:
        print(line)
    if lost and not is_accepted:
        print(f"{scenario}: nothing is recorded; --accept takes the above", file=sys.stderr)
        return 1
    write_recorded(machine, scenario, found, is_whole=True)
    print(f"{scenario}: recorded {len(found)} values")
    show(found, missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
