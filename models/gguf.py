"""Converts a GGUF file, once, into an ordinary model folder in the cache.

Owns the translation of llama.cpp's tensor names, layouts and metadata into Hugging Face's, for the
architectures that have a model file here; the tokenizer's translation is in `gguf_tokenizer.py`.
Quantised weights are dequantised and stored in the smallest float format that holds their values
exactly, so that loading the folder in float32 gives the file's own numbers.

Source: the GGUF specification and llama.cpp's tensor naming; reading and block formats are the
`gguf` package's.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled_engine.errors import ConfigError
from compiled_engine.models import gguf_tokenizer
from compiled_engine.models.config import load_model_config
from compiled_engine.models.rope_config import RopeScaling
from compiled_engine.models.weights import ProgressCallback

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MAX_SHARD_BYTES = 2**31

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP_BIASES = ("ffn_gate", "ffn_up", "ffn_down")
# Frequency factors stand for llama3 RoPE scaling in llama.cpp's conversions of Llama 3.1 and later.
_ROPE_FACTORS = "rope_freqs.weight"
# The constants every published Llama 3 model uses beside its factor.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_TRAINED = 1.0, 4.0, 8192


def convert_gguf(
    path: Path,
    cache_dir: Path,
    *,
    with_weights: bool = True,
    progress: ProgressCallback | None = None,
) -> Path:
    """The model folder made from a GGUF file; converts if the cache has none yet.

    Safe to call from many processes at once: one converts, the others wait for it. Blocks.

    Args:
        path: the `.gguf` file.
        cache_dir: folders are kept in `<cache_dir>/models`, keyed by the file's path, size and
            time of change, and by this converter's source.
        with_weights: False makes do with a folder that has all but the weights, made in a moment.
        progress: called with file bytes converted so far.

    Raises:
        ConfigError: no readable GGUF, something in it that the models here do not compute, or a
            cache folder that cannot be written.
    """
    path = path.resolve()
    try:
        target = cache_dir / "models" / f"{path.stem}-{_cache_key(path)}"
        if target.exists():
            return target
        if not with_weights:
            target = target.with_name(f"{target.name}-config")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_name(f"{target.name}.lock")):
            if not target.exists():
                _convert_into(path, target, progress, with_weights=with_weights)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be converted into {cache_dir}: {error}; COMPILED_ENGINE_CACHE or "
            "--cache-dir names another cache folder",
            param="model",
        ) from error
    return target


def _convert_into(
    path: Path, target: Path, progress: ProgressCallback | None, *, with_weights: bool
) -> None:
    # The lock is ours, so whatever an interrupted converter left behind is nobody's.
    for left in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        file = _GgufFile(path)
        config = file.model_config()
        _write_json(folder / "config.json", config)
        load_model_config(folder)
        gguf_tokenizer.write_tokenizer(file.metadata, folder)
        _write_json(folder / "generation_config.json", _generation_config(file.metadata))
        if with_weights:
            _write_weights(file, config, folder, progress)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cache_key(path: Path) -> str:
    status = path.stat()
    key = hashlib.sha256(f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    for source in (__file__, gguf_tokenizer.__file__):
        key.update(Path(source).read_bytes())
    return key.hexdigest()[:16]


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the system drops it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _GgufFile:
    """A mapped GGUF file: metadata, and tensors in Hugging Face's names and layouts."""

    def __init__(self, path: Path) -> None:
        # Reading costs more than a second of imports, which a model folder does not need.
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no readable GGUF file: {error}", param="model") from error
        self.metadata: dict[str, Any] = {
            name: field.contents()
            for name, field in self._reader.fields.items()
            if not name.startswith("GGUF.")
        }
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            self.refuse(
                "general.architecture",
                f'is "{self.architecture}"; supported are {", ".join(_ARCHITECTURES)}',
            )
        if int(self.metadata.get("split.count", 1)) > 1:
            self.refuse("split.count", "is above 1; merge the parts with gguf-split first")

    def refuse(self, field: str, reason: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {field} {reason}", param="model")

    def get(self, name: str, default: Any = None) -> Any:
        """Metadata of this architecture, `llama.<name>` for instance."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            self.refuse(f"{self.architecture}.{name}", "is missing")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Metadata that must be one whole number; some architectures have one a layer."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(f"{self.architecture}.{name}", f"is {value!r}; it must be a whole number")
        return value

    def dequantized(self, name: str) -> Tensor:
        """One tensor in float32, rows first: [rows, columns] or [size]."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            self.refuse(name, f"has the unsupported format {tensor.tensor_type.name}")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        # A copy: plain float tensors come as read-only views of the file.
        return torch.tensor(values, dtype=torch.float32).reshape(shape)

    def model_config(self) -> dict[str, Any]:
        """The `config.json` this file stands for."""
        if "token_embd.weight" not in self.tensors:
            self.refuse("token_embd.weight", "is missing")
        num_heads = self.integer("attention.head_count")
        hidden_size = self.integer("embedding_length")
        rope_size = self.integer("rope.dimension_count", hidden_size // max(num_heads, 1))
        head_dim = self.integer("attention.key_length", rope_size)
        self._refuse_unsupported(head_dim, rope_size)
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": _shortest_float32(self.get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest_float32(self.get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": self._has_biases(_ATTENTION_BIASES),
            "mlp_bias": self._has_biases(_MLP_BIASES),
            "hidden_act": "silu",
            "dtype": self._dtype(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        scaling = self._rope_scaling(head_dim, config["rope_theta"])
        return config if scaling is None else {**config, "rope_scaling": scaling}

    def _refuse_unsupported(self, head_dim: int, rope_size: int) -> None:
        if rope_size != head_dim:
            self.refuse("rope.dimension_count", f"is {rope_size}, not the head size {head_dim}")
        if self.integer("attention.value_length", head_dim) != head_dim:
            self.refuse("attention.value_length", f"differs from key_length = {head_dim}")
        for name in ("expert_count", "attention.sliding_window"):
            if self.get(name, 0):
                self.refuse(f"{self.architecture}.{name}", f"is {self.get(name)}: not supported")

    def _has_biases(self, parts: tuple[str, ...]) -> bool:
        present = [part for part in parts if f"blk.0.{part}.bias" in self.tensors]
        if present and len(present) < len(parts):
            self.refuse("biases", f"are on {present} only; supported are all of {list(parts)}")
        return bool(present)

    def _dtype(self) -> str:
        """The dtype to compute in: the file's own where its matrices are plain floats."""
        formats = {
            tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1
        }
        return {"F32": "float32", "F16": "float16"}.get("".join(formats), "bfloat16")

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        kind = str(self.get("rope.scaling.type", "none"))
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self.get("rope.scaling.factor"))}
        if kind != "none":
            self.refuse("rope.scaling.type", f'is "{kind}"; supported are none, linear, llama3')
        if _ROPE_FACTORS not in self.tensors:
            return None
        factors = self.dequantized(_ROPE_FACTORS)
        scaling = RopeScaling(
            rope_type="llama3",
            factor=float(factors.max()),
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
            original_max_position_embeddings=_LLAMA3_TRAINED,
        )
        expected = llama3_factors(head_dim, theta, scaling)
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
            self.refuse(_ROPE_FACTORS, "is not the frequency scaling of Llama 3")
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_TRAINED,
        }


