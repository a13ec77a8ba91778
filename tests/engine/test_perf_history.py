"""Guards of a device that has a name: what its committed runs give, and what a check sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perf import __main__ as perf_main
from perf.history import device_noise, guards
from perf.judge import read_recorded
from perf.rows import Measured, Row, read_rows, write_rows

MACHINE = "nvidia-h200"
RESULTS = perf_main.RESULTS
STEP = "decode_step_ms[qwen3-30b-a3b,bf16,batch=8]"


def _row(run: int, value: float, *, n: int = 3, spread: float = 0.001, **fields: str) -> Row:
    known = {"metric": "decode_step_ms", "unit": "ms", "scenario": "gpu_step"} | fields
    repeats = [value, value * (1 + spread), value * (1 - spread)][:n]
    measured = Measured(
        metric=known["metric"], unit=known["unit"], values=repeats, case=known.get("case", "")
    )
    return measured.row(
        scenario=known["scenario"],
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
    assert (entry.value, entry.margin) == (10.1, round(2 * 0.2 / 10.1, 4))
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


def test_times_have_no_less_than_the_noise_of_the_device_and_ratios_less():
    rows = [_device(1, 4.6), _device(2, 4.7), _device(3, 4.6), _row(3, 10.0)]
    rows.append(_row(3, 1.2, metric="decode_step_over_floor", unit="ratio"))
    noise = 2 * 0.1 / 4.6
    assert device_noise(rows) == pytest.approx(noise)
    assert _margin(rows) == round(noise, 4)
    assert _margin(rows, "decode_step_over_floor") == 0.02
    assert guards(rows, "gpu_step")[1] == {"read_tb_s": "what the machine gives"}


def test_a_row_alone_takes_its_whole_spread_and_the_widest_margin_of_its_metric():
    alone = _row(2, 10.0, case="alone", spread=0.03)
    assert _margin([alone], alone.key) == pytest.approx(0.06)
    once = _row(2, 5.0, case="once", n=1)
    assert guards([once], "gpu_step") == ({}, {once.key: "one run with one repeat"})
    others = [_row(1, 10.0), _row(2, 10.4)]
    assert _margin([*others, once], once.key) == round(2 * 0.2 / 10.2, 4)


def test_what_is_too_noisy_has_no_guard_and_counts_have_no_margin():
    noisy = _row(1, 10.0, spread=0.4)
    assert guards([noisy], "gpu_step")[1] == {noisy.key: "noise of 80%"}
    counts = [
        _row(run, value, metric="syncs", unit="count", n=1) for run, value in ((1, 2), (2, 3))
    ]
    entry = guards(counts, "gpu_step")[0]["syncs"]
    assert (entry.value, entry.margin, entry.runs) == (3, 0, ("run-2",))


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


def _new_results(folder: Path, share: float = 1.0, key: str = STEP) -> list[str]:
    """The committed rows again as runs of another time, one of them so much larger."""
    for row in read_rows(RESULTS / MACHINE):
        factor = share if row.key == key else 1.0 if row.unit == "count" else 1.003
        again = replace(row, run_id=f"new-{row.run_id}", value=row.value * factor)
        write_rows([again], folder / MACHINE)
    extra = _row(9, 1.0, metric="nobody_knows", unit="us", scenario="gpu_models")
    write_rows([replace(extra, model="qwen3-8b", dtype="bf16")], folder / MACHINE)
    return ["--results", str(folder), "--machine", MACHINE, "check"]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, None),
        (1.02, None),
        (1.08, "REGRESSION"),
        (0.92, "a win that is not recorded"),
    ],
)
def test_new_rows_go_red_on_a_planted_regression_and_on_a_win(share, text, tmp_path, capsys):
    command = _new_results(tmp_path, share)
    assert perf_main.main([*command, "gpu_models"]) == (0 if text is None else 1)
    written = capsys.readouterr().out
    red = [line for line in written.splitlines() if "REGRESSION" in line or "a win" in line]
    assert [line.partition(": ")[0] for line in red] == ([] if text is None else [STEP])
    assert text is None or text in red[0]
    assert "unguarded: " in written
    assert "nobody_knows[qwen3-8b,bf16]" in written.splitlines()[-1]
    # The suite sees it too, beside what was never run.
    assert perf_main.main([*command, "--suite", "h200"]) == (0 if text is None else 1)
    assert "agentic: never run on this machine" in capsys.readouterr().out


def test_every_kind_of_row_can_go_red(tmp_path, capsys):
    for number, key in enumerate(
        (
            "decode_step_over_floor[batch=32]",
            "prefill_tok_s[batch=8,case=8192]",
            "e2e_s[batch=32,case=32x1024+256]",
            "agentic_s[batch=64,case=cold_prefix]",
        )
    ):
        for share in (1.08, 0.92):
            folder = tmp_path / f"{number} {share}"
            assert perf_main.main([*_new_results(folder, share, key), "gpu_step"]) == 1
            is_win = (share > 1) == (key.startswith("prefill"))
            assert ("a win" if is_win else "REGRESSION") in capsys.readouterr().out


def test_record_needs_one_way_and_a_run(tmp_path, capsys):
    place = ["--results", str(tmp_path), "--machine", "box"]
    with pytest.raises(SystemExit):
        perf_main.main([*place, "record", "gpu_step", "--history", "--num-runs", "2"])
    assert "not allowed with" in capsys.readouterr().err
    assert perf_main.main([*place, "record", "gpu_step", "--history"]) == 1
    assert "gpu_step: no run of box" in capsys.readouterr().err
