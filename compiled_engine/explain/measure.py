"""Times of a piece's rows on the GPU: the chosen kernel, or what Inductor makes of the row's nodes.

Every call has inputs of its own, in all more than the device's cache holds, and all calls of a row
are captured in one CUDA graph: the device's time, without the host's.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_engine.compile.inductor_view import Group, is_work
from compiled_engine.custom_ops.families import family_of
from compiled_engine.custom_ops.family_inputs import filled
from compiled_engine.custom_ops.kernel_family import num_bytes
from compiled_engine.custom_ops.timing import graph_ms
from compiled_engine.explain.report import KernelRow
from compiled_engine.explain.trace import (
    Options,
    Traced,
    bound_values,
    external_inputs,
    external_results,
)

OUT_OF_CACHE_BYTES = 256e6
MAX_COPIES = 16
NUM_REPLAYS, NUM_REPEATS = 10, 5

logger = logging.getLogger(__name__)


def measure_rows(
    traced: Traced, rows: list[KernelRow], options: Options, device: torch.device
) -> list[KernelRow]:
    """The rows with times; one that cannot be run keeps none, and says so in the log."""
    made = []
    for group, row in zip(traced.groups, rows, strict=True):
        try:
            calls = _calls(group, options, device)
            with torch.no_grad():
                taken = graph_ms(calls, num_replays=NUM_REPLAYS, num_repeats=NUM_REPEATS)
            made.append(replace(row, measured_us=statistics.median(taken) * 1e3))
        except Exception as error:  # one row must not cost the others
            logger.warning("%s was not measured: %s: %s", row.name, type(error).__name__, error)
            made.append(row)
        torch.cuda.empty_cache()
    return made


def _calls(group: Group, options: Options, device: torch.device) -> list[Callable[[], Any]]:
    node = group.nodes[-1]
    family = None if group.is_generated else family_of(node.target)
    if family is not None:
        values = bound_values(node, family)
        make = partial(family.real_inputs, values, device, options.context)
        return [partial(_run, node.target, make()) for _ in range(_copies(values))]
    sources = external_inputs(group)
    module = extracted(group, sources)
    values = {source.name: source.meta["val"] for source in sources}
    function: Callable[..., Any] = module
    if group.is_generated:
        function = torch.compile(module, dynamic=False, options=options.inductor or None)
    return [partial(function, *filled(values, device).values()) for _ in range(_copies(values))]


def _run(op: Any, arguments: dict[str, Any]) -> Any:
    return op(**arguments)


def _copies(values: dict[str, Any]) -> int:
    size = sum(num_bytes(value) for value in values.values())
    return max(2, min(MAX_COPIES, int(-(-OUT_OF_CACHE_BYTES // max(1, size)))))


def extracted(group: Group, sources: list[Node]) -> GraphModule:
    """The nodes of a group as a module of their own, with the views between them."""
    graph = Graph()
    copies: dict[Node, Node] = {source: graph.placeholder(source.name) for source in sources}

    def copied(node: Node) -> Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        return copies[node]

    results = external_results(group) or list(group.nodes[-1:])
    for node in group.nodes:
        assert is_work(node), node
        copied(node)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(torch.nn.Module(), graph)
