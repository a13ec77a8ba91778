"""The one pass object: runs the fusions in order, then expands what nobody took.

Handed to Inductor as `post_grad_custom_pre_pass` of each compile. Its fingerprint covers the pass
sources, every reference body, the order and the options, so a compiled artefact is never used with
other sources. Counts go to the counters given by the caller.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from compiled_engine.compile.torch_compat import note_matches
from compiled_engine.custom_ops import (
    ALL_OPS,
    OpSpec,
    families,
)
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import KernelRegistry, Target
from compiled_engine.custom_ops.tuning import source_hash
from compiled_engine.passes import (
    choose_kernels,
    decode_attention,
    flatten_batch,
    fuse_activation_quant,
    fuse_add_rms_norm,
    fuse_attention_quant,
    fuse_linear,
    fuse_norm_quant,
    fuse_qk_norm_rope_kv,
    fuse_sparse_mlp,
    lift_gated_activation,
    lift_rms_norm,
    lift_rope,
    lift_route,
    lower_quantized_linear,
    lower_scaled_linear,
    merge_linears,
    pattern,
    quant_pattern,
    remove_no_ops,
    use_library_op,
    use_linear_op,
)
from compiled_engine.passes.names import check_names
from compiled_engine.passes.pattern import (
    CustomGraphPass,
    Graph,
    expand_functionalized,
    expander,
    functionalized_calls,
)

# The order is that of `names.PASS_NAMES`.
LIFTS: tuple[ModuleType, ...] = (
    remove_no_ops,
    flatten_batch,
    merge_linears,
    lift_rms_norm,
    lift_gated_activation,
    lift_rope,
    lift_route,
)
FUSIONS: tuple[ModuleType, ...] = (
    *LIFTS,
    decode_attention,
    lower_quantized_linear,
    lower_scaled_linear,
    fuse_sparse_mlp,
    fuse_linear,
    use_library_op,
    fuse_add_rms_norm,
    fuse_norm_quant,
    fuse_activation_quant,
    fuse_attention_quant,
    fuse_qk_norm_rope_kv,
)
# Passes that look at plain ATen: they run when the ops that nobody took have become that.
LATE_PASSES: tuple[ModuleType, ...] = (use_linear_op,)


class Recorder(Protocol):
    """Sees a graph before the first pass and after each; `dump.GraphDump` writes it to files."""

    def start(self, graph: Graph) -> None:
        """A graph before any pass has seen it."""

    def after(self, graph: Graph, name: str) -> None:
        """The graph as the pass of that name left it."""


class PassPipeline(CustomGraphPass):
    """Fusions, then expansion.

    Args:
        disabled: names from `PASS_NAMES` to leave out.
        kept_ops: names of fused ops that have a kernel on the target device and stay in the graph;
            the others are matched and counted, then expanded again.
        on_pass: called with (pass name, matches, seconds) after each pass of each graph.
        registry: chooses kernels; one without overrides if not given.
        dump: gets every graph before and after each pass; not part of the fingerprint.
        target: what code is made for, if that is not the device of a graph's values.
        on_choice: is told every choice of a kernel.

    Raises:
        ConfigError: an unknown pass name; lists the known ones.
    """

    def __init__(
        self,
        *,
        disabled: tuple[str, ...] = (),
        kept_ops: frozenset[str] = frozenset(),
        on_pass: Callable[[str, int, float], None],
        registry: KernelRegistry | None = None,
        dump: Recorder | None = None,
        target: Target | None = None,
        on_choice: choose_kernels.OnChoice | None = None,
    ) -> None:
        check_names(disabled, "disable")
        self.registry = registry or make_registry()
        disabled = (*disabled, *_in_the_way(self.registry))
        self.fusions = tuple(m for m in FUSIONS if m.NAME not in disabled)
        self.late_passes = tuple(m for m in LATE_PASSES if m.NAME not in disabled)
        self.kept_ops = kept_ops
        self.on_pass = on_pass
        self.dump = dump
        self.kept_ops -= _asked_plain(self.registry)
        self.target = target
        self.on_choice = on_choice
        names = tuple(m.NAME for m in (*self.fusions, *self.late_passes))
        self._fingerprint = _fingerprint(names, self.kept_ops, self.registry)
        pure = [op for op in ALL_OPS if op.is_expandable and op.functional_reference is None]
        self._expanders = [
            (op, expander(op.overload, op.reference)) for op in pure if op.name not in self.kept_ops
        ]

    def __call__(self, graph: Graph) -> None:
        if self.dump is not None:
            self.dump.start(graph)
        for module in self.fusions:
            self._apply(graph, module.NAME, module.apply)
        self._apply(graph, choose_kernels.NAME, self._choose)
        self._apply(graph, "expand", self._expand)
        num_late = sum(self._apply(graph, m.NAME, m.apply) for m in self.late_passes)
        if num_late:  # their ops have kernels to choose from, too
            self._choose(graph)
        graph.eliminate_dead_code()
        graph.lint()

    def _apply(self, graph: Graph, name: str, function: Callable[[Graph], int]) -> int:
        """Runs one pass, and says what it did; returns its matches."""
        start = time.perf_counter()
        matches = function(graph)
        self.on_pass(name, matches, time.perf_counter() - start)
        note_matches(name, matches)
        if self.dump is not None:
            self.dump.after(graph, name)
        return matches

    def uuid(self) -> str:
        """The fingerprint; part of Inductor's cache key."""
        return self._fingerprint

    def _choose(self, graph: Graph) -> int:
        options: dict[str, Any] = {"target": self.target, "on_choice": self.on_choice}
        return choose_kernels.apply(graph, self.registry, **options)

    def _expand(self, graph: Graph) -> int:
        expanded = 0
        for op in ALL_OPS:
            is_mutable = op.functional_reference is not None
            if is_mutable and op.is_expandable and op.name not in self.kept_ops:
                expanded += _expand_mutable(graph, op)
        for _, found in self._expanders:
            expanded += found.apply(graph)
        return expanded


def _asked_plain(registry: KernelRegistry) -> frozenset[str]:
    """Ops that an option wants in plain torch, and that are not told which kernel runs."""
    return frozenset(
        family.op.name
        for family in families.FAMILIES
        if not family.has_impl
        and family.op.is_expandable
        and family.op.functional_reference is None  # `choose_kernels` has a plain call of these
        and registry.override(family.family, family.mode) == "torch"
    )


def _in_the_way(registry: KernelRegistry) -> tuple[str, ...]:
    """Passes that would hide an op of which an option names the kernel."""
    parts = (("experts", "grouped"), ("route", "top_k"))
    is_asked = any(registry.override(*part) is not None for part in parts)
    return (fuse_sparse_mlp.NAME,) if is_asked else ()


def _expand_mutable(graph: Graph, op: OpSpec) -> int:
    assert op.functional_reference is not None
    return sum(
        expand_functionalized(graph, node, op.overload, op.functional_reference)
        for node in functionalized_calls(graph, op.overload)
    )


def _fingerprint(
    order: tuple[str, ...], kept_ops: frozenset[str], kernel_registry: KernelRegistry
) -> str:
    """Hash of sources, reference bodies, order and options; equal on every machine."""
    digest = hashlib.sha256()
    options = (order, sorted(kept_ops), kernel_registry.fingerprint, torch.__version__)
    digest.update(repr(options).encode())
    digest.update(source_hash().encode())  # bodies, and which kernel is chosen
    for module in (
        pattern,
        quant_pattern,
        choose_kernels,
        *FUSIONS,
        *LATE_PASSES,
        inspect.getmodule(_fingerprint),
    ):
        assert module is not None
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()
