"""Shapes with experts on one GPU: steps over what they must read, prompts, and whole jobs.

As `gpu_step`, but for several models, one after the other, each with an engine of its own. What a
step must read depends on how many experts its rows went through: that is counted, from the router's
own choices in the last step of a measured batch, and stands in a row of its own.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from compiled_engine.kernels.ceilings import matmul_8bit_flop_s
from perf.ceilings import Ceilings, measure_ceilings
from perf.decode import BATCH_SIZES, INPUT_LEN, OUTPUT_LEN, Driver, measure_decode
from perf.gpu_step import ENGINE, Note, Throttled
from perf.model_shapes import SHAPES, ModelShape, write_folder
from perf.offline import PREFILL_LENS, measure_agentic, measure_e2e, measure_prefill
from perf.pass_costs import Job, measure_passes, run_in_processes
from perf.qwen3_8b import Prompts
from perf.rows import Measured, Outcome, key_of
from perf.stopping import Stopped, left_out, stop_on_sigterm

NAME = "gpu_models"
DEFAULT_MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
LONE_ENGINE = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "max_total_tokens": 4 * 4096,
    "chunked_prefill_size": 512,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        num_repeats: repeats of every measurement that count.
        model: names of shapes, with commas between them; `DEFAULT_MODELS` if not given.
        only: names of parts, likewise; `DEFAULT_PARTS` if not given.
    """

    num_repeats: int = 3
    model: str | None = None
    only: str | None = None


class Bench:
    """What the parts share; the model's engine is built when a part first needs it.

    Args:
        shape: of the model.
        ceilings: of the device.
        num_repeats: as in `Options`.
        stack: keeps what is opened.
        note: shows how far a build is.

    Attributes:
        folder: of the model.
    """

    def __init__(
        self,
        shape: ModelShape,
        ceilings: Ceilings,
        num_repeats: int,
        stack: ExitStack,
        note: Note,
    ) -> None:
        self.shape = shape
        self._note = note
        self.ceilings = ceilings
        self.num_repeats = num_repeats
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_folder(self.folder, shape.config)

    @cached_property
    def llm(self) -> Any:
        """The engine of nearly all parts."""
        options = {name: value for name, value in ENGINE.items() if name != "max_step_ms"}
        return self._stack.enter_context(self.build(options))

    @cached_property
    def driver(self) -> Driver:
        """Its loop."""
        return Driver(self.llm.engine, Prompts(vocab_size=self.shape.config["vocab_size"]))

    @cached_property
    def lone_driver(self) -> Driver:
        """The loop of an engine of few rows and short prompts, which takes little to build."""
        llm = self._stack.enter_context(self.build(LONE_ENGINE))
        return Driver(llm.engine, Prompts(vocab_size=self.shape.config["vocab_size"]))

    def build(self, options: dict[str, Any]) -> Any:
        """An engine of the shape with these options of `LLM`."""
        from compiled_engine import LLM

        start = time.perf_counter()
        progress = Throttled(self._note)
        llm = LLM(str(self.folder), progress=progress, **options, **self.shape.options)
        self._note(f"{self.shape.name} built in {time.perf_counter() - start:.1f} s")
        return llm


def _decode(bench: Bench) -> Iterator[Measured]:
    yield from _decode_steps(bench, bench.driver, BATCH_SIZES)


def _decode_one(bench: Bench) -> Iterator[Measured]:
    yield from _decode_steps(bench, bench.lone_driver, (1,))


def _decode_steps(bench: Bench, driver: Driver, batch_sizes: tuple[int, ...]) -> Iterator[Measured]:
    costs = bench.shape.costs
    distinct = dict.fromkeys(batch_sizes, 0.0)
    if costs.num_experts:
        distinct = count_distinct(driver, batch_sizes)

    def floor_bytes(context_tokens: float, batch_size: int) -> float:
        return costs.step_bytes(context_tokens, batch_size, distinct[batch_size])

    yield from measure_decode(driver, bench.ceilings, bench.num_repeats, floor_bytes, batch_sizes)
    if not costs.num_experts:
        return
    for batch_size, count in distinct.items():
        yield Measured(metric="distinct_experts", unit="count", batch=batch_size, values=[count])
        yield Measured(
            metric="distinct_experts_over_uniform",
            unit="ratio",
            batch=batch_size,
            values=[count / costs.uniform_distinct(batch_size)],
        )


