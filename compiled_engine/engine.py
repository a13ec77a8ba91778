"""Builds an engine from a config: model, memory, scheduler, compiled pieces, loop.

Used by the engine process and by `LLM`. Reports what it does through `progress`; owns no process.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from compiled_engine.beside_load import working_beside
from compiled_engine.build_ahead import BuildProcesses, building_ahead, is_missing, num_jobs
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.graphs import StepGraphs
from compiled_engine.compile.store import EntryStore
from compiled_engine.compile.torch_compat import has_own_kernel
from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops import ALL_OPS
from compiled_engine.custom_ops.quant import QUANT_OPS
from compiled_engine.custom_ops.registry import Target
from compiled_engine.device import pick_device
from compiled_engine.eager_first import LaterPieces
from compiled_engine.errors import ConfigError
from compiled_engine.grammar import GrammarService
from compiled_engine.grammar_compiler import TokenTable
from compiled_engine.key_parts import keeps_pieces, start_key
from compiled_engine.kv_cache import allocate
from compiled_engine.loop import StepLoop
from compiled_engine.memory import (
    MemoryNeeds,
    MemoryTable,
    keep_needs,
    load_needs,
    measure_needs,
    memory_table,
    needs_name,
)
from compiled_engine.models import ARCHITECTURES, CausalLM, HfModelConfig, ModelConfig
from compiled_engine.models.hf_load import build_hf_model
from compiled_engine.models.weights import build_model, init_dummy_weights, load_weights
from compiled_engine.pieces import StepPieces, few_limit
from compiled_engine.quant_report import quantization_report
from compiled_engine.request import ModelLimits
from compiled_engine.sampler import build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.settings import (
    BuildProgress,
    Settings,
    allows_pickle,
    cache_geometry,
    check_options,
    find_model,
    model_config_of,
    resolve,
    scheduler_shape,
    weight_bytes,
)
from compiled_engine.start_table import AHEAD, StartMeter, kept_files, used_files
from compiled_engine.start_times import StartPhase
from compiled_engine.step import StepExecutor
from compiled_engine.step_times import StepTimes
from compiled_engine.tokenizer import Tokenizer, has_tokenizer
from compiled_engine.tuned_for import warn_if_tuned_elsewhere

logger = logging.getLogger(__name__)

# Ops that `--cudagraph-mode piecewise` keeps out of graphs.
SPLIT_OPS = ("ce::paged_attention", "ce::paged_attention_quant")
# Ops that stay in the graph wherever they have a kernel of their own.
FUSED_OPS = (
    "fused_linear",
    "sparse_mlp",
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    *(op.name for op in QUANT_OPS),
    "gelu_and_mul",
    "swiglu_clamped",
    "route",
)


class Engine:
    """A loaded model behind a step loop."""

    def __init__(
        self,
        settings: Settings,
        driver: CompileDriver,
        loop: StepLoop,
        memory: MemoryTable | None,
        start: list[StartPhase],
        later: LaterPieces | None = None,
    ) -> None:
        self.settings = settings
        self.driver = driver
        self.loop = loop
        self.limits = loop.limits
        self.memory = memory
        self.start = start
        self._later = later

    def close(self) -> None:
        """Ends what still compiles for it."""
        if self._later is not None:
            self._later.close()


def build_engine(
    config: EngineConfig, progress: BuildProgress, *, loaded: CausalLM | None = None
) -> Engine:
    """Loads, allocates and compiles. Blocks until the first request can be served.

    `loaded` is the model of another engine of this process, if its weights shall not be read again.

    Raises:
        ConfigError: whatever of the config or the model folder cannot work.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = pick_device(config.device)
    check_options(config, device)
    driver = CompileDriver(config, kept_ops=kept_ops(device), device_type=device.type)
    meter = StartMeter(driver.times)
    with driver.times.measure("load"):
        folder = find_model(config, progress)
    here, report = replace(config, model=str(folder)), partial(progress, "compiling")
    is_later = config.compile_mode == "eager-first" and is_missing(here)
    noting = (meter.note_missing, meter.note_made)
    with building_ahead(here, device, report, *noting) as wait_for_build:
        with driver.times.measure("load"), working_beside(here, device, driver.times, meter):
            model_config = model_config_of(config, folder, Target.of(device))
            model = loaded or _load_model(config, model_config, folder, device, progress)
        with driver.times.measure(AHEAD):
            wait_for_build()
    model_config = model.config
    warn_if_tuned_elsewhere(config, model_config, device)
    needs, reserved = None, 0
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_utilization, device)
        with driver.times.measure("memory probe"):
            needs, reserved = _memory_needs(config, model_config, folder, model, driver, progress)
    settings = resolve(config, model_config, folder, device, model, reserved_bytes=reserved)
    shape = scheduler_shape(config, settings)
    if keeps_pieces(config):
        key = start_key(config, settings, shape, model_config, driver)
        if driver.store is None or driver.store.key != key:
            driver.store = EntryStore(config.cache_dir, key)
    later = None
    if is_later:
        executor, later = _serving_plain(
            here, model_config, model, shape, settings, driver, progress
        )
    else:
        executor = make_executor(config, model_config, model, shape, settings, driver)
        with driver.times.measure("first steps"):
            _warm_up(config, executor, progress)
    _log_quantization(model, model_config, settings, driver)
    loop = _make_loop(config, model_config, settings, executor)
    memory = None
    if needs is not None:
        memory = _memory_table(config, settings, executor, needs)
    if driver.store is not None:
        if needs is not None:
            keep_needs(driver.store, needs_name(config.cudagraph_mode), needs)
        if not is_later:
            driver.store.finish(used_files(driver, config.cache_dir))
    return Engine(settings, driver, loop, memory, meter.phases(driver), later)


