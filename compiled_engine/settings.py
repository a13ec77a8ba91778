"""The config's open values, settled for a model and a device, without loading weights.

Owns the defaults that depend on both: lengths, rows, pages, token buckets, the vocabulary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compiled_engine.config import DEFAULT_MODEL, EngineConfig, SchedulerKernels
from compiled_engine.custom_ops.quant_fp4 import FP4_ARCH
from compiled_engine.custom_ops.registry import Target
from compiled_engine.device import pick_device
from compiled_engine.errors import ConfigError
from compiled_engine.kv_cache import (
    CacheGeometry,
    available_bytes,
    choose_num_pages,
    memory_sums,
)
from compiled_engine.models import CausalLM, HfModelConfig, ModelConfig, model_class
from compiled_engine.models.config import load_model_config
from compiled_engine.models.quant_plan import (
    online_plan,
    with_quantized_head,
    without_fp4_activations,
)
from compiled_engine.models.source import resolve_model
from compiled_engine.models.weights import outline_model
from compiled_engine.plain_attention import check_attention
from compiled_engine.sampler import MAX_EOS_TOKEN_IDS
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.tokenizer import Tokenizer, has_tokenizer

# A pool's pages where code is made that does not depend on them: equal to no other size by chance,
# since a compiler that compares two equal sizes takes them for one.
ANY_PAGES = 251
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
        scheduler: "torch" or "cuda", as in `EngineConfig`.
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
    scheduler: SchedulerKernels


def check_options(config: EngineConfig, device: torch.device) -> None:
    """Refuses options that contradict each other or mean nothing on the device.

    Raises:
        ConfigError: names the first of them.
    """
    for name in ("kernels", "kernel_objective", "kernel_config"):
        if getattr(config, name) and config.enforce_eager:
            flag = "--kernel" if name == "kernels" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} chooses for compiled pieces and --enforce-eager compiles none: leave one "
                "of them out",
                param=name,
            )
    if config.compile_mode == "eager-first":
        for flag, is_given, reason in (
            ("enforce_eager", config.enforce_eager, "compiles nothing"),
            ("dump_graphs", config.dump_graphs is not None, "keeps nothing that is compiled"),
            ("device_loop", config.device_loop, "needs captured steps from the start"),
            ("max_step_ms", config.max_step_ms is not None, "measures compiled steps at the start"),
        ):
            if is_given:
                raise ConfigError(
                    f"--compile-mode eager-first cannot go with --{flag.replace('_', '-')}, which "
                    f"{reason}: leave one of them out",
                    param="compile_mode",
                )
    if config.device_loop and config.cudagraph_mode != "full":
        raise ConfigError(
            f"--device-loop repeats whole graphs; --cudagraph-mode is {config.cudagraph_mode}",
            param="device_loop",
        )
    if config.device_loop and config.scheduler == "torch":
        raise ConfigError(
            "--device-loop needs the scheduler's CUDA kernels; --scheduler is torch",
            param="device_loop",
        )
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if config.inductor_pdl and major < 9:
            raise ConfigError(
                f"--inductor-pdl needs compute capability 9.0; this GPU has {major}.{minor}",
                param="inductor_pdl",
            )
        return
    for name, value, plain in (
        ("max_step_ms", config.max_step_ms, (None,)),
        ("inductor_pdl", config.inductor_pdl, (False,)),
        ("kv_cache_dtype", config.kv_cache_dtype, ("auto",)),
        ("device_loop", config.device_loop, (False,)),
        ("scheduler", config.scheduler, ("auto", "torch")),
        ("cudagraph_mode", config.cudagraph_mode, ("full", "none")),
        ("check_graphs", config.check_graphs, (False,)),
    ):
        if value not in plain:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value} needs a GPU; this is a CPU", param=name)


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
        allow_pickle=allows_pickle(config),
        progress=lambda done, total, label: progress("loading", label, done, total),
    )


def allows_pickle(config: EngineConfig) -> bool:
    """Whether `.bin` and `.pt` weights may be read."""
    return config.allow_pickle and config.load_format != "safetensors"


def model_config_of(config: EngineConfig, folder: Path, target: Target) -> ModelConfig:
    """The model's config, with the quantisation that the engine's options ask for.

    A checkpoint with 4-bit activations has them where `target` multiplies such.

    Raises:
        ConfigError: as `load_model_config`; or the options do not suit the checkpoint.
    """
    model_config = load_model_config(
        folder, config.model_impl, trust_remote_code=config.trust_remote_code
    )
    if isinstance(model_config, HfModelConfig):
        return _without_quantization(config, model_config)
    plan, dtype = model_config.quantization, model_config.dtype
    if plan is not None and (target.device_type != "cuda" or target.arch < FP4_ARCH):
        plan = without_fp4_activations(plan)
    if config.quantization != "auto":
        if plan is not None:
            raise ConfigError(
                f"--quantization is {config.quantization}, but the checkpoint is quantised "
                f"already ({plan.method}): leave it out",
                param="quantization",
            )
        plan = online_plan(config.quantization, dtype, quantizes_head=config.quantize_lm_head)
    elif config.quantize_lm_head:
        if plan is None:
            raise ConfigError(
                "--quantize-lm-head needs --quantization, or a quantised checkpoint",
                param="quantize_lm_head",
            )
        plan = with_quantized_head(plan, dtype)
    return replace(model_config, quantization=plan)


def _without_quantization(config: EngineConfig, model_config: HfModelConfig) -> HfModelConfig:
    """The config, if no option asks to quantise it."""
    for name, is_asked in (
        ("quantization", config.quantization != "auto"),
        ("quantize_lm_head", config.quantize_lm_head),
    ):
        if is_asked:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for models that have a file here; "
                f"{model_config.architecture} runs from transformers' own code: leave it out",
                param=name,
            )
    return model_config


def preview_settings(config: EngineConfig) -> Settings:
    """What `build_engine` would settle on, without loading weights.

    Raises:
        ConfigError: as `build_engine`.
    """
    return preview(config)[0]


def preview(config: EngineConfig, *, num_pages: int | None = None) -> tuple[Settings, ModelConfig]:
    """As `preview_settings`, with the config that the model would be built from.

    With `num_pages` nobody asks how much memory is free.
    """
    device = pick_device(config.device)
    folder = resolve_model(config.model, config.cache_dir, with_weights=False)
    model_config = model_config_of(config, folder, Target.of(device))
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    made = model_class(model_config)
    model = outline_model(made, model_config, dtype=getattr(torch, name))
    model_config = model.config
    # On a CPU the pool's share does not depend on the weights.
    reserved_bytes = weight_bytes(model) if device.type == "cuda" else 0
    settings = resolve(
        config,
        model_config,
        folder,
        device,
        model,
        reserved_bytes=reserved_bytes,
        num_pages=num_pages,
    )
    return settings, model_config


def weight_bytes(model: CausalLM) -> int:
    """Bytes of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def token_buckets(largest: int, *, fine_up_to: int | None = None) -> tuple[int, ...]:
    """Every count up to 8, then steps of at most 12.5 %, up to `largest`.

    Above `fine_up_to` the steps are twice as wide.
    """
    buckets = [1]
    while buckets[-1] < largest:
        is_coarse = fine_up_to is not None and buckets[-1] >= fine_up_to
        step = max(1, 1 << max(0, buckets[-1].bit_length() - (3 if is_coarse else 4)))
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
        num_candidates=min(settings.max_num_seqs, 4 if is_cpu else 64),
        max_releases=min(settings.max_num_seqs, 4 if is_cpu else 16),
        # A GPU's steps are long and large: prompts must arrive faster than they are computed.
        max_submits=16 if is_cpu else 64,
        max_pieces=16 if is_cpu else 256,
        max_masks=min(settings.max_num_seqs, 256),
        token_page_size=token_page,
        num_token_pages=settings.max_num_seqs * width,
        prefix_caching=config.enable_prefix_caching,
        vocab_size=settings.vocab_size,
    )