def _prefill(bench: Bench) -> Iterator[Measured]:
    costs = bench.shape.costs
    rows = list(
        measure_prefill(bench.driver, bench.ceilings, bench.num_repeats, costs.prefill_flops)
    )
    yield from rows
    if bench.shape.dtype == "fp8" and not costs.num_experts:  # experts read 16-bit inputs
        yield from _share_of_fp8(bench, next(r for r in rows if r.metric == "prefill_tok_s"))


def _share_of_fp8(bench: Bench, rate: Measured) -> Iterator[Measured]:
    """Prompts over linears at the measured rate of fp8 and attention at that of bf16."""
    rates = [rate / 1e12 for rate in matmul_8bit_flop_s(bench.num_repeats)]
    yield Measured(metric="fp8_matmul_tflops", unit="TFLOP/s", values=rates)
    flops = bench.shape.costs.prefill_flops(PREFILL_LENS)
    linear = bench.shape.costs.linear_flops(PREFILL_LENS)
    floor_s = linear / (statistics.median(rates) * 1e12) + (flops - linear) / bench.ceilings.matmul
    shares = [floor_s * value / sum(PREFILL_LENS) for value in rate.values]
    yield replace(rate, metric="prefill_share_of_floor", unit="ratio", values=shares)


def over_bf16(measured: list[Measured]) -> list[Measured]:
    """Steps and prompts of quantised shapes as ratios to the same shape in bf16, of one run."""
    names = {"decode_step_ms": "step_over_bf16", "prefill_tok_s": "prefill_over_bf16"}
    plain = {
        (m.metric, m.model, m.batch, m.case): statistics.median(m.values)
        for m in measured
        if m.dtype == "bf16" and m.metric in names
    }
    return [
        replace(
            entry,
            metric=names[entry.metric],
            unit="ratio",
            values=[value / plain[key] for value in entry.values],
        )
        for entry in measured
        if entry.dtype != "bf16"
        and (key := (entry.metric, entry.model, entry.batch, entry.case)) in plain
    ]


def _e2e(bench: Bench) -> Iterator[Measured]:
    yield from measure_e2e(bench.llm, bench.driver.prompts, bench.num_repeats)


def _agentic(bench: Bench) -> Iterator[Measured]:
    yield from measure_agentic(bench.llm, bench.driver.prompts, bench.num_repeats)


def _passes(bench: Bench) -> Iterator[Measured]:
    job = Job(
        folder=str(bench.folder),
        options=bench.shape.options,
        vocab_size=bench.shape.config["vocab_size"],
        num_repeats=bench.num_repeats,
    )
    yield from measure_passes(partial(run_in_processes, job))


PARTS: dict[str, Callable[[Bench], Iterator[Measured]]] = {
    "decode": _decode,
    "decode_1": _decode_one,  # a row alone, which takes seconds
    "prefill": _prefill,
    "e2e": _e2e,
    "agentic": _agentic,
    "passes": _passes,
}
DEFAULT_PARTS = ("decode", "prefill", "e2e", "agentic")


def count_distinct(driver: Driver, batch_sizes: Sequence[int]) -> dict[int, float]:
    """Experts of a layer that a decode step of so many rows goes through, mean of the layers.

    The largest batch, as `measure_decode` has it, is run to its end; its last step is then computed
    again, each row by the plain model over the row's whole sequence, to see what the routers
    choose. Smaller batches are its first rows.
    """
    import torch

    model = driver.engine.loop.executor.model
    device = driver.engine.settings.device
    choices: list[set[int]] = [set() for _ in model.layers]
    found = {}
    for row, sequence in enumerate(_answered(driver, max(batch_sizes)), 1):
        for seen, ids in zip(choices, last_choices(model, sequence, device), strict=True):
            seen.update(ids)
        if row in batch_sizes:
            sparse = [len(seen) for seen in choices if seen]
            found[row] = sum(sparse) / len(sparse)
    torch.cuda.empty_cache()
    return found


