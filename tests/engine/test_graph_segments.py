"""Captures are cut at the named ops, which run between the segments on every replay.

The graphs are stand-ins that count, so no GPU is needed; what a real one replays is tested on one.
"""

from __future__ import annotations

from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compiled_engine.custom_ops  # noqa: F401 - registers the ops
from compiled_engine.compile import graphs
from compiled_engine.compile.graphs import _Segments


class FakeGraph:
    log: list[str]

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, **_: Any) -> None:
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(FakeGraph, "log", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(graphs, "_launcher", lambda graph: lambda: made.append("replay"))
    monkeypatch.setattr(graphs, "_unowned", lambda tensor: tensor)
    return made


def step(x: torch.Tensor, weight: torch.Tensor, log: list[str]) -> torch.Tensor:
    for _ in range(2):
        x = torch.ops.ce.linear.default(x + 1, weight, None)
        log.append("op")
    return x * 2


def test_segments_without_split_ops_are_one_graph(log):
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    segments = _Segments((), None, {})
    segments.record(lambda: step(x, weight, log))
    assert log == ["begin", "op", "op", "end"]
    assert len(segments.replays) == len(segments.graphs) == 1


def test_segments_are_cut_at_the_named_op(log):
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    buffers: dict[Any, torch.Tensor] = {}
    segments = _Segments(("ce::linear",), None, buffers)
    segments.record(lambda: step(x, weight, log))
    assert log == ["begin", "end", "begin", "op", "end", "begin", "op", "end"]
    assert len(segments.graphs) == 3
    assert len(segments.replays) == 5
    (buffer,) = buffers.values()  # both calls leave their result in the same place
    log.clear()
    buffer.fill_(float("nan"))
    for replay in segments.replays:
        replay()
    assert log == ["replay"] * 3
    assert not buffer.isnan().any(), "the op ran between the graphs"


def test_segments_end_their_capture_after_an_error(log):
    segments = _Segments(("ce::linear",), None, {})

    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        segments.record(fails)
    assert log == ["begin", "end"]


def test_nothing_stands_under_a_key_whose_capture_ran_out_of_memory(log, monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda _: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    made = graphs.StepGraphs(torch.device("cpu"))

    def fails() -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError, match="no"):
        made.capture("step", fails)
    assert "step" not in made
    assert log == ["wait", "begin", "end", "wait"]
    made.capture("step", lambda: None)
    assert "step" in made


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", torch.OutOfMemoryError),
        ("CUDA_ERROR_INVALID_VALUE", RuntimeError),
    ],
)
def test_driver_calls_that_run_out_of_memory_say_so(name, kind):
    class Status(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1
        CUDA_ERROR_OUT_OF_MEMORY = 2

    assert graphs.check_call((Status.CUDA_SUCCESS, 7)) == 7
    with pytest.raises(RuntimeError) as caught:
        graphs.check_call((Status[name], None))
    assert type(caught.value) is kind