def resolve(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    device: torch.device,
    model: CausalLM,
    *,
    reserved_bytes: int = 0,
    num_pages: int | None = None,
) -> Settings:
    """Settings for a model; `reserved_bytes` are memory that is free now and will not be.

    The pool has `num_pages`, or what fits into the rest.
    """
    is_cpu = device.type == "cpu"
    max_model_len = _max_model_len(config, model_config)
    max_num_seqs = config.max_num_seqs or (64 if is_cpu else 256)
    chunk = config.chunked_prefill_size or (512 if is_cpu else 8192)
    dtype = next(model.parameters()).dtype
    if num_pages is None:
        num_pages = _fitting_pages(
            config,
            model_config,
            device,
            dtype,
            (max_model_len, max_num_seqs, chunk),
            reserved_bytes,
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
        is_overlapped={"auto": not is_cpu, "on": True, "off": False}[config.overlap_schedule],
        buckets=token_buckets(chunk, fine_up_to=None if is_cpu else max_num_seqs),
        scheduler=_scheduler(config, is_cpu=is_cpu),
    )


def _fitting_pages(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    reserved_bytes: int,
) -> int:
    """Pages that memory has room for; `sizes` are the longest row, the rows, tokens of a step."""
    max_model_len, max_num_seqs, chunk = sizes
    is_cpu = device.type == "cpu"
    geometry = cache_geometry(config, model_config, dtype)
    free = available_bytes(
        device,
        config.gpu_memory_utilization,
        is_size_given=config.max_total_tokens is not None,
    )
    if not is_cpu and not reserved_bytes:  # once, before the largest step is tried
        check_attention(
            Target.of(device),
            geometry,
            dtype,
            num_heads=model_config.num_heads,
            num_tokens=chunk,
            context=max_model_len,
            num_rows=max_num_seqs,
            free_bytes=free,
        )
    return choose_num_pages(
        geometry,
        max_total_tokens=config.max_total_tokens,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available_bytes=max(0, free - reserved_bytes),
        sums=memory_sums(device, config.gpu_memory_utilization, reserved_bytes),
    )


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    own = model_config.max_position_embeddings
    longest = config.max_model_len or own
    if longest > own:
        raise ConfigError(
            f"--max-model-len is {longest}; the model was made for {own} positions",
            param="max_model_len",
        )
    return longest


