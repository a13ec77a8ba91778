"""Linears that read one tensor share one matrix, put together once when a model is loaded.

Each stays a module of its own that computes with its rows of the shared matrix, so the model's code
runs as it stands; a pass (`passes/merge_linears.py`) makes one product of them, for which no weight
is copied while a step runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedWeight(nn.Module):
    """A matrix [sum of rows, k], and a bias [sum of rows] or None, of several linears."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class LinearPart(nn.Module):
    """A linear over rows `[start, stop)` of a `SharedWeight`; otherwise as `nn.Linear`."""

    def __init__(self, shared: SharedWeight, start: int, stop: int) -> None:
        super().__init__()
        self.shared = shared
        self.start = start
        self.stop = stop
        self.in_features = shared.weight.shape[1]
        self.out_features = stop - start

    @property
    def weight(self) -> Tensor:
        """[stop - start, k], a view."""
        return self.shared.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """[stop - start], a view."""
        shared = self.shared.bias
        return None if shared is None else shared[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` of [..., k]."""
        return nn.functional.linear(x, self.weight, self.bias)


@torch.no_grad()
def merge_linears(owner: nn.Module, names: tuple[str, ...]) -> None:
    """Puts the linears of these names below `owner` over one matrix, in place, rows in that order.

    All have the same number of inputs, and a bias or none. At most one matrix more is held
    meanwhile.
    """
    linears: list[nn.Linear] = []
    for name in names:
        linear = owner.get_submodule(name)
        assert type(linear) is nn.Linear, f"{name} is a {type(linear).__name__}"
        linears.append(linear)
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), f"some of {names} have a bias"
    shared = SharedWeight(
        torch.cat([weight.detach() for weight in weights]),
        torch.cat([bias.detach() for bias in biases]) if biases else None,
    )
    start = 0
    for name, linear in zip(names, linears, strict=True):
        stop = start + linear.out_features
        parent, _, attribute = name.rpartition(".")
        setattr(owner.get_submodule(parent), attribute, LinearPart(shared, start, stop))
        start = stop
