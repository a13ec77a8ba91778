"""Which decoder layers of a model can share compiled code.

A traced layer is specialised on everything about it but the values of its tensors: the classes of
its modules, their constants, and the shapes and dtypes of their tensors. Layers that agree in all
of these are of one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

# Indices of the layers that run, in order; None for all.
Layers = Sequence[int] | None

# Constants that tell layers apart and that no layer computes with.
_IGNORED = frozenset({"layer_idx"})


def layer_kinds(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """The kind of each layer: equal for layers that can share code, numbered as they appear."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(_signature(layer), len(numbers)) for layer in layers)


def sample_of_kinds(kinds: Sequence[int]) -> tuple[int, ...]:
    """Layers, in order, that launch every kernel the whole model does.

    The first two of each kind, since what a layer is given may lie otherwise behind one of its own
    kind than behind another or the embedding; and the last, which may be cut short.
    """
    seen: Counter[int] = Counter()
    found = []
    for index, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= 2 or index == len(kinds) - 1:
            found.append(index)
    return tuple(found)


def _signature(layer: nn.Module) -> Hashable:
    """What a traced layer is specialised on."""
    modules = tuple(
        (name, type(module), _constants(module)) for name, module in layer.named_modules()
    )
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, tuple((name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors)


def _constants(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """Numbers, texts and tuples of them that the module holds."""
    return tuple(
        sorted(
            (name, value)
            for name, value in vars(module).items()
            if name not in _IGNORED and not name.startswith("_") and _is_constant(value)
        )
    )


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, bool | int | float | str)