def _memory_table(
    config: EngineConfig, settings: Settings, executor: StepExecutor, needs: MemoryNeeds
) -> MemoryTable:
    geometry = cache_geometry(config, executor.model.config, settings.dtype)
    return memory_table(
        settings.device,
        config.gpu_memory_utilization,
        weights=weight_bytes(executor.model),
        kv=geometry.page_bytes * executor.shape.num_pages,
        needs=needs,
    )


def _serving_plain(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    shape: SchedulerShape,
    settings: Settings,
    driver: CompileDriver,
    progress: BuildProgress,
) -> tuple[StepExecutor, LaterPieces]:
    """What runs uncompiled pieces until processes have compiled them; see `eager_first`."""

    def report(label: str, done: int, total: int) -> None:
        logger.info("compiling %s: %d of %d done", label, done, total)

    def make() -> StepPieces:
        return make_pieces(model, shape, settings, driver)

    def finish() -> None:
        assert driver.store is not None
        driver.store.finish(kept_files(config.cache_dir))  # the processes' are among them

    if isinstance(model_config, HfModelConfig):
        raise ConfigError(
            f"--compile-mode eager-first is for models that have a file here; "
            f"{model_config.architecture} runs from transformers' own code",
            param="compile_mode",
        )
    plain = replace(config, enforce_eager=True, cudagraph_mode="none")
    executor = make_executor(plain, model_config, model, shape, settings, CompileDriver(plain))
    with driver.times.measure("first steps"):
        _warm_up(plain, executor, progress)
    device = settings.device
    # Beside a full KV pool there is memory for one process.
    jobs = 1 if device.type == "cuda" and config.compile_jobs is None else num_jobs(config, device)
    processes = BuildProcesses(config, device, report, jobs)
    later = LaterPieces(executor, driver, make, processes, _graphs(config, executor))
    later.on_taken = finish
    return executor, later


def _make_loop(
    config: EngineConfig, model_config: ModelConfig, settings: Settings, executor: StepExecutor
) -> StepLoop:
    shape = executor.shape
    limits = ModelLimits(
        max_model_len=settings.max_model_len,
        vocab_size=settings.vocab_size,
        max_total_tokens=(shape.num_pages - 1) * shape.page_size + 1,
    )
    return StepLoop(
        executor,
        limits,
        eos_token_ids=settings.eos_token_ids,
        seed=config.seed,
        is_overlapped=settings.is_overlapped,
        step_times=_measure_step_times(config, model_config, executor),
        loops_on_device=config.device_loop,
        grammars=_grammar_service(config, settings),
    )


