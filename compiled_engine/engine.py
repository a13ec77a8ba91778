"""Builds an engine from a config: model, memory, scheduler, compiled pieces, loop.

Used by the engine process and by `LLM`. Reports what it does through `progress`; owns no process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.device import pick_device
from compiled_engine.errors import ConfigError
from compiled_engine.kv_cache import CacheGeometry, allocate, available_bytes, choose_num_pages
from compiled_engine.loop import StepLoop
from compiled_engine.models import ARCHITECTURES, CausalLM, ModelConfig
from compiled_engine.models.config import load_model_config
from compiled_engine.models.source import resolve_model
from compiled_engine.models.weights import build_model, init_dummy_weights, load_weights
from compiled_engine.request import ModelLimits
from compiled_engine.sampler import MAX_EOS_TOKEN_IDS, build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.step import StepExecutor
from compiled_engine.tokenizer import Tokenizer

# (phase, label, done, total); phase is "loading" or "compiling"
BuildProgress = Callable[[str, str, int, int], None]

MAX_TOKEN_PAGES = 32_768


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The config's open values, resolved for a model and a device.

    Attributes:
        folder: the model's folder.
        device, dtype: where and in what the model runs.
        max_model_len, max_num_seqs, chunked_prefill_size: as in `EngineConfig`, never None.
        num_pages: KV pages, the null page included.
        vocab_size: real token ids.
        is_overlapped: which loop runs; see `loop`.
        buckets: token counts of a step.
    """

    folder: Path
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    chunked_prefill_size: int
    num_pages: int
    vocab_size: int
    is_overlapped: bool
    buckets: tuple[int, ...]


class Engine:
    """A loaded model behind a step loop."""

    def __init__(self, settings: Settings, driver: CompileDriver, loop: StepLoop) -> None:
        self.settings = settings
        self.driver = driver
        self.loop = loop
        self.limits = loop.limits


