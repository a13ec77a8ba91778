"""The pipeline as a whole: order, switches, fingerprint, a real compile of each family's layer."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from compiled_engine.counters import CompileCounters
from compiled_engine.custom_ops import (
    ALL_OPS,
    rms_norm,
)
from compiled_engine.errors import ConfigError
from compiled_engine.passes import (
    fuse_add_rms_norm,
    fuse_qk_norm_rope_kv,
    lower_scaled_linear,
    pattern,
    pipeline,
)
from compiled_engine.passes.dump import GraphDump
from compiled_engine.passes.names import LIFT_NAMES, PASS_NAMES
from compiled_engine.passes.pipeline import LIFTS, PassPipeline
from tests.helpers.layer_step import (
    NUM_PAGES,
    LayerStep,
    call_layer,
    run_eagerly,
)
from tests.helpers.pass_harness import Harness, op_counts

ORDER = [*(m.NAME for m in pipeline.FUSIONS), "choose_kernels", "expand"]
ORDER += [m.NAME for m in pipeline.LATE_PASSES]
FUSED = {"llama": "rope_kv_write", "qwen3": "qk_norm_rope_kv_write"}


def ignore(*_: object) -> None:
    """Counts nothing."""


def names_of_passes(**options: object) -> list[str]:
    """Names in the order in which the passes report, over a graph that does nothing."""
    graph = torch.fx.Graph()
    graph.output(())
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    names: list[str] = []
    passes = PassPipeline(on_pass=lambda name, *_: names.append(name), **options)  # type: ignore[arg-type]
    passes(module.graph)
    return names


def new_pipeline(**options: object) -> PassPipeline:
    return PassPipeline(on_pass=ignore, **options)  # type: ignore[arg-type]


# --- one layer of each family ---------------------------------------------------------------------


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_counts_of_a_layer(tmp_path, family, dynamic):
    step = LayerStep(tmp_path, family)
    arguments = step.arguments()
    kept = frozenset({"add_rms_norm", FUSED[family]})
    found = Harness(kept_ops=kept).run(call_layer, *arguments, dynamic=dynamic)
    assert found.matches("fuse_add_rms_norm") == 1
    assert found.matches("fuse_qk_norm_rope_kv") == 1
    counts = op_counts(found.after)
    counts.pop("linear", None)
    assert counts == {"add_rms_norm": 1, FUSED[family]: 1, "paged_attention": 1}
    assert found.counters.num_expansions == 2, "the first norm and the activation"
    outputs, cache = run_eagerly(step)
    torch.testing.assert_close(found.outputs, outputs)
    torch.testing.assert_close(arguments[3], cache)


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("disabled", [(), PASS_NAMES], ids=["on", "off"])
def test_everything_is_expanded_and_the_numbers_stay(tmp_path, family, disabled):
    step = LayerStep(tmp_path, family)
    arguments = step.arguments()
    found = Harness(disabled=disabled).run(call_layer, *arguments)
    unexpandable = {op.name for op in ALL_OPS if not op.is_expandable}
    assert set(op_counts(found.after)) <= unexpandable
    outputs, cache = run_eagerly(step)
    torch.testing.assert_close(found.outputs, outputs)
    torch.testing.assert_close(arguments[3], cache)


def call_layers(*calls: tuple[object, ...]) -> list[Tensor]:
    """A layer of each family, one after the other."""
    return [call_layer(*arguments) for arguments in calls]


def test_compiled_layers_write_the_caches_in_place(tmp_path, monkeypatch):
    """One real compile of both families: nothing as large as a cache is allocated or copied."""
    from torch._inductor.utils import run_and_get_code

    steps = [LayerStep(tmp_path / family, family) for family in FUSED]
    # Code that comes from a cache would leave nothing to look at.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters = CompileCounters()
    passes = PassPipeline(on_pass=counters.count_pass)
    options = {"post_grad_custom_pre_pass": passes}
    compiled = torch.compile(call_layers, fullgraph=True, dynamic=False, options=options)
    calls = [step.arguments() for step in steps]
    with torch.no_grad():
        got, (code,) = run_and_get_code(compiled, *calls)
    for step, arguments, outputs in zip(steps, calls, got, strict=True):
        expected, cache = run_eagerly(step)
        torch.testing.assert_close(outputs, expected)
        torch.testing.assert_close(arguments[3], cache)
    assert counters.num_matches["fuse_add_rms_norm"] == len(FUSED)
    assert counters.num_matches["fuse_qk_norm_rope_kv"] == len(FUSED)
    assert "ce.paged_attention" in code
    for op in ALL_OPS:
        assert not op.is_expandable or f"ce.{op.name}." not in code, f"{op.name} is in the code"
    allocations = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", code)
    assert allocations
    assert not [sizes for sizes in allocations if str(NUM_PAGES) in sizes.split(", ")]
    num_cache_values = steps[0].cache.k_cache.numel()
    loops = [int(bound) for bound in re.findall(r"static_cast<int64_t>\((\d+)L\)", code)]
    assert loops
    assert num_cache_values not in loops, "a loop over the whole cache"
    assert "clone" not in code


# --- options --------------------------------------------------------------------------------------


def test_unknown_pass_is_refused():
    message = f"no such pass; there are {', '.join(PASS_NAMES)}"
    with pytest.raises(ConfigError, match=message) as caught:
        new_pipeline(disabled=("fuse_everything",))
    assert caught.value.param == "disable_passes"
    assert "fuse_everything" in str(caught.value)


def test_passes_run_in_the_stated_order_and_late_ones_behind_the_expansion():
    assert names_of_passes() == ORDER
    modules = (*pipeline.FUSIONS, *pipeline.LATE_PASSES)
    assert tuple(module.NAME for module in modules) == PASS_NAMES
    assert tuple(module.NAME for module in LIFTS) == LIFT_NAMES


def test_each_pass_can_be_switched_off_alone():
    for name in PASS_NAMES:
        expected = [n for n in ORDER if n != name]
        assert names_of_passes(disabled=(name,)) == expected


def test_counts_of_several_graphs_add_up():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rms_norm(x, weight, 1e-5), weight, 1e-5)

    found = Harness().run(function, torch.randn(3, 8), torch.randn(8))
    assert found.counters.num_expansions == 2
    assert set(found.counters.pass_seconds) == set(ORDER)


# --- dumped graphs --------------------------------------------------------------------------------


def norm_of_sum(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return rms_norm(total, weight, 1e-5), total


def dump_of(folder: Path, **options: object) -> dict[str, str]:
    """Files of the graph of a residual add and a norm, by name."""
    inputs = (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8))
    Harness(dump=GraphDump(folder), **options).run(norm_of_sum, *inputs)  # type: ignore[arg-type]
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_dumped_graphs_show_each_change_and_only_changes(tmp_path):
    files = dump_of(tmp_path / "new" / "piece")
    assert list(files) == [
        "1-00-before.txt",
        f"1-{ORDER.index('fuse_add_rms_norm') + 1:02d}-fuse_add_rms_norm.txt",
        f"1-{ORDER.index('expand') + 1:02d}-expand.txt",
    ]
    before, fused, expanded = files.values()
    assert "ce.rms_norm" in before
    assert "aten.add" in before
    assert "ce.add_rms_norm" in fused
    assert "aten.add" not in fused
    assert "ce." not in expanded
    assert "f32[3, 8][8, 1]" in before


def test_dumped_graphs_do_not_change_the_fingerprint(tmp_path):
    assert new_pipeline(dump=GraphDump(tmp_path)).uuid() == new_pipeline().uuid()


def test_folder_for_graphs_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--dump-graphs .*cannot be made: ") as caught:
        GraphDump(tmp_path / "file" / "piece")
    assert caught.value.param == "dump_graphs"


# --- fingerprint ----------------------------------------------------------------------------------


def test_fingerprint_is_stable():
    assert new_pipeline().uuid() == new_pipeline().uuid()
    assert re.fullmatch("[0-9a-f]{64}", new_pipeline().uuid())


def test_fingerprint_follows_the_options():
    options = [{}, {"kept_ops": frozenset({"add_rms_norm"})}, {"kept_ops": frozenset({"rope"})}]
    options += [{"disabled": (name,)} for name in PASS_NAMES]
    fingerprints = {new_pipeline(**each).uuid() for each in options}
    assert len(fingerprints) == len(options)


def test_fingerprint_follows_the_order(monkeypatch):
    before = new_pipeline().uuid()
    monkeypatch.setattr(pipeline, "FUSIONS", tuple(reversed(pipeline.FUSIONS)))
    assert new_pipeline().uuid() != before


@pytest.mark.parametrize(
    "module",
    [
        fuse_add_rms_norm,
        fuse_qk_norm_rope_kv,
        lower_scaled_linear,
        *LIFTS,
        pattern,
        pipeline,
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_fingerprint_follows_the_sources(monkeypatch, module: ModuleType):
    before = new_pipeline().uuid()
    getsource = inspect.getsource

    def changed(thing: object) -> str:
        return getsource(thing) + ("\n# changed" if thing is module else "")  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "getsource", changed)
    assert new_pipeline().uuid() != before


@pytest.mark.parametrize("name", ["reference_quant.py", "gemm_choice.py", "row.cuh"])
def test_fingerprint_follows_every_source_of_the_ops(monkeypatch, name: str):
    before = new_pipeline().uuid()
    read = Path.read_bytes

    def changed(path: Path) -> bytes:
        return read(path) + (b"\n" if path.name == name else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert new_pipeline().uuid() != before