def _scheduler(config: EngineConfig, *, is_cpu: bool) -> SchedulerKernels:
    if config.scheduler != "auto":
        return config.scheduler
    return "torch" if is_cpu else "cuda"


def cache_geometry(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
) -> CacheGeometry:
    """What a token costs in the KV cache of a model whose weights have `dtype`."""
    if config.kv_cache_dtype == "fp8_e4m3":
        dtype = torch.float8_e4m3fn
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
        num_ids, own_ends = read_vocabulary(config, folder)
        vocab_size = min(num_ids, vocab_size)
        ends = tuple(dict.fromkeys((*ends, *own_ends)))
    # Ids beyond the vocabulary are never chosen, so they end nothing.
    ends = tuple(token_id for token_id in ends if 0 <= token_id < vocab_size)
    if len(ends) > MAX_EOS_TOKEN_IDS:
        raise ConfigError(
            f"{folder}: {len(ends)} end-of-sequence ids; at most {MAX_EOS_TOKEN_IDS} are supported",
            param="eos_token_id",
        )
    return vocab_size, ends


def read_vocabulary(config: EngineConfig, folder: Path) -> tuple[int, tuple[int, ...]]:
    """How many ids the tokenizer in `folder` knows, and which end an answer.

    A start asks several times, of files that take part of a second to read: the last answer is
    kept while the folder stays as it is.

    Raises:
        ConfigError: as `Tokenizer.from_folder`.
    """
    return _read_vocabulary(folder, tuple(sorted(_files(folder))), config.trust_remote_code)


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Name, time of change and size of each."""
    for entry in os.scandir(folder):
        with suppress(OSError):  # a link that leads nowhere
            found = entry.stat()
            yield entry.name, found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=1)
def _read_vocabulary(
    folder: Path, state: tuple[tuple[str, int, int], ...], trust_remote_code: bool
) -> tuple[int, tuple[int, ...]]:
    tokenizer = Tokenizer.from_folder(folder, trust_remote_code=trust_remote_code)
    return tokenizer.vocab_size, tokenizer.eos_token_ids