def build_engine(config: EngineConfig, progress: BuildProgress) -> Engine:
    """Loads, allocates and compiles. Blocks until the first request can be served.

    Raises:
        ConfigError: whatever of the config or the model folder cannot work.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = pick_device(config.device)
    driver = CompileDriver(config)
    folder = resolve_model(
        config.model,
        config.cache_dir,
        with_weights=config.load_format != "dummy",
        allow_pickle=config.allow_pickle,
        progress=lambda done, total, label: progress("loading", label, done, total),
    )
    model_config = load_model_config(folder)
    if len(model_config.eos_token_ids) > MAX_EOS_TOKEN_IDS:
        raise ConfigError(
            f"{folder}: {len(model_config.eos_token_ids)} end-of-sequence ids; at most "
            f"{MAX_EOS_TOKEN_IDS} are supported",
            param="eos_token_id",
        )
    model = _load_model(config, model_config, folder, device, progress)
    settings = _resolve(config, model_config, folder, device, model)
    shape = scheduler_shape(config, settings)
    caches = allocate(_geometry(config, model_config, settings.dtype), shape.num_pages, device)
    executor = StepExecutor(model, caches, shape, settings.vocab_size, settings.buckets, driver)
    _warm_up(executor, progress)
    limits = ModelLimits(
        max_model_len=settings.max_model_len,
        vocab_size=settings.vocab_size,
        max_total_tokens=(shape.num_pages - 1) * shape.page_size + 1,
    )
    loop = StepLoop(
        executor,
        limits,
        eos_token_ids=model_config.eos_token_ids,
        seed=config.seed,
        is_overlapped=settings.is_overlapped,
    )
    return Engine(settings, driver, loop)


def preview_settings(config: EngineConfig) -> Settings:
    """What `build_engine` would settle on, without loading weights.

    Raises:
        ConfigError: as `build_engine`.
    """
    device = pick_device(config.device)
    folder = resolve_model(config.model, config.cache_dir, with_weights=False)
    model_config = load_model_config(folder)
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    with torch.device("meta"):
        model = ARCHITECTURES[model_config.architecture](model_config).to(getattr(torch, name))
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # On a CPU the pool's share does not depend on the weights.
    reserved_bytes = weight_bytes if device.type == "cuda" else 0
    return _resolve(config, model_config, folder, device, model, reserved_bytes=reserved_bytes)


def token_buckets(largest: int) -> tuple[int, ...]:
    """Every count up to 8, then steps of at most 12.5 %, up to `largest`."""
    buckets = [1]
    while buckets[-1] < largest:
        step = max(1, 1 << max(0, buckets[-1].bit_length() - 4))
        buckets.append(min(largest, buckets[-1] + step))
    return tuple(buckets)


def scheduler_shape(config: EngineConfig, settings: Settings) -> SchedulerShape:
    """Static sizes of the scheduler for resolved settings."""
    is_cpu = settings.device.type == "cpu"
    block = config.block_size
    token_page = max(256, block)
    width = -(-settings.max_model_len // token_page)
    return SchedulerShape(
        max_rows=settings.max_num_seqs,
        num_pages=settings.num_pages,
        page_size=block,
        max_model_len=settings.max_model_len,
        max_tokens=settings.chunked_prefill_size,
        num_candidates=min(settings.max_num_seqs, 4 if is_cpu else 32),
        max_releases=min(settings.max_num_seqs, 4 if is_cpu else 16),
        token_page_size=token_page,
        num_token_pages=settings.max_num_seqs * width,
        prefix_caching=config.enable_prefix_caching,
    )


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    device: torch.device,
    progress: BuildProgress,
) -> CausalLM:
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name)
    model_class = ARCHITECTURES[model_config.architecture]
    model = build_model(model_class, model_config, dtype=dtype, device=device)
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
        allow_pickle=config.allow_pickle,
        progress=report,
    )
    return model


def _resolve(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    device: torch.device,
    model: CausalLM,
    *,
    reserved_bytes: int = 0,
) -> Settings:
    """Settings for a model; `reserved_bytes` are memory that is free now and will not be."""
    is_cpu = device.type == "cpu"
    own = model_config.max_position_embeddings
    max_model_len = config.max_model_len or own
    if max_model_len > own:
        raise ConfigError(
            f"--max-model-len is {max_model_len}; the model was made for {own} positions",
            param="max_model_len",
        )
    max_num_seqs = config.max_num_seqs or (64 if is_cpu else 256)
    chunk = config.chunked_prefill_size or (512 if is_cpu else 8192)
    dtype = next(model.parameters()).dtype
    geometry = _geometry(config, model_config, dtype)
    free = available_bytes(device, config.gpu_memory_utilization)
    num_pages = choose_num_pages(
        geometry,
        max_total_tokens=config.max_total_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available_bytes=max(0, free - reserved_bytes),
    )
    return Settings(
        folder=folder,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        chunked_prefill_size=chunk,
        num_pages=num_pages,
        vocab_size=_real_vocab_size(config, model_config, folder),
        is_overlapped=not is_cpu
        if config.overlap_schedule == "auto"
        else config.overlap_schedule == "on",
        buckets=token_buckets(chunk),
    )


def _geometry(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> CacheGeometry:
    return CacheGeometry(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.block_size,
        dtype=dtype,
    )


def _real_vocab_size(config: EngineConfig, model_config: ModelConfig, folder: Path) -> int:
    """Ids the tokenizer knows; the model's own count where a folder has no tokenizer."""
    source = Path(config.tokenizer) if config.tokenizer else folder
    if not os.path.exists(source / "tokenizer.json"):
        return model_config.vocab_size
    known = Tokenizer.from_folder(source, trust_remote_code=config.trust_remote_code).vocab_size
    return min(known, model_config.vocab_size)


def _warm_up(executor: StepExecutor, progress: BuildProgress) -> None:
    shape = executor.shape
    inbox, _ = InboxBuilder(shape).take()
    param_inbox = build_param_inbox(shape, [])
    executor.warm_up(
        inbox, param_inbox, lambda label, done, total: progress("compiling", label, done, total)
    )
