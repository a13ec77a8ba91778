"""Bytes that a GPU's copies move in steps, by its own profile, against those that are declared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compiled_engine.engine import Engine
from compiled_engine.upload import ALIGNMENT
from perf.decode import Driver
from perf.qwen3_8b import Prompts
from perf.step_gates import NUM_STEPS, counted_bytes, steady
from tests.helpers.engines import tiny_engine
from tests.helpers.gpu_engine import OPTIONS, SHAPE
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu

BATCH_SIZE = 8
# Tensors that the entries of a step consist of, each padded on its way.
MAX_TENSORS = 64
TO_DEVICE, TO_HOST = "Memcpy HtoD", "Memcpy DtoH"


def copied(work: Callable[[], object], place: Path) -> dict[str, int]:
    """Direction -> bytes that the device's copies moved during `work`, of which nothing is left."""
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as seen:  # without: a warning of torch's
        work()
        torch.cuda.synchronize()
    trace = place / "trace.json"
    seen.export_chrome_trace(str(trace))
    found = {TO_DEVICE: 0, TO_HOST: 0}
    for event in json.loads(trace.read_text())["traceEvents"]:
        for direction in found:
            if event.get("cat") == "gpu_memcpy" and event["name"].startswith(direction):
                found[direction] += event["args"]["bytes"]
    return found


def repeated(step: Callable[[], None], extra: Callable[[], object] = int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(NUM_STEPS):
            step()
            extra()

    return work


@pytest.fixture(scope="module", params=["cuda", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("gpu") / "qwen3", family="qwen3", **SHAPE)
    options: dict[str, Any] = {**OPTIONS, "scheduler": request.param}
    copied(torch.cuda.synchronize, folder)  # a process's first profile sets the profiler up
    return tiny_engine(folder, **options)


def driver_of(engine: Engine) -> Driver:
    return Driver(engine, Prompts(vocab_size=engine.settings.vocab_size))


def test_gpu_steady_steps_copy_what_is_declared(engine: Engine, tmp_path: Path):
    """Entries there are none, and the kernel that ends a step writes its record by itself."""
    with steady(driver_of(engine), BATCH_SIZE) as step:
        step()
        with counted_bytes(engine) as (sent, received):
            found = copied(repeated(step), tmp_path)
    assert sum(sent) == 0
    assert len(received) == NUM_STEPS
    is_written = engine.loop.executor.pieces.scheduler == "cuda"
    assert found == {TO_DEVICE: 0, TO_HOST: 0 if is_written else sum(received)}


def test_gpu_one_more_copy_is_seen(engine: Engine, tmp_path: Path):
    there, here = torch.zeros(1000, device="cuda"), torch.zeros(500)
    with steady(driver_of(engine), BATCH_SIZE) as step:
        step()
        clean = copied(repeated(step), tmp_path)
        back = copied(repeated(step, there.cpu), tmp_path)
        forth = copied(repeated(step, here.cuda), tmp_path)
    assert back[TO_HOST] - clean[TO_HOST] == NUM_STEPS * there.nbytes
    assert forth[TO_DEVICE] - clean[TO_DEVICE] == NUM_STEPS * here.nbytes


def test_gpu_entries_are_one_copy_a_step(engine: Engine, tmp_path: Path):
    driver = driver_of(engine)
    with steady(driver, BATCH_SIZE) as step:
        step()

        def arrive() -> None:
            arrived.update(driver.submit_batch(1, 16, 64))

        arrived: set[int] = set()
        with counted_bytes(engine) as (sent, _):
            found = copied(lambda: (arrive(), driver.loop.step()), tmp_path)
        driver.run_out(arrived)
    assert len(sent) == 1
    assert sum(sent) <= found[TO_DEVICE] <= sum(sent) + ALIGNMENT * MAX_TENSORS
