"""Private torch names: here, in `inductor_view` and in `passes/pattern.py` only.

Each use names the versions it was seen in (2.11 to 2.14).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

from compiled_engine.errors import ConfigError

# Of our counters among Inductor's.
_MATCHES = "compiled_engine_"


def dynamo_counters() -> dict[str, int]:
    """Totals of Dynamo's and Inductor's own counters in this process; zeros if neither is loaded.

    Something may have loaded Dynamo without having compiled: then Inductor is not loaded.
    """
    names = ("num_graphs", "num_graph_breaks", "num_inductor_compiles", "num_cache_hits")
    dynamo = sys.modules.get("torch._dynamo.utils")
    inductor = sys.modules.get("torch._inductor.metrics")
    if dynamo is None:
        return dict.fromkeys((*names, "num_kernels"), 0)
    counters = dynamo.counters
    return {
        "num_graphs": counters["stats"]["unique_graphs"],
        "num_graph_breaks": sum(counters["graph_break"].values()),
        "num_inductor_compiles": counters["inductor"]["fxgraph_cache_miss"],
        "num_cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "num_kernels": 0 if inductor is None else inductor.generated_kernel_count,
    }


def note_matches(name: str, matches: int) -> None:
    """Notes what one of our passes matched in a graph, where Inductor keeps it with the graph.

    Inductor takes the rise of its counters into the entry of its cache, and lets them rise as much
    when it takes the graph from there (2.11 to 2.14): our passes do not run then.
    """
    from torch._dynamo.utils import counters

    if matches:
        counters["inductor"][_MATCHES + name] += matches


def noted_matches() -> dict[str, int]:
    """Matches by pass of all graphs that this process compiled or took from Inductor's cache."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    found = {} if dynamo is None else dynamo.counters["inductor"]
    return {n.removeprefix(_MATCHES): k for n, k in found.items() if n.startswith(_MATCHES)}


