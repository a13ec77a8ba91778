"""The arguments of `experts` as its kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class ExpertOperands(NamedTuple):
    """Arguments of `experts`, in order and without the kernel's name; see `reference_moe`.

    Attributes:
        residual: [T, h] that the sum is added to, which the op `experts` itself does not take.
    """

    x: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    weights: Tensor
    ids: Tensor
    order: Tensor
    offsets: Tensor
    activation: str
    alpha: float
    limit: float
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    gate_up_global_scale: Tensor | None
    down_global_scale: Tensor | None
    format: str
    residual: Tensor | None = None

    @property
    def residual_or_x(self) -> Tensor:
        """The residual; x, which is not read, if there is none."""
        return self.x if self.residual is None else self.residual

    @property
    def num_experts(self) -> int:
        """Experts there are."""
        return self.gate_up.shape[0]

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.weights.shape[1]

    @property
    def inner_size(self) -> int:
        """Values between an expert's two products."""
        return self.gate_up.shape[1] // 2

    def scale(self, product: int) -> Tensor:
        """Scales of the first (0) or second product; x, which is not read, if there are none."""
        found = self.down_scale if product else self.gate_up_scale
        return self.x if found is None else found

    def global_scale(self, product: int) -> Tensor:
        """Scales of the matrices of the first (0) or second product; x if there are none."""
        found = self.down_global_scale if product else self.gate_up_global_scale
        return self.x if found is None else found

    def bias(self, product: int) -> Tensor:
        """The bias of the first (0) or second product; x, which is not read, if there is none."""
        found = self.down_bias if product else self.gate_up_bias
        return self.x if found is None else found


def common_constants(operands: ExpertOperands) -> dict[str, Any]:
    """Constants that all kernels have."""
    from compiled_engine.custom_ops.triton_common import has_pdl, is_interpreted

    return {
        "K": operands.top_k,
        "SIZE": operands.x.shape[1],
        "INNER": operands.inner_size,
        "FORMAT": operands.format,
        "HAS_BIAS": operands.gate_up_bias is not None,
        "IN_ASSEMBLY": operands.x.is_cuda and not is_interpreted(),
        "PDL": has_pdl(operands.x.device),
    }
