"""Compiled pieces: what is kept for a later start, what runs then, what they keep alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.compile import piece as piece_module
from compiled_engine.compile.direct import DirectPiece
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.piece import Captured, Piece
from compiled_engine.compile.program import Kind, LoadedProgram, Program, ProgramError
from compiled_engine.compile.torch_compat import (
    Compiled,
    mark_any_size,
    mark_dynamic,
    waits_in_every_kernel,
)
from compiled_engine.config import EngineConfig
from compiled_engine.counters import CompileCounters
from compiled_engine.custom_ops import LayerCache, rms_norm


class Memory:
    """A store of entries in memory."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.dropped: dict[str, str] = {}

    def load(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def save(self, name: str, data: bytes) -> None:
        self.entries[name] = data

    def drop(self, name: str, reason: str) -> None:
        del self.entries[name]
        self.dropped[name] = reason


class Code:
    """Stands for Inductor's code."""

    source_code = ""
    constants: dict[str, Any] = {}  # noqa: RUF012
    cache_key = "none"

    def current_callable(self, arguments: list[Any]) -> Any:
        raise AssertionError("not called")


def interpreted(options: dict[str, Any], keep: Any) -> Any:
    """A backend that compiles nothing."""
    return lambda graph, examples: keep(graph, Compiled(graph.forward, Code()))


def layer(weight: Tensor, cache: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor]:
    return (x @ weight * scale + cache,)


def summed(pair: LayerCache, x: Tensor) -> tuple[LayerCache, None]:
    pair.k_cache.add_(x.sum())
    return LayerCache(pair.v_cache, torch.tanh(x) * 2), None


def made(function: Any, store: Memory | None, name: str = "piece") -> Piece:
    return Piece(function, name, options=dict, counters=CompileCounters(), store=store)


def test_a_piece_that_is_gone_keeps_no_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(piece_module, "inductor_backend", interpreted)
    piece = DirectPiece(made(layer, None), num_static=2, num_shared=1)
    shared = (torch.tensor(2.0),)
    layers = [(torch.randn(4, 4), torch.randn(4)) for _ in range(3)]
    x = torch.randn(2, 4)
    for _ in range(2):
        for key, static in enumerate(layers):
            (got,) = piece(key, static, shared, x)
            assert torch.equal(got, layer(*static, *shared, x)[0])
    kept = [weakref.ref(tensor) for static in layers for tensor in static]
    del piece, layers, static
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6


def test_what_cannot_be_recorded_runs_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(piece_module, "inductor_backend", interpreted)
    store = Memory()
    piece = made(layer, store)
    arguments = (torch.randn(4, 4), torch.randn(4), torch.tensor(2.0), torch.randn(2, 4))
    for _ in range(2):
        assert torch.equal(piece(*arguments)[0], layer(*arguments)[0])
    assert isinstance(piece.loaded, Captured)
    assert piece.is_unkept
    assert piece._counters.num_unrecorded == 1
    assert not store.entries
    assert "compiled again at every start" in caplog.text


@pytest.mark.parametrize("size", [None, 3])
def test_code_for_one_size_of_a_dim_that_varies_is_not_kept(size: int | None):
    from compiled_engine.compile.program import ProgramInput
    from compiled_engine.compile.program_record import NotRecordable, check_marks

    kind = Kind((size, 4), (4, 1), "torch.float32", "cpu")
    inputs = (ProgramInput("L['n']", "n", None), ProgramInput("L['cache'][0]", "cache", kind))
    cache = torch.zeros(3, 4)
    check_marks(inputs, [3, cache])
    mark_dynamic(cache, 0, low=2, high=9)
    if size is None:
        check_marks(inputs, [3, cache])
    else:
        with pytest.raises(NotRecordable, match=r"3 as dim 0 of L\['cache'\]\[0\]"):
            check_marks(inputs, [3, cache])


def test_code_for_one_size_is_not_used_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(piece_module, "inductor_backend", interpreted)
    monkeypatch.setattr(piece_module, "apply_marks", lambda _: None)  # Dynamo is not told
    store, cache = Memory(), torch.zeros(4)
    piece = made(layer, store)
    weight, scale = torch.randn(4, 4), torch.tensor(2.0)
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4)
        mark_dynamic(x, 0, low=2, high=9)
        (got,) = piece(weight, cache, scale, x)
        assert torch.equal(got, x @ weight * scale)
    assert piece.loaded is None
    assert not store.entries
    assert "made for 3 as dim 0" in caplog.text