def _log_quantization(
    model: CausalLM, model_config: ModelConfig, settings: Settings, driver: CompileDriver
) -> None:
    """Says which kernels run a quantised model's layers."""
    is_gpu = settings.device.type == "cuda"
    lines = quantization_report(
        model,
        driver.registry if is_gpu and not driver.is_eager else None,
        dtype=settings.dtype,
        device=settings.device,
        max_tokens=settings.buckets[-1],
        max_few=few_limit(driver.registry),
    )
    plan = model_config.quantization
    if plan is not None and plan.note:
        lines.append(plan.note)
    for line in lines:
        logger.info("quantised: %s", line)


def _grammar_service(config: EngineConfig, settings: Settings) -> GrammarService | None:
    """Compiles grammars for the model's tokenizer; None where it has none, or no end token."""
    folder = settings.tokenizer_folder
    if not (has_tokenizer(folder) and settings.eos_token_ids):
        return None

    def load_tokens() -> TokenTable:
        tokenizer = Tokenizer.from_folder(folder, trust_remote_code=config.trust_remote_code)
        tokens = [""] * settings.vocab_size
        for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
            if token_id < len(tokens):
                tokens[token_id] = token
        special = sorted(i for i in tokenizer.special_token_ids if i < len(tokens))
        return TokenTable(tokens, special, list(settings.eos_token_ids), tokenizer.backend.to_str())

    return GrammarService(load_tokens, encodes=config.jump_forward == "on")


def kept_ops(device: torch.device) -> frozenset[str]:
    """Ops that stay in the graph on the device, where they have a kernel of their own.

    Fused ones, as it beats what Inductor makes of their bodies; and all that write the KV cache:
    how many pages a GPU has is open while code is made, and Inductor's code would index them with
    32 bits, for few pages only.
    """
    if device.type != "cuda":
        return frozenset()
    writing = {op.name for op in ALL_OPS if op.functional_reference is not None}
    found = {op.name for op in ALL_OPS if has_own_kernel(op.overload, "cuda")}
    return frozenset(found & writing.union(FUSED_OPS))


def make_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    shape: SchedulerShape,
    settings: Settings,
    driver: CompileDriver,
) -> StepExecutor:
    """Caches, state and pieces for one shape; nothing is compiled yet."""
    caches = allocate(
        cache_geometry(config, model_config, settings.dtype), shape.num_pages, settings.device
    )
    pieces = make_pieces(model, shape, settings, driver)
    return StepExecutor(model, caches, pieces, settings.buckets, driver)


def make_pieces(
    model: CausalLM, shape: SchedulerShape, settings: Settings, driver: CompileDriver
) -> StepPieces:
    """The functions of a step for one shape, compiled by `driver` when they are first called."""
    return StepPieces(
        model,
        shape,
        settings.vocab_size,
        driver,
        is_gpu=settings.device.type == "cuda",
        scheduler=settings.scheduler,
    )


def _memory_needs(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    model: CausalLM,
    driver: CompileDriver,
    progress: BuildProgress,
) -> tuple[MemoryNeeds, int]:
    """What steps will need, and how much of what is free now: from an earlier start, or a probe.

    The driver's store is opened for it. The key of a start with the scheduler in torch depends on
    the number of KV pages, which is not known yet: such a start finds no measurement.
    """
    device = next(model.parameters()).device
    eager = replace(config, enforce_eager=True, max_total_tokens=config.block_size * 8)
    settings = resolve(eager, model_config, folder, device, model)
    shape = scheduler_shape(eager, settings)
    if keeps_pieces(config):
        key = start_key(config, settings, shape, model_config, driver)
        driver.store = EntryStore(config.cache_dir, key)
    torch.cuda.empty_cache()  # what loading the weights left
    free, _ = torch.cuda.mem_get_info(device)
    needs = load_needs(driver.store, needs_name(config.cudagraph_mode), free)
    if needs is not None:
        return needs, needs.reserved + needs.kept
    progress("compiling", "memory probe", 0, 1)
    needs = _probe_memory(eager, model_config, model, shape, settings)
    return needs, needs.reserved


