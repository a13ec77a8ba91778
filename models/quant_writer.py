"""Writes a quantised checkpoint: a model folder's linear layers in a published layout.

fp8, int8, int4, nvfp4 and mxfp4 are those of compressed-tensors, fp8_block is DeepSeek's (that of
compressed-tensors where the output projection is quantised too, for which DeepSeek's has no word).
Everything else is copied. Tensors are read and quantised one by one, and written a file at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled_engine.custom_ops.quant_pack import (
    INT4_GROUP,
    MXFP4_GROUP,
    PackedWeight,
    quantize_weight,
)
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP
from compiled_engine.errors import ConfigError
from compiled_engine.models import ARCHITECTURES
from compiled_engine.models.checkpoint import (
    checkpoint_files,
    checkpoint_tensors,
    open_checkpoint,
)
from compiled_engine.models.config import ModelConfig, load_model_config
from compiled_engine.models.config_fields import read_json
from compiled_engine.models.expert_parts import ExpertMatrix
from compiled_engine.models.quant_plan import HEAD, ONLINE_FORMATS, online_plan
from compiled_engine.models.weights import model_quant_parts, outline_model

MAX_FILE_BYTES = 4 * 1024**3
# Called with (done bytes, total bytes, what is being quantised).
Progress = Callable[[int, int, str], None]

_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_TOKEN = {"strategy": "token", "dynamic": True}
# Format -> name of the packing, weights, activations.
_COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8": (
        "float-quantized",
        {**_FLOAT8, "strategy": "channel", "dynamic": False},
        {**_FLOAT8, **_TOKEN},
    ),
    "fp8_block": (
        "float-quantized",
        {**_FLOAT8, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        {**_FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "int8": (
        "int-quantized",
        {**_INT8, "strategy": "channel", "dynamic": False},
        {**_INT8, **_TOKEN},
    ),
    "int4": (
        "pack-quantized",
        {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": INT4_GROUP,
            "dynamic": False,
        },
        None,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**_FLOAT4, "strategy": "tensor_group", "group_size": NVFP4_GROUP},
        None,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**_FLOAT4, "strategy": "group", "group_size": MXFP4_GROUP},
        None,
    ),
}
# Columns a layer must be a multiple of: these layouts have no padding.
_MULTIPLES = {"nvfp4": NVFP4_GROUP, "mxfp4": MXFP4_GROUP, "int4": 8}


def _check_source(folder: Path, config: ModelConfig) -> None:
    """Raises ConfigError where a model cannot be quantised."""
    if config.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder} is a {config.architecture}; models are quantised that have a file here: "
            f"{', '.join(sorted(ARCHITECTURES))}",
            param="model",
        )
    if config.quantization is not None:
        raise ConfigError(
            f"{folder} is quantised already ({config.quantization.method})", param="model"
        )


def quantize_checkpoint(
    folder: Path,
    output: Path,
    name: str,
    *,
    quantizes_head: bool,
    device: torch.device,
    allow_pickle: bool,
    progress: Progress,
) -> list[str]:
    """Quantises the model in `folder` and writes it to `output`.

    Args:
        folder: of a plain model.
        output: an empty folder, made if missing.
        name: a key of `ONLINE_FORMATS`.
        quantizes_head: the output projection too.
        device: where the numbers are made.
        allow_pickle: read `.bin` files where there are no safetensors.
        progress: called after each tensor.

    Returns:
        The layers that stay as they are because the layout cannot hold their number of columns.

    Raises:
        ConfigError: the model is quantised already or cannot be read; the output cannot be written.
    """
    config = load_model_config(folder)
    _check_source(folder, config)
    plan = online_plan(name, config.dtype, quantizes_head=quantizes_head)
    model = outline_model(
        ARCHITECTURES[config.architecture],
        replace(config, quantization=plan),
        dtype=getattr(torch, config.dtype),
    )
    files = checkpoint_files(folder, allow_pickle=allow_pickle)
    parts = model_quant_parts(model)
    other = {part.module.format for part in parts if isinstance(part.module, ExpertMatrix)}
    if other - {ONLINE_FORMATS[name][0]}:
        raise ConfigError(
            f"--format {name}: experts are served in {', '.join(other)}; give that", param="format"
        )
    columns = {part.name: part.module.in_features for part in parts}
    writer = _Writer(config, columns, name, quantizes_head=quantizes_head, device=device)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise ConfigError(f"--output {output} is not empty", param="output")
        writer.write(folder, output, files, progress)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}", param="output") from error
    return writer.left


class _Writer:
    """Quantises one model.

    Args:
        config: of the plain model.
        columns: columns of every layer to quantise, by its name in the checkpoint.
        name: a key of `ONLINE_FORMATS`.
        quantizes_head: the output projection too.
        device: where the numbers are made.
    """

    def __init__(
        self,
        config: ModelConfig,
        columns: dict[str, int],
        name: str,
        *,
        quantizes_head: bool,
        device: torch.device,
    ) -> None:
        self.config = config
        self.name = name
        self.device = device
        self.quantizes_head = quantizes_head
        self._format = ONLINE_FORMATS[name][0]
        multiple = _MULTIPLES.get(name, 1)
        self.left = sorted(layer for layer, size in columns.items() if size % multiple)
        self._layers = set(columns) - set(self.left)

    def write(self, folder: Path, output: Path, files: list[Path], progress: Progress) -> None:
        """Writes config, weights and all other files of `folder` to `output`."""
        total = sum(
            info.num_bytes for path in files for info in open_checkpoint(path).infos().values()
        )
        written = _Files(output)
        done = 0
        for name, tensor in checkpoint_tensors(files):
            for made, value in self._written(name, tensor):
                written.add(made, value)
            done += tensor.nbytes
            progress(done, total, name)
        written.close()
        fields = read_json(folder / "config.json")
        fields["quantization_config"] = self.quantization_config()
        if self.quantizes_head:
            fields["tie_word_embeddings"] = False
        (output / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        for path in sorted(folder.iterdir()):
            if _is_kept(path) and not (output / path.name).exists():
                shutil.copyfile(path, output / path.name)

    def quantization_config(self) -> dict[str, Any]:
        """The field of `config.json`."""
        head = [] if self.quantizes_head else [HEAD]
        ignored = [*head, *self.left]
        if self.name == "fp8_block" and not self.quantizes_head:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ignored,
            }
        packing, weights, inputs = _COMPRESSED[self.name]
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": packing,
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }

    def _written(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the checkpoint holds of a plain tensor."""
        layer, _, kind = name.rpartition(".")
        is_embedding = name == "model.embed_tokens.weight"
        makes_head = is_embedding and self.quantizes_head and self.config.tie_word_embeddings
        if makes_head:
            layer = HEAD
        if not makes_head and (kind != "weight" or layer not in self._layers):
            yield name, tensor
            return
        if makes_head:
            yield name, tensor
        packed = quantize_weight(tensor.to(self.device), self._format)
        for suffix, value in self._spelled(packed, tensor.shape).items():
            yield f"{layer}.{suffix}", value.contiguous().cpu()

    def _spelled(self, packed: PackedWeight, shape: torch.Size) -> dict[str, Tensor]:
        """Tensors of a layer by suffix, without our padding."""
        num_rows, size = shape
        weight, scale, _, global_scale = packed
        if self.name in ("fp8", "int8"):
            return {"weight": weight[:, :size], "weight_scale": scale}
        if self.name == "fp8_block":
            is_compressed = self.quantizes_head
            name = "weight_scale" if is_compressed else "weight_scale_inv"
            return {"weight": weight[:, :size], name: scale}
        if self.name == "int4":
            return {
                "weight_packed": weight[:, : size // 2].contiguous().view(torch.int32),
                "weight_scale": scale[:, : -(-size // INT4_GROUP)],
                "weight_shape": torch.tensor([num_rows, size]),
            }
        group = _MULTIPLES[self.name]
        spelled = {
            "weight_packed": weight[:, : size // 2],
            "weight_scale": scale[:, : size // group],
        }
        if global_scale is not None:  # the layout divides by it
            spelled["weight_global_scale"] = 1.0 / global_scale[:1, 0]
        return spelled


class _Files:
    """Safetensors files of a bounded size, and the index that says what is where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._parts: list[tuple[Path, list[str], int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; writes the file that is full."""
        if self._tensors and self._num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._write()
        self._tensors[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes what is left, and gives the files their names."""
        self._write()
        if len(self._parts) == 1:
            self._parts[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, (path, names, _) in enumerate(self._parts, start=1):
            final = f"model-{index:05d}-of-{len(self._parts):05d}.safetensors"
            path.rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        total = sum(size for _, _, size in self._parts)
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index_file, indent=2) + "\n")

    def _write(self) -> None:
        if not self._tensors:
            return
        path = self._folder / f"model-part-{len(self._parts) + 1}.tmp"
        save_file(self._tensors, path, metadata={"format": "pt"})
        self._parts.append((path, list(self._tensors), self._num_bytes))
        self._tensors, self._num_bytes = {}, 0


def _is_kept(path: Path) -> bool:
    """Whether a file of the plain model belongs to the quantised one: tokenizer, texts."""
    is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".pth", ".tmp")
    return path.is_file() and not is_weights and not path.name.endswith(".index.json")
