"""Guards of a device that has a name: what its committed runs give, and what a check sees."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import __main__ as perf_main
from perf.history import device_noise, guards
from perf.judge import read_recorded, write_recorded
from perf.report import write_markdown
from perf.rows import Measured, Row, read_rows, write_rows

MACHINE = "nvidia-h200"
RESULTS = perf_main.RESULTS
STEP = "decode_step_ms[qwen3-30b-a3b,bf16,batch=8]"
OP = "op_us[case=gemm: ours]"


def _row(run: int, value: float, *, n: int = 3, spread: float = 0.001, **fields: Any) -> Row:
    known = {"metric": "decode_step_ms", "unit": "ms"} | fields
    scenario = known.pop("scenario", "gpu_step")
    repeats = [value, value * (1 + spread), value * (1 - spread)][:n]
    return Measured(values=repeats, **known).row(
        scenario=scenario,
        run_id=f"run-{run}",
        commit="abc",
        command="c",
        environment={"device": "NVIDIA H200"},
    )


def _device(run: int, value: float) -> Row:
    return _row(run, value, metric="read_tb_s", unit="TB/s")


def _margin(rows: list[Row], key: str = "decode_step_ms") -> float:
    return guards(rows, "gpu_step")[0][key].margin


def test_the_newest_run_is_reached_and_the_runs_before_give_its_noise():
    found, missing = guards([_row(1, 10.0), _row(2, 10.3), _row(3, 10.1)], "gpu_step")
    entry = found["decode_step_ms"]
    assert (entry.value, entry.margin) == (10.1, round(2 * 0.15 / 10.1, 4))
    assert entry.runs == ("run-1", "run-2", "run-3")
    assert not missing


def test_a_run_of_other_code_ends_what_is_looked_at():
    rows = [_row(1, 10.0), _row(2, 12.0), _row(3, 10.2), _row(4, 10.0)]
    entry = guards(rows, "gpu_step")[0]["decode_step_ms"]
    assert entry.runs == ("run-3", "run-4")
    # Repeats that meet those of the newest are noise however far their median lies.
    wide = [_row(1, 10.0, spread=0.2), _row(2, 11.0, spread=0.2)]
    assert guards(wide, "gpu_step")[0]["decode_step_ms"].runs == ("run-1", "run-2")
    assert _margin(wide) == 0.2


def test_what_the_newest_run_changed_is_no_noise_and_earlier_changes_are_little():
    flat = [_row(run, 10.0) for run in (1, 2, 3)]
    assert _margin([*flat, _row(4, 10.4)]) == 0.02
    # Two regressions under the limit, one after the other.
    assert _margin([_row(1, 10.0), _row(2, 10.0), _row(3, 10.45), _row(4, 10.45)]) == 0.05


def test_times_have_no_less_than_the_noise_of_the_device_and_ratios_less():
    rows = [_device(1, 4.6), _device(2, 4.7), _device(3, 4.6), _row(3, 10.0)]
    rows.append(_row(3, 1.2, metric="decode_step_over_floor", unit="ratio"))
    noise = 2 * 0.1 / 4.6
    assert device_noise(rows) == pytest.approx(noise)
    assert _margin(rows) == round(noise, 4)
    assert _margin(rows, "decode_step_over_floor") == 0.02
    assert guards(rows, "gpu_step")[1] == {"read_tb_s": "what the machine gives"}


def test_a_row_alone_takes_its_whole_spread_and_the_median_margin_of_its_metric():
    alone = _row(2, 10.0, case="alone", spread=0.03)
    assert _margin([alone], alone.key) == pytest.approx(0.06)
    once = _row(2, 5.0, case="once", n=1)
    assert guards([once], "gpu_step") == ({}, {once.key: "one run with one repeat"})
    # One noisy row of three widens no other.
    others = [alone, _row(2, 10.0, case="noisy", spread=0.2), _row(2, 10.0, case="quiet")]
    assert _margin([*others, once], once.key) == pytest.approx(0.06)
    assert _margin([*others, once], "decode_step_ms[case=quiet]") == pytest.approx(0.06)
    assert _margin([*others, once], "decode_step_ms[case=noisy]") == pytest.approx(0.4)


def test_what_is_too_noisy_has_no_guard_and_counts_have_no_margin():
    noisy = _row(1, 10.0, spread=0.4)
    assert guards([noisy], "gpu_step")[1] == {noisy.key: "noise of 80%"}
    entry = guards(_counts(2, 3), "gpu_step")[0]["syncs"]
    assert (entry.value, entry.margin, entry.runs) == (3, 0, ("run-2",))
    assert guards(_counts(0), "gpu_step")[0]["syncs"].value == 0


def _counts(*values: float) -> list[Row]:
    return [_row(n, value, metric="syncs", unit="count", n=1) for n, value in enumerate(values, 1)]


def test_counts_are_kept_to_the_last_digit_and_a_mean_that_happens_to_be_whole_is_none():
    assert guards(_counts(16_390_123_457), "gpu_step")[0]["syncs"].value == 16_390_123_457
    entry = guards(_counts(3.1, 2.9, 3), "gpu_step")[0]["syncs"]
    assert entry.margin == 0.05, "twice 0.1 of 3, and no more than that"
    assert entry.runs == ("run-1", "run-2", "run-3")


def test_zeros_that_are_no_counts_have_no_guard_and_divide_nothing():
    reason = "zero, of which no share is a margin"
    for rows in ([_row(1, 0.0)], [_row(1, 10.0, spread=1.5), _row(2, 0.0)]):
        assert guards(rows, "gpu_step") == ({}, {"decode_step_ms": reason})
    assert guards(_counts(0.5, 0), "gpu_step") == ({}, {"syncs": reason})
    # Zeros before the newest, whose repeats it meets.
    before = [_row(1, 0.0), replace(_row(2, 0.0), spread=(0.0, 10.0)), _row(3, 10.0)]
    assert _margin(before) == 0.5
    assert device_noise([_device(1, 0.0)]) == 0.02


def test_a_scenario_gives_the_least_margin_of_its_rows():
    least = {"decode_step_ms": 0.3, "syncs": 0.3}
    found, _ = guards([_row(1, 10.0), *_counts(2)], "gpu_step", least.__getitem__)
    assert (found["decode_step_ms"].margin, found["syncs"].margin) == (0.3, 0)


def test_a_run_of_a_part_hides_no_other_row(tmp_path, capsys):
    model = {"model": "m", "dtype": "bf16"}
    whole = [_device(1, 4.6), _row(1, 10.0, **model), _row(1, 20.0, case="b", **model)]
    for part in ([_device(2, 4.7)], [_device(2, 4.7), _row(2, 11.0, **model)]):
        rows = [*whole, *part]
        found = guards(rows, "gpu_step")[0]
        assert found.keys() == {"decode_step_ms", "decode_step_ms[case=b]"}
        newest = {row.key: row.run_id for row in perf_main.newest(rows, "gpu_step")}
        assert newest["decode_step_ms[case=b]"] == "run-1"
        assert newest["read_tb_s"] == "run-2"
        assert perf_main.check(perf_main.newest(rows, "gpu_step"), found) == 0
        out = capsys.readouterr().out
        (line,) = _lines_of("decode_step_ms[case=b]", out)
        assert line.endswith("; of the earlier run run-1")
        assert _lines_of("read_tb_s", out) == ["read_tb_s: 4.7 TB/s: no guard"]
    write_rows(rows, tmp_path / "results" / "box")
    write_markdown(tmp_path / "README.md", tmp_path / "results")
    first, second = (tmp_path / "README.md").read_text().partition("Run `run-1`")[2].split("Run `")
    # Each run with what the device gave in it.
    assert "| read_tb_s |  |  | 4.6 |" in first
    assert "| decode_step_ms |  | b | 20 |" in first
    assert "| decode_step_ms |  |  |" not in first
    assert "| read_tb_s |  |  | 4.7 |" in second
    assert "| decode_step_ms |  |  | 11 |" in second


def test_void_runs_say_nothing():
    rows = [_row(1, 10.0), replace(_row(2, 30.0), void=True)]
    assert guards(rows, "gpu_step")[0]["decode_step_ms"].value == 10


def test_what_is_recorded_of_the_device_is_what_its_committed_rows_give():
    rows, recorded = read_rows(RESULTS / MACHINE), read_recorded(MACHINE)
    for scenario in dict.fromkeys(row.scenario for row in rows):
        found, _ = guards(rows, scenario)
        as_stored = {k: json.loads(json.dumps(vars(e))) for k, e in recorded[scenario].items()}
        assert as_stored == {k: json.loads(json.dumps(vars(e))) for k, e in found.items()}, (
            f"run perf --machine {MACHINE} record {scenario} --history"
        )


# Scenario -> rows of the box that the cases below plant something in: fields, unit and value.
PLANTED = {
    "gpu_models": [
        ({"metric": "decode_step_ms", "batch": 8, "model": "qwen3-30b-a3b", "dtype": "bf16"}, 3.5),
    ],
    "gpu_step": [
        ({"metric": "decode_step_over_floor", "unit": "ratio", "batch": 32}, 1.3),
        ({"metric": "prefill_tok_s", "unit": "tokens/s", "batch": 8, "case": "8192"}, 41000.0),
        ({"metric": "e2e_s", "unit": "s", "batch": 32, "case": "32x1024+256"}, 2.3),
        ({"metric": "agentic_s", "unit": "s", "batch": 64, "case": "cold_prefix"}, 1.1),
        ({"metric": "syncs_per_step", "unit": "count"}, 2.0),
    ],
    "op_bench": [
        ({"metric": "op_us", "unit": "us", "case": "gemm: ours"}, 80.0),
        ({"metric": "op_us", "unit": "us", "case": "gemm: cublas"}, 90.0),
        ({"metric": "op_us", "unit": "us", "case": "attention: ours", "spread": 0.1}, 50.0),
    ],
}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words before the command: of a machine with runs of its own, and what is recorded of them."""
    recorded = tmp_path / "recorded.json"
    monkeypatch.setattr(perf_main, "read_recorded", partial(read_recorded, path=recorded))
    monkeypatch.setattr(perf_main, "write_recorded", partial(write_recorded, path=recorded))
    place = ["--results", str(tmp_path / "results"), "--machine", "box"]
    for scenario, entries in PLANTED.items():
        runs = (1,) if scenario == "op_bench" else (1, 2, 3)
        for run in runs:
            _write(tmp_path, [_device(run, 4.7 if run == 2 else 4.6)], scenario)
            for fields, value in entries:
                _write(tmp_path, [_row(run, value, **fields)], scenario)
    assert perf_main.main([*place, "record", "--suite", "h200", "--history"]) == 0
    return place


