"""`experts` by the library: rows gathered, two grouped products, a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_engine.custom_ops.activation import silu_and_mul
from compiled_engine.custom_ops.moe_operands import ExpertOperands


def run_library(operands: ExpertOperands) -> Tensor:
    """As `reference_moe.experts`, for plain weights in bf16 without a bias, gated by silu."""
    from compiled_engine.custom_ops.moe_stream import sum_pairs

    ends = operands.offsets[1:]
    order = operands.order.long()
    rows = operands.x[order // operands.top_k]
    both = torch.nn.functional.grouped_mm(rows, operands.gate_up.transpose(1, 2), offs=ends)
    inner = silu_and_mul(both)
    sorted_results = torch.nn.functional.grouped_mm(inner, operands.down.transpose(1, 2), offs=ends)
    results = torch.empty_like(sorted_results)
    results[order] = sorted_results
    return sum_pairs(results, operands)