def llama3_factors(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """What each rotary frequency is divided by under llama3 scaling: [head_dim // 2] fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - kept) / scaling.factor + kept)).float()


def _write_weights(
    file: _GgufFile, config: dict[str, Any], folder: Path, progress: ProgressCallback | None
) -> None:
    """Writes safetensors of at most 2 GiB each, with an index if there are several."""
    names = [name for name in file.tensors if name != _ROPE_FACTORS]
    total = sum(int(file.tensors[name].n_bytes) for name in names)
    shards: list[dict[str, Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    done = shard_bytes = 0
    for name in names:
        target_name = _hugging_face_name(file, name)
        tensor = _smallest_exact(_rotary_rows(target_name, file.dequantized(name), config))
        if shards[-1] and shard_bytes + tensor.nbytes > _MAX_SHARD_BYTES:
            _save_shard(shards[-1], folder, len(shards))
            shards[-1].clear()
            shards.append({})
            shard_bytes = 0
        shards[-1][target_name] = tensor
        weight_map[target_name] = _shard_name(len(shards))
        shard_bytes += tensor.nbytes
        done += int(file.tensors[name].n_bytes)
        if progress is not None:
            progress(done, total, f"converting {file.path.name}")
    _save_shard(shards[-1], folder, len(shards))
    if len(shards) == 1:
        (folder / _shard_name(1)).rename(folder / "model.safetensors")
    else:
        _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save_shard(tensors: dict[str, Tensor], folder: Path, number: int) -> None:
    save_file(tensors, folder / _shard_name(number), metadata={"format": "pt"})


def _hugging_face_name(file: _GgufFile, name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    file.refuse(name, f"is no tensor of the architecture {file.architecture}")


def _rotary_rows(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Puts q and k rows of llama files into halves order: llama.cpp stores rotary pairs adjacent.

    Only the `llama` architecture is stored that way; qwen3 keeps Hugging Face's order.
    """
    if config["model_type"] != "llama":
        return tensor
    if ".q_proj." in name:
        num_heads = config["num_attention_heads"]
    elif ".k_proj." in name:
        num_heads = config["num_key_value_heads"]
    else:
        return tensor
    # [heads, pairs, 2, ...] -> [heads, 2, pairs, ...]
    pairs = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _smallest_exact(tensor: Tensor) -> Tensor:
    """The tensor in bfloat16 or float16 if that holds every value exactly, else in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        small = tensor.to(dtype)
        if torch.equal(small.to(torch.float32), tensor):
            return small
    return tensor


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Begin token and every token that ends an answer: end of text, of turn and of message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _shortest_float32(value: Any) -> float:
    """The decimal number a float32 of the file was written from: 1e-05, not 9.9999997e-06."""
    return float(f"{float(value):.7g}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
