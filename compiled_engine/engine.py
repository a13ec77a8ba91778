"""Builds an engine from a config: model, memory, scheduler, compiled pieces, loop.

Used by the engine process and by `LLM`. Reports what it does through `progress`; owns no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import DEFAULT_MODEL, EngineConfig
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
from compiled_engine.tokenizer import Tokenizer, has_tokenizer

# (phase, label, done, total); phase is "loading" or "compiling"
BuildProgress = Callable[[str, str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The config's open values, resolved for a model and a device.

    Attributes:
        folder: the model's folder.
        tokenizer_folder: the tokenizer's; the same one unless the config names another.
        device, dtype: where and in what the model runs.
        max_model_len, max_num_seqs, chunked_prefill_size: as in `EngineConfig`, never None.
        num_pages: KV pages, the null page included.
        vocab_size: real token ids.
        eos_token_ids: end an answer; the model's own, then the tokenizer's.
        is_overlapped: which loop runs; see `loop`.
        buckets: token counts of a step.
    """

    folder: Path
    tokenizer_folder: Path
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    chunked_prefill_size: int
    num_pages: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
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
    folder = find_model(config, progress)
    model_config = load_model_config(folder)
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
        eos_token_ids=settings.eos_token_ids,
        seed=config.seed,
        is_overlapped=settings.is_overlapped,
    )
    return Engine(settings, driver, loop)


def find_model(config: EngineConfig, progress: BuildProgress) -> Path:
    """The folder of `config.model`, downloaded or converted first if it must be. Blocks.

    Raises:
        ConfigError: it cannot be had, or its weights are not in the format that is asked for.
    """
    is_gguf = config.model.lower() == DEFAULT_MODEL or config.model.lower().endswith(".gguf")
    if config.load_format == "gguf" and not is_gguf:
        raise ConfigError(
            f"--load-format is gguf, but {config.model} is no .gguf file", param="load_format"
        )
    if config.load_format == "safetensors" and is_gguf:
        raise ConfigError(
            f"--load-format is safetensors, but {config.model} is a GGUF model", param="load_format"
        )
    return resolve_model(
        config.model,
        config.cache_dir,
        with_weights=config.load_format != "dummy",
        allow_pickle=_allows_pickle(config),
        progress=lambda done, total, label: progress("loading", label, done, total),
    )


def _allows_pickle(config: EngineConfig) -> bool:
    return config.allow_pickle and config.load_format != "safetensors"


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
        allow_pickle=_allows_pickle(config),
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
    free = available_bytes(
        device,
        config.gpu_memory_utilization,
        is_size_given=config.max_total_tokens is not None,
    )
    num_pages = choose_num_pages(
        geometry,
        max_total_tokens=config.max_total_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available_bytes=max(0, free - reserved_bytes),
    )
    tokenizer_folder = folder
    if config.tokenizer is not None:
        tokenizer_folder = resolve_model(config.tokenizer, config.cache_dir, with_weights=False)
    vocab_size, eos_token_ids = _vocabulary(config, model_config, tokenizer_folder)
    return Settings(
        folder=folder,
        tokenizer_folder=tokenizer_folder,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        chunked_prefill_size=chunk,
        num_pages=num_pages,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
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


def _vocabulary(
    config: EngineConfig, model_config: ModelConfig, folder: Path
) -> tuple[int, tuple[int, ...]]:
    """Ids the tokenizer in `folder` knows, and those of them that end an answer.

    The model's own count and ids alone where the folder has no tokenizer.
    """
    vocab_size, ends = model_config.vocab_size, model_config.eos_token_ids
    if has_tokenizer(folder):
        tokenizer = Tokenizer.from_folder(folder, trust_remote_code=config.trust_remote_code)
        vocab_size = min(tokenizer.vocab_size, vocab_size)
        ends = tuple(dict.fromkeys((*ends, *tokenizer.eos_token_ids)))
    # Ids beyond the vocabulary are never chosen, so they end nothing.
    ends = tuple(token_id for token_id in ends if 0 <= token_id < vocab_size)
    if len(ends) > MAX_EOS_TOKEN_IDS:
        raise ConfigError(
            f"{folder}: {len(ends)} end-of-sequence ids; at most {MAX_EOS_TOKEN_IDS} are supported",
            param="eos_token_id",
        )
    return vocab_size, ends


def _warm_up(executor: StepExecutor, progress: BuildProgress) -> None:
    shape = executor.shape
    inbox, _ = InboxBuilder(shape).take()
    param_inbox = build_param_inbox(shape, [])
    executor.warm_up(
        inbox, param_inbox, lambda label, done, total: progress("compiling", label, done, total)
    )
