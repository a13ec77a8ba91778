"""Layers with experts through the pipeline: what the passes find in them, and equal numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.layer_step import LayerStep, call_layer, run_eagerly
from tests.helpers.pass_harness import Harness, calls_of, ce, op_counts

# Family -> the op that writes its keys.
WRITES = {
    "qwen3_moe": "qk_norm_rope_kv_write",
    "mixtral": "rope_kv_write",
    "gpt_oss": "rope_kv_write",
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", WRITES)
def test_passes_find_what_they_find_in_dense_layers(tmp_path: Path, family: str, dynamic: bool):
    step = LayerStep(tmp_path, family)
    kept = frozenset({"add_rms_norm", "rms_norm", "route", WRITES[family]})
    arguments = step.arguments()
    found = Harness(kept_ops=kept).run(call_layer, *arguments, dynamic=dynamic)
    assert found.matches("fuse_add_rms_norm") == 1
    assert found.matches("fuse_qk_norm_rope_kv") == 1
    counts = op_counts(found.after)
    for name in ("experts", "route", "paged_attention", "add_rms_norm", "rms_norm", WRITES[family]):
        assert counts[name] == 1, name
    (experts,) = calls_of(found.after, ce.experts.default)
    assert experts.kwargs.get("impl", "") == ("" if dynamic else "grouped")
    (attention,) = calls_of(found.after, ce.paged_attention.default)
    options = attention.args[11:14]  # window, cap and sinks; left out where they are the schema's
    assert [bool(option) for option in options] == [True, False, True] * (family == "gpt_oss")
    expected, cache = run_eagerly(step)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(arguments[3], cache, strict=True):
        torch.testing.assert_close(got[1:], wanted[1:])


@pytest.mark.parametrize("family", WRITES)
def test_a_router_that_nobody_took_becomes_plain_operations(tmp_path: Path, family: str):
    step = LayerStep(tmp_path, family)
    found = Harness().run(call_layer, *step.arguments())
    counts = op_counts(found.after)
    assert counts["route"] == 0
    assert counts["experts"] == 1
    torch.testing.assert_close(found.outputs, run_eagerly(step)[0], rtol=1e-5, atol=1e-5)
