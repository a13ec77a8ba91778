"""Fills a model's parameters: from a checkpoint folder, or with seeded random numbers.

Owns the mapping from checkpoint tensors to (fused) parameters, and every check that the two fit.
Does not own where the folder comes from (`source.py`, `gguf.py`) nor `config.json` (`config.py`).
Each tensor goes straight into its rows of the parameter, in the parameter's dtype and on its
device, so that no second copy of the model ever exists: from the mapped file on a CPU, by
`weight_stream` on a GPU.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compiled_engine.errors import ConfigError
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.config_fields import read_json
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.weight_stream import (
    FileRange,
    safetensors_offsets,
    split_ranges,
    stream_chunks,
)
from compiled_engine.models.weight_targets import Target, checkpoint_targets

# Called with (done bytes, total bytes, what is being read).
ProgressCallback = Callable[[int, int, str], None]

DUMMY_STD = 0.02
# Random 4-bit floats have a deviation of 2.9; times 2^-7 that is 0.023.
_DUMMY_EXPONENT = 127 - 7
_MAX_LISTED = 20
# Buffers that older checkpoints carry and that are computed here.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor: shape, dtype (None if none that is read), bytes in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    num_bytes: int


def build_model(
    model_class: type[CausalLM],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """A model with uninitialised parameters of `dtype` on `device`, ready for inference.

    The module is made without storage first, so nothing is initialised twice or held twice.
    """
    with torch.device("meta"):
        model = model_class(config)
    materialize(model, dtype=dtype, device=device)
    return model.eval()


def materialize(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Gives parameters that have no storage an uninitialised one, in place.

    Those that are no floats, and those that a module lists in its `fp32_parameters`, keep their
    dtype. Modules that hold computed tensors recompute them in their `reset(device)`.
    """
    for module in model.modules():
        fp32 = getattr(module, "fp32_parameters", ())
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                is_kept = name in fp32 or not parameter.is_floating_point()
                kind = parameter.dtype if is_kept else dtype
                storage = torch.empty(parameter.shape, dtype=kind, device=device)
                setattr(module, name, nn.Parameter(storage, requires_grad=False))
            parameter.requires_grad_(False)
        reset = getattr(module, "reset", None)
        if reset is not None:
            reset(device)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, f"buffers without storage, and no reset() to compute them: {left}"


def load_weights(
    model: CausalLM,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allow_pickle: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Fills every parameter of `model` from the checkpoint in `folder`, in place.

    Args:
        model: a model class of ours; parameters without storage get one first.
        folder: holds safetensors, single or sharded with an index; or `.bin` pickles.
        dtype: of parameters that have no storage yet.
        device: of parameters that have no storage yet.
        allow_pickle: read `.bin` files where there are no safetensors.
        progress: called after each tensor, by the calling thread.

    Raises:
        ConfigError: no readable checkpoint, pickles without `allow_pickle`, or tensors that are
            missing, unexpected, of a wrong shape or no floating-point numbers; lists them all.
    """
    materialize(model, dtype=dtype, device=device)
    files = _checkpoint_files(folder, allow_pickle=allow_pickle)
    infos: dict[str, TensorInfo] = {}
    for path in files:
        infos.update(_open_checkpoint(path).infos())
    targets = checkpoint_targets(model, infos)
    _check_tensors(folder, targets, infos, tied=model.config.tie_word_embeddings)
    total = sum(infos[name].num_bytes for name in targets)
    done = 0

    def on_tensor(name: str) -> None:
        nonlocal done
        done += infos[name].num_bytes
        if progress is not None:
            progress(done, total, name)

    place = next(model.parameters()).device
    if place.type == "cuda" and all(path.suffix == ".safetensors" for path in files):
        _stream_files(files, targets, infos, place, on_tensor)
    else:
        _copy_files(files, targets, on_tensor)
    for target in targets.values():
        target.arrange()


def _copy_files(
    files: list[Path], targets: dict[str, Target], on_tensor: Callable[[str], None]
) -> None:
    """Copies every tensor out of the mapped files."""
    for path in files:
        checkpoint = _open_checkpoint(path)
        for name in checkpoint.infos():
            if name in targets:
                with torch.no_grad():
                    memory = targets[name].memory
                    memory.copy_(checkpoint.tensor(name).view(memory.shape))
                on_tensor(name)


def _stream_files(
    files: list[Path],
    targets: dict[str, Target],
    infos: dict[str, TensorInfo],
    device: torch.device,
    on_tensor: Callable[[str], None],
) -> None:
    """Reads every tensor by threads and copies it to the device meanwhile."""
    ranges: dict[str, FileRange] = {}
    for path in files:
        for name, offset in safetensors_offsets(path).items():
            if name in targets:
                dtype = infos[name].dtype
                assert dtype is not None, name
                ranges[name] = FileRange(name, path, offset, dtype, targets[name].memory)
    left = {name: item.num_bytes for name, item in ranges.items()}
    try:
        for chunk in stream_chunks(split_ranges(list(ranges.values())), device):
            for part in chunk.parts:
                left[part.name] -= part.num_bytes
                if left[part.name] == 0:
                    on_tensor(part.name)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}", param="model"
        ) from error


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fills every parameter with seeded random numbers on its own device, in place.

    Matrices are normal with standard deviation 0.02, norm weights 1, biases and sinks 0. Packed
    4-bit floats are random bytes, whose one scale gives them about that deviation. Each parameter's
    numbers depend on the seed and its name only: not on order, on threads or on other parameters.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith("_scale"):
                parameter.fill_(_DUMMY_EXPONENT)
            else:
                digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
                generator = torch.Generator(device=parameter.device)
                generator.manual_seed(int.from_bytes(digest, "little"))
                if parameter.is_floating_point():
                    parameter.normal_(0.0, DUMMY_STD, generator=generator)
                else:
                    parameter.random_(0, 256, generator=generator)


def _check_tensors(
    folder: Path, targets: dict[str, Target], infos: dict[str, TensorInfo], *, tied: bool
) -> None:
    def is_harmless(name: str) -> bool:
        return name.endswith(_HARMLESS_SUFFIXES) or (tied and name == "lm_head.weight")

    missing = [name for name in targets if name not in infos]
    unexpected = [name for name in infos if name not in targets and not is_harmless(name)]
    shapes, floats, packed = [], [], []
    for name, target in targets.items():
        info = infos.get(name)
        if info is None:
            continue
        if info.shape != target.shape:
            hint = ""
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                hint = " (rows are vocab_size in config.json)"
            shapes.append(f"{name} is {list(info.shape)}, not {list(target.shape)}{hint}")
        if target.memory.is_floating_point():
            if info.dtype is None or not info.dtype.is_floating_point:
                floats.append(name)
        elif info.dtype != target.memory.dtype:
            packed.append(name)
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of a wrong shape": shapes,
        "not bfloat16, float16, float32 or float64": floats,
        "not packed into bytes": packed,
    }
    lines = [
        f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what}: {_list(names)}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(lines),
            param="model",
        )


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def _checkpoint_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
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
            f"{folder} lacks {len(absent)} of {len(names)} weight files: {_list(absent)}",
            param="model",
        )
    return [folder / value for value in names]


class _Checkpoint(Protocol):
    def infos(self) -> dict[str, TensorInfo]: ...

    def tensor(self, name: str) -> Tensor: ...


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
        return self._file.get_tensor(name)


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


def _open_checkpoint(path: Path) -> _Checkpoint:
    try:
        if path.suffix == ".safetensors":
            return _SafetensorsFile(path)
        return _PickleFile(path)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
