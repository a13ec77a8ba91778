"""One piece of a step through the engine's passes: what runs, which pass made it, who computes it.

Watches the pipeline from inside: a recorder sees the graph after each pass, and the registry's
choices are kept as they are made. Rows are then what Inductor's scheduler would launch.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from compiled_engine.compile.inductor_view import Group, View, is_work, view_function
from compiled_engine.custom_ops.families import family_of
from compiled_engine.custom_ops.kernel_family import KernelFamily, num_bytes
from compiled_engine.custom_ops.registry import Choice, KernelRegistry, Target
from compiled_engine.explain.report import KernelRow, PassRow, PieceReport
from compiled_engine.passes.names import PASS_NAMES, PieceTraits
from compiled_engine.passes.pattern import Graph, auto_functionalized_v2
from compiled_engine.passes.pipeline import LIFTS, PassPipeline

NOT_FUSIONS = ("choose_kernels", "expand")
_ATEN = torch.ops.aten
# Ops that read some rows of their first argument, and ops that write some.
_LOOK_UPS = (
    _ATEN.embedding.default,
    _ATEN.index.Tensor,
    _ATEN.index_select.default,
    _ATEN.gather.default,
)
_UPDATES = (_ATEN.index_put.default, _ATEN.index_put_.default)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How pieces are compiled.

    Attributes:
        target: device.
        kept_ops: fused ops that have a kernel there.
        disabled: passes that are switched off.
        registry: chooses kernels.
        inductor: options of Inductor.
        context: tokens of KV of each sequence.
    """

    target: Target
    kept_ops: frozenset[str]
    disabled: tuple[str, ...]
    registry: KernelRegistry
    inductor: dict[str, Any]
    context: int


@dataclass(frozen=True)
class Traced:
    """A piece's report, and the graph it is about; `groups` are its rows."""

    report: PieceReport
    view: View
    groups: tuple[Group, ...]


class _Watch:
    """Sees a graph before the first pass and after each."""

    def __init__(self) -> None:
        self.matches: dict[str, int] = {}
        self._made: dict[Node, str] = {}
        self._choices: dict[Node, tuple[KernelFamily, Choice]] = {}
        self._graph: Graph | None = None

    def start(self, graph: Graph) -> None:
        self._graph = graph
        self._made = dict.fromkeys(graph.nodes, "")
        self._sort()

    def after(self, graph: Graph, name: str) -> None:
        for node in graph.nodes:
            self._made.setdefault(node, name)
        self._sort()

    def on_pass(self, name: str, matches: int, seconds: float) -> None:
        self.matches[name] = matches

    def on_choice(
        self, node: Node, family: KernelFamily, choices: tuple[tuple[int, Choice], ...]
    ) -> None:
        if choices:
            self._choices[node] = (family, choices[0][1])
            if self._graph is not None:
                self._sort()

    def _sort(self) -> None:
        """By op and by how many of its calls come before: later passes make other nodes of them."""
        assert self._graph is not None
        self.made_by: dict[Any, list[str]] = defaultdict(list)
        self.chosen: dict[Any, list[tuple[KernelFamily, Choice] | None]] = defaultdict(list)
        self.by_node: dict[Node, str] = {}
        for node in self._graph.nodes:
            if node.op != "call_function":
                continue
            self.by_node[node] = self._made.get(node, "")
            op = node.args[0] if node.target is auto_functionalized_v2 else node.target
            self.made_by[op].append(self._made.get(node, ""))
            self.chosen[op].append(self._choices.get(node))


def trace_piece(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    report: PieceReport,
    traits: PieceTraits,
    options: Options,
) -> Traced:
    """Traces a piece; `report` brings its name and counts, the result has passes and rows."""
    watch = _Watch()
    skipped = traits.skipped()
    pipeline = PassPipeline(
        disabled=tuple(dict.fromkeys((*options.disabled, *skipped))),
        kept_ops=options.kept_ops,
        on_pass=watch.on_pass,
        registry=options.registry,
        dump=watch,
        target=options.target,
        on_choice=watch.on_choice,
    )
    view = view_function(function, arguments, pipeline, options.target, options.inductor)
    rows = _rows(view, watch, options)
    # Passes for foreign code are of no interest where there is none.
    hidden = () if traits.is_foreign else {module.NAME for module in LIFTS}
    passes = tuple(
        PassRow(
            name=name,
            matches=watch.matches.get(name, 0),
            why_off="disabled" * (name in options.disabled) or "not for it" * (name in skipped),
        )
        for name in (*PASS_NAMES, *NOT_FUSIONS)
        if not (name in hidden and name not in options.disabled)
    )
    made = replace(
        report, passes=passes, kernels=tuple(rows), num_graph_breaks=view.num_graph_breaks
    )
    return Traced(made, view, tuple(view.groups))


def _rows(view: View, watch: _Watch, options: Options) -> list[KernelRow]:
    owners = {node: index for index, g in enumerate(view.groups) for node in g.nodes}
    seen: dict[Any, int] = defaultdict(int)
    rows = []
    for group in view.groups:
        inputs = tuple(sorted({i for node in group.nodes for i in _sources(node, owners)}))
        own = owners[group.nodes[-1]]
        inputs = tuple(index for index in inputs if index != own)
        if group.is_generated:
            rows.append(_generated(group, watch, inputs))
            continue
        node = group.nodes[-1]
        place = seen[node.target]
        seen[node.target] += 1
        rows.append(_call(node, place, watch, inputs, options))
    return rows