def _write(folder: Path, rows: list[Row], scenario: str) -> None:
    write_rows([replace(row, scenario=scenario) for row in rows], folder / "results" / "box")


def _plant(folder: Path, key: str = "", share: float = 1.0) -> None:
    """The rows again as runs of another time, the one of the key so much larger."""
    for scenario, entries in PLANTED.items():
        for fields, value in entries:
            row = replace(_row(9, value, **fields), scenario=scenario)
            factor = share if row.key == key else 1.0 if row.unit == "count" else 1.003
            write_rows([replace(row, value=value * factor)], folder / "results" / "box")
    _write(folder, [_row(9, 1.0, metric="nobody_knows", model="m", dtype="bf16")], "gpu_models")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, None),
        (1.02, None),
        (1.08, "REGRESSION"),
        (0.92, "a win that is not recorded"),
    ],
)
def test_new_rows_go_red_on_a_planted_regression_and_on_a_win(share, text, box, tmp_path, capsys):
    _plant(tmp_path, STEP, share)
    capsys.readouterr()
    assert perf_main.main([*box, "check", "gpu_models"]) == (0 if text is None else 1)
    written = capsys.readouterr().out
    red = [line for line in written.splitlines() if "REGRESSION" in line or "a win" in line]
    assert [line.partition(": ")[0] for line in red] == ([] if text is None else [STEP])
    assert text is None or text in red[0]
    assert "unguarded: " in written
    assert "nobody_knows[m,bf16]" in written.splitlines()[-1]
    # The suite sees it too, beside what was never run.
    assert perf_main.main([*box, "check", "--suite", "h200"]) == (0 if text is None else 1)
    written = capsys.readouterr().out
    never = {name for name in perf_main.scenarios_of("h200") if name not in PLANTED}
    assert never
    assert all(f"{name}: never run on this machine\n" in written for name in never)
    *_, last = written.splitlines()
    assert last == (
        f"h200: {len(PLANTED)} of {len(PLANTED) + len(never)} scenarios have run on this machine; "
        f"failed: {'none' if text is None else 'gpu_models'}; "
        f"never run here, so unguarded: {', '.join(sorted(never, key=order))}"
    )


