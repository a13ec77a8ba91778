"""Models that have no file here: read through transformers' own config classes.

Owns what can be refused from the config alone; the rest shows when the model is looked at
(`hf_plan`). Imports transformers, which takes seconds, inside functions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compiled_engine.errors import ConfigError
from compiled_engine.models.config import SUPPORTED_ARCHITECTURES, ModelConfig, ModelDtype
from compiled_engine.models.config_fields import read_json

# Kinds of layers that keep no more than keys and values, all of them or those in a window.
_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# Rotary frequencies that follow the longest row of a batch: rows would change each other's answers.
_BATCH_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, kw_only=True)
class HfModelConfig(ModelConfig):
    """A model that transformers' code computes.

    Of the fields of `ModelConfig`, the engine reads the sizes, the dtype and the ids; what the
    layers compute with, transformers reads from the folder itself.

    Attributes:
        folder: holds config.json.
        trust_remote_code: run the model code in the folder.
    """

    folder: Path
    trust_remote_code: bool = False


def load_hf_config(
    folder: Path,
    *,
    dtype: ModelDtype,
    eos_token_ids: tuple[int, ...],
    bos_token_id: int | None,
    trust_remote_code: bool,
) -> HfModelConfig:
    """The config of a model that has no file here.

    Raises:
        ConfigError: transformers does not know the model, or it is of a kind that is not served.
    """
    config = transformers_config(folder, trust_remote_code=trust_remote_code)
    architecture = _check_architecture(folder, config)
    _check_kind(folder, config)
    hidden_size = int(config.hidden_size)
    num_heads = int(config.num_attention_heads)
    return HfModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=max(1, _integer(config, "intermediate_size", 1)),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=_integer(config, "head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=int(config.vocab_size),
        max_position_embeddings=_positions(folder, config),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_theta=10000.0,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        folder=folder,
        trust_remote_code=trust_remote_code,
    )


def transformers_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """transformers' own config object.

    Raises:
        ConfigError: it does not know the model, or its code is in the folder and not trusted.
    """
    import transformers
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    if raw.get("auto_map") and not trust_remote_code and _is_unknown(str(raw.get("model_type"))):
        _refuse(
            folder,
            "model_type",
            f"is {raw.get('model_type')!r}, whose code is in the folder: "
            "pass --trust-remote-code if you trust it",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # its checks differ by version and by model
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it, "
            f"and there is no model file here for {raw.get('architectures')}: {text}",
            param="architectures",
        ) from error


def _is_unknown(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type not in CONFIG_MAPPING_NAMES


def _check_architecture(folder: Path, config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = list(getattr(config, "architectures", None) or [])
    name = str(listed[0]) if len(listed) == 1 else ""
    if getattr(config, "is_encoder_decoder", False):
        _refuse(folder, "architectures", f"is {listed}: encoders are not served")
    if config.get_text_config(decoder=True) is not config:
        _refuse(folder, "architectures", f"is {listed}: only models of text alone are served")
    remote = getattr(config, "auto_map", None) or {}
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if "AutoModelForCausalLM" in remote or (known is not None and (not listed or known == name)):
        return name or str(known)
    _refuse(
        folder,
        "architectures",
        f"is {listed}: neither a model with a file here "
        f"({', '.join(sorted(SUPPORTED_ARCHITECTURES))}) nor a causal language model of "
        "transformers",
    )


def _check_kind(folder: Path, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        _refuse(folder, "quantization_config", "is given: transformers' code is served unquantised")
    layer_types = getattr(config, "layer_types", None)
    unknown = sorted(set(layer_types or ()) - _SERVED_LAYERS)
    if unknown:
        _refuse(
            folder,
            "layer_types",
            f"holds {unknown}: only attention over all keys or a window of them is served",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        rope_type = parameters.get("rope_type", "default")
        if rope_type in _BATCH_ROPE:
            _refuse(
                folder,
                "rope_parameters.rope_type",
                f'is "{rope_type}": its frequencies follow the longest row of a batch',
            )


def _positions(folder: Path, config: Any) -> int:
    value = getattr(config, "max_position_embeddings", None)
    if not isinstance(value, int):
        _refuse(folder, "max_position_embeddings", "is missing: nothing says how long rows may be")
    return value


def _integer(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return default if value is None else int(value)


def _refuse(folder: Path, field: str, reason: str) -> NoReturn:
    raise ConfigError(f"{folder / 'config.json'}: {field} {reason}", param=field)
