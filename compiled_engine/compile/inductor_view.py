"""What Inductor would do with a graph: our passes, its own, its fusions; no code is generated.

A function is traced as the engine traces it, on tensors without values, and goes through the same
pipeline; then Inductor lowers the graph and its scheduler says which nodes share a kernel. So a
graph can be looked at without weights, and for a GPU that is not here: it is traced on CPU tensors,
whose place is changed before the first pass sees them, and a description stands in for the device.
Private torch names, as in `torch_compat`; seen in 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from compiled_engine.compile.torch_compat import dynamo_counters
from compiled_engine.custom_ops.registry import Target
from compiled_engine.passes.pipeline import PassPipeline


@dataclass(frozen=True)
class Group:
    """Nodes of the final graph that run as one: one call of an op, or one generated kernel.

    Attributes:
        nodes: in graph order.
        is_generated: Inductor writes the kernel.
    """

    nodes: tuple[Node, ...]
    is_generated: bool


@dataclass
class View:
    """What became of a function.

    Attributes:
        module: the final graph; nodes have fake values.
        groups: in the order in which they run.
        num_graph_breaks: places where tracing had to give up.
    """

    module: GraphModule | None = None
    groups: list[Group] = field(default_factory=list)
    num_graph_breaks: int = 0


class _Seen(Exception):
    """Ends a compile that has shown what it was asked for."""


def view_function(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    passes: PassPipeline,
    target: Target,
    options: dict[str, Any] | None = None,
    *,
    has_groups: bool = True,
) -> View:
    """Traces `function` over fake arguments for `target`.

    Args:
        function: as the engine compiles it.
        arguments: fake tensors, or what holds them: on the target's device if it is here, else on
            the CPU.
        passes: the engine's pipeline, made for `target`.
        target: what code is made for.
        options: further options of Inductor.
        has_groups: also ask Inductor's scheduler what runs together.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.compile_fx import compile_fx

    found = View()
    is_described = target.device_type == "cuda" and not torch.cuda.is_available()

    def inner(module: GraphModule, examples: list[Any], **_: Any) -> Any:
        found.module = module
        with _described_gpu(target.arch) if is_described else nullcontext():
            _lower(found, module, examples, has_groups=has_groups)
        raise _Seen

    def backend(module: GraphModule, examples: list[Any]) -> Any:
        patches = {"post_grad_custom_pre_pass": passes, **(options or {})}
        return compile_fx(module, examples, inner_compile=inner, config_patches=patches)

    if is_described:
        passes.dump = _Mover(passes)
    torch._dynamo.reset()
    before = dynamo_counters()["num_graph_breaks"]
    with torch.no_grad():
        try:
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*arguments)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Seen):
                raise error.inner_exception from error
    found.num_graph_breaks = dynamo_counters()["num_graph_breaks"] - before
    return found


def _lower(found: View, module: GraphModule, examples: list[Any], *, has_groups: bool) -> None:
    """What `codegen_and_compile` of Inductor does, up to the scheduler."""
    from torch._inductor.compile_fx import fake_tensor_prop, record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    view_to_reshape(module)
    mode = fake_tensor_prop(module, examples)
    record_original_output_strides(module)
    with V.set_fake_mode(mode):
        post_grad_passes(module, is_inference=True)
    if not has_groups:
        return
    # Where they were moved to; sizes are no tensors.
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    examples = [
        value if isinstance(example, torch.Tensor) else example
        for example, value in zip(examples, inputs, strict=True)
    ]
    graph = GraphLowering(
        module, example_inputs=examples, shape_env=mode.shape_env, is_inference=True
    )
    with (
        V.set_debug_handler(DebugContext()),
        V.set_fake_mode(mode),
        V.set_graph_handler(graph),
        V.set_extern_kernel_nodes([]),
    ):
        graph.run(*examples)
        graph.init_wrapper_code()
        graph._update_scheduler()
        found.groups = list(_groups(module, graph.scheduler.nodes))


class _Mover:
    """Lets the fusions see a graph on a GPU that need not be there.

    Bodies of ops are traced with the values back on the CPU: indexing a tensor on a device that is
    not here fails even without values. What is behind the passes then stands on the GPU again.
    """

    def __init__(self, passes: PassPipeline) -> None:
        self._inner = passes.dump
        self._last = passes.fusions[-1].NAME if passes.fusions else None

    def start(self, graph: Graph) -> None:
        """Before the first fusion."""
        if self._last is not None:
            _move(graph, torch.device("cuda", 0))
        if self._inner is not None:
            self._inner.start(graph)

    def after(self, graph: Graph, name: str) -> None:
        """Behind the last fusion, and behind all passes."""
        if name == self._last:
            _move(graph, torch.device("cpu"))
        elif name == "expand":
            _move(graph, torch.device("cuda", 0))
        if self._inner is not None:
            self._inner.after(graph, name)


def _move(graph: Graph, device: torch.device) -> None:
    """Says of every value of a graph that it is on `device`."""
    from torch._subclasses.fake_tensor import FakeTensor

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with value.fake_mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)


def _groups(module: GraphModule, scheduled: list[Any]) -> Iterator[Group]:
    """Nodes that run together, as Inductor's scheduler has them."""
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    order = {node: place for place, node in enumerate(module.graph.nodes)}

    def nodes_of(item: Any) -> tuple[Node, ...]:
        parts = [part for part in item.get_nodes() if part.node is not None]
        origins = {node for part in parts for node in part.node.origins if node in order}
        return tuple(sorted((n for n in origins if is_work(n)), key=order.__getitem__))

    def is_call(item: Any) -> bool:
        is_result = isinstance(item.node, (ir.MultiOutput, ir.MutationOutput))
        return isinstance(item, ExternKernelSchedulerNode) and not is_result

    # What is called is the last of its origins; the others are where its inputs come from.
    called = {nodes_of(item)[-1] for item in scheduled if is_call(item) and nodes_of(item)}
    seen: set[Node] = set()
    for item in scheduled:
        nodes = nodes_of(item)
        if is_call(item) and nodes and nodes[-1] not in seen:
            seen.add(nodes[-1])
            yield Group(nodes[-1:], is_generated=False)
        is_other = isinstance(item, (ExternKernelSchedulerNode, NopKernelSchedulerNode))
        inside = tuple(node for node in nodes if node not in called)
        if not is_other and inside:
            yield Group(inside, is_generated=True)


def is_work(node: Node) -> bool:
    """A call that computes something, rather than another look at a tensor."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.is_view:
        return False
    return node.target not in (torch.ops.aten.reshape.default, torch.ops.aten.alias.default)


@contextmanager
def _described_gpu(arch: int) -> Iterator[None]:
    """Answers Inductor's questions about a GPU that is not here; sizes are those of an H200."""
    import torch._dynamo.device_interface as interfaces
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    interfaces.get_interface_for_device("cuda")  # fills the table

    class Properties:
        name = f"sm_{arch}"
        major, minor = divmod(arch, 10)
        multi_processor_count = 132
        regs_per_multiprocessor = 65536
        max_threads_per_multi_processor = 2048
        max_threads_per_block = 1024
        warp_size = 32

    class Described(interfaces.CudaInterface):
        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return Properties

        @staticmethod
        def get_compute_capability(device: Any = None) -> Any:
            return arch

        @staticmethod
        def is_available() -> bool:
            return True

    clear = getattr(DeviceProperties.create, "cache_clear", None)
    if clear is not None:  # of a GPU that was described before
        clear()
    with (
        mock.patch.dict(interfaces.device_interfaces, {"cuda": Described}),
        mock.patch.object(scheduler, "has_triton", return_value=True),
    ):
        yield