def _probe_memory(
    eager: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    shape: SchedulerShape,
    settings: Settings,
) -> MemoryNeeds:
    """What steps will need, seen on an engine with hardly any KV pages that compiles nothing."""
    device = settings.device
    before, _ = torch.cuda.mem_get_info(device)
    executor = make_executor(eager, model_config, model, shape, settings, CompileDriver(eager))
    inbox, _ = InboxBuilder(shape).take()
    executor.prepare(inbox, build_param_inbox(shape, []))
    num_graphs = len(executor.keys()) if eager.cudagraph_mode != "none" else 0
    needs = _measure(device, executor, num_graphs)
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    return replace(needs, kept=max(0, before - torch.cuda.mem_get_info(device)[0]))


def _measure(device: torch.device, executor: StepExecutor, num_graphs: int) -> MemoryNeeds:
    graphs = StepGraphs(device)
    smallest, largest = executor.buckets[0], executor.buckets[-1]

    def capture_one() -> None:
        graphs.capture(len(graphs), lambda: executor.run_empty(smallest))

    # What is set up once is not counted for a step, and no kernel may be loaded in a capture.
    for size in (smallest, largest):
        executor.run_empty(size, is_short=True)
    return measure_needs(
        device, lambda: executor.run_empty(largest, is_short=True), capture_one, num_graphs
    )


def _measure_step_times(
    config: EngineConfig, model_config: ModelConfig, executor: StepExecutor
) -> StepTimes | None:
    if config.max_step_ms is None:
        return None
    # Two products of a query with a key, and as many with a value; the rate is a cautious one.
    per_pair = 4 * model_config.num_layers * model_config.num_heads * model_config.head_dim
    return StepTimes(config.max_step_ms / 1e3, executor.mixed_seconds(), per_pair / 300e12)


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    device: torch.device,
    progress: BuildProgress,
) -> CausalLM:
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name)
    if isinstance(model_config, HfModelConfig):
        return _load_hf_model(config, model_config, dtype, device, progress)
    model = build_model(
        ARCHITECTURES[model_config.architecture], model_config, dtype=dtype, device=device
    )
    if config.load_format == "dummy":
        init_dummy_weights(model, config.seed)
        return model

    def report(done: int, total: int, label: str) -> None:
        progress("loading", label, done, total)

    load_weights(
        model,
        folder,
        dtype=dtype,
        device=device,
        allow_pickle=allows_pickle(config),
        folds_kv_scales=config.kv_cache_dtype == "fp8_e4m3",
        progress=report,
    )
    return model


def _load_hf_model(
    config: EngineConfig,
    model_config: HfModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: BuildProgress,
) -> CausalLM:
    label = f"{model_config.architecture} of transformers"
    progress("loading", label, 0, 1)
    model = build_hf_model(
        model_config,
        dtype=dtype,
        device=device,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        allow_pickle=allows_pickle(config),
    )
    progress("loading", label, 1, 1)
    return model


def _warm_up(config: EngineConfig, executor: StepExecutor, progress: BuildProgress) -> None:
    shape = executor.shape
    inbox, _ = InboxBuilder(shape).take()
    executor.warm_up(
        inbox,
        build_param_inbox(shape, []),
        lambda label, done, total: progress("compiling", label, done, total),
        graphs=_graphs(config, executor),
    )


def _graphs(config: EngineConfig, executor: StepExecutor) -> StepGraphs | None:
    """What captures steps; None where they are launched kernel by kernel."""
    if executor.device.type != "cuda" or config.cudagraph_mode == "none":
        return None
    return StepGraphs(
        executor.device,
        split_ops=SPLIT_OPS if config.cudagraph_mode == "piecewise" else (),
        addresses=executor.addresses if config.check_graphs else None,
    )
