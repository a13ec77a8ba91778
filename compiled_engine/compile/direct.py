"""A compiled function that is called past Dynamo: captured once, then bound by position.

Dynamo's guards and bytecode cost more than a small layer's own overhead, and they can decide
nothing for us: the caller picks the version by size, and every layer has the same shapes. The first
call goes through `torch.compile` and keeps what the backend made of the graph; later calls hand it
the tensors in the graph's order. `tests/engine/test_engine.py` compares with the eager twin.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from compiled_engine.compile.torch_compat import inductor_backend, input_sources, with_own_code


@dataclass(frozen=True)
class _Input:
    """One input of the captured graph: an expression over the function's arguments."""

    place: int
    argument: str
    code: CodeType
    is_size: bool

    def value(self, arguments: dict[str, Any]) -> Any:
        """The input's value; the expression is one that Dynamo wrote about our own arguments."""
        return eval(self.code, {"__builtins__": {}}, {"L": arguments})


class _FirstCall:
    """What went into the first call of a graph and came out, until it has been looked at."""

    def __init__(self) -> None:
        self.arguments: list[Any] = []
        self.results: Any = ()


class DirectPiece:
    """A function `(*static, *shared, *varying) -> tuple of tensors`, compiled.

    `static` arguments belong to a key (a layer and its cache) and never change; `shared` ones are
    the same objects for all calls of a step; `varying` ones are tensors new in every call.

    Args:
        function: mutates at most what its arguments hold; returns a tuple of tensors.
        name: shown in logs.
        num_static: leading arguments that belong to a key.
        num_shared: arguments after them that belong to a step.
        options: Inductor's, the passes among them.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        name: str,
        *,
        num_static: int,
        num_shared: int,
        options: dict[str, Any],
    ) -> None:
        names = list(inspect.signature(function).parameters)
        self._static_names = names[:num_static]
        self._shared_names = names[num_static : num_static + num_shared]
        self._varying_names = names[num_static + num_shared :]
        self._compiled: Callable[..., Any] | None = None
        self._inputs: list[_Input] = []
        self._outputs: list[int] = []
        self._bound: dict[int, list[tuple[int, Any]]] = {}
        self._shared: tuple[Any, ...] | None = None
        self._template: list[Any] = []
        self._varying_places: list[tuple[int, int]] = []
        self._example: list[Any] = []
        self._first = _FirstCall()
        # Dynamo keeps its backend for good, which must not keep this piece and the weights it has.
        keep = weakref.WeakMethod(self._keep)

        def keep_here(
            graph: torch.fx.GraphModule, compiled: Callable[..., Any]
        ) -> Callable[..., Any]:
            method = keep()
            assert method is not None, "compiled for a piece that is gone"
            return method(graph, compiled)

        self._trace = torch.compile(
            with_own_code(function, name),
            fullgraph=True,
            dynamic=False,
            backend=inductor_backend(options, keep_here),
        )

    def __call__(
        self, key: int, static: tuple[Any, ...], shared: tuple[Any, ...], *varying: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the function; the first call compiles it."""
        if self._compiled is None:
            return self._capture(static, shared, varying)
        if shared is not self._shared:
            self._bind_shared(shared, varying)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind_static(key, static)
        arguments = self._template.copy()
        for place, value in bound:
            arguments[place] = value
        for place, index in self._varying_places:
            arguments[place] = varying[index]
        results = self._compiled(*arguments)
        return tuple(results[place] for place in self._outputs)

    def _keep(
        self, graph: torch.fx.GraphModule, compiled: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Called by the backend: notes the graph's inputs, and what the first call returns."""
        assert not self._inputs, "captured twice"
        for place, source in enumerate(input_sources(graph)):
            argument = source.split("'")[1]
            code = compile(source, "<graph input>", "eval")
            self._inputs.append(_Input(place, argument, code, "size()" in source))

        first = self._first

        def first_call(*arguments: Any) -> Any:
            first.results = compiled(*arguments)
            first.arguments = list(arguments)
            return first.results

        self._made = compiled
        return first_call

    def _capture(
        self, static: tuple[Any, ...], shared: tuple[Any, ...], varying: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        returned = self._trace(*static, *shared, *varying)
        self._outputs = [
            next(place for place, made in enumerate(self._first.results) if made is value)
            for value in returned
        ]
        self._compiled = self._made
        for item in self._inputs:
            if item.argument in self._varying_names and not item.is_size:
                self._varying_places.append((item.place, self._varying_names.index(item.argument)))
        self._example, self._first.arguments, self._first.results = self._first.arguments, [], ()
        return returned

    def _bind_shared(self, shared: tuple[Any, ...], varying: tuple[Tensor, ...]) -> None:
        """Fills in what is the same for all calls of a step, sizes included."""
        arguments = dict(zip(self._shared_names, shared, strict=True))
        arguments |= dict(zip(self._varying_names, varying, strict=True))
        self._template = [None] * len(self._inputs)
        for item in self._inputs:
            if item.argument in self._shared_names or item.is_size:
                self._template[item.place] = item.value(arguments)
        self._shared = shared

    def _bind_static(self, key: int, static: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """The tensors of one key, checked against the ones the graph was made for."""
        arguments = dict(zip(self._static_names, static, strict=True))
        bound = []
        for item in self._inputs:
            if item.argument not in self._static_names:
                continue
            value, example = item.value(arguments), self._example[item.place]
            kind, made_for = _kind(value), _kind(example)
            assert kind == made_for, f"{item.argument}: {kind}, compiled for {made_for}"
            bound.append((item.place, value))
        self._bound[key] = bound
        return bound


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What a graph was specialised on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class PlainPiece:
    """The same interface over the function itself: the eager twin."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function

    def __call__(
        self, key: int, static: tuple[Any, ...], shared: tuple[Any, ...], *varying: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the function; `key` is not needed."""
        return self._function(*static, *shared, *varying)
