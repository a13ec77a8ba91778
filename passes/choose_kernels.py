"""Ops that several kernels implement get the chosen one's name as an argument.

    before:  o = ce.paged_attention(q, ..., impl="")
    after:   o = ce.paged_attention(q, ..., impl="triton")

The registry decides from device, dtype and shapes, once, while the graph is traced. Where the
number of tokens varies within the graph, the op itself takes the best for each, unless an option
asks for something: then the argument is a list by tokens (`registry.by_tokens`). A plugin's kernel
is called in the place of the op. An op without such an argument that an option wants in plain torch
becomes its body; on a GPU one that writes the KV cache becomes a call of it.
Conditions: none. Numerics: as the chosen kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.node import map_arg

from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.kernel_family import KernelFamily
from compiled_engine.custom_ops.registry import (
    Choice,
    KernelRegistry,
    Priority,
    Query,
    Target,
    names_by_tokens,
)
from compiled_engine.custom_ops.rope_kv import PLAIN_WRITES
from compiled_engine.errors import ConfigError
from compiled_engine.passes.pattern import (
    UNBOUNDED,
    Graph,
    Node,
    calls,
    expand_functionalized,
    functionalized_calls,
    inline_call,
    size_range,
    symbol_range,
)

NAME = "choose_kernels"
# Numbers of tokens beyond which nothing is chosen anew; the second where a graph names no limit.
MOST_TOKENS, MOST_UNTOLD = 1 << 14, 1 << 10
# For a size that is open besides the number of tokens: pages of caches, mostly.
MANY_PAGES = 2048
# (node, family, choices by the highest number of tokens they serve)
OnChoice = Callable[[Node, KernelFamily, tuple[tuple[int, Choice], ...]], None]


def apply(
    graph: Graph,
    registry: KernelRegistry,
    *,
    target: Target | None = None,
    on_choice: OnChoice | None = None,
) -> int:
    """Rewrites the graph in place; returns how many calls got a name.

    Args:
        graph: with ops of ours.
        registry: decides.
        target: what code is made for; the device of the graph's values if not given.
        on_choice: is told every choice, of ops too that need no name.

    Raises:
        ConfigError: an option asks for a kernel that cannot serve.
    """
    matches = 0
    for family in FAMILIES:
        is_asked = family.has_impl or not registry.is_plain(family.family, family.mode)
        if not is_asked and on_choice is None:
            continue
        for node, arguments in _calls(graph, family):
            choices = _choices(family, arguments, registry, target, is_told=on_choice is not None)
            if on_choice is not None:
                on_choice(node, family, choices)
            if is_asked and choices:
                device = target.device_type if target else arguments[family.main].device.type
                matches += _write(graph, node, family, registry, choices, device)
    return matches


def _calls(graph: Graph, family: KernelFamily) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Calls of the family's op with their arguments by name, tensors as their fake values."""
    overload = family.op.overload
    for node in calls(graph, overload):
        yield node, _values(family.bind(node.args, node.kwargs))
    for node in functionalized_calls(graph, overload):
        bases = node.kwargs["_all_bases"]
        assert isinstance(bases, (list, tuple))
        given = dict(node.kwargs)
        for argument in overload._schema.arguments:
            index = node.kwargs.get(f"_{argument.name}_base_index")
            if isinstance(index, int):
                given[argument.name] = bases[index]
        names = [a.name for a in overload._schema.arguments]
        yield node, _values(family.bind((), {n: given[n] for n in names if n in given}))


def _values(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: map_arg(value, lambda n: n.meta["val"]) for name, value in arguments.items()}


def _choices(
    family: KernelFamily,
    arguments: dict[str, Any],
    registry: KernelRegistry,
    target: Target | None,
    *,
    is_told: bool,
) -> tuple[tuple[int, Choice], ...]:
    """Choices by tokens, one with limit 0 where their number does not matter.

    Empty where the op may look when it runs and nobody is told.
    """
    main = arguments[family.main]
    target = target or Target.of(main.device)
    layout = str(arguments[family.layout]) if family.layout else ""

    def decide(traits: dict[str, int], concrete: dict[str, Any]) -> Choice:
        query = Query(
            family=family.family,
            mode=family.mode,
            target=target,
            dtype=family.dtype_of(arguments),
            traits=traits,
            layout=layout,
        )
        return registry.decide(query, concrete)

    open_size = main.shape[0] if main.dim() else 0
    if not isinstance(open_size, torch.SymInt):
        sized_arguments = with_size(arguments, None, 0)
        return ((0, decide(family.traits(arguments, target), sized_arguments)),)
    low, high = size_range(open_size)
    limits = token_limits(low, high)
    sized = {limit: with_size(arguments, open_size, limit) for limit in limits}
    traits = {limit: family.traits(sized[limit], target) for limit in limits}
    if all(found == traits[limits[0]] for found in traits.values()):
        return ((0, decide(traits[limits[0]], sized[limits[0]])),)
    if registry.is_plain(family.family, family.mode) and not is_told:
        return ()
    made: list[tuple[int, Choice]] = []
    for limit in limits:
        try:
            made.append((limit, decide(traits[limit], sized[limit])))
        except ConfigError:
            if not made:
                raise
            break  # the op refuses more tokens when it gets them
    return tuple(made)


