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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compiled_engine.errors import ConfigError
from compiled_engine.models.config import ModelConfig, read_json
from compiled_engine.models.kv_scales import fold_kv_scales, kv_scale_names
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.quant_layouts import Expected
from compiled_engine.models.quant_linear import QuantLinear, quantize_layers
from compiled_engine.models.quant_weights import QuantPart, fill_parts, fill_random, quant_parts
from compiled_engine.models.weight_stream import (
    FileRange,
    safetensors_offsets,
    split_ranges,
    stream_chunks,
)

# Called with (done bytes, total bytes, what is being read).
ProgressCallback = Callable[[int, int, str], None]

DUMMY_STD = 0.02
_MAX_LISTED = 20
# Buffers that older checkpoints carry and that are computed here.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
_FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPES = _FLOAT_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one checkpoint tensor: shape, dtype (None if unknown), bytes in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    num_bytes: int


@dataclass(frozen=True)
class _Target:
    """Rows `[start, start + shape[0])` of one parameter that a checkpoint tensor fills."""

    parameter: nn.Parameter
    start: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> Tensor:
        return self.parameter[self.start : self.start + self.shape[0]]


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
    model = outline_model(model_class, config, dtype=dtype)
    materialize(model, dtype=dtype, device=device)
    return model.eval()


def outline_model(
    model_class: type[CausalLM], config: ModelConfig, *, dtype: torch.dtype
) -> CausalLM:
    """A model whose parameters have shapes and dtypes and no storage."""
    with torch.device("meta"):
        model = model_class(config)
    if config.quantization is not None:
        quantize_layers(model, config.quantization, partial(parts_of, model))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name not in getattr(module, "fixed_dtypes", ()):
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    return model


