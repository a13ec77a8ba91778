"""`scaled_linear` by the library's products of 8-bit numbers, in the layouts that it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.registry import Traits

# The library takes scales of blocks only for whole fours of tokens: it reads those of a block,
# which stand next to each other, by 16 bytes.
BLOCK_TOKENS = 4


class ScaledOperands(NamedTuple):
    """Arguments of `scaled_linear`, without the kernel's name."""

    q: Tensor
    q_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    format: str
    activation_format: str
    dtype: torch.dtype


def scaled_mm(operands: ScaledOperands) -> Tensor:
    """As `reference_quant.scaled_linear`: scales of all, of rows, or of 128 columns.

    One scale for all rows of one operand is repeated if the other has one a row.
    """
    count = operands.q.shape[0]
    if operands.format == "fp8_block" and count % BLOCK_TOKENS:
        return scaled_mm(_with_more_tokens(operands, -count % BLOCK_TOKENS))[:count]
    q, q_scale, weight, weight_scale, bias, format, activation_format, dtype = operands
    num_tokens, num_outputs = q.shape[0], weight.shape[0]
    if format == "fp8_block":
        # The library wants the tokens of a block next to each other.
        left, right = q_scale.T.contiguous().T, weight_scale.T
    elif format == "fp8_tensor" and activation_format == "fp8_tensor":
        left, right = q_scale.reshape(()), weight_scale.reshape(())
    else:
        left = q_scale.reshape(-1, 1).expand(num_tokens, 1).contiguous()
        right = weight_scale.reshape(1, -1).expand(1, num_outputs).contiguous()
    return torch._scaled_mm(
        q, weight.T, left, right, bias=bias, out_dtype=dtype, use_fast_accum=format != "fp8_block"
    )


def _with_more_tokens(operands: ScaledOperands, count: int) -> ScaledOperands:
    """The same with tokens of zeros behind the last."""
    q, q_scale = operands.q, operands.q_scale
    padded = q.new_empty((q.shape[0] + count, q.shape[1]))
    padded.view(torch.uint8)[-count:] = 0
    padded[:-count] = q
    return operands._replace(q=padded, q_scale=torch.nn.functional.pad(q_scale, (0, 0, 0, count)))


def int_mm(operands: ScaledOperands) -> Tensor:
    """As `reference_quant.scaled_linear`, of int8: the library's sums, then their scales."""
    from compiled_engine.custom_ops.quant_scaled_triton import scale_sums

    return scale_sums(torch._int_mm(operands.q, operands.weight.T), operands)


def int_mm_rejects(traits: Traits) -> str | None:
    """What `torch._int_mm` cannot take; traits: those of `quant_choice.scaled_linear_traits`."""
    rules = (
        (traits["is_int8"], "multiplies int8 with scales of tokens and outputs only"),
        (traits["num_tokens"] > 16, f"needs more than 16 tokens, not {traits['num_tokens']}"),
        (traits["size"] == traits["stored"], "needs weights without columns behind the last"),
        (traits["size"] % 8 == 0, "needs a multiple of 8 columns"),
        (traits["rows"] % 8 == 0, "needs a multiple of 8 outputs"),
        (traits["is_weight_contiguous"], "needs contiguous operands"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def scaled_mm_rejects(traits: Traits) -> str | None:
    """What the library cannot take; traits: those of `quant_choice.scaled_linear_traits`."""
    rules = (
        (traits["is_fp8"], "multiplies 8-bit floats only"),
        (traits["arch"] >= 89, "needs compute capability 8.9"),
        (traits["num_tokens"] > 0, "needs a token"),
        (traits["size"] == traits["stored"], "needs weights without columns behind the last"),
        (traits["size"] % 16 == 0, "needs a multiple of 16 columns"),
        (traits["rows"] % 16 == 0, "needs a multiple of 16 outputs"),
        (
            not traits["in_blocks"] or traits["arch"] // 10 == 9,
            "takes scales of blocks on compute capability 9",
        ),
        (
            not traits["in_blocks"] or (traits["size"] % 512 == 0 and traits["rows"] % 128 == 0),
            "needs whole blocks of 128, four of them in a row",
        ),
        (not traits["has_token_blocks"], "takes weights with scales of blocks of 128 rows"),
        (traits["is_weight_contiguous"], "needs contiguous operands"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)
