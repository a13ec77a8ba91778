"""Experts whose matrices are quantised one by one: in the checkpoint, or while it is loaded.

Each expert's gate, up and down matrix is a layer of its own to a `QuantPlan` and in a checkpoint.
Activations of experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops.moe_choice import FP4_COLUMNS
from compiled_engine.custom_ops.quant_pack import MXFP4_GROUP, PackedWeight
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP
from compiled_engine.custom_ops.reference_quant import BLOCK
from compiled_engine.errors import ConfigError
from compiled_engine.models.moe import Experts, SparseCausalLM
from compiled_engine.models.quant_linear import scale_rows
from compiled_engine.models.quant_plan import LinearScheme, QuantPlan
from compiled_engine.models.quant_weights import QuantPart

# Layout of a checkpoint -> format here.
_PUBLISHED = {
    "fp8_block_inv": "fp8_block",
    "fp8_block": "fp8_block",
    "mxfp4_packed": "mxfp4",
    "nvfp4": "nvfp4",
    "nvfp4_packed": "nvfp4",
}
# Format that `--quantization` gives linear layers -> that of experts.
_ONLINE = {
    "fp8_channel": "fp8_block",
    "fp8_block": "fp8_block",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
# Columns of a matrix are a multiple of this, and rows of gate and up, which begin with a scale.
_MULTIPLES = {"fp8_block": (16, BLOCK), "mxfp4": (FP4_COLUMNS, 1), "nvfp4": (FP4_COLUMNS, 1)}
_GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}


class ExpertMatrix:
    """One matrix of one expert, as what takes quantised rows; see `QuantRows`.

    Args:
        experts: hold it.
        name: "gate_up_proj" or "down_proj".
        expert: which.
    """

    zero = None
    input_scale = None
    input_order = None

    def __init__(self, experts: Experts, name: str, expert: int) -> None:
        self.format = experts.format
        self.scheme = LinearScheme(format=experts.format, layout=experts.layout)
        self.out_features, self.in_features = experts.sizes[name]
        self.group_size = _GROUPS.get(experts.format, 0)
        self._experts, self._name, self._expert = experts, name, expert

    @property
    def weight(self) -> Tensor:
        """Stored values of the matrix."""
        return getattr(self._experts, self._name)[self._expert]

    @torch.no_grad()
    def fill(self, packed: PackedWeight, start: int, num_rows: int) -> None:
        """Copies a quantised matrix into rows from `start` on."""
        self.weight[start : start + num_rows].copy_(packed.weight)
        scale = getattr(self._experts, f"{self._name}_scale")[self._expert]
        scale[scale_rows(self.format, start, packed)].copy_(packed.scale)
        overall = getattr(self._experts, f"{self._name}_global_scale")
        if overall is not None and packed.global_scale is not None:
            rows = self.out_features // overall.shape[1]  # of each matrix, with a scale of its own
            overall[self._expert, start // rows : (start + num_rows) // rows].copy_(
                packed.global_scale[::rows, 0]
            )


def quantize_experts(model: nn.Module, plan: QuantPlan) -> None:
    """Gives the experts of a model that has no storage yet the plan's formats, in place.

    Raises:
        ConfigError: a format that experts cannot have, or sizes that do not fit it.
    """
    if not isinstance(model, SparseCausalLM):
        return
    for name, module in model.named_modules():
        if not isinstance(module, Experts) or module.format:
            continue
        scheme = plan.scheme_of(list(_matrix_names(model, name, module.num_experts)))
        if scheme is not None:
            _check(model, plan, scheme)
            with torch.device("meta"):
                module.quantize(_format(scheme), scheme.layout)
            _check_sizes(module)


def _format(scheme: LinearScheme) -> str:
    """The format experts have by the scheme, "" if there is none."""
    if scheme.layout == "plain":
        return _ONLINE.get(scheme.format, "")
    return _PUBLISHED.get(scheme.layout, "")


def _check(model: SparseCausalLM, plan: QuantPlan, scheme: LinearScheme) -> None:
    is_online = scheme.layout == "plain"
    field = "quantization" if is_online else "quantization_config"
    if model.is_interleaved:
        raise ConfigError(
            f"{field}: {plan.method} would quantise experts that the checkpoint holds stacked; "
            "one tensor for each expert is supported",
            param=field,
        )
    if not _format(scheme):
        known = "fp8, fp8_block" if is_online else "fp8 in 128 x 128 blocks"
        raise ConfigError(
            f"{field}: {plan.method} quantises experts in {scheme.format}; supported for them are "
            f"{known}, mxfp4 and nvfp4",
            param=field,
        )


def _check_sizes(experts: Experts) -> None:
    columns, rows = _MULTIPLES[experts.format]
    for _, num_columns in experts.sizes.values():
        if num_columns % columns:
            raise ConfigError(
                f"experts of {num_columns} columns: {experts.format} needs a multiple of {columns}",
                param="moe_intermediate_size",
            )
    inner = experts.sizes["down_proj"][1]
    if inner % rows:
        raise ConfigError(
            f"experts of {inner} rows: {experts.format} needs a multiple of {rows}",
            param="moe_intermediate_size",
        )


def _matrix_names(model: SparseCausalLM, path: str, num_experts: int) -> Iterator[str]:
    """Checkpoint names of all matrices below the module at `path`, gate, up and down in turn."""
    published = model.published_name(f"{path}.")
    for expert in range(num_experts):
        for part in model.expert_names:
            yield f"{published}{expert}.{part}"


def quantized_experts(model: nn.Module) -> Iterator[tuple[str, ExpertMatrix]]:
    """All matrices of a model's experts that are quantised one by one."""
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, matrix in expert_matrices(module):
                yield f"{path}.{name}", matrix


def expert_matrices(experts: Experts) -> Iterator[tuple[str, ExpertMatrix]]:
    """All matrices of a layer that are quantised one by one, by names of their own."""
    if experts.layout:
        for expert in range(experts.num_experts):
            for name in experts.sizes:
                yield f"{expert}.{name}", ExpertMatrix(experts, name, expert)


def expert_parts(model: nn.Module) -> list[QuantPart]:
    """The checkpoint layers that fill experts which are quantised one by one."""
    found: list[QuantPart] = []
    if not isinstance(model, SparseCausalLM):
        return found
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        names = _matrix_names(model, path, module.num_experts)
        for name, matrix in expert_matrices(module):
            num_parts = 2 if name.endswith("gate_up_proj") else 1
            rows = matrix.out_features // num_parts
            found += [QuantPart(next(names), matrix, i * rows, rows) for i in range(num_parts)]
    return found
