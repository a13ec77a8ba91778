"""The start key of an engine: which setting enters it where, and which do not.

Every field of `EngineConfig` is in one of two tables. What matters enters as it was settled, not as
it was given, so that a default and the same value spelled out are the same start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.fingerprint import fixed_parts, source_files, version_parts
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.torch_compat import changed_options
from compiled_engine.config import EngineConfig
from compiled_engine.models import HfModelConfig, ModelConfig
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.settings import Settings, cache_geometry

# Field of `EngineConfig` -> the part, or the group of parts, that it enters.
RELEVANT_FIELDS = {
    "model": "model",
    "model_impl": "model.implementation",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "quantize_lm_head": "model.quantization",
    "device": "device",
    "max_model_len": "shape.max_model_len",
    "max_num_seqs": "shape.max_rows",
    "chunked_prefill_size": "shape.max_tokens",
    "block_size": "shape.page_size",
    "kv_cache_dtype": "shape.kv_cache_dtype",
    "max_total_tokens": "shape.num_pages",  # with the scheduler in torch alone
    "enable_prefix_caching": "shape.prefix_caching",
    "scheduler": "flags.scheduler",
    "disable_passes": "flags.disabled_passes",
    "enable_passes": "flags.disabled_passes",
    "inductor_pdl": "flags.inductor",
    "kernels": "flags.kernels",
    "kernel_objective": "flags.kernel_objective",
    "kernel_config": "flags.kernels",
    "num_threads": "device.threads",  # on a CPU
}
# Field -> why compiled code does not depend on it.
IRRELEVANT_FIELDS = {
    "tokenizer": "text is the host's; how many ids there are is shape.vocab_size",
    "load_format": "where weights come from, not what they are",
    "gpu_memory_utilization": "sizes the KV pool of a GPU, whose pages are counted when code runs",
    "jump_forward": "a choice of the host's between steps",
    "enforce_eager": "nothing is compiled then",
    "overlap_schedule": "when the host launches a step",
    "cudagraph_mode": "graphs are captured at every start, of the same code",
    "check_graphs": "compares addresses before a replay",
    "device_loop": "a graph around captured steps",
    "max_step_ms": "how long a chunk the host asks for",
    "dump_graphs": "caches are neither read nor written then",
    "config_file": "its values enter one by one",
    "seed": "a number that code is given",
    "trust_remote_code": "the code itself is hashed",
    "allow_pickle": "which weight files may be read",
    "cache_dir": "where the code is kept",
    "compile_jobs": "who compiles it",
    "compile_mode": "when it is compiled",
}
# Of a scheduler's shape: what follows from the number of pages.
_OF_PAGES = frozenset({"num_pages", "index_buckets"})
# Of a model's config: names, and numbers that only the host looks at.
_NOT_COMPILED = frozenset({"eos_token_ids", "bos_token_id", "folder", "trust_remote_code"})
_NOT_COMPILED_JSON = frozenset({"_name_or_path", "transformers_version", "eos_token_id"})


def keeps_pieces(config: EngineConfig) -> bool:
    """Whether an engine's compiled pieces are kept for later starts."""
    return not config.enforce_eager and config.dump_graphs is None


def start_key(
    config: EngineConfig,
    settings: Settings,
    shape: SchedulerShape,
    model_config: ModelConfig,
    driver: CompileDriver,
) -> StartKey:
    """Everything that the compiled code of such an engine depends on.

    Args:
        config: of the engine.
        settings: `config` resolved.
        shape: of the scheduler.
        model_config: as the model was built from it.
        driver: its passes, kernels and options.
    """
    return StartKey(
        {
            **fixed_parts(settings.device),
            **model_parts(model_config),
            "model.dtype": str(settings.dtype).removeprefix("torch."),
            **shape_parts(config, settings, shape, model_config),
            **driver_parts(driver),
            "flags.scheduler": settings.scheduler,
        }
    )


def model_parts(config: ModelConfig) -> dict[str, str]:
    """A model as its builder sees it; neither its path nor its name."""
    fields = {n: v for n, v in asdict(config).items() if n not in _NOT_COMPILED}
    if fields["quantization"] is not None:
        fields["quantization"].pop("note")
    parts = _flat("model", fields)
    if not isinstance(config, HfModelConfig):
        return parts | {"model.implementation": "native"}
    parts |= {"model.implementation": "transformers", **version_parts(("transformers",))}
    raw = json.loads((config.folder / "config.json").read_text(encoding="utf-8"))
    raw = {name: value for name, value in raw.items() if name not in _NOT_COMPILED_JSON}
    parts["model.config_json"] = _hash(json.dumps(raw, sort_keys=True).encode())
    if config.trust_remote_code:
        for path in source_files(config.folder):
            name = path.relative_to(config.folder).as_posix()
            parts[f"source.remote/{name}"] = _hash(path.read_bytes())
    return parts


def shape_parts(
    config: EngineConfig, settings: Settings, shape: SchedulerShape, model_config: ModelConfig
) -> dict[str, str]:
    """Sizes of tensors and steps.

    How many KV pages there are follows from free memory on a GPU; code that is made there does not
    depend on it, unless the scheduler is compiled too.
    """
    sizes = asdict(shape)
    if settings.scheduler == "cuda":
        sizes = {name: value for name, value in sizes.items() if name not in _OF_PAGES}
    geometry = cache_geometry(config, model_config, settings.dtype)
    return _flat(
        "shape",
        {
            **sizes,
            "kv_cache_dtype": str(geometry.dtype).removeprefix("torch."),
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "buckets": settings.buckets,
        },
    )


def driver_parts(driver: CompileDriver) -> dict[str, str]:
    """Passes, kernels, and options of the compilers, those set from Python too."""
    overrides, objective, plugins, generation = driver.registry.fingerprint
    return {
        "flags.disabled_passes": _words(sorted(driver.disabled_passes)),
        "flags.kept_ops": _words(sorted(driver.kept_ops)),
        "flags.kernels": str(overrides),
        "flags.kernel_objective": str(objective),
        "flags.kernel_plugins": str(plugins),
        "flags.kernel_measurements": str(generation),
        "flags.inductor": str(sorted(driver.options.items())),
        **{f"compilers.{name}": value for name, value in changed_options().items()},
    }


def _flat(prefix: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """Dotted names for the values of nested dicts."""
    found: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}.{name}", value)
        else:
            found[f"{prefix}.{name}"] = str(value)
    return found


def _words(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
