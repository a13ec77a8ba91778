"""Plan and advance on the device: 256 decoding rows over 50 000 pages, in one captured graph.

Runs the pieces an engine runs, at a size of their own: no KV pages are allocated and no model runs,
so the sampled tokens are constants. What is timed holds the packing of the record as well, and in
the torch form the row parameters' upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.models import CausalLM
from compiled_engine.outbox import Outbox, RecordQueue, RingOutbox
from compiled_engine.pieces import StepPieces
from compiled_engine.sampler import Sampled, build_param_inbox, new_row_params
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.state import DECODE, SchedulerShape, SchedulerState, new_state
from perf.qwen3_8b import MODEL, VOCAB_SIZE, Prompts
from perf.rows import Measured
from perf.timing import event_ms

NUM_ROWS, NUM_PAGES, CONTEXT = 256, 50_000, 1024
NUM_REPLAYS = 100
MAX_STEPS = 2000  # to bring the rows in; about 70 are needed


class _Bench:
    """A scheduler without a model.

    Args:
        shape: 256 rows.
        driver: compiles, or hands functions back.
        kernels: "torch" or "cuda", as `EngineConfig.scheduler`.
        device: where the state lives.
    """

    def __init__(
        self, shape: SchedulerShape, driver: CompileDriver, kernels: Any, device: str = "cuda"
    ) -> None:
        import torch

        assert shape.max_rows == NUM_ROWS, f"{shape.max_rows} rows, not {NUM_ROWS}"
        # 0: as large as the pages ask for
        self.shape = replace(shape, num_pages=NUM_PAGES, index_buckets=0)
        no_model: Any = CausalLM  # its layers are never asked for
        self.pieces = StepPieces(
            no_model, self.shape, VOCAB_SIZE, driver, is_gpu=device == "cuda", scheduler=kernels
        )
        self.device = torch.device(device)
        self.state: SchedulerState = new_state(self.shape, self.device)
        self.params = new_row_params(NUM_ROWS + 1, self.device)
        self.param_inbox = _moved(build_param_inbox(self.shape, []), self.device)
        queue = RingOutbox if kernels == "cuda" else Outbox
        self.outbox: RecordQueue = queue(NUM_ROWS + 1, self.device)
        self.budget = torch.tensor(self.shape.max_tokens, dtype=torch.int32, device=self.device)
        rows = (NUM_ROWS + 1, 1)
        self.sampled = Sampled(
            torch.full(rows, 7, dtype=torch.int32, device=self.device),
            torch.zeros(rows, dtype=torch.bool, device=self.device),
        )

    def step(self, inbox: Any) -> None:
        """One step without a model."""
        plan = self.pieces.begin(self.state, self.params, inbox, self.param_inbox, self.budget)
        self.pieces.end(self.state, plan, self.sampled, self.outbox)

    def fill(self, num_new: int) -> None:
        """Brings all rows to DECODE, each with room for `num_new` tokens more."""
        prompts, builder = Prompts(), InboxBuilder(self.shape)
        for row in range(NUM_ROWS):
            builder.submit(
                row=row,
                gen=1,
                arrival=row + 1,
                priority=0,
                salt=0,
                prompt=prompts.one(CONTEXT),
                max_len=CONTEXT + num_new,
            )
        for _ in range(MAX_STEPS):
            if builder.is_empty and self.num_decoding == NUM_ROWS:
                return
            self.step(_moved(builder.take()[0], self.device))
        raise AssertionError(f"{self.num_decoding} of {NUM_ROWS} rows decode")

    @property
    def num_decoding(self) -> int:
        """Rows in DECODE; waits for the device."""
        return int((self.state.state == DECODE).sum())


def measure_plan_advance(engine: Any, num_repeats: int) -> Iterator[Measured]:
    """Device time of the scheduler's part of a decode step, with an engine's own settings."""
    shape, kernels = engine.loop.executor.shape, engine.settings.scheduler
    bench = _Bench(shape, engine.driver, kernels)
    yield Measured(
        metric="plan_advance_us", unit="us", batch=NUM_ROWS, values=_step_us(bench, num_repeats)
    )


def measure_alone(num_repeats: int) -> Iterator[Measured]:
    """The same without an engine, for both kinds of kernels."""
    config = EngineConfig(model=MODEL)
    shape = SchedulerShape(
        max_rows=NUM_ROWS, num_pages=NUM_PAGES, page_size=16, max_model_len=16384, max_tokens=8192
    )
    for kernels in ("cuda", "torch"):
        bench = _Bench(shape, CompileDriver(config), kernels)
        yield Measured(
            metric="op_us",
            unit="us",
            batch=NUM_ROWS,
            case=f"plan and advance: {kernels}",
            values=_step_us(bench, num_repeats),
        )


def _step_us(bench: _Bench, num_repeats: int) -> list[float]:
    import torch

    with torch.no_grad():
        bench.fill(MAX_STEPS + NUM_REPLAYS * (num_repeats + 1))
        inbox = _moved(InboxBuilder(bench.shape).take()[0], bench.device)
        bench.step(inbox)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bench.step(inbox)
        before = int(bench.state.num_tokens[:-1].sum())
        taken = event_ms(graph.replay, num_calls=NUM_REPLAYS, num_repeats=num_repeats)
        gained = int(bench.state.num_tokens[:-1].sum()) - before
    assert bench.num_decoding == NUM_ROWS, "rows left while steps were timed"
    num_steps = 1 + NUM_REPLAYS * num_repeats
    assert gained == num_steps * NUM_ROWS, f"{gained} tokens in {num_steps} steps"
    return [milliseconds * 1e3 for milliseconds in taken]


def _moved(entries: Any, device: Any) -> Any:
    """The tensors of an inbox on the device."""
    import torch

    if isinstance(entries, torch.Tensor):
        return entries.to(device)
    return type(entries)(*(_moved(entry, device) for entry in entries))
