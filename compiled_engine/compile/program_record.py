"""Takes a program out of what Inductor made, while it runs for the first time.

Everything is checked rather than assumed: what cannot be taken out whole is refused with a reason,
and the piece is then called as Inductor left it. Private names of torch, as in `torch_compat`, seen
in 2.11 to 2.14.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_engine.compile.program import Kind, Program, ProgramInput, wrapper_names
from compiled_engine.compile.program_kernels import CpuKernel, GpuKernel
from compiled_engine.compile.torch_compat import size_marks

# Statements around the kernels' sources that a program does without.
_KERNEL_MAKERS = ("triton", "cpp_pybinding")


class NotRecordable(Exception):
    """What Inductor made cannot be kept as a program; says why."""


class Watched:
    """What goes into the first call of Inductor's code for a graph, and what comes out.

    Args:
        code: Inductor's, as `compile_fx_inner` returns it.
    """

    def __init__(self, code: Any) -> None:
        self.code = code
        self.arguments: list[Any] = []
        self.results: list[Any] = []
        self._original = code.current_callable
        code.current_callable = self._watch

    def _watch(self, arguments: list[Any]) -> Any:
        self.arguments = list(arguments)  # the call empties it
        results = self._original(arguments)
        self.results = list(results)
        return results

    def stop(self) -> None:
        """Calls go to the code itself again, and nothing is held any more."""
        self.code.current_callable = self._original
        self.arguments, self.results = [], []


def check_same(watched: Watched, arguments: list[Any], results: list[Any]) -> None:
    """That the code was called with the graph's inputs and gave its results, with nothing between.

    Raises:
        NotRecordable: AOTAutograd does something before or behind it.
    """
    if not watched.results and results:
        raise NotRecordable("it did not run")
    if len(watched.arguments) != len(arguments) or any(
        seen is not given and not _are_equal_numbers(seen, given)
        for seen, given in zip(watched.arguments, arguments, strict=True)
    ):
        raise NotRecordable("its inputs are not the graph's")
    if len(watched.results) != len(results) or any(
        seen is not given and not _are_same_views(seen, given)
        for seen, given in zip(watched.results, results, strict=True)
    ):
        raise NotRecordable("its results are not the graph's")


def check_bound(bound: list[Any], arguments: list[Any]) -> None:
    """That the expressions for the inputs give what the graph was called with.

    Raises:
        NotRecordable: they do not.
    """
    if len(bound) != len(arguments) or any(
        value is not given and not _are_equal_numbers(value, given)
        for value, given in zip(bound, arguments, strict=True)
    ):
        raise NotRecordable("its inputs cannot be found again")


def _are_equal_numbers(seen: Any, given: Any) -> bool:
    return isinstance(seen, int) and isinstance(given, int) and seen == given


def _are_same_views(seen: Any, given: Any) -> bool:
    return (
        isinstance(seen, Tensor)
        and isinstance(given, Tensor)
        and seen.data_ptr() == given.data_ptr()
        and seen.shape == given.shape
        and seen.stride() == given.stride()
        and seen.dtype == given.dtype
    )


def output_structure(returned: Any, results: list[Any], arguments: dict[str, Any]) -> list[Any]:
    """How what a function returned is made of a graph's results and its own arguments.

    Raises:
        NotRecordable: a part of it is neither.
    """
    if returned is None:
        return ["none"]
    if isinstance(returned, Tensor):
        for place, made in enumerate(results):
            if made is returned:
                return ["result", place]
        for source, value in _leaves(arguments):
            if value is returned:
                return ["argument", source]
        raise NotRecordable("it returns a tensor that is no result of its graph")
    if isinstance(returned, tuple):
        items = [output_structure(item, results, arguments) for item in returned]
        kind = type(returned)
        if kind is tuple:
            return ["tuple", items]
        return ["record", f"{kind.__module__}:{kind.__qualname__}", items]
    raise NotRecordable(f"it returns a {type(returned).__name__}")


def _leaves(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    def below(source: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                yield from below(f"{source}[{place}]", item)
        else:
            yield source, value

    for name, value in arguments.items():
        yield from below(f"L['{name}']", value)


def graph_inputs(graph: torch.fx.GraphModule, sources: list[str]) -> tuple[ProgramInput, ...]:
    """The inputs of a graph that Dynamo captured; `sources` as `torch_compat.input_sources` says.

    Raises:
        NotRecordable: one comes from elsewhere than the function's arguments.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = []
    for node, source in zip(nodes, sources, strict=True):
        if not source.startswith("L['"):
            raise NotRecordable(f"it reads {source}, which is no argument")
        example = node.meta["example_value"]
        kind = kind_of(example) if isinstance(example, Tensor) else None
        inputs.append(ProgramInput(source, source.split("'")[1], kind))
    return tuple(inputs)


