"""The arithmetic of the scenario of models with experts, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_engine.models.moe import SparseMLP
from perf import decode, gpu_models, model_shapes, qwen3_8b
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
    row: Row = entry.row(scenario=MANY_MODELS, **origin)
    assert row.key == "m[a,bf16,batch=8]"
    assert entry.row(scenario="gpu_step", **origin).key == "m[batch=8]"
    assert gpu_models.NAME == MANY_MODELS


def test_names_are_checked_before_anything_is_measured():
    with pytest.raises(SystemExit, match="no gpt-oss; there are qwen3-8b"):
        gpu_models.run(gpu_models.Options(model="gpt-oss"), lambda _: None)
    with pytest.raises(SystemExit, match="no itl; there are decode"):
        gpu_models.run(gpu_models.Options(only="itl"), lambda _: None)