def order(scenario: str) -> int:
    """Its place in the suite."""
    return perf_main.scenarios_of("h200").index(scenario)


def test_a_suite_of_which_nothing_was_run_is_no_success(box, capsys):
    place = [*box[:3], "another"]
    assert perf_main.main([*place, "check", "--suite", "h200"]) == 1
    names = perf_main.scenarios_of("h200")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"h200: 0 of {len(names)} scenarios have run on this machine; never run here, so "
        f"unguarded: {', '.join(names)}"
    )


@pytest.mark.parametrize(
    ("scenario", "key"),
    [
        ("gpu_step", "decode_step_over_floor[batch=32]"),
        ("gpu_step", "prefill_tok_s[batch=8,case=8192]"),
        ("gpu_step", "e2e_s[batch=32,case=32x1024+256]"),
        ("gpu_step", "agentic_s[batch=64,case=cold_prefix]"),
        ("gpu_step", "syncs_per_step"),
        ("op_bench", OP),
    ],
)
def test_every_kind_of_row_can_go_red(scenario, key, box, tmp_path, capsys):
    _plant(tmp_path)
    capsys.readouterr()
    assert perf_main.main([*box, "check", scenario]) == 0
    (line,) = _lines_of(key, capsys.readouterr().out)
    assert ": ok, recorded" in line
    for share in (1.08, 0.92):
        _plant(tmp_path, key, share)
        assert perf_main.main([*box, "check", scenario]) == 1
        (line,) = _lines_of(key, capsys.readouterr().out)
        is_win = (share > 1) == key.startswith("prefill")
        assert ("a win" if is_win else "REGRESSION") in line