def _generated(group: Group, watch: _Watch, inputs: tuple[int, ...]) -> KernelRow:
    makers = [watch.by_node.get(node, "") for node in group.nodes]
    results = external_results(group)
    size = _moved_bytes(group, results)
    return KernelRow(
        name="inductor",
        shape=describe(results[-1].meta["val"] if results else group.nodes[-1].meta["val"]),
        made_by=tuple(dict.fromkeys(name for name in makers if name)),
        kernel="inductor",
        reason="no op of ours is left in it: Inductor fuses what it is made of",
        covers=tuple(op_name(node.target) for node in group.nodes),
        inputs=inputs,
        num_bytes=float(size),
        num_flops=float(sum(_flops(node) for node in group.nodes)),
    )


def _call(
    node: Node, place: int, watch: _Watch, inputs: tuple[int, ...], options: Options
) -> KernelRow:
    """A row for one call of an op, ours or ATen's."""
    makers = watch.made_by.get(node.target, [])
    made_by = tuple(name for name in makers[place : place + 1] if name)
    row = KernelRow(
        name=op_name(node.target), shape=describe(node.meta.get("val")), made_by=made_by,
        inputs=inputs,
    )  # fmt: skip
    chosen = (watch.chosen.get(node.target) or [None] * (place + 1))[place]
    family = chosen[0] if chosen is not None else family_of(node.target)
    if family is None:
        values = [n.meta["val"] for n in node.all_input_nodes]
        moved = float(sum(num_bytes(v) for v in [*values, node.meta.get("val")]))
        return replace(
            row,
            kernel="library",
            reason="an op of torch, with its library's kernel",
            num_bytes=moved,
            num_flops=float(_flops(node)),
        )
    arguments = bound_values(node, family)
    cost = family.cost(arguments, _results(node), options.context)
    row = replace(row, place=family.place, **asdict(cost))
    if chosen is None:
        return row
    choice = chosen[1]
    traits = family.traits(arguments, options.target)
    return replace(
        row,
        kernel=choice.candidate.name,
        reason=choice.reason,
        rejected=choice.rejected,
        num_kernels=choice.candidate.num_kernels(traits),
    )


def bound_values(node: Node, family: KernelFamily) -> dict[str, Any]:
    """Arguments of a call by name, tensors as their fake values."""
    bound = family.bind(node.args, node.kwargs)
    return {n: v.meta["val"] if isinstance(v, Node) else v for n, v in bound.items()}


def _results(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _sources(node: Node, owners: dict[Node, int]) -> list[int]:
    """Groups that a node reads from, through views and outputs of multi-output ops."""
    found, pending, visited = [], list(node.all_input_nodes), set()
    while pending:
        source = pending.pop()
        if source in visited:
            continue
        visited.add(source)
        if source in owners:
            found.append(owners[source])
        elif not is_work(source):
            pending += source.all_input_nodes
    return found


def external_inputs(group: Group) -> list[Node]:
    """Nodes outside a group whose values it reads, views resolved to what they are of."""
    inside, found = set(group.nodes), []
    for node in group.nodes:
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source in inside:
                continue
            is_open = not is_work(source) and source.op == "call_function"
            if is_open and _comes_from(source, inside):
                pending += source.all_input_nodes
            elif source not in found:
                found.append(source)
    return [node for node in found if isinstance(node.meta.get("val"), torch.Tensor)]


def _moved_bytes(group: Group, results: list[Node]) -> int:
    """Bytes that a group reads and writes: of a table only the rows that are looked up or set."""
    inside = set(group.nodes)
    size = 0
    for source in external_inputs(group):
        readers = [user for user in source.users if user in inside]
        is_looked_up = bool(readers) and all(
            user.target in _LOOK_UPS and user.args[0] is source for user in readers
        )
        is_set = bool(readers) and all(
            user.target in _UPDATES and user.args[0] is source for user in readers
        )
        rows = sum(num_bytes(user.meta["val"]) for user in readers) if is_looked_up else 0
        size += 0 if is_set else rows if is_looked_up else num_bytes(source.meta["val"])
    for result in results:
        values = result.args[2] if result.target in _UPDATES else result
        size += num_bytes(values.meta["val"]) if isinstance(values, Node) else 0
    return size


def _comes_from(node: Node, inside: set[Node]) -> bool:
    """A view of something in the group."""
    return any(
        source in inside or (not is_work(source) and _comes_from(source, inside))
        for source in node.all_input_nodes
    )


def external_results(group: Group) -> list[Node]:
    """Nodes of a group that somebody else reads."""
    inside = set(group.nodes)

    def is_read(node: Node) -> bool:
        return any(
            user not in inside and (is_work(user) or user.op == "output" or is_read(user))
            for user in node.users
        )

    return [node for node in group.nodes if is_read(node)]


def _flops(node: Node) -> float:
    """Of matrix products and the like, as torch counts them."""
    packet = getattr(node.target, "overloadpacket", None)
    counter = flop_registry.get(packet)
    if counter is None:
        return 0.0
    values = [n.meta["val"] if isinstance(n, Node) else n for n in node.args]
    return float(counter(*values, out_val=node.meta["val"]))


def op_name(target: Any) -> str:
    """An op as people write it: `aten.mm`, `ce.fused_linear`."""
    if target is operator.getitem:
        return "getitem"
    schema = getattr(target, "_schema", None)
    return str(target) if schema is None else schema.name.replace("::", ".")


def describe(value: Any) -> str:
    """Dtype and shape of a value, of the first of several."""
    if isinstance(value, tuple | list):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return ""
    sizes = " x ".join(str(int(size)) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} {sizes}".strip()