def _answered(driver: Driver, batch_size: int) -> list[list[int]]:
    """Prompts and answers of one batch, but the last token, which no step has seen."""
    prompts = driver.prompts.many(batch_size, INPUT_LEN)
    sequences = {driver.submit(prompt, OUTPUT_LEN): list(prompt) for prompt in prompts}
    left = set(sequences)
    while left:
        for event in driver.loop.step():
            sequences[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                left.discard(event.request_id)
    driver.run_out(set())
    return [sequence[:-1] for sequence in sequences.values()]


def last_choices(model: Any, token_ids: list[int], device: Any) -> list[list[int]]:
    """Experts that the last token of a sequence goes through, by layer; none in dense layers."""
    import torch

    choices: list[list[int]] = [[] for _ in model.layers]
    hooks = []

    def watch(index: int, mlp: Any) -> None:
        def note(_module: Any, inputs: tuple[Any, ...]) -> None:
            choices[index] = mlp.choose(inputs[0][-1:]).ids[0].tolist()

        hooks.append(mlp.register_forward_pre_hook(note))

    for index, layer in enumerate(model.layers):
        if hasattr(layer.mlp, "choose"):
            watch(index, layer.mlp)
    try:
        with torch.no_grad():
            ids = torch.tensor(token_ids, device=device)
            residual, rotary = model.embed(ids, torch.arange(len(token_ids), device=device))
            for layer in model.layers:
                residual = layer(residual, rotary)
    finally:
        for hook in hooks:
            hook.remove()
    return choices


def chosen(names: str | None, known: dict[str, Any], default: tuple[str, ...]) -> list[str]:
    """The names of a list with commas, in the order of `known`.

    Raises:
        SystemExit: an unknown name.
    """
    wanted = default if names is None else tuple(names.split(","))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if name in wanted]


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit without a GPU or for an unknown name."""
    import torch

    models = chosen(options.model, SHAPES, DEFAULT_MODELS)
    parts = chosen(options.only, PARTS, DEFAULT_PARTS)
    if not torch.cuda.is_available():
        raise SystemExit(f"{NAME} needs an NVIDIA GPU; torch sees none")
    ceilings = measure_ceilings(options.num_repeats)
    measured, failures = list(ceilings.measured()), list[str]()
    stop_on_sigterm()
    for name in models:
        shape, start = SHAPES[name], time.perf_counter()
        try:
            for entry in _measure_model(
                shape, parts, ceilings, options.num_repeats, failures, note
            ):
                measured.append(replace(entry, model=shape.name, dtype=shape.dtype))
                values = ", ".join(f"{value:.4g}" for value in entry.values)
                key = key_of(entry.metric, entry.batch, entry.case, shape.name)
                note(f"{key}: {values} {entry.unit}")
        except Stopped:  # what was measured so far is kept
            failures.append(left_out(name))
            break
        except Exception as error:  # one model must not cost the rows of the others
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
        torch.cuda.empty_cache()
        note(f"-- {name}: {time.perf_counter() - start:.1f} s")
    for entry in over_bf16(measured):
        measured.append(entry)
        key = key_of(entry.metric, entry.batch, entry.case, entry.model or "")
        note(f"{key} {entry.dtype}: {entry.values[0]:.4g}")
    return Outcome(
        measured=measured,
        environment=ceilings.environment,
        void=ceilings.is_void(torch.cuda.get_device_name()),
        failures=failures,
    )


def _measure_model(
    shape: ModelShape,
    parts: list[str],
    ceilings: Ceilings,
    num_repeats: int,
    failures: list[str],
    note: Note,
) -> Iterator[Measured]:
    with ExitStack() as stack:
        bench = Bench(shape, ceilings, num_repeats, stack, note)
        for part in parts:
            try:
                yield from PARTS[part](bench)
            except Exception as error:  # one part must not cost the rows of the others
                traceback.print_exc()
                kind = type(error).__name__
                failures.append(f"{shape.name} {shape.dtype} {part}: {kind}: {error}")