def _lines_of(key: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{key}: ")]


def test_a_regression_is_recorded_only_if_it_is_accepted(box, tmp_path, capsys):
    recorded = tmp_path / "recorded.json"
    before = recorded.read_text()
    command = [*box, "record", "op_bench", "--history"]
    _plant(tmp_path, OP, 1.08)
    assert perf_main.main(command) == 1
    seen = capsys.readouterr()
    (line,) = _lines_of(OP, seen.out)
    assert "86.4 us: REGRESSION: recorded 80" in line
    assert "--accept" in seen.err
    assert recorded.read_text() == before
    assert perf_main.main([*command, "--accept"]) == 0
    assert perf_main.read_recorded("box")["op_bench"][OP].value == 86.4
    # A win needs nothing.
    _plant(tmp_path, OP, 0.9)
    assert perf_main.main(command) == 0
    assert perf_main.read_recorded("box")["op_bench"][OP].value == 72


def test_a_guard_is_lost_only_if_that_is_accepted(box, tmp_path, capsys):
    _write(tmp_path, [_row(9, 80.0, metric="op_us", case="gemm: ours", spread=0.9)], "op_bench")
    capsys.readouterr()
    assert perf_main.main([*box, "record", "op_bench", "--history"]) == 1
    (line,) = _lines_of(OP, capsys.readouterr().out)
    assert "GUARD LOST: recorded 80" in line
    assert OP in perf_main.read_recorded("box")["op_bench"]
    assert perf_main.main([*box, "record", "op_bench", "--history", "--accept"]) == 0
    assert OP not in perf_main.read_recorded("box")["op_bench"]


def test_the_least_margin_of_a_scenario_counts(box, monkeypatch):
    scenario = SimpleNamespace(least_margin=lambda key: 0.3 if key == OP else 0.0)
    monkeypatch.setattr(perf_main, "load_scenario", lambda _: scenario)
    assert perf_main.main([*box, "record", "op_bench", "--history"]) == 0
    assert perf_main.read_recorded("box")["op_bench"][OP].margin == 0.3


def test_record_needs_one_way_and_a_run(tmp_path, capsys):
    place = ["--results", str(tmp_path), "--machine", "box"]
    for words, text in (
        (["gpu_step", "--history", "--num-runs", "2"], "not allowed with"),
        (["gpu_step", "--accept"], "--accept belongs to --history"),
        (["ci", "--history"], "rows of ci belong to any machine"),
        (["--suite", "ci", "--history"], "rows of ci belong to any machine"),
    ):
        with pytest.raises(SystemExit) as refused:
            perf_main.main([*place, "record", *words])
        assert refused.value.code == 2
        assert text in capsys.readouterr().err
    assert perf_main.main([*place, "record", "gpu_step", "--history"]) == 1
    assert "gpu_step: no run of box" in capsys.readouterr().err
