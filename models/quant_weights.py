"""Fills quantised layers: reads the tensors of each checkpoint layer, repacks them, and drops them.

Used by `weights.py`, which knows the files. A few layers at a time lie on the device as the
checkpoint spells them (`BATCH_BYTES`), so that no second copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops.quant_pack import PackedWeight, quantize_weight, row_format
from compiled_engine.custom_ops.reference_quant import PACKED_FORMATS
from compiled_engine.errors import ConfigError
from compiled_engine.models.quant_layouts import LAYOUTS, Expected, Layout, Sizes, column_order
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.models.quant_plan import LinearScheme

BATCH_BYTES = 512 * 1024**2
# Names of tensors -> the tensors, in the dtypes of the files and on the model's device.
Reader = Callable[[Sequence[str]], Mapping[str, Tensor]]


class QuantRows(Protocol):
    """What takes rows of a quantised matrix; attributes as those of `QuantLinear`."""

    scheme: LinearScheme
    format: str
    group_size: int
    in_features: int
    out_features: int

    @property
    def weight(self) -> Tensor:
        """Stored values [n, ...]."""

    @property
    def zero(self) -> Tensor | None:
        """Codes that mean 0."""

    @property
    def input_scale(self) -> Tensor | None:
        """Static scale of the input."""

    @property
    def input_order(self) -> Tensor | None:
        """Columns of the input in the order of the weight's."""

    def fill(self, packed: PackedWeight, start: int, num_rows: int) -> None:
        """Copies a quantised matrix into rows from `start` on."""


@dataclass(frozen=True)
class QuantPart:
    """A checkpoint layer that fills rows of a quantised layer.

    Attributes:
        name: of the checkpoint layer.
        module: takes its rows.
        start, num_rows: which.
        tied_to: name of the unquantised tensor that is the weight, or "".
    """

    name: str
    module: QuantRows
    start: int
    num_rows: int
    tied_to: str = ""

    @property
    def layout(self) -> Layout:
        """How the checkpoint spells it."""
        return LAYOUTS[self.module.scheme.layout]

    @property
    def sizes(self) -> Sizes:
        """What its tensors are measured against."""
        module = self.module
        columns = module.weight.shape[1] * (2 if module.format in PACKED_FORMATS else 1)
        return Sizes(
            self.num_rows,
            module.in_features,
            module.format,
            module.group_size,
            columns,
            module.scheme.has_zero,
            module.input_scale is not None,
            module.input_order is not None,
        )

    def expected(self) -> dict[str, Expected]:
        """Full names of its tensors in the checkpoint."""
        found = self.layout.expected(self.sizes)
        if self.tied_to:
            return {self.tied_to: found["weight"]}
        return {f"{self.name}.{suffix}": tensor for suffix, tensor in found.items()}

    def unused(self) -> set[str]:
        """Full names of tensors that the checkpoint may hold and that are not needed."""
        return {f"{self.name}.{suffix}" for suffix in self.layout.unused}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Repacks the tensors, by their full names, into the module's rows."""
        found = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        is_inverse = "input_global_scale" in found  # compressed-tensors multiplies by it
        name = "input_global_scale" if is_inverse else "input_scale"
        static = found.pop(name, None) if self.sizes.is_static else None
        try:
            packed = self.layout.packed(self.sizes, found)
            self._order_input(column_order(self.sizes, found))
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}", param=error.param) from error
        self.module.fill(packed, self.start, self.num_rows)
        if static is not None:
            assert self.module.input_scale is not None
            # The parts read one input: the largest of their scales clips nothing.
            scale = (1.0 / static if is_inverse else static).float().reshape(1)
            if self.start:
                scale = torch.maximum(scale, self.module.input_scale)
            self.module.input_scale.copy_(scale)

    def _order_input(self, order: Tensor | None) -> None:
        mine = self.module.input_order
        if order is None or mine is None:
            return
        if self.start and not torch.equal(order.to(mine.device), mine):
            raise ConfigError(
                "its columns are in another order than those of the layers beside it, with which "
                "it is one matrix here",
                param="quantization_config",
            )
        mine.copy_(order)


def quant_parts(
    model: nn.Module, parts_of: Callable[[str, int], dict[str, int]], tied_head: str
) -> list[QuantPart]:
    """All parts of a model's quantised layers, those of a layer in the order of their rows.

    `tied_head` is the tensor that an output projection is made of which the checkpoint does not
    hold, or "".
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        start = 0
        for part, num_rows in parts_of(name, module.out_features).items():
            tied_to = tied_head if name == "lm_head" else ""
            found.append(QuantPart(part, module, start, num_rows, tied_to))
            start += num_rows
    return found


@torch.no_grad()
def fill_parts(
    parts: Sequence[QuantPart],
    num_bytes: Mapping[str, int],
    read: Reader,
    on_tensor: Callable[[str], None],
) -> None:
    """Fills every part from the checkpoint.

    Args:
        parts: in the order of their rows.
        num_bytes: of each tensor of the checkpoint.
        read: gives tensors by name.
        on_tensor: called with each name once its layer is filled.
    """
    for batch in _batches(parts, num_bytes):
        names = [[name for name in part.expected() if name in num_bytes] for part in batch]
        tensors = read([name for listed in names for name in listed])
        for part, listed in zip(batch, names, strict=True):
            part.fill({name: tensors[name] for name in listed})
            for name in listed:
                on_tensor(name)


def _batches(parts: Sequence[QuantPart], num_bytes: Mapping[str, int]) -> Iterator[list[QuantPart]]:
    batch: list[QuantPart] = []
    total = 0
    for part in parts:
        size = sum(num_bytes.get(name, 0) for name in part.expected())
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(part)
        total += size
    if batch:
        yield batch


@torch.no_grad()
def fill_random(module: QuantRows, normal: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Random weights: `normal` fills a matrix [n, k] of `dtype`, which is then quantised."""
    shape = (module.out_features, module.in_features)
    values = normal(torch.empty(shape, dtype=dtype, device=module.weight.device))
    packed = quantize_weight(values, row_format(module.format), module.group_size)
    if module.zero is not None:
        middle = 0 if module.zero.is_floating_point() else 8
        packed = packed._replace(zero=torch.full_like(module.zero, middle))
    module.fill(packed, 0, module.out_features)
    if module.input_scale is not None:
        module.input_scale.fill_(1.0 / 16)
    if module.input_order is not None:
        module.input_order.copy_(torch.arange(module.in_features))
