"""The arithmetic of the scenario of models with experts, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import compiled_engine
from compiled_engine.models.moe import SparseMLP
from perf import decode, gpu_models, model_shapes, pass_costs, qwen3_8b
from perf.rows import MANY_MODELS, Measured, Row
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model

READ = 4.63e12


def test_costs_of_the_dense_shape_are_those_counted_by_hand():
    costs = model_shapes.QWEN3_8B.costs
    assert costs.dense_bytes == qwen3_8b.step_weight_bytes()
    assert costs.step_bytes(3 * 1024, 3, 0) == qwen3_8b.step_bytes(3 * 1024, 3)
    assert costs.prefill_flops([8192, 100]) == qwen3_8b.prefill_flops([8192, 100])
    assert (costs.num_experts, costs.expert_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("shape", "floor_ms"),
    [(model_shapes.QWEN3_30B_A3B, 1.34), (model_shapes.GPT_OSS_20B, 0.81)],
)
def test_a_step_of_one_row_reads_its_own_experts(shape: Any, floor_ms: float):
    costs = shape.costs
    assert costs.uniform_distinct(1) == pytest.approx(costs.top_k)
    floor = costs.step_bytes(1152, 1, costs.top_k) / READ
    assert floor * 1e3 == pytest.approx(floor_ms, rel=0.02)
    more = costs.step_bytes(1152, 1, costs.top_k + 1) - costs.step_bytes(1152, 1, costs.top_k)
    assert more == pytest.approx(costs.expert_bytes)


def test_a_window_bounds_what_a_step_reads_and_a_prompt_computes():
    costs = model_shapes.GPT_OSS_20B.costs
    assert costs.windows == (128, 0) * 12
    token = costs.token_cache_bytes
    assert token == 2 * 8 * 64 * 2
    near, far = costs.step_bytes(2 * 1000, 2, 0), costs.step_bytes(2 * 1001, 2, 0)
    assert far - near == 2 * 12 * token
    # Whole triangles of 12 layers, and bands of the others.
    only = costs.prefill_flops([1000]) - 2.0 * 1000 * (costs.dense_values + 4 * costs.expert_values)
    assert only == pytest.approx(4.0 * 64 * 64 * 12 * (1000**2 / 2 + 128 * 872 + 128**2 / 2))


def test_values_of_packed_experts_are_counted_as_values():
    costs = model_shapes.GPT_OSS_20B.costs
    assert costs.expert_values == 24 * 3 * 2880 * 2880
    # Half a byte each, a byte for 32, and two bytes for each bias.
    assert costs.expert_bytes == 24 * (3 * 2880 * 2880 * (1 / 2 + 1 / 32) + 3 * 2880 * 2)


def test_quantised_shapes_read_less_and_compute_the_same():
    plain = model_shapes.SHAPES["qwen3-8b"].costs
    fp8, nvfp4 = (model_shapes.SHAPES[f"qwen3-8b-{name}"].costs for name in ("fp8", "nvfp4"))
    head = 151936 * 4096 * 2
    layers = plain.dense_bytes - head
    assert (fp8.dense_bytes - head) / layers == pytest.approx(0.5, rel=2e-3)
    assert (nvfp4.dense_bytes - head) / layers == pytest.approx((0.5 + 1 / 16) / 2, rel=2e-3)
    for costs in (fp8, nvfp4):
        assert costs.linear_flops([100]) == plain.linear_flops([100])
    sparse, packed = (model_shapes.SHAPES[f"qwen3-30b-a3b{end}"].costs for end in ("", "-fp8"))
    assert packed.expert_bytes / sparse.expert_bytes == pytest.approx(0.5, rel=2e-3)
    assert packed.linear_flops([1]) == sparse.linear_flops([1])


def test_ratios_are_taken_of_the_same_shape_batch_and_case():
    def entry(metric: str, dtype: str, value: float, batch: int = 8, model: str = "a") -> Measured:
        return Measured(
            metric=metric, unit="x", values=[value], dtype=dtype, batch=batch, model=model
        )

    rows = [
        entry("decode_step_ms", "bf16", 4.0),
        entry("prefill_tok_s", "bf16", 100.0),
        entry("decode_step_ms", "fp8", 3.0),
        entry("decode_step_ms", "fp8", 3.0, batch=1),
        entry("decode_step_ms", "fp8", 3.0, model="b"),
        entry("prefill_tok_s", "fp8", 150.0),
        entry("e2e_s", "bf16", 1.0),
        entry("e2e_s", "fp8", 1.0),
    ]
    found = [(row.metric, row.dtype, row.values) for row in gpu_models.over_bf16(rows)]
    assert found == [
        ("step_over_bf16", "fp8", [0.75]),
        ("prefill_over_bf16", "fp8", [1.5]),
    ]


def test_each_pass_that_matches_is_switched_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built: list[tuple[str, ...]] = []
    caches: set[str] = set()

    class Built:
        """An engine that matched two passes, and does a step in 4 ms, or 5 without one."""

        def __init__(self, _: str, *, disable_passes: tuple[str, ...], **options: Any) -> None:
            built.append(disable_passes)
            caches.add(options["cache_dir"])
            matches = {"fuse_linear": 4, "fuse_add_rms_norm": 0, "decode_attention": 1, "expand": 9}
            counters = SimpleNamespace(num_matches=matches)
            self.engine = SimpleNamespace(
                driver=SimpleNamespace(refresh=lambda: counters),
                loop=SimpleNamespace(ms=5.0 if disable_passes else 4.0),
            )

        def __enter__(self) -> Built:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(compiled_engine, "LLM", Built, raising=False)
    monkeypatch.setattr(
        pass_costs, "measure_steady", lambda d, n: SimpleNamespace(step_s=d.engine.loop.ms / 1e3)
    )
    monkeypatch.setattr(pass_costs, "profiled_steps", lambda *_: [None] * 32)
    job = pass_costs.Job(folder=str(tmp_path), options={}, vocab_size=260, num_repeats=2)
    rows = list(
        pass_costs.measure_passes(lambda each: [pass_costs.run_job(job, names) for names in each])
    )
    assert built == [(), ("fuse_linear",), ("decode_attention",)]
    assert len(caches) == 3
    steps = {row.case: row.values for row in rows if row.metric == "pass_step_ms"}
    assert steps == {
        f"{name} {state}": [value] * 2
        for name in ("fuse_linear", "decode_attention")
        for state, value in (("on", 4.0), ("off", 5.0))
    }
    counts = [row.values for row in rows if row.metric == "pass_kernels_per_step"]
    assert counts == [[2.0]] * 4


def test_distinct_experts_are_those_of_the_engines_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_models, "INPUT_LEN", 20)
    monkeypatch.setattr(gpu_models, "OUTPUT_LEN", 6)
    folder = write_tiny_model(tmp_path, family="qwen3_moe", num_experts=40)
    engine = tiny_engine(folder, overlap_schedule="off")
    driver = decode.Driver(engine, qwen3_8b.Prompts(vocab_size=260))
    steps: list[set[int]] = []
    choose = SparseMLP.choose

    def spy(self: SparseMLP, x: Any) -> Any:
        routes = choose(self, x)
        steps.append(set(routes.ids.flatten().tolist()))
        return routes

    answered = gpu_models._answered

    def recorded(*arguments: Any) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SparseMLP, "choose", spy)
            return answered(*arguments)

    monkeypatch.setattr(gpu_models, "_answered", recorded)
    for batch_size in (1, 3):
        steps.clear()
        found = gpu_models.count_distinct(driver, (1, batch_size))
        assert found[batch_size] == (len(steps[-2]) + len(steps[-1])) / 2
        assert 2 == found[1] <= found[batch_size] <= 2 * batch_size


def test_rows_of_several_models_have_keys_of_their_own():
    origin = {"run_id": "r", "commit": "c", "command": "x", "environment": {}}
    entry = Measured(metric="m", unit="s", values=[1.0], model="a", dtype="bf16", batch=8)
    row: Row = entry.row(scenario=gpu_models.NAME, **origin)
    assert row.key == "m[a,bf16,batch=8]"
    assert entry.row(scenario="gpu_step", **origin).key == "m[batch=8]"
    assert gpu_models.NAME in MANY_MODELS


def test_names_are_checked_before_anything_is_measured():
    with pytest.raises(SystemExit, match="no gpt-oss; there are qwen3-8b"):
        gpu_models.run(gpu_models.Options(model="gpt-oss"), lambda _: None)
    with pytest.raises(SystemExit, match="no itl; there are decode"):
        gpu_models.run(gpu_models.Options(only="itl"), lambda _: None)
