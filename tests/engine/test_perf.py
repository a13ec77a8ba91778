"""Rows, expectations and reports of `perf`; no engine is measured here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from compiled_engine.start_times import StartPhase
from perf import __main__ as perf_main
from perf import machine
from perf.ceilings import Ceilings
from perf.compare import find
from perf.judge import (
    Expectation,
    Recorded,
    any_machine,
    change,
    judge,
    read_expectations,
    read_recorded,
    record,
    write_recorded,
)
from perf.report import BEGIN, END, write_markdown
from perf.rows import (
    Measured,
    Outcome,
    key_of,
    newest_runs,
    read_rows,
    write_rows,
)
from perf.suites import SUITES, chosen


def _rows(run_id: str, *, scenario: str = "cpu_vs_peers", void: bool = False, **values: float):
    origin = {"run_id": run_id, "commit": "abc", "command": "python -m perf run s"}
    environment = {"device": "a cpu", "idle_percent_before": 99, "idle_percent_after": 50}
    return [
        Measured(metric=metric, unit="ratio", values=[value, value + 1, value + 5]).row(
            scenario=scenario, environment=environment, void=void, **origin
        )
        for metric, value in values.items()
    ]


def _decode_row(batch: int, value: float, *, void: bool = False):
    origin = {"run_id": "r", "commit": "abc", "command": "c", "environment": {"device": "gpu"}}
    return Measured(
        metric="decode_step_over_floor",
        unit="ratio",
        values=[value],
        model="qwen3-8b",
        dtype="bf16",
        batch=batch,
    ).row(scenario="gpu_step", void=void, **origin)


def test_row_is_the_median_with_its_spread():
    (row,) = _rows("r", speed=2.0)
    assert (row.value, row.n, row.spread) == (3.0, 3, (2.0, 7.0))


def test_rows_survive_the_file_and_the_newest_run_is_found(tmp_path):
    old, new = _rows("old", speed=1.0, size=2.0), _rows("new", speed=3.0, size=2.0)
    write_rows(old, tmp_path)
    path = write_rows(new, tmp_path)
    assert read_rows(tmp_path) == [*old, *new]
    part = _rows("part", speed=3.0)
    assert newest_runs([*old, *part], "cpu_vs_peers") == [old[1:], part]
    assert newest_runs([*old, *new], "cpu_vs_peers") == [new]
    assert newest_runs(new, "other") == []
    path.write_text('{"metric": "x"}\n')
    with pytest.raises(SystemExit, match="no row"):
        read_rows(tmp_path)


def test_a_row_says_what_was_measured_with_what(tmp_path):
    row = _decode_row(8, 1.2)
    path = write_rows([row], tmp_path)
    line = json.loads(path.read_text())
    wanted = ("metric", "model", "dtype", "batch", "case", "value", "unit", "spread", "run_id")
    assert [line[name] for name in wanted] == [
        "decode_step_over_floor", "qwen3-8b", "bf16", 8, "", 1.2, "ratio", [1.2, 1.2], "r",
    ]  # fmt: skip
    assert (line["command"], line["void"]) == ("c", False)
    assert read_rows(tmp_path) == [row]


def test_rows_of_before_are_readable(tmp_path):
    (row,) = _rows("old", speed=1.0)
    added = ("model", "dtype", "batch", "case", "void")
    line = {name: value for name, value in asdict(row).items() if name not in added}
    (tmp_path / "s.jsonl").write_text(json.dumps(line) + "\n")
    assert read_rows(tmp_path) == [row]
    (tmp_path / "s.jsonl").write_text(json.dumps(line | {"shoes": 2}) + "\n")
    with pytest.raises(SystemExit, match="shoes"):
        read_rows(tmp_path)


def test_rows_of_the_repository_are_readable():
    results = Path(perf_main.ROOT, "results")
    assert all(read_rows(folder) for folder in results.iterdir() if folder.is_dir())


def test_key_has_batch_and_case_where_there_are_any():
    assert key_of("x") == "x"
    assert key_of("x", 8) == "x[batch=8]"
    assert key_of("x", None, "cold") == "x[case=cold]"
    assert key_of("x", 8, "cold") == "x[batch=8,case=cold]"
    assert _decode_row(8, 1.0).key == "decode_step_over_floor[batch=8]"


@pytest.mark.parametrize(
    ("expected", "bad", "good", "text"),
    [
        ({"at_least": 2.0}, 1.9, 2.0, "≥ 2"),
        ({"at_most": 0.5}, 0.6, 0.5, "≤ 0.5"),
        ({"equals": 0}, 1, 0, "= 0"),
    ],
    ids=["at least", "at most", "equals"],
)
def test_expectation_names_what_is_wrong(expected, bad, good, text):
    assert Expectation(**expected).failure(good) is None
    assert Expectation(**expected).failure(bad) is not None
    assert str(Expectation(**expected)) == text


def test_expected_file_holds_one_bound_for_each_metric():
    expectations = read_expectations()
    assert expectations.keys() <= set(perf_main.SCENARIOS)
    for entries in expectations.values():
        for name, entry in entries.items():
            bounds = [b for b in (entry.at_least, entry.at_most, entry.equals) if b is not None]
            assert len(bounds) == 1, name


def test_check_fails_on_a_broken_bound_and_lists_unguarded_metrics(capsys):
    good = _rows("r", decode_1_stream_vs_transformers=2.5, other=1.0)
    assert perf_main.check(good) == 0
    out = capsys.readouterr().out
    assert "decode_1_stream_vs_transformers: 3.5 ratio: ok" in out
    assert "other: 2 ratio: no guard" in out
    assert "recompiles: not measured" in out
    assert "decode_step_over_floor" not in out, "another scenario's metrics"
    assert perf_main.check(_rows("r", decode_1_stream_vs_transformers=0.5)) == 1
    assert perf_main.check([]) == 1


def test_check_judges_each_batch_by_its_own_bound(capsys):
    assert perf_main.check([_decode_row(1, 1.1), _decode_row(8, 1.2)]) == 0
    assert perf_main.check([_decode_row(1, 1.2), _decode_row(8, 1.2)]) == 1
    assert "decode_step_over_floor[batch=1]: 1.2 ratio: above 1.15" in capsys.readouterr().out


def test_check_fails_on_a_void_run(capsys):
    assert perf_main.check([_decode_row(1, 1.0, void=True)]) == 1
    assert "run r is void" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("read", "matmul", "device", "is_void"),
    [
        (4.6, 790.0, "NVIDIA H200", False),
        (4.39, 790.0, "NVIDIA H200", True),
        (4.6, 739.0, "NVIDIA H200", True),
        (0.5, 50.0, "NVIDIA L4", False),
    ],
)
def test_a_device_that_gives_too_little_makes_a_run_void(read, matmul, device, is_void):
    ceilings = Ceilings(
        read_tb_s=[read],
        copy_tb_s=[4.0],
        matmul_tflops=[matmul],
        sustained_tflops=[matmul],
        environment={},
    )
    assert ceilings.is_void(device) is is_void


class _Scenario:
    """A scenario that measures nothing."""

    NAME = "gpu_step"

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    class Options:
        __dataclass_fields__ = {}  # noqa: RUF012

    def run(self, options: object, note: object) -> Outcome:
        return self._outcome


def test_run_keeps_rows_of_the_parts_that_worked(tmp_path, capsys, monkeypatch):
    outcome = Outcome(
        measured=[Measured(metric="read_tb_s", unit="TB/s", values=[4.0])],
        environment={"sm_clock_mhz": 1980},
        void=True,
        failures=["itl: no such thing"],
        documents={"decode_profile.md": "# Kernels\n"},
    )
    monkeypatch.setattr(perf_main, "load_scenario", lambda _: _Scenario(outcome))
    monkeypatch.setattr(machine, "idle_percent", lambda: 100)
    place = ["--results", str(tmp_path), "--machine", "box"]
    assert perf_main.main([*place, "run", "gpu_step", "--commit", "abc123"]) == 1
    printed = capsys.readouterr()
    assert "not measured: itl: no such thing" in printed.err
    assert "the run is void" in printed.out
    (row,) = read_rows(tmp_path / "box")
    assert (row.commit, row.void, row.environment["sm_clock_mhz"]) == ("abc123", True, 1980)
    assert row.run_id.endswith("-abc123")
    assert row.run_id in (tmp_path / "box" / "decode_profile.md").read_text()


def test_report_and_compare_show_what_was_recorded(tmp_path, capsys):
    write_rows(_rows("first", speed=1.0), tmp_path / "box")
    write_rows(_rows("second", speed=3.0), tmp_path / "box")
    place = ["--results", str(tmp_path), "--machine", "box"]
    assert perf_main.main([*place, "report"]) == 0
    out = capsys.readouterr().out
    assert "run second" in out
    assert "run first" not in out
    assert "the machine was busy" in out
    assert perf_main.main([*place, "compare", "first", "second"]) == 0
    out = capsys.readouterr().out
    assert "x 2.000" in out
    assert "1 same" in out, "the spread of the two runs is larger"
    assert perf_main.main([*place, "compare", "first", "third"]) == 1
    assert "there are: first, second" in capsys.readouterr().err


def test_tables_show_batch_and_case(tmp_path, capsys):
    write_rows([_decode_row(8, 1.2)], tmp_path / "box")
    place = ["--results", str(tmp_path), "--machine", "box"]
    assert perf_main.main([*place, "report"]) == 0
    assert "decode_step_over_floor[batch=8]" in capsys.readouterr().out


def test_markdown_puts_targets_beside_the_newest_values(tmp_path):
    write_rows(_rows("first", decode_1_stream_vs_transformers=1.0), tmp_path / "a-cpu")
    write_rows(_rows("second", decode_1_stream_vs_transformers=2.5), tmp_path / "a-cpu")
    write_rows([_decode_row(1, 1.3, void=True)], tmp_path / "a-gpu")
    target = tmp_path / "README.md"
    target.write_text(f"By hand.\n{BEGIN}\nwhat was there\n{END}\nThe end.\n")
    place = ["--results", str(tmp_path), "--machine", "a-cpu"]
    assert perf_main.main([*place, "report", "--markdown", str(target)]) == 0
    text = target.read_text()
    assert "Run `second`" in text
    assert "Run `first`" not in text
    assert "| decode_1_stream_vs_transformers | 3.5 ratio | second |" in text
    assert "what was there" not in text
    assert text.startswith("By hand.\n")
    assert text.endswith("The end.\n")
    assert "| decode_1_stream_vs_transformers |  |  | 3.5 | 2.5 to 7.5 | ratio | ≥ 2 | ok |" in text
    line = "| decode_step_over_floor | 1 |  | 1.3 | 1.3 to 1.3 | ratio | ≤ 1.15 | above 1.15 |"
    assert line in text
    assert text.count("**Void**") == 1
    assert "python -m perf run --suite h200 --only step" in text


def test_the_readme_is_what_the_rows_say(tmp_path):
    committed = Path(perf_main.ROOT, "README.md").read_text()
    copy = tmp_path / "README.md"
    copy.write_text(committed)
    write_markdown(copy, Path(perf_main.ROOT, "results"))
    assert committed == copy.read_text(), "run perf report --markdown perf/README.md"


def test_a_document_without_marks_is_refused(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text("By hand.\n")
    with pytest.raises(SystemExit, match="lacks the marks"):
        write_markdown(copy, tmp_path)


def test_machine_is_described_without_measuring():
    assert machine.machine_name()
    assert {"device", "torch", "triton", "num_cpus"} <= machine.environment().keys()
    assert machine.commit()
    assert isinstance(machine.clocks(), dict)


def _time(value: float, spread: float = 0.0):
    values = [value - spread, value, value + spread]
    origin = {"run_id": "r", "commit": "abc", "command": "c", "environment": {"device": "gpu"}}
    return Measured(metric="decode_step_ms", unit="ms", values=values).row(
        scenario="gpu_step", **origin
    )


def test_check_fails_on_a_regression_and_on_a_win_that_nobody_recorded():
    seen = Recorded(value=10.0, margin=0.05, runs=("a", "b", "c"))
    assert not judge(_time(10.4), None, seen).has_failed
    slower, faster = judge(_time(10.6), None, seen), judge(_time(9.4), None, seen)
    assert slower.has_failed
    assert "REGRESSION" in slower.text
    assert faster.has_failed
    assert "a win that is not recorded" in faster.text


def test_more_is_better_of_rates_and_worse_of_times():
    (rate,) = _rows("r", tokens_vs_vllm=2.0)
    seen = Recorded(value=1.0, margin=0.01)
    assert "a win" in judge(rate, None, seen).text
    assert "REGRESSION" in judge(_time(3.0), None, seen).text


def test_a_missed_target_fails_only_where_nothing_is_recorded():
    target = Expectation(at_most=9.0)
    assert judge(_time(10.0), target, None).has_failed
    verdict = judge(_time(10.0), target, Recorded(value=10.0))
    assert not verdict.has_failed
    assert "target missed: above 9" in verdict.text


def test_margins_come_from_repeated_runs():
    runs = [[_time(value)] for value in (10.0, 10.2, 9.9)]
    (entry,) = record(runs).values()
    assert (entry.value, entry.margin) == (10.0, 0.04)
    assert len(entry.runs) == 3
    wide = record([[_time(10.0, spread=1.0)]])
    assert wide["decode_step_ms"].margin == 0.1


def test_counts_have_no_margin():
    origin = {"run_id": "r", "commit": "abc", "command": "c", "environment": {}}
    rows = [
        Measured(metric="graph_breaks", unit="count", values=[value]).row(scenario="ci", **origin)
        for value in (3, 3, 4)
    ]
    (entry,) = record([rows[:1], rows[1:2]]).values()
    assert (entry.value, entry.margin) == (3, 0.0)
    assert judge(rows[2], None, entry).has_failed
    with pytest.raises(SystemExit, match="no count that a gate can hold: 3, 3, 4"):
        record([rows])
    assert not judge(rows[0], None, entry).has_failed


def test_recorded_values_of_every_machine_and_of_one_are_merged(tmp_path):
    path = tmp_path / "recorded.json"
    write_recorded(any_machine(), "ci", {"graph_breaks": Recorded(value=0)}, path)
    write_recorded("box", "ci", {"seconds": Recorded(value=2.0, margin=0.5)}, path)
    write_recorded("other", "ci", {"seconds": Recorded(value=9.0)}, path)
    found = read_recorded("box", path)["ci"]
    assert {key: entry.value for key, entry in found.items()} == {"graph_breaks": 0, "seconds": 2.0}


def test_a_gate_that_was_recorded_and_is_gone_fails_a_whole_check(capsys):
    rows = _rows("r", other=1.0)
    gone = {"graph_breaks": Recorded(value=0)}
    assert perf_main.check(rows, gone) == 0
    assert perf_main.check(rows, gone, is_whole=True) == 1
    assert "graph_breaks: not measured" in capsys.readouterr().out


def test_a_change_within_the_spread_is_none():
    assert change(_time(10.0, 0.5), _time(10.4), None) == "same"
    assert change(_time(10.0), _time(10.4), None) == "worse"
    assert change(_time(10.0), _time(9.6), None) == "better"
    assert change(_time(10.0), _time(10.4), Recorded(value=10.0, margin=0.05)) == "same"


def test_runs_are_found_by_id_commit_and_file(tmp_path):
    path = write_rows([_time(1.0)], tmp_path / "box")
    rows = {"box": read_rows(tmp_path / "box")}
    key = ("box", "gpu_step", "decode_step_ms")
    for name in ("r", "abc", str(path)):
        assert find(name, rows)[key].value == 1.0
    assert find("nothing", rows) == {}


def test_suites_name_scenarios_that_exist_and_commands_their_parts():
    for name, parts in SUITES.items():
        assert {part.scenario for part in parts} <= set(perf_main.SCENARIOS)
        assert [part.name for part in chosen(name, None)] == [part.name for part in parts]
    with pytest.raises(SystemExit, match="no part nothing in cpu"):
        chosen("cpu", "step,nothing")


@pytest.mark.parametrize("name", perf_main.SCENARIOS)
def test_every_scenario_loads_and_takes_options(name):
    scenario = perf_main.load_scenario(name)
    assert name == scenario.NAME
    assert dataclasses.is_dataclass(scenario.Options)
    assert scenario.Options()


def test_recorded_file_guards_rows_of_scenarios_that_exist():
    stored = json.loads(Path(perf_main.ROOT, "recorded.json").read_text())
    for scenarios in stored.values():
        assert scenarios.keys() <= set(perf_main.SCENARIOS)
        for entries in scenarios.values():
            for entry in entries.values():
                assert Recorded(**entry).runs, "whoever records names the runs"


def test_phases_of_a_start_are_those_that_a_server_prints():
    from perf.start import phases

    text = "loading ...\nloading: done in 1.5 s\ncompiling: done in 20.0 s\nready after 22 s: http"
    assert phases(text) == {"loading": 1.5, "compiling": 20.0}


def test_misses_of_a_start_are_those_of_its_table():
    """Of the real table, wherever its columns stand."""
    from compiled_engine.commands.settings_table import print_start
    from perf.start import misses

    def printed(pieces: int, inductor: int, triton: int, ahead: int = 0) -> str:
        rows = [
            StartPhase(name="imports", seconds=4.3),
            StartPhase(name="pieces", seconds=0.0, num_hits=13, num_misses=pieces, num_bytes=99),
            StartPhase(name="inductor", seconds=1.0, num_hits=0, num_misses=inductor),
            StartPhase(name="triton", seconds=0.2, num_hits=110, num_misses=triton),
            StartPhase(name="own sources", seconds=0.0, num_hits=38),
            StartPhase(name="- inductor", seconds=9.0, num_misses=ahead),
        ]
        out = StringIO()
        print_start(Console(file=out, width=80), rows)
        return f"loading: done in 0.1 s\n{out.getvalue()}ready after 9 s: http"

    assert misses(printed(0, 0, 0)) == 0
    assert misses(printed(2, 3, 40, 7)) == 52
    with pytest.raises(SystemExit, match="no table"):
        misses("loading: done in 0.1 s\nready")


def test_turns_of_an_agent_are_counted_apart():
    from compiled_engine.bench.stats import RequestRecord
    from perf.agentic import Turn, rows, take

    turns = [Turn(index, RequestRecord(sent_s=float(index))) for index in (0, 1, 2)]
    for turn in turns:
        start = turn.record.sent_s
        for n, place in enumerate((0.2, 0.4, 0.6)):
            take({"choices": [{"token_ids": [n]}]}, turn, start + place / (1 + turn.index))
        details = {"cached_tokens": 0 if turn.index == 0 else 90}
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": details}
        take({"choices": [], "usage": usage}, turn, start + 1.0)
    assert [turn.answer for turn in turns] == [[0, 1, 2]] * 3
    found = {(row.metric, row.case): row.values for row in rows(turns, 1, 3.0)}
    assert found["agentic_ttft_ms", "first turn"] == [pytest.approx(200.0)]
    assert found["agentic_ttft_ms", "later turns"] == [pytest.approx(100.0), pytest.approx(200 / 3)]
    assert found["agentic_cached_share", ""] == [0.9], "of the later turns"
    assert found["agentic_total_tok_s", ""] == [pytest.approx(103.0)]
    with pytest.raises(SystemExit, match="failed"):
        take({"error": "boom"}, turns[0], 0.0)


def test_parts_of_a_suite_say_the_commit_of_its_start_and_no_folder_of_this_machine(monkeypatch):
    found = iter(["abc", "abc+"])
    monkeypatch.setattr(machine, "commit", lambda: next(found))
    called = []
    monkeypatch.setattr(perf_main, "run_suite", lambda parts, *words: called.append(words) or 0)
    assert perf_main.main(["run", "--suite", "cpu"]) == 0
    assert called == [([], ["--commit", "abc"])]
    perf_main.main(["--results", "elsewhere", "run", "--suite", "cpu", "--commit", "def"])
    assert called[1] == (["--results", "elsewhere"], ["--commit", "def"])


@pytest.mark.parametrize("code", [0, 3])
def test_a_suite_runs_every_part_and_tells_which_failed(code, monkeypatch, capsys):
    import subprocess

    from perf.suites import run_suite

    commands = []

    class Child:
        def __init__(self, command):
            commands.append(command)

        def wait(self):
            return code if "cpu_step" in commands[-1] else 0

    monkeypatch.setattr(subprocess, "Popen", Child)
    parts = chosen("cpu", "step,passes")
    assert run_suite(parts, ["--machine", "box"], ["--num-repeats", "2"]) == (1 if code else 0)
    words = [command[3:] for command in commands]
    assert words == [
        ["--machine", "box", "run", "passes", "--num-repeats", "2"],
        ["--machine", "box", "run", "cpu_step", "--num-repeats", "2"],
    ]
    assert ("failed or left out: step" in capsys.readouterr().err) == bool(code)
