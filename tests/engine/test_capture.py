"""What runs before a step is captured: every kernel that the capture launches, and few layers.

Graphs are stand-ins, which need no GPU: a capture only notes what is called meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from compiled_engine import pieces
from compiled_engine.layer_kinds import sample_of_kinds
from compiled_engine.sampler import build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.step import StepExecutor
from compiled_engine.step_key import StepKey, masked_keys
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model

NUM_LAYERS = 6
# Layers of two kinds in turns, and layers of one kind, the last of which is cut short.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
}
Call = tuple[Hashable, ...]


class Noted(TorchDispatchMode):
    """Notes the ops that are called, with all that a kernel could be made for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def form(tensor: Tensor) -> Hashable:
            return tensor.shape, tensor.stride(), tensor.dtype

        call = tree_map_only(Tensor, form, (args, kwargs or {}))
        self.calls.append((func.name(), repr(call)))
        return func(*args, **(kwargs or {}))


class NotingGraphs:
    """Stands for `StepGraphs`: what ran before the captures, and what ran in each.

    Attributes:
        before: calls behind the pieces' first ones.
        captured: calls by key.
    """

    def __init__(self, noted: Noted) -> None:
        self._noted = noted
        self.before: list[Call] = []
        self.captured: dict[StepKey, list[Call]] = {}

    def on_piece(self, label: str, *_: int) -> None:
        """What is called up to the last piece is none of the captures' business."""
        if not label.startswith("graph of"):
            self.take()

    def take(self) -> list[Call]:
        taken, self._noted.calls = self._noted.calls, []
        return taken

    def capture(self, key: StepKey, function: Callable[[], None]) -> None:
        self.before += self.take()
        function()
        self.captured[key] = self.take()


def warmed_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> NotingGraphs:
    """The graphs of a warm-up on a CPU that launches steps as on a GPU."""
    executor = tiny_engine(folder, max_num_seqs=1, chunked_prefill_size=2).loop.executor
    monkeypatch.setattr(StepExecutor, "reads_plans", property(lambda _: False))
    empty, _ = InboxBuilder(executor.shape).take()
    params = build_param_inbox(executor.shape, [])
    with Noted() as noted:
        graphs: Any = NotingGraphs(noted)
        executor.warm_up(empty, params, graphs.on_piece, graphs=graphs)
    return graphs


def model(folder: Path, family: str) -> Path:
    options = {"num_hidden_layers": NUM_LAYERS, **MODELS[family]}
    return write_tiny_model(folder, family=family, **options)


def num_layers_in(calls: list[Call]) -> int:
    return sum(name == "ce::paged_attention" for name, _ in calls)


def missing(graphs: NotingGraphs) -> set[Call]:
    """Calls that are captured and were not made before."""
    return {
        call for captured in graphs.captured.values() for call in set(captured) - set(graphs.before)
    }


@pytest.mark.parametrize("family", MODELS)
def test_every_call_that_is_captured_was_made_before(family, tmp_path, monkeypatch):
    graphs = warmed_up(model(tmp_path, family), monkeypatch)
    assert graphs.captured
    assert missing(graphs) == set()
    for captured in graphs.captured.values():
        assert num_layers_in(captured) == NUM_LAYERS
    num_runs = len(graphs.captured) + len(masked_keys(graphs.captured, max_rows=1))
    assert num_layers_in(graphs.before) < NUM_LAYERS * num_runs


def test_a_kind_of_layer_that_did_not_run_before_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "sample_of_kinds", lambda kinds: (1, 3, 5))
    assert missing(warmed_up(model(tmp_path, "gpt_oss"), monkeypatch))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((0,), (0,)),
        ((0, 0), (0, 1)),
        ((0,) * 36, (0, 1, 35)),
        ((0, 1) * 4, (0, 1, 2, 3, 7)),
        ((0, 1, 1, 1, 0, 0, 2), (0, 1, 2, 4, 6)),
        ((), ()),
    ],
)
def test_sample_has_two_layers_of_each_kind_and_the_last(kinds, expected):
    assert sample_of_kinds(kinds) == expected
