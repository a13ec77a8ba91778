"""Fills a model's parameters: from a checkpoint folder, or with seeded random numbers.

Owns the mapping from checkpoint tensors to (fused) parameters, and every check that the two fit.
Does not own where the folder comes from (`source.py`, `gguf.py`) nor `config.json` (`config.py`).
Each tensor goes straight into its rows of the parameter, in the parameter's dtype and on its
device, so that no second copy of the model ever exists: from the mapped file on a CPU, by
`weight_stream` on a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint import (
    FLOAT_DTYPES,
    TensorInfo,
    checkpoint_files,
    list_names,
    open_checkpoint,
)
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.expert_parts import (
    expert_parts,
    quantize_experts,
    quantized_experts,
)
from compiled_engine.models.kv_scales import fold_kv_scales, kv_scale_names
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.quant_layouts import Expected
from compiled_engine.models.quant_linear import QuantLinear, quantize_layers
from compiled_engine.models.quant_weights import (
    QuantPart,
    QuantRows,
    fill_parts,
    fill_random,
    quant_parts,
)
from compiled_engine.models.weight_stream import (
    FileRange,
    safetensors_offsets,
    split_ranges,
    stream_chunks,
)
from compiled_engine.models.weight_targets import (
    Target,
    checkpoint_targets,
    parts_of,
    plain_parameters,
)

# Called with (done bytes, total bytes, what is being read).
ProgressCallback = Callable[[int, int, str], None]

DUMMY_STD = 0.02
# Random 4-bit floats have a deviation of 2.9; times 2^-7 that is 0.023.
_DUMMY_EXPONENT = 127 - 7
# Buffers that older checkpoints carry and that are computed here.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)


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
    model_class: Callable[[ModelConfig], CausalLM], config: ModelConfig, *, dtype: torch.dtype
) -> CausalLM:
    """A model whose parameters have shapes and dtypes and no storage."""
    with torch.device("meta"):
        model = model_class(config)
    if config.quantization is not None:
        quantize_layers(model, config.quantization, partial(parts_of, model))
        quantize_experts(model, config.quantization)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = parameter.to(_dtype_of(module, name, parameter, dtype))
            setattr(module, name, nn.Parameter(made, requires_grad=False))
    return model


def _dtype_of(
    module: nn.Module, name: str, parameter: nn.Parameter, dtype: torch.dtype
) -> torch.dtype:
    """The dtype a parameter has in a model of `dtype`."""
    is_fixed = name in getattr(module, "fixed_dtypes", ()) or not parameter.is_floating_point()
    return parameter.dtype if is_fixed else dtype


def materialize(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Gives parameters that have no storage an uninitialised one, in place.

    Those that are no floats, and those that a module lists in its `fixed_dtypes`, keep their
    dtype. Modules that hold computed tensors recompute them in their `reset(device)`.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                kind = _dtype_of(module, name, parameter, dtype)
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
    files = checkpoint_files(folder, allow_pickle=allow_pickle)
    infos: dict[str, TensorInfo] = {}
    for path in files:
        infos.update(open_checkpoint(path).infos())
    targets = checkpoint_targets(model, infos)
    parts = model_quant_parts(model)
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
    copy({name: target.memory for name, target in targets.items()}, on_tensor)
    for target in targets.values():
        target.arrange()
    read = partial(_read_tensors, copy, infos, place)
    fill_parts(parts, sizes, read, on_tensor)
    if folds_kv_scales:
        scales = kv_scale_names(infos)
        values = read(list(scales.values()))
        fold_kv_scales(model, {key: float(values[name]) for key, name in scales.items()})


def _read_tensors(
    copy: Callable[[dict[str, Tensor], Callable[[str], None]], None],
    infos: Mapping[str, TensorInfo],
    device: torch.device,
    names: Sequence[str],
) -> Mapping[str, Tensor]:
    """Tensors as they are in the files, on `device`."""
    made = {
        name: torch.empty(infos[name].shape, dtype=infos[name].dtype, device=device)
        for name in names
    }
    copy(made, lambda name: None)
    return made


def model_quant_parts(model: CausalLM) -> list[QuantPart]:
    """The checkpoint layers that fill the model's quantised layers."""
    tied = "model.embed_tokens.weight" if model.config.tie_word_embeddings else ""
    return [*quant_parts(model, partial(parts_of, model), tied), *expert_parts(model)]


def _copy_files(
    files: list[Path], targets: dict[str, Tensor], on_tensor: Callable[[str], None]
) -> None:
    """Copies every tensor out of the mapped files."""
    for path in files:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.infos():
            if name in targets:
                with torch.no_grad():
                    targets[name].copy_(checkpoint.tensor(name).view(targets[name].shape))
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

    Matrices are normal with standard deviation 0.02, norm weights 1, biases and sinks 0. Packed
    4-bit floats are random bytes, whose one scale gives them about that deviation. Each parameter's
    numbers depend on the seed and its name only: not on order, on threads or on other parameters.
    """

    def fill(name: str, values: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=values.device)
        generator.manual_seed(int.from_bytes(digest, "little"))
        if values.is_floating_point():
            return values.normal_(0.0, DUMMY_STD, generator=generator)
        return values.random_(0, 256, generator=generator)

    quantized: list[tuple[str, QuantRows]] = [
        (n, m) for n, m in model.named_modules() if isinstance(m, QuantLinear)
    ]
    quantized += quantized_experts(model)
    with torch.no_grad():
        for name, parameter in plain_parameters(model):
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith("_scale"):
                parameter.fill_(_DUMMY_EXPONENT)
            else:
                fill(name, parameter)
        for name, module in quantized:
            fill_random(module, partial(fill, f"{name}.weight"), model.model.norm.weight.dtype)


def _check_tensors(
    folder: Path,
    model: CausalLM,
    targets: dict[str, Target],
    parts: Sequence[QuantPart],
    infos: dict[str, TensorInfo],
) -> None:
    floats = tuple(FLOAT_DTYPES.values())
    expected = {
        name: Expected((t.shape,), floats if t.memory.is_floating_point() else (t.memory.dtype,))
        for name, t in targets.items()
    }
    for part in parts:
        expected |= {name: e for name, e in part.expected().items() if name not in targets}
    plan = model.config.quantization
    suffixes = (*_HARMLESS_SUFFIXES, *(plan.unused if plan else ()))
    harmless = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    harmless |= set().union(*(part.unused() for part in parts))
    missing = [n for n, wanted in expected.items() if n not in infos and not wanted.is_optional]
    unexpected = [
        name
        for name in infos
        if name not in expected and name not in harmless and not name.endswith(suffixes)
    ]
    shapes: list[str] = []
    dtypes: dict[str, list[str]] = {}
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
            dtypes.setdefault(_dtype_problem(wanted), []).append(name)
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of a wrong shape": shapes,
        **dtypes,
    }
    lines = [
        f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what}: "
        f"{list_names(names)}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(lines),
            param="model",
        )


def _dtype_problem(wanted: Expected) -> str:
    """What a tensor is whose dtype is none of the expected ones."""
    if wanted.dtypes == (torch.uint8,):
        return "not packed into bytes"
    if wanted.dtypes == tuple(FLOAT_DTYPES.values()):
        return "not bfloat16, float16, float32 or float64"
    return "of a dtype that the checkpoint's quantization_config does not mean"
