"""Compiles what a start on another GPU would, on a machine that has no such GPU.

The start's own steps run on tensors without values, see `described_gpu`: each launch of a kernel
written here says what has to be compiled, under the key that a launch on the GPU looks up. Layers
and head run as the passes leave their graphs. What Inductor generates is not among it: a piece is
kept as what it did when it first ran, and it runs nowhere but on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

from compiled_engine.cache_folders import CUBINS, place_caches, write_problem
from compiled_engine.compile.direct import PlainPiece
from compiled_engine.compile.driver import PLAIN, CompileDriver
from compiled_engine.compile.inductor_view import view_function
from compiled_engine.config import EngineConfig
from compiled_engine.cross_builds import BuildRow, CrossBuilds
from compiled_engine.custom_ops import cuda_build, gemm
from compiled_engine.custom_ops.library import LIBRARY
from compiled_engine.custom_ops.registry import Target
from compiled_engine.described_gpu import (
    GPU,
    Chip,
    described_gpu,
    tensors_here,
    tensors_on_gpu,
    triton_for,
)
from compiled_engine.engine import kept_ops, make_pieces
from compiled_engine.errors import ConfigError
from compiled_engine.kv_cache import allocate
from compiled_engine.models import ARCHITECTURES, HfModelConfig, ModelConfig
from compiled_engine.models.weights import build_model
from compiled_engine.passes.names import PieceTraits
from compiled_engine.passes.pipeline import PassPipeline
from compiled_engine.sampler import Variant, build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.settings import (
    ANY_PAGES,
    Settings,
    cache_geometry,
    preview,
    scheduler_shape,
)
from compiled_engine.step import StepExecutor
from compiled_engine.step_key import StepKey, masked_keys

_PIECE_REASON = (
    "a piece is kept as the kernels that Inductor made and ran: it is compiled where it runs"
)
# What else a start makes on its GPU.
_OTHERS = (
    ("measurement", "memory", "what steps need beside weights is measured by the first start"),
    (
        "capture",
        "CUDA graphs",
        "hold addresses of one process: every start captures them",
    ),
)
# (label, done, total)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CrossReport:
    """What was made for a GPU that is not here.

    Attributes:
        built: kernels that are in the cache now, by name.
        left: what a start on the GPU compiles itself, with reasons.
        files: of the cache folder, that hold what was built; relative to it.
        versions: of the compilers, which are part of the keys.
    """

    built: tuple[BuildRow, ...]
    left: tuple[BuildRow, ...]
    files: tuple[str, ...]
    versions: dict[str, str]

    @property
    def is_complete(self) -> bool:
        """Whether no compiler refused anything."""
        return not any(row.is_error for row in self.left)


def check_cross(config: EngineConfig) -> None:
    """Refuses what cannot be had for a GPU that is not here.

    Raises:
        ConfigError: names the option or the package.
    """
    for flag, is_given, reason in (
        ("--device cpu", config.device == "cpu", "is not the device of that architecture"),
        ("--scheduler torch", config.scheduler == "torch", "compiles on the GPU alone"),
        ("--dump-graphs", config.dump_graphs is not None, "is for pieces, which are not compiled"),
        (
            "--kernel-objective autotune",
            config.kernel_objective == "autotune",
            "measures kernels on the GPU",
        ),
    ):
        if is_given:
            raise ConfigError(f"--target-arch cannot go with {flag}, which {reason}: leave one out")
    if problem := write_problem(Path(config.cache_dir)):
        raise ConfigError(
            f"--target-arch keeps what it compiles in {config.cache_dir}: {problem}; choose "
            "another --cache-dir",
            param="cache_dir",
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("--target-arch compiles, and TRITON_INTERPRET=1 has Triton interpret")
    missing = [name for name in ("triton", "cuda") if find_spec(name) is None]
    try:
        cuda_build.supported_archs()
    except Exception:  # the bindings have several errors for a library that is not there
        missing.append("NVRTC")
    if missing:
        raise ConfigError(
            f"--target-arch needs {' and '.join(missing)}: install triton, cuda-bindings and "
            "nvidia-cuda-nvrtc, in the versions of the machine with the GPU"
        )


def cross_compile(config: EngineConfig, chip: Chip, report: Report) -> CrossReport:
    """Compiles for `chip` what a start with `config` on it would, into the config's cache folder.

    For a process that does nothing else: see `described_gpu`.

    Raises:
        ConfigError: as `build_engine` and `check_cross`.
    """
    check_cross(config)
    place_caches(config.cache_dir)
    builds = CrossBuilds(Path(config.cache_dir), config.compile_jobs or _num_cores())
    with described_gpu(chip):
        settings, model_config = preview(config, num_pages=ANY_PAGES)
        if isinstance(model_config, HfModelConfig):
            raise ConfigError(
                f"--target-arch is for models that have a file here; {model_config.architecture} "
                "runs from transformers' own code, which is laid out on the GPU",
                param="target_arch",
            )
        driver = _Driver(config, chip, builds)
        with (
            builds.running(),
            triton_for(chip, builds.note_launch),
            mock.patch.object(cuda_build, "cached_cubin", builds.cubin),
            mock.patch.object(gemm, "has_cublaslt", return_value=True),
            mock.patch.object(gemm, "library_product", builds.library_product),
            tensors_on_gpu(LIBRARY.gpu_kernels, builds.note_failed_launch),
        ):
            _run_steps(config, settings, model_config, driver, report)
            if config.device_loop:
                builds.cubin("loop/device_loop.cu", chip.arch, Path(config.cache_dir) / CUBINS)
    left = [("piece", name, _PIECE_REASON) for name in driver.names]
    return CrossReport(
        built=tuple(builds.rows()),
        left=(
            *builds.failures(),
            *(BuildRow(kind=kind, name=name, reason=why) for kind, name, why in (*left, *_OTHERS)),
        ),
        files=tuple(builds.files()),
        versions=_compiler_versions(),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _compiler_versions() -> dict[str, str]:
    import triton
    from cuda.bindings import nvrtc

    major, minor = cuda_build.checked(nvrtc.nvrtcVersion())
    return {"nvrtc": f"{major}.{minor}", "triton": triton.__version__}


def _run_steps(
    config: EngineConfig,
    settings: Settings,
    model_config: ModelConfig,
    driver: _Driver,
    report: Report,
) -> None:
    """Every step that a start runs: those of its memory probe, its warm-up and its captures."""
    architecture = ARCHITECTURES[model_config.architecture]
    model = build_model(architecture, model_config, dtype=settings.dtype, device=settings.device)
    shape = scheduler_shape(config, settings)
    caches = allocate(
        cache_geometry(config, model.config, settings.dtype), shape.num_pages, settings.device
    )

    def steps(used: CompileDriver) -> _Steps:
        pieces = make_pieces(model, shape, settings, used)
        made = _Steps(model, caches, pieces, settings.buckets, used)
        inbox, _ = InboxBuilder(shape).take()
        made.prepare(inbox, build_param_inbox(shape, []))
        return made

    if not driver.is_eager:
        plain = steps(CompileDriver(replace(config, enforce_eager=True)))
        for size in (settings.buckets[0], settings.buckets[-1]):
            plain.run_empty(size, is_short=True)
    steps(driver).run_all(report)


class _Steps(StepExecutor):
    """The steps of a start."""

    def run_all(self, report: Report) -> None:
        """Those that compile the pieces, and those that are captured."""
        keys = [
            StepKey(version.example_size, not version.is_decode, Variant.FULL)
            for version in self.pieces.versions
        ]
        keys += self.keys()
        # Processes that compile ahead run this variant at each size, too.
        keys += [key._replace(variant=Variant.FULL) for key in self.keys() if not key.variant]
        keys += masked_keys(keys, self.shape.max_rows)
        for done, key in enumerate(keys):
            report(f"step of {key.num_tokens} tokens", done, len(keys))
            self._enqueue(key, layers=self.pieces.sample_layers)
        report("done", len(keys), len(keys))


class _Driver(CompileDriver):
    """Hands layers and head back as what their compiled forms call, the other pieces as they are.

    Those are plain code around ops that choose their kernels when they are called.

    Attributes:
        names: of the pieces.
    """

    def __init__(self, config: EngineConfig, chip: Chip, builds: CrossBuilds) -> None:
        super().__init__(config, kept_ops=kept_ops(GPU), device_type=GPU.type)
        self.names: list[str] = []
        self._target = Target(GPU.type, chip.number, is_described=True)
        self._builds = builds

    def compile(
        self, function: Callable[..., Any], name: str, traits: PieceTraits = PLAIN
    ) -> Callable[..., Any]:
        """The function, or what stands for it."""
        if self.is_eager:
            return function
        self.names.append(name)
        if not name.startswith(("layer", "head")):
            return function
        return _TracedPiece(function, name, self._graph_of(traits), self._builds)

    def compile_direct(
        self,
        function: Callable[..., tuple[Any, ...]],
        name: str,
        *,
        num_static: int,
        num_shared: int,
        traits: PieceTraits = PLAIN,
    ) -> PlainPiece:
        """The same, as layers are called."""
        return PlainPiece(self.compile(function, name, traits))

    def _graph_of(self, traits: PieceTraits) -> Callable[..., GraphModule]:
        """Gives the graph of a function, over arguments that are here, behind the passes."""

        def trace(function: Callable[..., Any], arguments: tuple[Any, ...]) -> GraphModule:
            passes = PassPipeline(
                disabled=tuple(dict.fromkeys((*self.disabled_passes, *traits.skipped()))),
                kept_ops=self.kept_ops,
                on_pass=self.counters.count_pass,
                registry=self.registry,
                target=self._target,
            )
            view = view_function(
                function, arguments, passes, self._target, self.options, has_groups=False
            )
            assert view.module is not None, "a traced function has a graph"
            return view.module

        return trace


class _TracedPiece:
    """A piece at each size that it is called with: its graph behind the passes, run op by op.

    Args:
        function: of the piece.
        name: of the piece.
        trace: gives its graph.
        builds: are told where that fails.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        trace: Callable[[Callable[..., Any], tuple[Any, ...]], GraphModule],
        builds: CrossBuilds,
    ) -> None:
        self._function = function
        self._name = name
        self._trace = trace
        self._builds = builds
        self._results: dict[Hashable, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns; the same tensors for arguments of the same layout."""
        tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        key = tuple((t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors)
        if key not in self._results:
            self._results[key] = self._first(*arguments)
        return self._results[key]

    def _first(self, *arguments: Any) -> Any:
        try:
            with tensors_here():
                module = self._trace(self._function, arguments)
        except Exception as error:  # of Dynamo, Inductor or a pass
            self._builds.note_failed_piece(self._name, error)
            return self._function(*arguments)
        values = (node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
        inputs = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=GPU)
            if isinstance(v, Tensor)
            else v
            for v in values
        ]
        results = Interpreter(module).run(*inputs)
        return results[0] if self._name.startswith("head") else tuple(results)