def test_kernels_for_dependent_launch_are_told_nothing_of_the_one_in_front(monkeypatch):
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    seen = []

    def before_access(kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.append((V.graph.scheduler.previous_node, arguments, options))

    monkeypatch.setattr(TritonKernel, "_handle_pdl_before_access", before_access)
    scheduler = SimpleNamespace(previous_node="in front")
    with V.set_graph_handler(SimpleNamespace(scheduler=scheduler)):
        with waits_in_every_kernel():
            TritonKernel._handle_pdl_before_access(None, "loads", "buf0", consider_reads=True)
        TritonKernel._handle_pdl_before_access(None, "loads", "buf0")
    given = ("loads", "buf0")
    assert seen == [(None, given, {"consider_reads": True}), ("in front", given, {})]
    assert scheduler.previous_node == "in front"


SOURCE = """
def call(args):
    pair_first, x, size = args
    args.clear()
    pair_first.add_(x.sum())
    return (torch.tanh(x) * size,)
"""


def program(**changes: Any) -> Program:
    """A program of `summed`, written by hand."""
    from compiled_engine.compile.program import ProgramInput

    kind = Kind((None,), (1,), "torch.float32", "cpu")
    fields: dict[str, Any] = {
        "name": "piece",
        "inputs": (
            ProgramInput("L['pair'][0]", "pair", Kind((), (), "torch.float32", "cpu")),
            ProgramInput("L['x']", "x", kind),
            ProgramInput("L['x'].size()[0]", "x", None),
        ),
        "outputs": [
            "tuple",
            [
                ["tuple", [["argument", "L['pair'][1]"], ["result", 0]]],
                ["none"],
            ],
        ],
        "source": SOURCE,
        "cpu_kernels": (),
        "gpu_kernels": (),
        "externs": (),
        "num_matches": {"fuse": 2},
        "num_expansions": 3,
    }
    return Program(**(fields | changes))


def test_a_stored_program_is_called_without_compiling():
    store = Memory()
    store.save("piece", program().to_bytes())
    piece = made(summed, store)
    pair, x = LayerCache(torch.zeros(()), torch.ones(2)), torch.randn(5)
    for count in (1, 2):
        (second, new), nothing = piece(pair, x)
        assert second is pair.v_cache
        assert nothing is None
        assert torch.allclose(pair.k_cache, x.sum() * count)
        assert torch.equal(new, torch.tanh(x) * 5)
    counters = piece._counters
    assert (counters.num_loaded, counters.num_matches, counters.num_expansions) == (
        1,
        {"fuse": 2},
        3,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": "def call(args:"}, "cannot run here"),
        ({"externs": ("no_such_product",)}, "cannot run here"),
        ({"outputs": ["record", "os:system", []]}, "no class of this package"),
        ({"outputs": ["what"]}, "unknown output"),
    ],
)
def test_an_entry_that_cannot_run_is_dropped_and_compiled(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(piece_module, "inductor_backend", interpreted)
    store = Memory()
    store.save("piece", program(**changes).to_bytes())
    pair, x = LayerCache(torch.zeros(()), torch.ones(2)), torch.randn(5)
    (second, new), _ = made(summed, store)(pair, x)
    assert second is pair.v_cache
    assert torch.allclose(new, torch.tanh(x) * 2)
    assert reason in store.dropped["piece"]


@pytest.mark.parametrize(
    "error", [ImportError("cannot map segment"), OSError("no /proc"), MemoryError("none left")]
)
def test_an_entry_that_cannot_be_loaded_just_now_stays(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr("compiled_engine.compile.program._load_call", fail)
    store = Memory()
    store.save("piece", program().to_bytes())
    assert not made(summed, store).preload()
    assert not store.dropped
    assert "piece" in store.entries
    assert f"cannot be loaded: {error}; it is compiled again" in caplog.text


def test_other_parameters_than_it_was_made_for_are_refused():
    with pytest.raises(ProgramError, match="no parameters pair"):
        LoadedProgram(program(), ["x"])


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"not a program", program().to_bytes()[:-9]])
def test_other_bytes_are_no_program(data: bytes):
    with pytest.raises(ProgramError, match="no program"):
        Program.from_bytes(data)


def test_a_layer_of_another_shape_is_refused():
    kind = Kind((4, 4), (4, 1), "torch.float32", "cpu")
    assert kind.takes(torch.zeros(4, 4))
    assert not kind.takes(torch.zeros(4, 5))
    assert not kind.takes(torch.zeros(4, 4).T.contiguous().to(torch.float64))
    assert not kind.takes(torch.zeros(4, 4).T[:, :4].as_strided((4, 4), (1, 4)))
    assert Kind((None, 4), (4, 1), "torch.float32", "cpu").takes(torch.zeros(9, 4))


def normed(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return rms_norm(residual, weight, 1e-5), residual


@pytest.mark.slow
def test_matches_are_those_of_the_first_compile_where_inductor_has_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two starts that have other keys and the same graphs, say."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("compiled_engine.compile.driver.place_caches", lambda _: None)
    arguments = torch.randn(6, 8), torch.randn(6, 8), torch.ones(8)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        driver, store = CompileDriver(EngineConfig(model="m", cache_dir=tmp_path)), Memory()
        driver.store = store  # type: ignore[assignment]
        driver.compile(normed, "piece")(*arguments)
        kept = Program.from_bytes(store.entries["piece"])
        counters = driver.refresh()
        assert counters.matches_since({}) == kept.num_matches
        assert counters.num_expansions == kept.num_expansions
        found.append((kept.num_matches, kept.num_expansions, counters.num_cache_hits))
    assert found[0] == ({"fuse_add_rms_norm": 1}, 1, 0)
    assert found[1] == ({"fuse_add_rms_norm": 1}, 1, 1)


SECOND_START = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from engine.test_direct_piece import Memory, LayerCache, made, summed
store = Memory()
store.entries = {{"piece": Path({path!r}).read_bytes()}}
piece = made(summed, store)
pair, x = LayerCache(torch.zeros(()), torch.ones(2)), torch.arange(7.0)
(second, new), _ = piece(pair, x)
assert second is pair.v_cache and torch.allclose(new, torch.tanh(x) * 2)
assert piece._counters.num_loaded == 1
used = [name for name in ("torch._inductor", "sympy") if name in sys.modules]
assert not used, used
"""


@pytest.mark.slow
def test_what_inductor_made_runs_in_another_process_without_it(tmp_path: Path):
    store = Memory()
    piece = made(summed, store)
    pair, x = LayerCache(torch.zeros(()), torch.ones(2)), torch.randn(5)
    mark_any_size(x, 0)
    piece(pair, x)
    assert isinstance(piece.loaded, LoadedProgram)
    assert not piece.is_unkept
    (second, new), _ = piece(pair, torch.ones(9))
    assert second is pair.v_cache
    assert torch.allclose(new, torch.tanh(torch.ones(9)) * 2)
    path = tmp_path / "entry"
    path.write_bytes(store.entries["piece"])
    tests = str(Path(__file__).parents[1])
    script = SECOND_START.format(tests=tests, path=str(path))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_only_dynamo_can_call_is_called_by_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(piece_module, "inductor_backend", interpreted)
    outside = torch.ones(3)

    def reads_outside(x: Tensor) -> tuple[list[Tensor]]:
        return ([x + outside],)

    piece = made(reads_outside, Memory())
    for _ in range(2):
        ((got,),) = piece(torch.zeros(3))
        assert torch.equal(got, outside)
    assert piece._counters.num_unrecorded == 1
    assert "compiled again at every start" in caplog.text
