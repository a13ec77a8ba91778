"""Which values are compared, and the config of an engine that can be held to all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiled_engine.config import EngineConfig
from compiled_engine.settings import Settings
from compiled_engine.tune.workloads import Workload

CHUNK, LIMIT, ROWS, KERNELS = (
    "chunked_prefill_size",
    "max_step_ms",
    "max_num_seqs",
    "kernel_objective",
)
LIMITS_MS = (50.0, 20.0, 10.0)
SMALLEST_CHUNK = 16
# Of the KV pages an engine would have: room for two engines over one model, and their graphs.
POOL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Values by setting, each time the default first; none where there is nothing to compare.

    Attributes:
        chunks: of `chunked_prefill_size`.
        limits_ms: of `max_step_ms`; None is no limit.
        rows: of `max_num_seqs`.
        objectives: of `kernel_objective`.
        reasons: why a setting has no candidates.
    """

    chunks: tuple[int, ...]
    limits_ms: tuple[float | None, ...]
    rows: tuple[int, ...]
    objectives: tuple[str, ...]
    reasons: dict[str, str]


def candidates(config: EngineConfig, settings: Settings, workload: Workload) -> Candidates:
    """What to compare for a model and a device.

    Args:
        config: as given; what it gives is not compared.
        settings: `config` resolved.
        workload: that counts.
    """
    reasons: dict[str, str] = {}
    chunk, rows = settings.chunked_prefill_size, settings.max_num_seqs
    goes_up = workload.name == "throughput"
    shares = (2, 4, 8) if workload.counts_latency else (2, 4)
    chunks = [chunk, *(chunk // n for n in shares), *([2 * chunk] if goes_up else [])]
    # A step must hold a token of every row that decodes.
    most_rows = 2 * rows if goes_up else rows
    chunks = [n for n in chunks if n == chunk or n >= max(SMALLEST_CHUNK, most_rows)]
    crowd = [rows, rows // 2, rows // 4, *([2 * rows] if goes_up else [])]
    limits: tuple[float | None, ...] = (None, *LIMITS_MS)
    objectives = ("latency", "autotune")
    if workload.crowd is None:
        reasons[ROWS] = f"{workload.name} has few requests at once"
    if settings.device.type != "cuda":
        reasons[LIMIT] = "GPU only"
    elif config.compile_mode != "first":
        reasons[LIMIT] = f"it cannot go with --compile-mode {config.compile_mode}"
    if config.enforce_eager:
        reasons[KERNELS] = "--enforce-eager compiles nothing"
    for name, is_given in (
        (CHUNK, config.chunked_prefill_size is not None),
        (LIMIT, config.max_step_ms is not None),
        (ROWS, config.max_num_seqs is not None),
        (
            KERNELS,
            bool(config.kernel_objective or config.kernels or config.kernel_config is not None),
        ),
    ):
        if is_given:
            reasons[name] = "given"
    return Candidates(
        chunks=() if CHUNK in reasons else tuple(dict.fromkeys(chunks)),
        limits_ms=() if LIMIT in reasons else limits,
        rows=() if ROWS in reasons else tuple(dict.fromkeys(n for n in crowd if n)),
        objectives=() if KERNELS in reasons else objectives,
        reasons=reasons,
    )


def bench_config(
    config: EngineConfig, settings: Settings, found: Candidates, workload: Workload
) -> EngineConfig:
    """The config of the engine that is measured: as large as the largest candidates.

    On a GPU its KV pool holds what the jobs need, so that a second engine fits beside it.
    """
    changes: dict[str, int | float] = {}
    if max(found.chunks, default=0) > settings.chunked_prefill_size:
        changes[CHUNK] = max(found.chunks)
    if max(found.rows, default=0) > settings.max_num_seqs:
        changes[ROWS] = max(found.rows)
    if found.limits_ms:
        changes[LIMIT] = LIMITS_MS[0]
    if settings.device.type == "cuda" and config.max_total_tokens is None:
        jobs = [workload.main, *([workload.crowd] if workload.crowd else [])]
        wanted = max(
            min(job.at_once, max(settings.max_num_seqs, *found.rows, 0))
            * (min(job.longest, settings.max_model_len) + config.block_size)
            for job in jobs
        )
        pool = int((settings.num_pages - 1) * config.block_size * POOL_SHARE)
        changes["max_total_tokens"] = max(config.block_size, min(wanted, pool))
    return replace(config, **changes)  # type: ignore[arg-type]