def kind_of(example: Tensor) -> Kind:
    """What a graph was specialised on, from the fake tensor that Dynamo had."""
    return Kind(
        tuple(map(_fixed, example.shape)),
        tuple(map(_fixed, example.stride())),
        str(example.dtype),
        example.device.type,
    )


def _fixed(size: int | torch.SymInt) -> int | None:
    """The only value a size may have; None if it may vary. Guards may have fixed a symbol, too."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def check_marks(inputs: tuple[ProgramInput, ...], arguments: list[Any]) -> None:
    """Raises NotRecordable if a size was fixed that was said to vary.

    Code made for an example's size would be used for every other one.
    """
    for item, value in zip(inputs, arguments, strict=True):
        if item.kind is None or not isinstance(value, Tensor):
            continue
        for dim in size_marks(value):
            if (size := item.kind.shape[dim]) is not None:
                raise NotRecordable(f"it is made for {size} as dim {dim} of {item.source} alone")


def record(
    watched: Watched,
    *,
    name: str,
    inputs: tuple[ProgramInput, ...],
    outputs: list[Any],
    num_matches: dict[str, int],
    num_expansions: int,
) -> Program:
    """The program of a piece whose code has run.

    Raises:
        NotRecordable: it holds something that a program cannot.
    """
    code = watched.code
    if getattr(code, "constants", None):
        raise NotRecordable(f"it holds tensors of its own: {', '.join(code.constants)}")
    module = _module_of(code)
    function, kernels = _parts(code.source_code)
    cpu, gpu = [], []
    for kernel, maker in kernels.items():
        made = getattr(module, kernel)
        if maker == "triton":
            gpu.append(_triton_kernel(kernel, made))
        else:
            cpu.append(CpuKernel(kernel, Path(made.__self__.__file__).read_bytes()))
    return Program(
        name=name,
        inputs=inputs,
        outputs=outputs,
        source=ast.unparse(function),
        cpu_kernels=tuple(cpu),
        gpu_kernels=tuple(gpu),
        externs=_externs(function),
        num_matches=num_matches,
        num_expansions=num_expansions,
    )


def _module_of(code: Any) -> Any:
    """The Python module that Inductor loaded the code's source into."""
    from torch._inductor.codecache import PyCodeCache

    for module in reversed(PyCodeCache.modules):
        if getattr(module, "key", None) == code.cache_key:
            return module
    raise NotRecordable("its module is not to be found")


def _parts(source: str) -> tuple[ast.Module, dict[str, str]]:
    """The function `call(args)` by itself, and the makers of its kernels by name."""
    function: ast.FunctionDef | None = None
    kernels: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Runner":
            function = next(
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name == "call"
            )
            function.args.args = function.args.args[1:]  # self
        elif isinstance(node, ast.FunctionDef):
            if node.name == "call":
                function = node
            elif node.name not in ("benchmark_compiled_module", "get_args"):
                raise NotRecordable(f"it has a function {node.name}")
        elif isinstance(node, ast.Assign) and _maker(node.value) is not None:
            maker = _maker(node.value)
            if maker not in _KERNEL_MAKERS:
                raise NotRecordable(f"it has a kernel made by {maker}")
            (target,) = node.targets
            assert isinstance(target, ast.Name)
            kernels[target.id] = maker
    if function is None:
        raise NotRecordable("it has no function call")
    _check_names(function, kernels)
    return ast.Module([function], []), kernels