def materialize(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Gives parameters that have no storage an uninitialised one, in place.

    Modules that hold computed tensors recompute them in their `reset(device)`.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                is_fixed = name in getattr(module, "fixed_dtypes", ())
                own = parameter.dtype if is_fixed else dtype
                storage = torch.empty(parameter.shape, dtype=own, device=device)
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
    folds_kv_scales: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Fills every parameter of `model` from the checkpoint in `folder`, in place.

    Args:
        model: a model class of ours; parameters without storage get one first.
        folder: holds safetensors, single or sharded with an index; or `.bin` pickles.
        dtype: of parameters that have no storage yet.
        device: of parameters that have no storage yet.
        allow_pickle: read `.bin` files where there are no safetensors.
        folds_kv_scales: fold the checkpoint's scales of keys and values, if it has them, into the
            weights: for a cache of 8-bit floats.
        progress: called after each tensor, by the calling thread.

    Raises:
        ConfigError: no readable checkpoint, pickles without `allow_pickle`, or tensors that are
            missing, unexpected, of a wrong shape or no floating-point numbers; lists them all.
    """
    materialize(model, dtype=dtype, device=device)
    files = _checkpoint_files(folder, allow_pickle=allow_pickle)
    targets = _targets(model)
    parts = _quant_parts(model)
    infos: dict[str, TensorInfo] = {}
    for path in files:
        infos.update(_open_checkpoint(path).infos())
    _check_tensors(folder, model, targets, parts, infos)
    sizes = {name: info.num_bytes for name, info in infos.items()}
    packed = [name for part in parts for name in part.expected() if name in infos]
    total = sum(sizes[name] for name in (*targets, *packed))
    done = 0

    def on_tensor(name: str) -> None:
        nonlocal done
        done += infos[name].num_bytes
        if progress is not None:
            progress(done, total, name)

    place = next(model.parameters()).device
    if place.type == "cuda" and all(path.suffix == ".safetensors" for path in files):
        copy = partial(_stream_files, files, infos, place)
    else:
        copy = partial(_copy_files, files)
    copy({name: target.rows for name, target in targets.items()}, on_tensor)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        """The tensors as they are in the files, on the model's device."""
        made = {
            name: torch.empty(infos[name].shape, dtype=infos[name].dtype, device=place)
            for name in names
        }
        copy(made, lambda name: None)
        return made

    fill_parts(parts, sizes, read, on_tensor)
    if folds_kv_scales:
        scales = kv_scale_names(infos)
        values = read(list(scales.values()))
        fold_kv_scales(model, {key: float(values[name]) for key, name in scales.items()})


def _copy_files(
    files: list[Path], targets: dict[str, Tensor], on_tensor: Callable[[str], None]
) -> None:
    """Copies every tensor out of the mapped files."""
    for path in files:
        checkpoint = _open_checkpoint(path)
        for name in checkpoint.infos():
            if name in targets:
                with torch.no_grad():
                    targets[name].copy_(checkpoint.tensor(name))
                on_tensor(name)


def _stream_files(
    files: list[Path],
    infos: dict[str, TensorInfo],
    device: torch.device,
    targets: dict[str, Tensor],
    on_tensor: Callable[[str], None],
) -> None:
    """Reads every tensor by threads and copies it to the device meanwhile."""
    ranges: dict[str, FileRange] = {}
    for path in files:
        for name, offset in safetensors_offsets(path).items():
            if name in targets:
                dtype = infos[name].dtype
                assert dtype is not None, name
                ranges[name] = FileRange(name, path, offset, dtype, targets[name])
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

    Matrices are normal with standard deviation 0.02, norm weights 1 and biases 0. Each parameter's
    numbers depend on the seed and its name only: not on order, on threads or on other parameters.
    """

    def normal(name: str, values: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=values.device)
        generator.manual_seed(int.from_bytes(digest, "little"))
        return values.normal_(0.0, DUMMY_STD, generator=generator)

    dtype = model.model.norm.weight.dtype
    with torch.no_grad():
        for name, parameter in _own_parameters(model):
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                normal(name, parameter)
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                fill_random(module, partial(normal, f"{name}.weight"), dtype)


def _own_parameters(model: CausalLM) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters but those that `quant_weights` fills."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, QuantLinear) or name not in module.fixed_dtypes:
                yield f"{path}.{name}", parameter


def _targets(model: CausalLM) -> dict[str, _Target]:
    """Checkpoint tensor name -> where it goes."""
    targets: dict[str, _Target] = {}
    for name, parameter in _own_parameters(model):
        layer, _, kind = name.rpartition(".")
        start = 0
        for part, num_rows in parts_of(model, layer, parameter.shape[0]).items():
            shape = (num_rows, *parameter.shape[1:])
            targets[f"{part}.{kind}"] = _Target(parameter, start, shape)
            start += num_rows
        assert start == parameter.shape[0], (name, start, parameter.shape)
    return targets


def parts_of(model: CausalLM, layer: str, num_rows: int) -> dict[str, int]:
    """Name and rows of each checkpoint layer that the model's `layer` holds, in order."""
    path, _, last = layer.rpartition(".")
    if last not in model.packed_modules:
        return {layer: num_rows}
    names = [f"{path}.{part}" for part in model.packed_modules[last]]
    return dict(zip(names, _part_rows(model.config, last), strict=True))


def _quant_parts(model: CausalLM) -> list[QuantPart]:
    tied = "model.embed_tokens.weight" if model.config.tie_word_embeddings else ""
    return quant_parts(model, partial(parts_of, model), tied)


def _part_rows(config: ModelConfig, module: str) -> tuple[int, ...]:
    """Rows of each part of a fused matrix."""
    if module == "qkv_proj":
        kv_size = config.num_kv_heads * config.head_dim
        return (config.num_heads * config.head_dim, kv_size, kv_size)
    if module == "gate_up_proj":
        return (config.intermediate_size, config.intermediate_size)
    raise AssertionError(f"no row counts are known for the fused module {module}")


def _check_tensors(
    folder: Path,
    model: CausalLM,
    targets: dict[str, _Target],
    parts: Sequence[QuantPart],
    infos: dict[str, TensorInfo],
) -> None:
    expected = {
        name: Expected((target.shape,), tuple(_FLOAT_DTYPES.values()))
        for name, target in targets.items()
    }
    unused = set().union(*(part.unused() for part in parts))
    for part in parts:
        expected |= {name: e for name, e in part.expected().items() if name not in targets}
    plan = model.config.quantization
    suffixes = (*_HARMLESS_SUFFIXES, *(plan.unused if plan else ()))
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()

    def is_harmless(name: str) -> bool:
        return name.endswith(suffixes) or name in tied or name in unused

    missing = [n for n, wanted in expected.items() if n not in infos and not wanted.is_optional]
    unexpected = [name for name in infos if name not in expected and not is_harmless(name)]
    shapes: list[str] = []
    dtypes: list[str] = []
    wrong: list[str] = []
    for name, wanted in expected.items():
        info = infos.get(name)
        if info is None:
            continue
        if info.shape not in wanted.shapes:
            hint = ""
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                hint = " (rows are vocab_size in config.json)"
            allowed = " or ".join(str(list(shape)) for shape in wanted.shapes)
            shapes.append(f"{name} is {list(info.shape)}, not {allowed}{hint}")
        if info.dtype not in wanted.dtypes:
            (dtypes if name in targets else wrong).append(name)
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of a wrong shape": shapes,
        "not bfloat16, float16, float32 or float64": dtypes,
        "of a dtype that the checkpoint's quantization_config does not mean": wrong,
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


def _open_checkpoint(path: Path) -> _Checkpoint:
    try:
        if path.suffix == ".safetensors":
            return _SafetensorsFile(path)
        return _PickleFile(path)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
