"""A compiled layer that is called past Dynamo: loaded or compiled once, then bound by position.

Every layer of a kind has the same shapes, so the graph's inputs are looked up once for each layer
and once for each step. `tests/engine/test_engine.py` compares with the eager twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from compiled_engine.compile.piece import Piece
from compiled_engine.compile.program import ProgramInput, binder, over_parameters


class DirectPiece:
    """A function `(*static, *shared, *varying) -> tuple of tensors`, compiled.

    `static` arguments belong to a key (a layer and its cache) and never change; `shared` ones are
    the same objects for all calls of a step; `varying` ones are tensors new in every call.

    Args:
        piece: of the function; returns new tensors only.
        num_static: leading arguments that belong to a key.
        num_shared: arguments after them that belong to a step.
    """

    def __init__(self, piece: Piece, *, num_static: int, num_shared: int) -> None:
        names = piece.parameters
        self._piece = piece
        self._static_names = names[:num_static]
        self._shared_names = names[num_static : num_static + num_shared]
        self._varying_names = names[num_static + num_shared :]
        self._call: Callable[[list[Any]], Any] | None = None
        self._bound: dict[int, list[tuple[int, Any]]] = {}
        self._shared: tuple[Any, ...] | None = None
        self._template: list[Any] = []
        self._varying_places: list[tuple[int, int]] = []

    def __call__(
        self, key: int, static: tuple[Any, ...], shared: tuple[Any, ...], *varying: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the function; the first call loads or compiles it."""
        if self._call is None:
            returned = self._piece.first(*static, *shared, *varying)
            if self._piece.loaded is not None:
                self._look_up()
            return tuple(returned)
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
        results = self._call(arguments)
        return tuple(results[place] for place in self._outputs)

    def _look_up(self) -> None:
        """Sorts the graph's inputs by whom they belong to."""
        loaded = self._piece.loaded
        assert loaded is not None
        kind, outputs = loaded.outputs
        assert kind == "tuple", loaded.outputs
        assert all(output[0] == "result" for output in outputs), outputs
        self._outputs = [place for _, place in outputs]
        varying, shared, static = [], [], []
        for place, item in enumerate(loaded.inputs):
            is_size = item.kind is None
            if item.argument in self._static_names:
                static.append((place, item))
            elif is_size or item.argument in self._shared_names:
                shared.append((place, item))
            else:
                varying.append((place, self._varying_names.index(item.argument)))
        self._varying_places = varying
        self._static_inputs: list[tuple[int, ProgramInput]] = static
        self._shared_places = [place for place, _ in shared]
        self._static_values = binder(self._static_names, [item.source for _, item in static])
        self._shared_values = binder(
            [*self._shared_names, *self._varying_names], [item.source for _, item in shared]
        )
        self._template = [None] * len(loaded.inputs)
        self._call = loaded.call

    def _bind_shared(self, shared: tuple[Any, ...], varying: tuple[Tensor, ...]) -> None:
        """Fills in what is the same for all calls of a step, sizes included."""
        for place, value in zip(
            self._shared_places, self._shared_values(*shared, *varying), strict=True
        ):
            self._template[place] = value
        self._shared = shared

    def _bind_static(self, key: int, static: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """The tensors of one key, checked against the ones the graph was made for."""
        bound = []
        for (place, item), value in zip(
            self._static_inputs, self._static_values(*static), strict=True
        ):
            if item.kind is not None and value.device.type == "cuda":
                # Generated kernels read 16 bytes at a time.
                assert value.data_ptr() % 16 == 0, f"{over_parameters(item.source)} is misaligned"
            assert item.kind is None or item.kind.takes(value), (
                f"{over_parameters(item.source)} is {value.shape}, compiled for {item.kind}"
            )
            bound.append((place, value))
        self._bound[key] = bound
        return bound


class PlainPiece:
    """The same interface over the function itself: the eager twin."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function

    def __call__(
        self, key: int, static: tuple[Any, ...], shared: tuple[Any, ...], *varying: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the function; `key` is not needed."""
        return self._function(*static, *shared, *varying)
