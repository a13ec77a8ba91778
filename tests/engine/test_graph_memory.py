"""Steps that graphs are captured of, where memory runs out. Graphs are stand-ins: no GPU is needed.

What a real capture does then is tested in `test_gpu_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import pytest
import torch

from compiled_engine.engine import Engine
from compiled_engine.faults import Fault
from compiled_engine.ipc import ClientFrame
from compiled_engine.request import Request
from compiled_engine.sampler import build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.step import StepExecutor
from compiled_engine.upload import DeviceInbox
from tests.helpers.engines import GREEDY, run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.turned_engine import PROMPTS, TurnedEngine

# Penalties and biases need steps of their own.
BIASED = msgspec.structs.replace(GREEDY, logit_bias={7: 3.0})


class FakeGraphs:
    """Keeps the functions; a replay calls them.

    Attributes:
        fails: a capture runs out of memory.
    """

    def __init__(self) -> None:
        self.functions: dict[Hashable, Callable[[], None]] = {}
        self.fails = False
        self.num_captures = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self.functions

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        self.num_captures += 1
        if self.fails:
            raise torch.OutOfMemoryError("no memory for this graph")
        self.functions[key] = function

    def replay(self, key: Hashable) -> None:
        with torch.no_grad():
            self.functions[key]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def captured(folder, monkeypatch) -> tuple[Engine, FakeGraphs]:
    """An engine on a CPU that launches steps as on a GPU."""
    engine = tiny_engine(folder)
    executor: Any = engine.loop.executor
    monkeypatch.setattr(StepExecutor, "reads_plans", property(lambda _: False))
    empty, _ = InboxBuilder(executor.shape).take()
    params = build_param_inbox(executor.shape, [])
    executor._upload = DeviceInbox(empty, params, torch.device("cpu"))
    executor._graphs = graphs = FakeGraphs()
    return engine, graphs


def test_step_that_cannot_be_captured_is_launched_without_a_graph(folder, captured, caplog):
    expected = run_requests(tiny_engine(folder), PROMPTS, BIASED).tokens
    engine, graphs = captured
    graphs.fails = True
    assert run_requests(engine, PROMPTS, BIASED).tokens == expected
    assert not graphs.functions
    # Said once for each size, tried once more when the allocator had handed back what it kept.
    num_sizes = len(engine.loop.executor._uncaptured)
    assert num_sizes > 0
    assert graphs.num_captures == 2 * num_sizes
    assert caplog.text.count("no memory for the CUDA graph") == num_sizes
    graphs.fails = False
    assert run_requests(engine, PROMPTS, BIASED).tokens == expected
    assert graphs.num_captures == 2 * num_sizes


def test_a_capture_finds_room_in_what_the_allocator_kept(folder, captured, monkeypatch, caplog):
    expected = run_requests(tiny_engine(folder), PROMPTS, BIASED).tokens
    engine, graphs = captured
    graphs.fails = True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(graphs, "fails", False))
    assert run_requests(engine, PROMPTS, BIASED).tokens == expected
    assert graphs.functions
    assert not engine.loop.executor._uncaptured
    assert not caplog.text


def test_what_asked_for_too_much_ends_and_the_others_go_on(folder, captured):
    expected = run_requests(tiny_engine(folder), PROMPTS).tokens
    engine, graphs = captured
    plain = TurnedEngine(engine)
    plain.submit()
    plain.finish()
    assert graphs.functions
    turned = TurnedEngine(engine)
    turned.submit()
    turned.turn()
    turned.turn()
    Fault("oom", step=engine.loop.stats.num_steps + 1).before_step(engine.loop)
    prompt = [*range(20, 60)]
    turned.turn(
        ClientFrame(submits=[Request(request_id=9, prompt_token_ids=prompt, params=BIASED)])
    )
    turned.finish(5)
    failed = turned.ends.pop(9)
    assert failed.finish_reason == "error"
    assert "ran out of memory" in str(failed.error)
    del turned.tokens[9]
    assert turned.tokens == dict(enumerate(expected))
    assert engine.loop.stats.num_scheduler_errors == 0
    assert engine.loop.stats.num_pages_active == 0
