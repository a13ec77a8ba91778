"""What a memory probe found is kept for later starts, and used where it can be trusted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from compiled_engine import engine
from compiled_engine.commands.settings_table import print_memory
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from compiled_engine.config import EngineConfig
from compiled_engine.memory import (
    MemoryNeeds,
    MemoryTable,
    bytes_each,
    is_needs,
    keep_needs,
    load_needs,
    measure_needs,
    needs_name,
)
from compiled_engine.models.config import load_model_config
from compiled_engine.models.llama import LlamaForCausalLM
from compiled_engine.models.weights import build_model
from tests.helpers.tiny_model import write_tiny_model

NAME = "memory_full"
MIB, GIB = 1024**2, 1024**3
NEEDS = MemoryNeeds(activations=300 * MIB, pool=200 * MIB, graphs=100 * MIB, kept=50 * MIB)
ENOUGH = NEEDS.reserved + NEEDS.kept


def new_store(folder: Path) -> EntryStore:
    return EntryStore(folder, StartKey({"flags.any": "1"}))


def test_needs_come_back_as_they_were_kept(tmp_path):
    assert load_needs(new_store(tmp_path), NAME, ENOUGH) is None
    keep_needs(new_store(tmp_path), NAME, NEEDS)
    assert load_needs(new_store(tmp_path), NAME, ENOUGH) == NEEDS
    assert load_needs(new_store(tmp_path), "memory_none", ENOUGH) is None


def test_needs_that_were_loaded_are_not_written_again(tmp_path):
    keep_needs(new_store(tmp_path), NAME, NEEDS)
    store = new_store(tmp_path)
    loaded = load_needs(store, NAME, ENOUGH)
    assert loaded is not None
    keep_needs(store, NAME, loaded)
    assert store.counters.num_saved == 0


def test_needs_of_more_than_there_is_are_measured_again(tmp_path):
    keep_needs(new_store(tmp_path), NAME, NEEDS)
    assert load_needs(new_store(tmp_path), NAME, ENOUGH - 1) is None


def test_a_start_without_a_store_has_no_needs():
    assert load_needs(None, NAME, ENOUGH) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"no json",
        b'{"activations": 1}',
        b'{"activations": "many", "pool": 1, "graphs": 1}',
        b'{"activations": null, "pool": 1, "graphs": 1}',
        b'{"activations": 1, "pool": 1, "graphs": 1, "weights": 1}',
        b"\xff\xfe",
    ],
)
def test_an_entry_that_holds_no_needs_is_dropped(data, tmp_path):
    new_store(tmp_path).save(NAME, data)
    store = new_store(tmp_path)
    assert load_needs(store, NAME, ENOUGH) is None
    assert store.counters.num_dropped == 1
    assert not list(tmp_path.rglob(f"{NAME}.*"))


@pytest.mark.parametrize("activations", [0, -5 * MIB])
def test_needs_that_cannot_be_are_measured_again(activations, tmp_path):
    keep_needs(new_store(tmp_path), NAME, MemoryNeeds(activations=activations, pool=0, graphs=0))
    store = new_store(tmp_path)
    assert load_needs(store, NAME, ENOUGH) is None
    assert store.counters.num_hits == 0
    keep_needs(store, NAME, NEEDS)
    assert load_needs(new_store(tmp_path), NAME, ENOUGH) == NEEDS


class FakeDevice:
    """Counts memory as `torch.cuda` does; a step takes it from `cached` free bytes first."""

    def __init__(self, cached: int, step: int, graphs: list[int]) -> None:
        self.allocated, self.reserved, self.step = GIB, GIB + cached, step
        self.peak_allocated = self.peak_reserved = 0
        self.graphs, self.free = iter(graphs), 100 * GIB
        self.num_captures = 0

    def run(self) -> None:
        self.peak_allocated = self.allocated + self.step
        self.peak_reserved = max(self.reserved, self.peak_allocated)

    def capture(self) -> None:
        self.num_captures += 1
        self.free -= next(self.graphs)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda *_: None,
            "memory_reserved": lambda *_: self.reserved,
            "memory_allocated": lambda *_: self.allocated,
            "max_memory_reserved": lambda *_: self.peak_reserved,
            "max_memory_allocated": lambda *_: self.peak_allocated,
            "mem_get_info": lambda *_: (self.free, 140 * GIB),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("cached", [0, 100 * MIB, GIB])
def test_a_step_needs_what_it_holds_whatever_was_cached(cached, monkeypatch):
    made = FakeDevice(cached, 300 * MIB, [MIB] * 9)
    made.stand_in(monkeypatch)
    needs = measure_needs(torch.device("cuda"), made.run, made.capture, 10)
    assert needs == MemoryNeeds(activations=300 * MIB, pool=300 * MIB, graphs=10 * MIB)


def test_where_no_graph_will_be_none_is_captured(monkeypatch):
    made = FakeDevice(0, 300 * MIB, [])
    made.stand_in(monkeypatch)
    needs = measure_needs(torch.device("cuda"), made.run, made.capture, 0)
    assert needs == MemoryNeeds(activations=300 * MIB, pool=0, graphs=0)
    assert made.num_captures == 0


def test_pieces_of_the_driver_and_other_processes_change_little():
    def each(*taken: int) -> float:
        return bytes_each([100 * GIB - n for n in itertools.accumulate(taken, initial=0)])

    assert each(2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB) == 2 * MIB
    assert each(0, 2 * MIB, 0, 2 * MIB, 0, 2 * MIB) == MIB  # a piece serves two
    assert each(2 * MIB, 5 * GIB, 2 * MIB, 2 * MIB) == 2 * MIB
    assert each(2 * MIB, -5 * GIB, 2 * MIB, 2 * MIB) == 2 * MIB


class Starts:
    """Starts of one model, whose probes are counted; there is no GPU."""

    def __init__(self, folder: Path, cache_dir: Path) -> None:
        self.num_probes = 0
        self.folder = folder
        self.config = EngineConfig(
            model=str(folder), device="cpu", max_num_seqs=4, cache_dir=cache_dir
        )
        self.model_config = load_model_config(folder)
        self.model = build_model(
            LlamaForCausalLM, self.model_config, dtype=torch.float32, device=torch.device("cpu")
        )

    def probe(self, *_: object) -> MemoryNeeds:
        self.num_probes += 1
        return NEEDS

    def start(self, **options: Any) -> int:
        """Bytes that a start keeps free."""
        config = replace(self.config, **options)
        driver = CompileDriver(config)
        given = (config, self.model_config, self.folder, self.model, driver)
        needs, reserved = engine._memory_needs(*given, lambda *_: None)
        if driver.store is not None:
            keep_needs(driver.store, needs_name(config.cudagraph_mode), needs)
        return reserved


@pytest.fixture
def starts(tmp_path, monkeypatch) -> Starts:
    made = Starts(write_tiny_model(tmp_path / "model"), tmp_path / "cache")
    monkeypatch.setattr(engine, "_probe_memory", made.probe)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (ENOUGH, 2 * ENOUGH))
    return made


def test_only_the_first_start_probes_and_later_ones_leave_free_what_it_took(starts):
    assert starts.start() == NEEDS.reserved
    assert starts.start() == starts.start() == NEEDS.reserved + NEEDS.kept
    assert starts.num_probes == 1


@pytest.mark.parametrize(
    "options",
    [{"chunked_prefill_size": 96}, {"max_num_seqs": 5}, {"cudagraph_mode": "none"}],
    ids=lambda options: next(iter(options)),
)
def test_other_steps_and_other_graphs_are_probed_anew(starts, options):
    starts.start()
    assert starts.start(**options) == NEEDS.reserved
    assert starts.num_probes == 2


@pytest.mark.parametrize("module", ["engine", "memory"])
def test_what_another_probe_found_is_measured_anew(starts, monkeypatch, module):
    starts.start()
    assert is_needs(needs_name("full"))
    real = Path.read_bytes

    def changed(path: Path) -> bytes:
        return real(path) + b"# other" * (path.name == f"{module}.py")

    monkeypatch.setattr(Path, "read_bytes", changed)
    needs_name.cache_clear()
    try:
        assert starts.start() == NEEDS.reserved
        assert starts.num_probes == 2
    finally:
        needs_name.cache_clear()


@pytest.mark.parametrize(
    "options", [{"gpu_memory_utilization": 0.5}, {"seed": 7}], ids=["utilization", "seed"]
)
def test_what_no_step_depends_on_is_not_probed_anew(starts, options):
    starts.start()
    starts.start(**options)
    assert starts.num_probes == 1


def test_an_engine_that_keeps_no_pieces_probes_at_every_start(starts):
    for _ in range(2):
        assert starts.start(enforce_eager=True) == NEEDS.reserved
    assert starts.num_probes == 2


def printed(memory: dict[str, int]) -> str:
    console = Console(file=StringIO(), width=60, color_system=None)
    print_memory(console, memory)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_names_every_part_of_the_memory_and_they_add_up():
    parts = {"weights": 15, "kv": 40, "activations": 3, "graphs": 2, "other": 1}
    table = MemoryTable(
        total=80 * GIB, allowed=72 * GIB, **{name: n * GIB for name, n in parts.items()}
    )
    assert table.used == 61 * GIB
    assert sum(size for _, size in table.rows()) == table.total
    title, head, *lines = (line.rstrip() for line in printed(dict(table.rows())).splitlines())
    assert title == "GPU memory"
    assert head.split() == ["for", "GiB"]
    assert [line.rsplit(maxsplit=1) for line in lines] == [
        ["weights", "15.00"],
        ["KV cache", "40.00"],
        ["activations", "3.00"],
        ["graphs", "2.00"],
        ["context and code", "1.00"],
        ["left below the ceiling", "11.00"],
        ["above the ceiling", "8.00"],
    ]
    assert len({len(line) for line in lines}) == 1, "numbers stand in a column"


def test_sizes_are_rounded_and_a_cpu_has_no_table():
    assert printed({"weights": int(1.256 * GIB)}).split()[-1] == "1.26"
    assert printed({}) == ""
