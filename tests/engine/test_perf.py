"""Rows, expectations and reports of `perf`; no engine is measured here."""

from __future__ import annotations

import pytest

from perf import __main__ as perf_main
from perf import machine
from perf.rows import Expectation, Measured, newest_run, read_expectations, read_rows, write_rows


def _rows(run_id: str, **values: float):
    origin = {"run_id": run_id, "commit": "abc", "command": "python -m perf run s"}
    environment = {"device": "a cpu", "idle_percent_before": 99, "idle_percent_after": 50}
    return [
        Measured(metric=metric, unit="ratio", values=[value, value + 1, value + 5]).row(
            scenario="s", environment=environment, **origin
        )
        for metric, value in values.items()
    ]


def test_row_is_the_median_with_its_spread():
    (row,) = _rows("r", speed=2.0)
    assert (row.value, row.n, row.spread) == (3.0, 3, (2.0, 7.0))


def test_rows_survive_the_file_and_the_newest_run_is_found(tmp_path):
    old, new = _rows("old", speed=1.0, size=2.0), _rows("new", speed=3.0)
    write_rows(old, tmp_path)
    path = write_rows(new, tmp_path)
    assert read_rows(tmp_path) == [*old, *new]
    assert newest_run(read_rows(tmp_path), "s") == new
    assert newest_run(read_rows(tmp_path), "other") == []
    path.write_text('{"metric": "x"}\n')
    with pytest.raises(SystemExit, match="no row"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("expected", "bad", "good"),
    [({"at_least": 2.0}, 1.9, 2.0), ({"at_most": 0.5}, 0.6, 0.5), ({"equals": 0}, 1, 0)],
    ids=["at least", "at most", "equals"],
)
def test_expectation_names_what_is_wrong(expected, bad, good):
    assert Expectation(**expected).failure(good) is None
    assert Expectation(**expected).failure(bad) is not None


def test_expected_file_holds_one_bound_for_each_metric():
    for name, entry in read_expectations().items():
        bounds = [b for b in (entry.at_least, entry.at_most, entry.equals) if b is not None]
        assert len(bounds) == 1, name


def test_check_fails_on_a_broken_bound_and_lists_unguarded_metrics(capsys):
    good = _rows("r", decode_1_stream_vs_transformers=2.5, other=1.0)
    assert perf_main.check(good) == 0
    out = capsys.readouterr().out
    assert "decode_1_stream_vs_transformers: 3.5 ratio: ok" in out
    assert "other: 2 ratio: no guard" in out
    assert "recompiles: not measured" in out
    assert perf_main.check(_rows("r", decode_1_stream_vs_transformers=0.5)) == 1
    assert perf_main.check([]) == 1


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
    assert "x 2.000" in capsys.readouterr().out
    assert perf_main.main([*place, "compare", "first", "third"]) == 1
    assert "there are: first, second" in capsys.readouterr().err


def test_machine_is_described_without_measuring():
    assert machine.machine_name()
    assert {"device", "torch", "num_cpus"} <= machine.environment().keys()
    assert machine.commit()
