"""Runs the pass pipeline on the graphs Inductor would hand it, without generating code.

A function is captured by Dynamo and AOTAutograd with Inductor's decompositions, views become
reshapes as Inductor makes them, the pipeline runs, and the rewritten graph is executed node by
node. So a test sees the graph before and after, the counts, and the numbers, in a fraction of a
second.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node

from compiled_engine.counters import CompileCounters
from compiled_engine.custom_ops.registry import KernelRegistry, Target
from compiled_engine.passes.dump import GraphDump
from compiled_engine.passes.pattern import functionalized_calls
from compiled_engine.passes.pipeline import PassPipeline

ce = torch.ops.ce
aten = torch.ops.aten


@dataclass
class Captured:
    """What one run of the pipeline did.

    Attributes:
        before: the graph as the pipeline got it.
        after: the graph as it left it.
        counters: matches by pass, and expansions.
        outputs: of the rewritten graph, run eagerly on the inputs.
    """

    before: Graph
    after: Graph
    counters: CompileCounters
    outputs: Any

    def matches(self, name: str) -> int:
        return self.counters.num_matches.get(name, 0)


@dataclass
class Harness:
    """A pipeline with options, applied to functions.

    Attributes:
        disabled: passes to leave out.
        kept_ops: fused ops that stay in the graph.
        dump: gets the graphs.
        registry: chooses kernels; one without overrides if not given.
        target: what code is made for, if that is not the device of the inputs.
    """

    disabled: tuple[str, ...] = ()
    kept_ops: frozenset[str] = frozenset()
    dump: GraphDump | None = None
    registry: KernelRegistry | None = None
    target: Target | None = None
    captures: list[Captured] = field(default_factory=list)

    def run(self, function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Captured:
        """Compiles and calls `function`; its tensors are mutated as it mutates them."""
        torch._dynamo.reset()
        counters = CompileCounters()
        pipeline = PassPipeline(
            disabled=self.disabled,
            kept_ops=self.kept_ops,
            on_pass=counters.count_pass,
            dump=self.dump,
            registry=self.registry,
            target=self.target,
        )
        graphs: list[Graph] = []

        def compiler(module: GraphModule, example_inputs: list[Tensor]) -> Any:
            view_to_reshape(module)
            graphs.append(copied(module.graph))
            mode = torch._guards.detect_fake_mode(example_inputs)
            with V.set_fake_mode(mode):
                pipeline(module.graph)
            graphs.append(copied(module.graph))
            module.recompile()
            return make_boxed_func(module.forward)

        backend = aot_autograd(
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        with torch.no_grad():
            compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
            outputs = compiled(*inputs)
        assert len(graphs) == 2, f"{len(graphs) // 2} graphs, expected one"
        return Captured(graphs[0], graphs[1], counters, outputs)


def copied(graph: Graph) -> Graph:
    """A copy that later rewriting leaves alone."""
    copy = Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return copy


def calls_of(graph: Graph, overload: Any) -> list[Node]:
    """Nodes that call the op, functionalised or not."""
    plain = [n for n in graph.nodes if n.op == "call_function" and n.target is overload]
    return plain + list(functionalized_calls(graph, overload))


def op_counts(graph: Graph) -> Counter[str]:
    """How often each op of ours occurs, functionalised or not."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = node.args[0] if "auto_functionalized" in str(node.target) else node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "ce":
            counts[target._schema.name.removeprefix("ce::")] += 1
    return counts


def placeholders(graph: Graph) -> list[Node]:
    """Graph inputs in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def source_of(value: Any) -> Any:
    """The node behind reshapes and the like: what tensor a value really comes from."""
    while isinstance(value, Node) and value.target in (
        aten.reshape.default,
        aten.view.default,
        aten.alias.default,
        aten.clone.default,
    ):
        value = value.args[0]
    return value


def item(node: Any) -> tuple[Node, int]:
    """The multi-output node and index that a getitem node reads."""
    assert isinstance(node, Node)
    assert node.target is operator.getitem, f"{node} is no output of a node"
    owner, index = node.args
    assert isinstance(owner, Node)
    assert isinstance(index, int)
    return owner, index
