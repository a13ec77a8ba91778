"""Builds the report: the model's pieces for one step, traced, costed and, on a GPU, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_engine.cache_folders import KERNELS, place_caches
from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Target
from compiled_engine.custom_ops.tuning import KernelTuner
from compiled_engine.device import describe_device, pick_device
from compiled_engine.engine import kept_ops
from compiled_engine.errors import ConfigError
from compiled_engine.explain.measure import measure_rows
from compiled_engine.explain.report import KernelRow, PieceReport, Report
from compiled_engine.explain.step_inputs import FakeStep, StepShape
from compiled_engine.explain.trace import Options, Traced, trace_piece
from compiled_engine.kernels.ceilings import Ceilings, measure
from compiled_engine.layer_kinds import layer_kinds
from compiled_engine.models import ModelConfig
from compiled_engine.models.source import resolve_model
from compiled_engine.passes.defaults import disabled_passes
from compiled_engine.passes.names import PieceTraits
from compiled_engine.pieces import (
    LayerVersion,
    few_limit,
    last_version_for,
    layer_function,
    layer_traits,
    layer_versions,
    version_for,
)
from compiled_engine.settings import model_config_of

# As measured on devices that may not be here.
KNOWN_CEILINGS = {90: ("an H200", Ceilings(4.61e12, 795e12, 1500e12))}
DEFAULT_CONTEXT = 1024
_SCHEDULER_NOTE = (
    "the scheduler (plan, layout, advance) and the sampler run once a step beside these pieces and "
    "are not counted"
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be explained.

    Attributes:
        config: of the engine.
        num_tokens: of the step.
        context: tokens of KV of each sequence of a decode step; None is 1024, or what the model
            was made for if that is less.
        arch: capability of a GPU that need not be here; None is the device that is.
        ceilings: of the device; None measures them, or takes known ones.
        is_measured: time the kernels, on a GPU.
    """

    config: EngineConfig
    num_tokens: int = 1
    context: int | None = None
    arch: int | None = None
    ceilings: Ceilings | None = None
    is_measured: bool = True


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The device: what it is, and where tensors without values say they are."""

    target: Target
    device: torch.device
    name: str
    is_here: bool


@dataclass(frozen=True)
class _Piece:
    """One piece to trace."""

    report: PieceReport
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    traits: PieceTraits


def explain_model(request: Request, note: Callable[[str], None] = lambda _: None) -> Report:
    """Traces every piece of a step; `note` is told what comes next.

    Raises:
        ConfigError: the model, an option or the device cannot be explained; says why.
    """
    start = time.perf_counter()
    config = request.config
    place = _place(request)
    note("reading the config")
    place_caches(config.cache_dir)
    folder = resolve_model(config.model, Path(config.cache_dir), with_weights=False)
    model_config = model_config_of(config, folder, place.target)
    shape, dtype = _shape(request, model_config, place)
    options = _options(request, place, shape.context)
    step = FakeStep(model_config, dtype, place.device, shape)
    traced = []
    for piece in _pieces(step, request, place, options):
        note(f"tracing {piece.report.name}")
        traced.append(
            trace_piece(piece.function, piece.arguments, piece.report, piece.traits, options)
        )
    ceilings, came_from = _ceilings(request, place, dtype, note)
    is_measured = request.is_measured and place.is_here and place.target.device_type == "cuda"
    made = [_finished(t, ceilings, options, place, is_measured=is_measured) for t in traced]
    return Report(
        model=config.model,
        architecture=model_config.architecture,
        device=place.name,
        target=place.target.device_type + (f" sm_{place.target.arch}" * bool(place.target.arch)),
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=request.num_tokens,
        context=shape.context,
        is_decode=shape.is_decode,
        num_layers=model_config.num_layers,
        read_tb_s=None if ceilings is None else ceilings.read / 1e12,
        matmul_tflop_s=None if ceilings is None else ceilings.matmul / 1e12,
        ceilings_from=came_from,
        objective=options.registry.objective.value,
        pieces=tuple(made),
        seconds=time.perf_counter() - start,
        notes=_notes(made, place),
    )


def _place(request: Request) -> _Place:
    if request.arch is not None:
        name = f"a GPU of sm_{request.arch}"
        described = Target("cuda", request.arch, is_described=True)
        if not torch.cuda.is_available():
            return _Place(
                target=described, device=torch.device("cpu"), name=f"{name}, not here",
                is_here=False,
            )  # fmt: skip
        device = torch.device("cuda", torch.cuda.current_device())
        here = Target.of(device)
        if here.arch != request.arch:
            return _Place(target=described, device=device, name=f"{name}, not here", is_here=False)
        return _Place(target=here, device=device, name=describe_device(device).name, is_here=True)
    device = pick_device(request.config.device)
    name = describe_device(device).name
    return _Place(target=Target.of(device), device=device, name=name, is_here=True)


def _shape(
    request: Request, model_config: ModelConfig, place: _Place
) -> tuple[StepShape, torch.dtype]:
    config = request.config
    is_cpu = place.target.device_type == "cpu"
    max_rows = config.max_num_seqs or (64 if is_cpu else 256)
    chunk = config.chunked_prefill_size or (512 if is_cpu else 8192)
    longest = model_config.max_position_embeddings
    if request.num_tokens > max(chunk, max_rows):
        raise ConfigError(
            f"--tokens is {request.num_tokens}; a step computes at most {chunk} "
            "(--chunked-prefill-size)",
            param="tokens",
        )
    is_decode = request.num_tokens <= max_rows
    wanted = min(DEFAULT_CONTEXT, longest) if request.context is None else request.context
    context = wanted if is_decode else request.num_tokens
    if context > longest:
        flag = "--context" if is_decode else "--tokens"
        raise ConfigError(
            f"{flag} is {context}; the model was made for {longest} positions", param="context"
        )
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name)
    is_fp8 = config.kv_cache_dtype == "fp8_e4m3"
    if is_fp8 and is_cpu:
        raise ConfigError("--kv-cache-dtype fp8_e4m3 needs a GPU", param="kv_cache_dtype")
    shape = StepShape(
        num_tokens=request.num_tokens,
        context=context,
        max_rows=max_rows,
        page_size=config.block_size,
        is_decode=is_decode,
        cache_dtype=torch.float8_e4m3fn if is_fp8 else dtype,
    )
    return shape, dtype


def _options(request: Request, place: _Place, context: int) -> Options:
    config = request.config
    tuner = KernelTuner(Path(config.cache_dir) / KERNELS) if place.is_here else None
    registry = make_registry(
        config.kernels,
        config_file=config.kernel_config,
        objective=config.kernel_objective,
        tuner=tuner,
    )
    return Options(
        target=place.target,
        kept_ops=kept_ops(torch.device(place.target.device_type)),
        disabled=disabled_passes(
            place.target.device_type, disabled=config.disable_passes, enabled=config.enable_passes
        ),
        registry=registry,
        inductor={"triton.enable_pdl": True} if config.inductor_pdl else {},
        context=context,
    )


def _pieces(step: FakeStep, request: Request, place: _Place, options: Options) -> list[_Piece]:
    """Embedding, each distinct layer, the last one apart where it gives fewer rows, the head."""
    model, shape = step.model, step.shape
    is_gpu = place.target.device_type == "cuda"
    max_few = few_limit(options.registry)
    chunk = request.config.chunked_prefill_size or (8192 if is_gpu else 512)
    versions = layer_versions(
        max(chunk, shape.num_tokens), shape.max_rows, is_gpu=is_gpu, has_last=is_gpu,
        max_few=max_few,
    )  # fmt: skip
    version = version_for(versions, shape.num_tokens, is_mixed=not shape.is_decode)
    last = last_version_for(versions, version, shape.num_tokens)
    num_layers = len(model.layers)

    def embed(token_ids: Tensor, positions: Tensor) -> tuple[Any, ...]:
        residual, rotary = model.embed(token_ids, positions)
        return (residual, *rotary)

    def head(residual: Tensor) -> Tensor:
        return model.head(residual)

    plain = PieceTraits(is_foreign=model.is_foreign)
    pieces = [_Piece(PieceReport(name="embedding"), embed, step.tokens(), plain)]
    kinds = layer_kinds(model.layers)
    for kind in sorted(set(kinds)):
        members = tuple(index for index, other in enumerate(kinds) if other == kind)
        layer = model.layers[members[0]]
        name = f"layer of kind {kind + 1}" if max(kinds) else "layer"
        kept = tuple(i for i in members if last is None or i != num_layers - 1)
        for served, indices in ((version, kept), (last, tuple(set(members) - set(kept)))):
            if served is None or not indices:
                continue
            pieces.append(_layer_piece(step, layer, served, indices, name, max_few, is_gpu=is_gpu))
    num_rows = min(shape.num_tokens, shape.max_rows)
    is_few = is_gpu and num_rows <= max_few
    traits = replace(plain, is_few=is_few)
    pieces.append(_Piece(PieceReport(name="head"), head, (step.residual(num_rows),), traits))
    return pieces


def _layer_piece(
    step: FakeStep,
    layer: Any,
    version: LayerVersion,
    indices: tuple[int, ...],
    name: str,
    max_few: int,
    *,
    is_gpu: bool,
) -> _Piece:
    function, _ = layer_function(version)
    arguments = step.layer_inputs(layer, is_last=version.is_last)
    report = PieceReport(
        name=f"{name}, last" if version.is_last else name,
        version=version.sizes,
        count=len(indices),
        layers=indices,
    )
    return _Piece(
        report,
        function,
        arguments,
        layer_traits(version, is_gpu=is_gpu, max_few=max_few, is_foreign=step.model.is_foreign),
    )


def _ceilings(
    request: Request, place: _Place, dtype: torch.dtype, note: Callable[[str], None]
) -> tuple[Ceilings | None, str]:
    if request.ceilings is not None:
        return request.ceilings, "given"
    if place.is_here:
        note("measuring the device's ceilings")
        return measure(place.device, dtype), "measured now"
    if place.target.arch in KNOWN_CEILINGS:
        name, known = KNOWN_CEILINGS[place.target.arch]
        return known, f"as measured on {name}"
    return None, "unknown: --read-tb-s and --matmul-tflops give them"


def _finished(
    traced: Traced,
    ceilings: Ceilings | None,
    options: Options,
    place: _Place,
    *,
    is_measured: bool,
) -> PieceReport:
    """With floors, and times where they are measured."""

    def floored(row: KernelRow) -> KernelRow:
        if ceilings is None:
            return row
        floor_s = ceilings.floor_s(row.num_bytes, row.num_flops, is_8bit=row.is_8bit)
        return replace(row, floor_us=floor_s * 1e6)

    rows = [floored(row) for row in traced.report.kernels]
    if is_measured:
        rows = measure_rows(traced, rows, options, place.device)
    return replace(traced.report, kernels=tuple(rows))


def _notes(pieces: list[PieceReport], place: _Place) -> tuple[str, ...]:
    notes = [_SCHEDULER_NOTE]
    if not place.is_here:
        notes.append("the device is not here: structure and floors only, nothing is measured")
    unknown = sum(row.num_kernels == 0 for piece in pieces for row in piece.kernels)
    if unknown:
        notes.append(
            "a call whose number of kernels is not known is counted as one: plain torch code runs "
            "one kernel an operation"
        )
    return tuple(notes)
