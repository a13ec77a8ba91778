"""Shape and constants of one model, read from a model folder's `config.json`.

Owns the frozen `ModelConfig`, and refuses by name whatever our model files would compute wrongly.
Does not own weights (`weights.py`), nor which class runs an architecture (`models/__init__.py`).
Reads plain JSON, in the spelling of transformers 4 and of transformers 5; imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint_header import first_dtype
from compiled_engine.models.config_fields import Fields, read_json
from compiled_engine.models.moe_config import (
    MoEConfig,
    read_moe,
    read_windows,
)
from compiled_engine.models.quant_config import read_quantization
from compiled_engine.models.quant_plan import HEAD, QuantPlan
from compiled_engine.models.rope_config import RopeScaling, read_rope

ModelDtype = Literal["bfloat16", "float16", "float32"]
# Who computes a model: "auto" takes a model file of ours where there is one, else transformers'
# own code.
ModelImpl = Literal["auto", "native", "transformers"]

# Architecture -> `model_type`: the ones that have a model file here.
SUPPORTED_ARCHITECTURES = {
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

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
class _Defaults:
    """Those of a family's own config class: older files leave fields out. None: as Llama's."""

    head_dim: int | None = None
    num_kv_heads: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: dict[str, Any] | None = None
    attention_bias: bool = False


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "qwen3": _Defaults(head_dim=128, max_position_embeddings=32768),
    "qwen3_moe": _Defaults(num_kv_heads=4, max_position_embeddings=32768),
    "mixtral": _Defaults(
        num_kv_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6
    ),
    "gpt_oss": _Defaults(
        head_dim=64,
        num_kv_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope=_GPT_OSS_ROPE,
        attention_bias=True,
    ),
}


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
        windows: tokens each layer's attention looks back on, itself included, 0 for all; empty
            where all layers look at all.
        moe: the mixtures of experts; None where every layer has an ordinary MLP.
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
    windows: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    quantization: QuantPlan | None = None

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

    @property
    def has_own_head(self) -> bool:
        """Whether the output projection is a matrix of its own: not tied, or quantised."""
        if not self.tie_word_embeddings:
            return True
        scheme = self.quantization.scheme(HEAD) if self.quantization else None
        return scheme is not None and scheme.layout == "plain"

    def window(self, layer: int) -> int:
        """Tokens the layer's attention looks back on, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0


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


def load_model_config(
    folder: Path, impl: ModelImpl = "auto", *, trust_remote_code: bool = False
) -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` where there is one.

    Args:
        folder: of the model.
        impl: who computes it; see `ModelImpl`.
        trust_remote_code: let transformers run model code in the folder.

    Returns:
        An `HfModelConfig` where transformers' own code computes the model.

    Raises:
        ConfigError: a file is missing or malformed, or a field asks for something the models here
            do not compute; the message names the field and what is allowed.
    """
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    if impl == "transformers" or (impl == "auto" and _native_architecture(fields) is None):
        return _load_foreign(fields, folder, trust_remote_code=trust_remote_code)
    architecture = _architecture(fields)
    family = SUPPORTED_ARCHITECTURES[architecture]
    _refuse_unsupported(fields, family)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    defaults = _DEFAULTS.get(family, _Defaults())
    num_layers = fields.integer("num_hidden_layers")
    rope_theta, rope_scaling = read_rope(
        fields, default_theta=defaults.rope_theta, default=defaults.rope
    )
    generation = _generation_fields(folder)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults.num_kv_heads or num_heads),
        head_dim=fields.integer("head_dim", defaults.head_dim or hidden_size // max(num_heads, 1)),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer(
            "max_position_embeddings", defaults.max_position_embeddings
        ),
        rms_norm_eps=fields.number("rms_norm_eps", defaults.rms_norm_eps),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias", default=defaults.attention_bias),
        mlp_bias=fields.flag("mlp_bias"),
        hidden_act=str(fields.values.get("hidden_act") or "silu"),
        dtype=_dtype(fields, folder),
        eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
        bos_token_id=next(
            iter(fields.integers("bos_token_id") or generation.integers("bos_token_id")), None
        ),
        windows=read_windows(fields, family, num_layers),
        moe=read_moe(fields, family, num_layers),
        quantization=read_quantization(fields.values, folder, family),
    )


def _generation_fields(folder: Path) -> Fields:
    path = folder / "generation_config.json"
    return Fields(read_json(path) if path.exists() else {}, path)


def _load_foreign(fields: Fields, folder: Path, *, trust_remote_code: bool) -> ModelConfig:
    """The config of a model that transformers' code computes."""
    from compiled_engine.models.hf_config import load_hf_config

    generation = _generation_fields(folder)
    starts = fields.integers("bos_token_id") or generation.integers("bos_token_id")
    return load_hf_config(
        folder,
        dtype=_dtype(fields, folder),
        eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
        bos_token_id=next(iter(starts), None),
        trust_remote_code=trust_remote_code,
    )


def _native_architecture(fields: Fields) -> str | None:
    """The architecture, if it has a model file here."""
    listed = fields.values.get("architectures")
    if listed is None:
        by_type = {model_type: name for name, model_type in SUPPORTED_ARCHITECTURES.items()}
        listed = [by_type.get(str(fields.values.get("model_type")), "")]
    is_known = isinstance(listed, list) and len(listed) == 1
    return str(listed[0]) if is_known and listed[0] in SUPPORTED_ARCHITECTURES else None


def _architecture(fields: Fields) -> str:
    supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
    name = _native_architecture(fields)
    if name is None:
        given = fields.values.get("architectures") or [fields.values.get("model_type")]
        fields.refuse("architectures", f"is {given}; supported are {supported}")
    return name


def _refuse_unsupported(fields: Fields, family: str) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        value = fields.values.get(field)
        if value not in neutral:
            hint = "" if "config" in field else "; --model-impl transformers may"
            fields.refuse(field, f"is {value!r}; no supported model file computes it{hint}")


def _dtype(fields: Fields, folder: Path) -> ModelDtype:
    field = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(field)
    if value is None:
        value = first_dtype(folder) or "bfloat16"
    if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
        fields.refuse(field, f"is {value!r}; supported are bfloat16, float16, float32")
    return _DTYPES[value.removeprefix("torch.")]