def _maker(value: ast.expr) -> str | None:
    """`NAME` of `async_compile.NAME(...)`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        owner = value.func.value
        if isinstance(owner, ast.Name) and owner.id == "async_compile":
            return value.func.attr
    return None


def _check_names(function: ast.FunctionDef, kernels: dict[str, str]) -> None:
    """That the function uses nothing that a loaded program does not have."""
    import builtins

    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    own |= {argument.arg for argument in function.args.args}
    known = {*own, *kernels, *wrapper_names(), "extern_kernels", *vars(builtins)}
    unknown = sorted({node.id for node in names} - known)
    if unknown:
        raise NotRecordable(f"it uses {', '.join(unknown)}")


def _externs(function: ast.Module) -> tuple[str, ...]:
    """Names behind `extern_kernels.` that mean the same behind `torch.`."""
    from torch._inductor.select_algorithm import extern_kernels

    names = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "extern_kernels"
    }
    for name in names:
        if getattr(extern_kernels, name, None) is not getattr(torch, name, object()):
            raise NotRecordable(f"it calls {name}, which is Inductor's own")
    return tuple(sorted(names))


def _triton_kernel(name: str, tuner: Any) -> GpuKernel:
    """One kernel that Inductor wrote in Triton, with the configuration it has settled on."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    (launcher,) = tuner.launchers
    made = next((r for r in tuner.compile_results if r.config is launcher.config), None)
    if made is None:
        raise NotRecordable(f"{name} has no configuration of its own")
    grid = GridExpr.from_meta(made.inductor_meta, launcher.config)
    folder = _triton_folder(tuner) / launcher.cache_hash
    function = tuner.fn.__name__
    about = _metadata(folder / f"{function}.json")
    scratch = [n for n in ("global_scratch_size", "profile_scratch_size") if n in about]
    if any(about[n] for n in scratch) or about.get("num_ctas", 1) != 1:
        raise NotRecordable(f"{name} needs scratch memory or a cluster")
    if about.get("launch_cooperative_grid"):
        raise NotRecordable(f"{name} is launched cooperatively")
    signature = made.compile_meta["signature"]
    constants = made.compile_meta.get("constants", {})
    return GpuKernel(
        name=name,
        function=str(about["name"]),
        cubin=(folder / f"{function}.cubin").read_bytes(),
        arguments=_run_arguments(launcher),
        parameters=tuple(
            (argument, str(kind))
            for argument, kind in signature.items()
            if kind != "constexpr" and argument not in constants
        ),
        num_scratch=len(scratch),
        grid=(str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)),
        grid_prefix=tuple(grid.prefix),
        num_warps=int(about["num_warps"]),
        shared_bytes=int(about["shared"]),
        is_dependent=bool(about.get("launch_pdl", False)),
    )


def _run_arguments(launcher: Callable[..., Any]) -> tuple[str, ...]:
    """What the wrapper gives the kernel; `stream` comes by name."""
    code = launcher.__code__
    names = code.co_varnames[: code.co_argcount]
    if names[-1:] != ("stream",):
        raise NotRecordable("a kernel is launched in a way that is not known")
    return names[:-1]


def _triton_folder(tuner: Any) -> Path:
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    device = tuner.triton_meta.get("device")
    index = getattr(device, "index", device) or 0
    return Path(os.environ.get("TRITON_CACHE_DIR") or triton_cache_dir(index))


def _metadata(path: Path) -> dict[str, Any]:
    import json

    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise NotRecordable(f"Triton's cache has no {path.name}") from error
    return found
