"""The gates of CI: they are green here, and go red when something is planted that they must see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from compiled_engine.compile.program import LoadedProgram, Program, ProgramInput
from perf import __main__ as perf_main
from perf import gates, tiny
from perf.decode import Driver
from perf.judge import Recorded, any_machine, judge, read_recorded
from perf.qwen3_8b import Prompts
from perf.rows import Measured, Row
from perf.step_gates import (
    count_allocations,
    count_steps,
    counted_copies,
    counted_reads,
    steady,
)
from tests.helpers.engines import compiled_tiny_engine, tiny_engine
from tests.helpers.tiny_model import tiny_config, write_tiny_model


def rows_of(measured: Iterable[Measured]) -> list[Row]:
    return list(gates.as_rows(measured))


def red(rows: list[Row]) -> set[str]:
    """Keys of the rows that fail the check, by what the repository has recorded."""
    recorded = read_recorded(any_machine())["ci"]
    return {row.key for row in rows if judge(row, None, recorded.get(row.key)).has_failed}


def check_recorded(rows: list[Row]) -> int:
    """Exit code of a check of these rows by what is recorded of their metrics."""
    metrics = {row.metric for row in rows}
    recorded = read_recorded(any_machine())["ci"]
    kept = {key: r for key, r in recorded.items() if key.partition("[")[0] in metrics}
    return perf_main.check(rows, kept, is_whole=True)


def test_structure_is_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = check_recorded(rows_of(gates.structure(tmp_path)))
    out = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in out.splitlines() if ": ok" not in line)
    assert "0 of " in out, f"without a guard: {out.splitlines()[-1]}"


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="recorded with torch for the CPU")
def test_a_warm_start_and_its_steps_cost_what_was_recorded(
    tmp_path: Path, engine_cache_dir: Path, capsys: pytest.CaptureFixture[str]
):
    """Counts, imports, and ratios of processor times, in a process that only loads."""
    compiled_tiny_engine(write_tiny_model(tmp_path / "tests", family="qwen3", seed=3))
    code = check_recorded(rows_of(gates.steps(tmp_path, engine_cache_dir, print)))
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "is_cold"),
    [
        ({"num_graphs": 9, "num_inductor_compiles": 9, "num_cache_hits": 0}, True),
        ({"num_graphs": 9, "num_inductor_compiles": 2, "num_cache_hits": 7}, False),
        ({"num_graphs": 9, "num_inductor_compiles": 0, "num_cache_hits": 9}, False),
        ({"num_graphs": 0, "num_inductor_compiles": 0, "num_cache_hits": 0}, False),
    ],
    ids=["cold", "partly", "other key, same graphs", "warm"],
)
def test_a_start_that_traced_anything_is_not_the_warm_one(
    first: dict[str, int], is_cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    warm = dict.fromkeys(first, 0)
    counters = [first] if first == warm else [first, warm]

    def start(*_: Path) -> dict[str, object]:
        return {"seconds": 1.0, "modules": [], "rows": [], "counters": counters.pop(0)}

    monkeypatch.setattr(gates, "start", start)
    gates.note_cold_start(tmp_path, 8.0)
    rows = {r.key: r.value for r in rows_of(gates.steps(tmp_path, tmp_path, lambda _: None))}
    assert rows["warm_start_graphs"] == 0
    assert not counters
    assert rows["warm_over_cold_start"] == (1.0 if is_cold else 0.125)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gates_are_green(engine_cache_dir: Path, capsys: pytest.CaptureFixture[str]):
    code = perf_main.main(["check", "--suite", "ci", "--cache-dir", str(engine_cache_dir)])
    out = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in out.splitlines() if ": ok" not in line)
    assert "0 of " in out, f"without a guard: {out.splitlines()[-1]}"


def test_the_gates_take_the_engine_that_the_tests_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert tiny_config("qwen3") == tiny.CONFIG
    assert tiny_config("qwen3_moe") == tiny.FAMILIES["qwen3_moe"]
    for place in ("compiled_engine.engine.build_engine", "tests.helpers.engines.build_engine"):
        monkeypatch.setattr(place, lambda config, _: config)
    folders = tiny.write_family(tmp_path, "qwen3"), write_tiny_model(tmp_path / "tests")
    ours = asdict(tiny.build(folders[0], tmp_path))
    theirs = asdict(tiny_engine(folders[1], cache_dir=tmp_path, enforce_eager=False))
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing == {"model", "load_format", "num_threads"}
    sizes = {Tokenizer.from_file(str(f / "tokenizer.json")).get_vocab_size() for f in folders}
    assert len(sizes) == 1


@pytest.mark.parametrize("name", ["fuse_add_rms_norm", "fuse_linear"])
def test_a_disabled_pass_turns_the_gate_red(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    """A pass that matches nothing has no row, and what was recorded must be there."""
    recorded = {k: r for k, r in read_recorded(any_machine())["ci"].items() if "[case=qwen3 " in k}
    planted = rows_of(gates.structure(tmp_path, disabled=(name,), families=("qwen3",)))
    assert perf_main.check(planted, recorded, is_whole=True) == 1
    assert f" {name}]: not measured" in capsys.readouterr().out


def test_an_extra_graph_break_turns_the_gate_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from compiled_engine.models.layers import RMSNorm

    plain = RMSNorm.forward

    def broken(self: RMSNorm, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(self, x, *more)

    monkeypatch.setattr(RMSNorm, "forward", broken)
    planted = red(rows_of(gates.structure(tmp_path, families=("qwen3",))))
    assert planted == {
        f"graph_breaks[case=qwen3 {place} {num_tokens}]" for place, _, _, num_tokens in gates.PLACES
    }


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory, engine_cache_dir: Path):
    folder = tiny.write_family(tmp_path_factory.mktemp("tiny"), "qwen3")
    return tiny.build(folder, engine_cache_dir, is_eager=True)


def test_a_host_read_in_the_step_turns_the_gate_red(eager, monkeypatch: pytest.MonkeyPatch):
    """Reads are Python's own, so the plain engine has as many as the compiled one."""
    clean = red([row for row in rows_of(count_steps(eager)) if "reads" in row.metric])
    executor = eager.loop.executor
    launch = executor.launch

    def reading(*args, **kwargs) -> None:
        executor.state.num_tokens.sum().item()
        launch(*args, **kwargs)

    monkeypatch.setattr(executor, "launch", reading)
    planted = red([row for row in rows_of(count_steps(eager)) if "reads" in row.metric])
    assert not clean
    assert planted == {"host_reads_per_step[batch=1]", "host_reads_per_step[batch=8]"}