def token_limits(low: int, high: int) -> list[int]:
    """Numbers of tokens that a choice is made at: powers of two from `low` on, and `high`.

    Where a graph was not told how many there may be, the last choice serves all above it.
    """
    most = MOST_UNTOLD if high >= UNBOUNDED else min(high, MOST_TOKENS)
    limits = [1 << power for power in range(31) if low <= 1 << power < most]
    return [*limits, max(low, most)]


def with_size(arguments: dict[str, Any], size: torch.SymInt | None, value: int) -> dict[str, Any]:
    """The same arguments without storage, where `value` stands for the size that varies.

    What may vary between the same limits is the same size: tensors of a step's tokens, each open by
    itself. Others, of KV pages say, are many: what is measured shall come from memory.
    A size made of several open ones, or a stride, follows from what stands for them.
    """
    limits = None if size is None else size_range(size)

    def of_symbol(low: int, high: int) -> int:
        return value if (low, high) == limits else max(low, min(high, MANY_PAGES))

    def number(given: Any) -> int:
        if not isinstance(given, torch.SymInt):
            return int(given)
        symbols = sorted(given.node.expr.free_symbols, key=str)
        chosen = {
            symbol: of_symbol(*symbol_range(symbol, given.node.shape_env)) for symbol in symbols
        }
        return int(given.node.expr.subs(chosen))

    def sized(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return number(given) if isinstance(given, torch.SymInt) else given
        shape = [number(n) for n in given.shape]
        stride = [number(n) for n in given.stride()]
        offset = number(given.storage_offset())
        extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        base = torch.empty(max(0, extent), dtype=given.dtype, device="meta")
        return base.as_strided(shape, stride, offset)

    return {name: sized(given) for name, given in arguments.items()}


def _write(
    graph: Graph,
    node: Node,
    family: KernelFamily,
    registry: KernelRegistry,
    choices: tuple[tuple[int, Choice], ...],
    device_type: str,
) -> bool:
    """Writes what was chosen into the graph; whether that was a name or another op."""
    found = {choice.candidate.name: choice.candidate for _, choice in choices}
    foreign = [candidate for candidate in found.values() if candidate.launch is not None]
    if len(found) == 1 and foreign:
        _call_instead(node, foreign[0].launch)
        return True
    if family.has_impl:
        is_open = choices[0][0] > 0
        if is_open and registry.is_plain(family.family, family.mode):
            return False  # the op looks when it runs
        # A plugin serves a graph of many sizes where it is chosen for all; else the op looks.
        names = [
            (limit, choice.candidate.name if choice.candidate.launch is None else "")
            for limit, choice in choices
        ]
        node.update_kwarg("impl", names_by_tokens(names) if is_open else names[0][1])
        return True
    if len(found) == 1 and next(iter(found.values())).priority is Priority.REFERENCE:
        plain = PLAIN_WRITES.get(family.op.name)
        if plain is not None and device_type == "cuda":  # see `_define_write` there
            _call_instead(node, plain.overload)
            return True
        return _inline(graph, node, family)
    return False


def _call_instead(node: Node, launch: Any) -> None:
    """Another op takes the place of ours: a plugin's, or plain PyTorch."""
    if node.target in (launch, None):
        return
    kwargs = {name: value for name, value in node.kwargs.items() if name != "impl"}
    if isinstance(node.args[0], torch._ops.OpOverload):  # functionalised
        node.args = (launch, *node.args[1:])
    else:
        wanted = len(launch._schema.arguments)
        node.args = node.args[:wanted]
        node.target = launch
    node.kwargs = kwargs


def _inline(graph: Graph, node: Node, family: KernelFamily) -> bool:
    op = family.op
    if not op.is_expandable:
        return False
    if op.functional_reference is not None:
        return expand_functionalized(graph, node, op.overload, op.functional_reference)
    inline_call(graph, node, op.reference)
    return True
