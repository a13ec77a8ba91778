"""The files of a checkpoint folder: which there are, what they hold, and their tensors.

Owns reading safetensors and, where it is allowed, pickles. Knows nothing of models.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiled_engine.errors import ConfigError
from compiled_engine.models.config_fields import read_json

_MAX_LISTED = 20
FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPES = FLOAT_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor: shape, dtype (None if none that is read), bytes in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    num_bytes: int


def list_names(names: list[str]) -> str:
    """The names in one text, the first of them if they are many."""
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def checkpoint_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """The checkpoint's files in order: safetensors before pickles, an index before single files."""
    files = _listed_files(folder, "model.safetensors") or sorted(folder.glob("*.safetensors"))
    if len(files) > 1 and not (folder / "model.safetensors.index.json").exists():
        raise ConfigError(
            f"{folder} holds {len(files)} safetensors files and no model.safetensors.index.json "
            "that says which belong to the model",
            param="model",
        )
    if files:
        return files
    files = _listed_files(folder, "pytorch_model.bin")
    if files and not allow_pickle:
        raise ConfigError(
            f"{folder} holds only pickled weights ({files[0].name}), which can run code while they "
            "are read; convert them to safetensors, or pass --allow-pickle if you trust them",
            param="allow_pickle",
        )
    if not files:
        raise ConfigError(
            f"{folder} holds no weights: expected model.safetensors or "
            "model.safetensors.index.json; --load-format dummy makes random ones",
            param="model",
        )
    return files


def _listed_files(folder: Path, name: str) -> list[Path]:
    """Files named by `<name>.index.json`, else the file `name`, else nothing."""
    index_path = folder / f"{name}.index.json"
    if not index_path.exists():
        return [folder / name] if (folder / name).exists() else []
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index_path} has no weight_map", param="model")
    names = sorted({str(value) for value in weight_map.values()})
    outside = [value for value in names if Path(value).name != value]
    if outside:
        raise ConfigError(f"{index_path} names files outside the folder: {outside}", param="model")
    absent = [value for value in names if not (folder / value).exists()]
    if absent:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of {len(names)} weight files: {list_names(absent)}",
            param="model",
        )
    return [folder / value for value in names]


class Checkpoint(Protocol):
    """One file of a checkpoint."""

    def infos(self) -> dict[str, TensorInfo]:
        """Its tensors."""

    def tensor(self, name: str) -> Tensor:
        """One of them, on the CPU."""


class _SafetensorsFile:
    """One mapped safetensors file; a tensor's pages are read when it is copied."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(str(path), framework="pt", device="cpu")

    def infos(self) -> dict[str, TensorInfo]:
        infos = {}
        for name in self._file.keys():  # noqa: SIM118 - not a dict
            view = self._file.get_slice(name)
            dtype = _DTYPES.get(view.get_dtype())
            shape = tuple(view.get_shape())
            infos[name] = TensorInfo(shape, dtype, _num_bytes(shape, dtype))
        return infos

    def tensor(self, name: str) -> Tensor:
        tensor = self._file.get_tensor(name)
        is_exponent = tensor.dtype == torch.float8_e8m0fnu
        return tensor.view(torch.uint8) if is_exponent else tensor


class _PickleFile:
    """One `.bin` file, mapped, and restricted to tensors by torch's weights-only reader."""

    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self._tensors: dict[str, Tensor] = {
            name: value for name, value in loaded.items() if isinstance(value, Tensor)
        }

    def infos(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                tuple(tensor.shape),
                tensor.dtype if tensor.dtype in _DTYPES.values() else None,
                tensor.nbytes,
            )
            for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype | None) -> int:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements * (1 if dtype is None else dtype.itemsize)


def checkpoint_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, one at a time, on the CPU."""
    for path in files:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.infos():
            yield name, checkpoint.tensor(name)


def open_checkpoint(path: Path) -> Checkpoint:
    """The file, mapped.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            return _SafetensorsFile(path)
        return _PickleFile(path)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
