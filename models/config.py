"""Shape and constants of one model, read from a model folder's `config.json`.

Owns the frozen `ModelConfig`, and refuses by name whatever our model files would compute wrongly.
Does not own weights (`weights.py`), nor which class runs an architecture (`models/__init__.py`).
Reads plain JSON, in the spelling of transformers 4 and of transformers 5; imports neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint_header import first_dtype
from compiled_engine.models.quant_config import read_quantization
from compiled_engine.models.quant_plan import HEAD, QuantPlan

ModelDtype = Literal["bfloat16", "float16", "float32"]

# Architecture -> `model_type`: the ones that have a model file here.
SUPPORTED_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

_DTYPES: dict[str, ModelDtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}

# Fields that change what a layer computes and that no supported architecture has: any value but
# the listed neutral ones is refused.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "attention_chunk_size": (None, 0),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": (None, 1),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was trained for.

    Attributes:
        rope_type: "linear" divides all frequencies by `factor`; "llama3" divides the low ones only.
        factor: at least 1.
        low_freq_factor: llama3: wavelengths above `original / low_freq_factor` are stretched fully.
        high_freq_factor: llama3: wavelengths below `original / high_freq_factor` are kept.
        original_max_position_embeddings: llama3: trained length, tokens.
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder-only model is made of; field names follow Hugging Face where they are short.

    Attributes:
        architecture: class name as in `config.json`, a key of `SUPPORTED_ARCHITECTURES`.
        num_layers: decoder layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        head_dim: width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        vocab_size: rows of the embedding, padding included.
        max_position_embeddings: longest sequence the model was made for, tokens.
        rope_scaling: None for plain rotary embeddings.
        attention_bias: q, k, v and o projections have a bias.
        mlp_bias: gate, up and down projections have a bias.
        hidden_act: always "silu".
        dtype: the model's own dtype, which `--dtype auto` takes.
        eos_token_ids: ids that end an answer, from generation_config.json where it says so.
        bos_token_id: None where the model has none.
        quantization: which linear layers are quantised, and how; None: none.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dtype: ModelDtype = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: QuantPlan | None = None

    @property
    def has_own_head(self) -> bool:
        """Whether the output projection is a matrix of its own: not tied, or quantised."""
        if not self.tie_word_embeddings:
            return True
        scheme = self.quantization.scheme(HEAD) if self.quantization else None
        return scheme is not None and scheme.layout == "plain"

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_heads}, no multiple of num_key_value_heads = "
                f"{self.num_kv_heads}",
                param="num_key_value_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}; rotary embeddings need an even one",
                param="head_dim",
            )
        if self.hidden_act != "silu":
            raise ConfigError(
                f'hidden_act is "{self.hidden_act}"; only "silu" is supported', param="hidden_act"
            )


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` where there is one.

    Raises:
        ConfigError: a file is missing or malformed, or a field asks for something the models here
            do not compute; the message names the field and what is allowed.
    """
    fields = _Fields(read_json(folder / "config.json"), folder / "config.json")
    architecture = _architecture(fields)
    family = SUPPORTED_ARCHITECTURES[architecture]
    _refuse_unsupported(fields, family)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    # The defaults are those of the family's own config class: older files leave fields out.
    default_head_dim = 128 if family == "qwen3" else hidden_size // max(num_heads, 1)
    default_positions = 32768 if family == "qwen3" else 2048
    rope_theta, rope_scaling = _rope(fields)
    generation_path = folder / "generation_config.json"
    generation = _Fields(
        read_json(generation_path) if generation_path.exists() else {}, generation_path
    )
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", default_head_dim),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", default_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        hidden_act=str(fields.values.get("hidden_act") or "silu"),
        dtype=_dtype(fields, folder),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        bos_token_id=next(
            iter(fields.token_ids("bos_token_id") or generation.token_ids("bos_token_id")), None
        ),
        quantization=read_quantization(fields.values, folder),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: a model folder needs a {path.name}", param="model"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", param="model")
    return value


class _Fields:
    """Typed look-ups in one JSON object, with errors that name the file and the field."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def refuse(self, field: str, reason: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {field} {reason}", param=field)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None:
            if default is None:
                self.refuse(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(field, f"is {value!r}; it must be a whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.values.get(field)
        if value is None:
            if default is None:
                self.refuse(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(field, f"is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.values.get(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(field, f"is {value!r}; it must be true or false")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        value = self.values.get(field)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int):
                self.refuse(field, f"is {value!r}; it must be a token id or a list of them")
        return tuple(listed)


def _architecture(fields: _Fields) -> str:
    listed = fields.values.get("architectures")
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    if listed is None:
        by_type = {model_type: name for name, model_type in SUPPORTED_ARCHITECTURES.items()}
        listed = [by_type.get(str(fields.values.get("model_type")), "")]
    if not isinstance(listed, list) or len(listed) != 1 or listed[0] not in SUPPORTED_ARCHITECTURES:
        given = fields.values.get("architectures") or [fields.values.get("model_type")]
        fields.refuse("architectures", f"is {given}; supported are {supported}")
    return str(listed[0])


def _refuse_unsupported(fields: _Fields, family: str) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        value = fields.values.get(field)
        if value not in neutral:
            fields.refuse(field, f"is {value!r}; no supported model file computes it")
    # Qwen configs carry a window size that only `use_sliding_window: true` switches on.
    window = fields.values.get("sliding_window")
    if window is not None and fields.values.get("use_sliding_window", family != "qwen3"):
        fields.refuse("sliding_window", f"is {window}; only full attention is supported")
    layer_types = set(fields.values.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        fields.refuse("layer_types", f"holds {sorted(layer_types)}; only full_attention is there")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """`rope_theta` and the scaling from `rope_parameters` (new) or `rope_scaling` (old)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    raw = fields.values.get(name) or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        fields.refuse(name, f"is {raw!r}; one set of rotary parameters for all layers is supported")
    rope = _Fields(raw, fields.path)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if raw.get("partial_rotary_factor", 1) not in (None, 1):
        fields.refuse("partial_rotary_factor", f"is {raw['partial_rotary_factor']}; only 1 works")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling(rope_type="linear", factor=rope.number("factor"))
    if rope_type == "llama3":
        scaling = RopeScaling(
            rope_type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            fields.refuse(
                f"{name}.high_freq_factor",
                f"is {scaling.high_freq_factor}; it must be above low_freq_factor = "
                f"{scaling.low_freq_factor}",
            )
        return theta, scaling
    fields.refuse(
        f"{name}.rope_type", f'is "{rope_type}"; supported are "default", "linear", "llama3"'
    )


def _dtype(fields: _Fields, folder: Path) -> ModelDtype:
    field = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(field)
    if value is None:
        value = first_dtype(folder) or "bfloat16"
    if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
        fields.refuse(field, f"is {value!r}; supported are bfloat16, float16, float32")
    return _DTYPES[value.removeprefix("torch.")]