def compile_seconds() -> dict[str, float]:
    """Seconds of this process's compiles so far: "trace", "inductor" with our passes, "compilers".

    "compilers" is the wait for the C++ compiler or for Triton. Empty where nothing was compiled.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    totals = {  # names seen in 2.11 to 2.14
        name: sum(utils.compilation_time_metrics.get(name, ()))
        for name in (
            "_compile.compile_inner",
            "OutputGraph.call_user_compiler",
            "async_compile.wait",
        )
    }
    whole, backend, wait = totals.values()
    return {
        "trace": max(0.0, whole - backend),
        "inductor": max(0.0, backend - wait),
        "compilers": wait,
    }


def changed_options() -> dict[str, str]:
    """Options of the compilers that this process has set from Python: "inductor.<name>" -> value.

    Those that are set by a variable are not among them: `fingerprint.environment_parts` has them,
    whether or not a compiler is loaded; nor are those that Inductor itself takes for harmless.
    Modules of options that nobody has loaded are at their defaults and stay unloaded.
    """
    found = {}
    for name in ("inductor", "dynamo", "functorch"):
        config: Any = sys.modules.get(f"torch._{name}.config")
        if config is None:
            continue
        ignored = getattr(config, "_cache_config_ignore_prefix", ())
        harmless = tuple(n for n in ignored if "custom" not in n)  # passes matter
        # `_get_dict`, `_config` and the fields of its entries: seen in 2.13.
        for option, value in config._get_dict(skip_default=True).items():
            entry = config._config[option]
            given = (entry.default, entry.env_value_force, entry.env_value_default)
            is_changed = not any(value is known or value == known for known in given)
            if is_changed and not option.startswith(("_", *harmless)):
                found[f"{name}.{option}"] = _spelled(value)
    return found


def _spelled(value: object) -> str:
    """A value's text, without an address in it."""
    if isinstance(value, (str, int, float, NoneType)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_spelled, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_spelled(k)}: {_spelled(v)}' for k, v in value.items())}}}"
    if hasattr(value, "uuid"):  # of Inductor's custom passes
        return f"{type(value).__qualname__} {value.uuid()!r}"
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def raw_stream(device_index: int) -> int:
    """Address of the current stream of a GPU; `torch.cuda.current_stream` makes objects for it."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))  # 2.11 to 2.14


def fake_result(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Shape, dtype and device of the one tensor that an op returns, without running it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as fakes:
        made = op(*(fakes.from_tensor(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
    assert isinstance(made, Tensor), op
    return made


def fake_mode() -> Any:
    """A mode in which tensors have shapes, dtypes and devices, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Tensors made in the block have storage, also where a graph is being traced or compiled."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes  # 2.11 to 2.14

    with tracing(None), _disable_current_modes():
        yield


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of `function` with a code object of its own.

    Dynamo keeps compiled versions by code object; a copy keeps sizes that are compiled apart from
    looking into each other's versions.
    """
    assert isinstance(function, FunctionType), function
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    return copy


def input_sources(graph: torch.fx.GraphModule) -> list[str]:
    """Where each input of a graph that Dynamo captured comes from, as an expression over `L`.

    To be called inside the backend: Dynamo forgets the sources afterwards.
    """
    names = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            name = node.meta["grapharg"].source.name
            names.append(name() if callable(name) else name)  # a method up to torch 2.11
    return names


@dataclass(frozen=True)
class Compiled:
    """What Inductor made of a graph.

    Attributes:
        function: takes the graph's inputs and returns its results.
        code: what it calls in the end, with `source_code` and `current_callable`.
    """

    function: Callable[..., Any]
    code: Any


@contextmanager
def waits_in_every_kernel() -> Iterator[None]:
    """Each of Inductor's kernels for dependent launch waits before its first access to memory.

    Inductor leaves the wait out where the kernel in front writes nothing that is read here: it
    relies on every kernel to wait before it lets the next one start. Ours let it start first.
    Seen in torch 2.13; where Inductor has no such method, `--inductor-pdl` is refused.

    Raises:
        ConfigError: this torch has it under another name, or not at all.
    """
    from unittest.mock import patch

    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    before_access = getattr(TritonKernel, "_handle_pdl_before_access", None)
    if before_access is None:
        raise ConfigError(
            f"--inductor-pdl cannot be had safely with torch {torch.__version__}: leave it out",
            param="inductor_pdl",
        )

    def waits(self: Any, *arguments: Any, **options: Any) -> None:
        scheduler = V.graph.scheduler
        if scheduler is None:
            before_access(self, *arguments, **options)
            return
        with patch.object(scheduler, "previous_node", None):  # nothing is known of it
            before_access(self, *arguments, **options)

    with patch.object(TritonKernel, "_handle_pdl_before_access", waits):
        yield


def inductor_backend(
    options: dict[str, Any],
    keep: Callable[[torch.fx.GraphModule, Compiled], Callable[..., Any]],
) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
    """Inductor with `options`, as a `torch.compile` backend that shows `keep` what it made."""

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        import torch._functorch.config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        made: list[Any] = []

        def inner(module: Any, inputs: Any, **kwargs: Any) -> Any:
            code = compile_fx_inner(module, inputs, **kwargs)
            made.append(code)
            return code

        # Its cache would hand back code without showing it.
        is_dependent = options.get("triton.enable_pdl", False)
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            waits_in_every_kernel() if is_dependent else nullcontext(),
        ):
            compiled: Any = compile_fx(graph, examples, inner_compile=inner, config_patches=options)
        return keep(graph, Compiled(compiled, made[-1]))

    return backend


def mark_dynamic(tensor: torch.Tensor, dim: int, *, low: int, high: int) -> None:
    """Says that `dim` varies from `low` to `high`, for the compile that sees the tensor next."""
    _marks(tensor)[dim] = (low, high)


def mark_any_size(tensor: torch.Tensor, dim: int) -> None:
    """Says that `dim` may have any size, 1 included, for the compile that sees the tensor next."""
    _marks(tensor)[dim] = None


def size_marks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dims that were said to vary."""
    return tuple(_marks(tensor)) if hasattr(tensor, "_size_marks") else ()


def has_any_size(tensor: torch.Tensor, dim: int) -> bool:
    """Whether `mark_any_size` was called on it."""
    return dim in _marks(tensor) and _marks(tensor)[dim] is None


def _marks(tensor: torch.Tensor) -> dict[int, tuple[int, int] | None]:
    """What was said of a tensor's dims; Dynamo is told, and loaded, when something is compiled."""
    if not hasattr(tensor, "_size_marks"):
        tensor._size_marks = {}  # type: ignore[attr-defined]
    marks: dict[int, tuple[int, int] | None] = tensor._size_marks  # type: ignore[attr-defined]
    return marks


def apply_marks(arguments: tuple[Any, ...]) -> None:
    """Tells Dynamo what was said of the tensors among the arguments, in tuples or not."""
    from torch.utils._pytree import tree_leaves

    for tensor in tree_leaves(arguments):
        if not hasattr(tensor, "_size_marks"):
            continue
        for dim, limits in _marks(tensor).items():
            if limits is None:
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
            else:
                low, high = limits
                torch._dynamo.mark_dynamic(tensor, dim, min=low, max=high)


def expect_equal(a: int, b: int) -> None:
    """Tells the compiler that two sizes are one. Where nothing is traced they are what they are.

    Called eagerly, `torch._check` would import sympy.
    """
    if torch.compiler.is_compiling() or not (isinstance(a, int) and isinstance(b, int)):
        torch._check(a == b)


def has_own_kernel(overload: Any, device_type: str) -> bool:
    """Whether an op has a kernel for "cpu" or "cuda" beside its plain-torch body."""
    key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}[device_type]
    return bool(overload.has_kernel_for_dispatch_key(key))