def test_bytes_across_are_those_of_entries_and_records(eager):
    rows = {row.key: row.value for row in rows_of(count_steps(eager))}
    assert rows["bytes_to_device_per_step[batch=8]"] == 0
    record = eager.loop.executor.shape.max_rows + 1
    assert rows["bytes_to_host_per_step[batch=8]"] >= record * 4 * 8


COPIES: dict[str, Callable[[torch.Tensor], object]] = {
    "to": lambda x: x.to(x.device, non_blocking=True),  # on a CPU it hands back what it was given
    "tensor": lambda x: torch.tensor([1, 2, 3], device=x.device),
    "copy_": lambda x: x.copy_(x),
    "__setitem__": lambda x: x.__setitem__(0, 0),
    "numpy": lambda x: x.numpy(),
    "_to_copy": torch.ops.aten._to_copy.default,
}


def test_one_more_copy_in_a_step_turns_the_gate_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = compiled_tiny_engine(write_tiny_model(tmp_path, family="qwen3", seed=3))
    executor = engine.loop.executor
    launch, extra = executor.launch, torch.zeros(1, dtype=torch.int64)
    keys = {f"copied_bytes_per_step[batch={batch}]" for batch in (1, 8)}
    assert not keys & red(rows_of(count_steps(engine)))
    for copy in COPIES.values():

        def copying(*args, copy=copy, **kwargs) -> None:
            copy(extra)
            launch(*args, **kwargs)

        monkeypatch.setattr(executor, "launch", copying)
        assert keys <= red(rows_of(count_steps(engine)))


def test_copies_are_counted_with_their_bytes_and_nothing_else():
    x = torch.zeros(4)
    with counted_copies() as found:
        x + 1
        x.view(2, 2).sum().unsqueeze(0)
        for copy in COPIES.values():
            copy(x)
    sizes = {"tensor": 24, "__setitem__": 4}
    assert found == [(name, sizes.get(name, 16)) for name in COPIES]


def test_copies_are_counted_where_a_compiled_piece_launches_and_on_this_thread_alone():
    program = Program(
        name="planted",
        inputs=(ProgramInput("L['x']", "x", None),),
        outputs=["result", 0],
        source="def call(args):\n    x, = args\n    return (x.copy_(x),)",
        cpu_kernels=(),
        gpu_kernels=(),
        externs=(),
        num_matches={},
        num_expansions=0,
    )
    piece, x = LoadedProgram(program, ["x"]), torch.zeros(4)
    with counted_copies() as found:
        piece.rebuild(piece.call(piece.bind(x)), x)
        other = threading.Thread(target=lambda: x.copy_(x))
        other.start()
        other.join()
    assert found == [("copy_", 16)]


def test_reads_and_allocations_are_counted_and_nothing_else():
    x = torch.ones(4)
    with counted_reads() as found:
        x.sum().item()
        x.tolist()
        x + 1
    assert found == ["item", "tolist"]
    assert torch.Tensor.item is not None
    assert count_allocations(lambda: [torch.empty(1000) for _ in range(5)]) == 5


def test_steady_steps_leave_no_request_behind(eager):
    driver = Driver(eager, Prompts(vocab_size=eager.settings.vocab_size))
    with steady(driver, 3) as step:
        step()
    assert not eager.loop.has_work


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_clean_repeats_raise_no_alarm(engine_cache_dir: Path):
    recorded = read_recorded(any_machine())["ci"]
    options = gates.Options(cache_dir=engine_cache_dir)
    for _ in range(10):
        rows = rows_of(gates.run(options, print).measured)
        assert red(rows) == set()
        assert recorded.keys() == {row.key for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planted_changes_of_the_compiled_engine_turn_gates_red(
    tmp_path: Path, engine_cache_dir: Path
):
    """A captured graph more counts as a recompile; memory more in a step is seen."""
    engine = tiny.build(tiny.write_family(tmp_path, "qwen3"), engine_cache_dir)
    assert red(rows_of(count_steps(engine))) == set()
    begin = engine.loop.executor.pieces.begin

    def more(*args):
        torch.empty(3)
        return begin(*args)

    engine.loop.executor.pieces.begin = more
    assert "allocations_per_step[batch=8]" in red(rows_of(count_steps(engine)))
    engine.loop.executor.pieces.begin = begin
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert "recompiles_in_steps" in red(rows_of(count_steps(engine)))


def test_margins_of_ratios_are_written_down_with_their_runs():
    recorded = read_recorded(any_machine())["ci"]
    ratios = {key: entry for key, entry in recorded.items() if entry.margin}
    assert {"compiled_step_over_eager", "warm_prefix_over_cold", "warm_over_cold_start"} <= set(
        ratios
    )
    assert all(len(entry.values) == len(entry.runs) >= 3 for entry in ratios.values())
    assert all(isinstance(entry, Recorded) for entry in recorded.values())
