"""The kernel families: for each op the traits, the costs, the tolerance, inputs for measurements.

Adding a family to `kernels list|check|bench`, to `explain` and to autotuning is adding a
`KernelFamily` to `FAMILIES` and its candidates to `kernels.CANDIDATES`; nothing else knows names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from compiled_engine.custom_ops import ALL_OPS, moe_costs
from compiled_engine.custom_ops import family_inputs as inputs
from compiled_engine.custom_ops.attention_choice import attention_traits
from compiled_engine.custom_ops.gemm import MAX_SKINNY_ROWS, fused_linear_traits
from compiled_engine.custom_ops.kernel_family import (
    Arguments,
    Cost,
    CostFunction,
    KernelFamily,
    Tolerance,
    num_bytes,
)
from compiled_engine.custom_ops.library import OpSpec
from compiled_engine.custom_ops.quant_choice import quantized_linear_traits, scaled_linear_traits
from compiled_engine.custom_ops.quant_kernels import MIN_ARCH, QUANT_OPS
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.registry import (
    DETERMINISTIC_TAG,
    PORTABLE_TAG,
    Candidate,
    Priority,
    Target,
    Traits,
)


def traffic(*skipped: str) -> CostFunction:
    """Every tensor argument is read once but those skipped, every result is written once."""

    def cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
        read = sum(num_bytes(value) for name, value in arguments.items() if name not in skipped)
        return Cost(float(read + sum(num_bytes(value) for value in results)))

    return cost


def kv_write_cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
    """The arguments read, the results and the rows of k and v written; not the whole cache."""
    plain = traffic("k_cache", "v_cache")(arguments, results, context)
    k, v, cache = arguments["k"], arguments["v"], arguments["k_cache"]
    return Cost(plain.num_bytes + (k.numel() + v.numel()) * cache.element_size())


def linear_cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
    """Two operations for each weight and token."""
    moved = traffic()(arguments, results, context).num_bytes
    return Cost(moved, 2.0 * arguments["x"].shape[0] * arguments["weight"].numel())


def attention_cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
    """Queries and results once, keys and values of each sequence once; two products a pair.

    Decode: every token attends to `context` positions of its own. Else the tokens are the last of
    one sequence of `context` positions, or all of it.
    """
    q, cache = arguments["q"], arguments["k_cache"]
    num_tokens, num_heads, head_dim = q.shape
    if arguments["is_decode"]:
        kv_tokens = pairs = num_tokens * context
    else:
        kv_tokens = max(context, num_tokens)
        pairs = num_tokens * (kv_tokens - num_tokens) + num_tokens * (num_tokens + 1) / 2
    moved = 2 * num_bytes(q) + 2.0 * kv_tokens * cache.shape[2] * head_dim * cache.element_size()
    return Cost(moved, 4.0 * pairs * num_heads * head_dim)


def _attention_quant_cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
    q = arguments["q"]
    plain = attention_cost(arguments, results, context)
    return Cost(plain.num_bytes - num_bytes(q) + q.numel(), plain.num_flops)


def _quantized_traits(arguments: Arguments, target: Target) -> dict[str, int]:
    operands = QuantOperands(*(arguments[name] for name in QuantOperands._fields))
    return quantized_linear_traits(operands)


def _scaled_traits(arguments: Arguments, target: Target) -> dict[str, int]:
    names = ("q", "weight", "weight_scale", "format", "activation_format")
    q, weight, scale, format, activation_format = (arguments[name] for name in names)
    return scaled_linear_traits(q, weight, scale, format, activation_format, target)


def _product_cost(main: str) -> CostFunction:
    """All operands once; two operations for each value of `main` and row of the weight.

    "q" holds 8-bit numbers; "x" becomes such if the activations have a format.
    """

    def cost(arguments: Arguments, results: tuple[Any, ...], context: int) -> Cost:
        moved = traffic()(arguments, results, context).num_bytes
        num_flops = 2.0 * arguments[main].numel() * arguments["weight"].shape[0]
        is_8bit = main == "q" or bool(arguments["activation_format"])
        return Cost(moved, num_flops, is_8bit=is_8bit)

    return cost


def shape_traits(main: str) -> Callable[[Arguments, Target], dict[str, int]]:
    """First dim of an argument as the number of tokens, and the values of each."""

    def traits(arguments: Arguments, target: Target) -> dict[str, int]:
        shape = arguments[main].shape
        return {"num_tokens": shape[0], "size": math.prod(shape[1:])}

    return traits


def _attention_traits(arguments: Arguments, target: Target) -> dict[str, int]:
    q, seq_rows = arguments["q"], arguments["seq_rows"]
    num_rows = q.shape[0] if arguments["is_decode"] else seq_rows.shape[0]
    found = attention_traits(q, arguments["k_cache"], num_rows, target)
    return found | {"is_decode": int(arguments["is_decode"])}


def _fused_traits(arguments: Arguments, target: Target) -> dict[str, int]:
    names = ("x", "weight", "bias", "norm_weight", "residual", "is_gated")
    x, weight, bias, norm_weight, residual, is_gated = (arguments[name] for name in names)
    return fused_linear_traits(x, weight, bias, norm_weight, residual, is_gated, target)


def _linear_traits(arguments: Arguments, target: Target) -> dict[str, int]:
    x, weight = arguments["x"], arguments["weight"]
    return {
        "num_tokens": x.shape[0],
        "rows": weight.shape[0],
        "size": x.shape[1],
        "most_few": MAX_SKINNY_ROWS.get(x.dtype, 0),
        "is_weight_contiguous": weight.is_contiguous(),
    }


def _spec(name: str) -> OpSpec:
    return next(op for op in ALL_OPS if op.name == name)


def _simple(
    family: str, mode: str, op: str, main: str, cost: CostFunction, **rest: Any
) -> KernelFamily:
    return KernelFamily(
        family=family,
        mode=mode,
        op=_spec(op),
        main=main,
        traits=shape_traits(main),
        cost=cost,
        **rest,
    )


_NORM = Tolerance(terms=("weight", 0), roundings=4, why="scaled value and result, on both sides")
_GATED = Tolerance(roundings=3, why="the gate, and the product on both sides")
_CODES = Tolerance(why="a value that lies between two codes, on both sides")
_ROTATED = Tolerance(terms=("cos", 1), roundings=4, why="normed value and result, on both sides")
_QUANTIZE = tuple(
    _simple("quantize", op.name, op.name, op.overload._schema.arguments[0].name, traffic(),
            tolerance=_CODES, dtype="dtype" if op.name == "dequantize" else "")
    for op in QUANT_OPS
    if op.name not in ("quantized_linear", "scaled_linear")
)  # fmt: skip
FAMILIES: tuple[KernelFamily, ...] = (
    KernelFamily(
        family="attention",
        mode="paged",
        op=_spec("paged_attention"),
        main="q",
        varying="num_rows",
        traits=_attention_traits,
        cost=attention_cost,
        tolerance=Tolerance(
            roundings=3, terms=("q", 2), why="probabilities, and the result on both sides"
        ),
        bench_cases=inputs.attention_cases,
        make_real=inputs.attention_step,
    ),
    KernelFamily(
        family="attention",
        mode="paged_quant",
        op=_spec("paged_attention_quant"),
        main="q",
        varying="num_rows",
        traits=_attention_traits,
        cost=_attention_quant_cost,
        tolerance=Tolerance(roundings=4, why="the result in 8 bits, on both sides"),
        make_real=inputs.attention_step,
    ),
    _simple("attention", "work", "attention_work", "token_rows", traffic("block_table")),
    KernelFamily(
        family="fused_linear",
        mode="few",
        op=_spec("fused_linear"),
        traits=_fused_traits,
        cost=linear_cost,
        tolerance=Tolerance(
            roundings=6,
            terms=("x", 1),
            why="norm, product, gate and sum of the reference, and the result on both sides",
        ),
        bench_cases=inputs.fused_linear_cases,
    ),
    KernelFamily(
        family="linear",
        mode="any",
        op=_spec("linear"),
        traits=_linear_traits,
        cost=linear_cost,
        tolerance=Tolerance(terms=("x", 1)),
        bench_cases=inputs.linear_cases,
    ),
    _simple(
        "norm", "rms_norm", "rms_norm", "x", traffic(),
        tolerance=_NORM, bench_cases=inputs.norm_cases,
    ),
    _simple(
        "norm", "add_rms_norm", "add_rms_norm", "x", traffic(),
        tolerance=_NORM, bench_cases=inputs.add_norm_cases,
    ),
    _simple("norm", "scaled_rms_norm", "scaled_rms_norm", "x", traffic(), tolerance=_NORM),
    *(
        _simple(
            "activation", name, name, "x", traffic(),
            tolerance=_GATED, bench_cases=partial(inputs.activation_cases, rest=tuple(rest)),
        )
        for name, *rest in (
            ("silu_and_mul",),
            ("gelu_and_mul", "tanh"),
            ("swiglu_clamped", 1.702, 7.0),
        )
    ),
    *_QUANTIZE,
    _simple("rope_kv", "rope", "rope", "q", traffic(), tolerance=_ROTATED),
    _simple("rope_kv", "qk_norm_rope", "qk_norm_rope", "q", traffic(), tolerance=_ROTATED),
    _simple("rope_kv", "kv_write", "kv_write", "k", kv_write_cost),
    _simple(
        "rope_kv", "rope_kv_write", "rope_kv_write", "q", kv_write_cost,
        tolerance=_ROTATED, bench_cases=inputs.rope_cases,
    ),
    _simple(
        "rope_kv", "qk_norm_rope_kv_write", "qk_norm_rope_kv_write", "q", kv_write_cost,
        tolerance=_ROTATED, bench_cases=inputs.norm_rope_cases,
    ),
    KernelFamily(
        family="route",
        mode="top_k",
        op=_spec("route"),
        main="logits",
        traits=moe_costs.route_traits,
        cost=traffic(),
        tolerance=Tolerance(roundings=4, terms=("logits", 1), why="exp, sum and quotient"),
        bench_cases=moe_costs.route_cases,
    ),
    KernelFamily(
        family="experts",
        mode="grouped",
        op=_spec("experts"),
        layout="format",
        traits=moe_costs.experts_traits,
        cost=lambda *call: Cost(*moe_costs.experts_bytes_flops(*call)),
        tolerance=Tolerance(
            roundings=8,
            terms=("x", 1),
            why="two products, the gate and the weighted sum, on both sides",
        ),
        bench_cases=moe_costs.experts_cases,
        make_real=moe_costs.experts_step,
    ),
    KernelFamily(
        family="sparse_mlp",
        mode="few",
        op=_spec("sparse_mlp"),
        layout="format",
        traits=moe_costs.block_traits,
        cost=lambda *call: Cost(*moe_costs.block_bytes_flops(*call)),
        tolerance=Tolerance(roundings=12, terms=("x", 1), why="norm, router, experts and the add"),
        bench_cases=moe_costs.block_cases,
        make_real=moe_costs.block_step,
    ),
    KernelFamily(
        family="quantized_linear",
        mode="few",
        op=_spec("quantized_linear"),
        traits=_quantized_traits,
        cost=_product_cost("x"),
        tolerance=Tolerance(roundings=8, terms=("x", 1), why="norm, quantised x, product and gate"),
    ),
    KernelFamily(
        family="scaled_linear",
        mode="product",
        op=_spec("scaled_linear"),
        main="q",
        dtype="dtype",
        traits=_scaled_traits,
        cost=_product_cost("q"),
        tolerance=Tolerance(roundings=4, terms=("q", 1), why="product and scale, on both sides"),
    ),
    _simple("sampling", "threshold", "sampling_threshold", "logits", traffic()),
    _simple(
        "sampling", "tokens", "sample_tokens", "logits", traffic(),
        bench_cases=inputs.sampling_cases,
    ),
    _simple("sampling", "rows", "sample_rows", "logits", traffic()),
    _simple(
        "sampling", "logprobs", "top_logprobs", "logits", traffic(),
        tolerance=Tolerance(roundings=4, terms=("logits", 1), why="exp, sum, log and difference"),
        bench_cases=inputs.logprob_cases,
    ),
)  # fmt: skip


def family_of(op: Any) -> KernelFamily | None:
    """The family of an `OpOverload`, None if it has none."""
    return next((f for f in FAMILIES if f.op.overload is op), None)


_SAME = (DETERMINISTIC_TAG,)
_16_BIT_AND_32 = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)


def _rejects_strided(traits: Traits) -> str | None:
    return None if traits["is_weight_contiguous"] else "needs a contiguous weight"


def _why_cpp_is_slower(traits: Traits) -> str | None:
    most = traits["most_few"]
    return None if traits["num_tokens"] <= most else f"was measured slower above {most} tokens"


def _torch(family: str, mode: str, dtypes: tuple[torch.dtype, ...] = _16_BIT_AND_32) -> Candidate:
    return Candidate(
        family=family,
        mode=mode,
        name="torch",
        priority=Priority.REFERENCE,
        dtypes=dtypes,
        tags=(*_SAME, "fused by Inductor where it is compiled"),
        num_kernels=lambda _: 0,
    )


def _triton(
    family: str,
    mode: str,
    interpreted: str = "",
    *,
    tags: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = _16_BIT_AND_32,
    min_arch: int = 80,
) -> Candidate:
    return Candidate(
        family=family,
        mode=mode,
        name="triton",
        priority=Priority.TUNED,
        device_type="cuda",
        min_arch=min_arch,
        dtypes=dtypes,
        tags=(*_SAME, PORTABLE_TAG, *tags),
        interpreted=interpreted,
    )


def _cpp(family: str, mode: str, **rest: Any) -> Candidate:
    return Candidate(
        family=family,
        mode=mode,
        name="cpp",
        priority=Priority.TUNED,
        device_type="cpu",
        tags=_SAME,
        **rest,
    )


# Candidates of the ops that the dispatcher gives a kernel: one on a GPU, some on a CPU. Those of
# attention and of `fused_linear` stand beside their kernels.
CANDIDATES: tuple[Candidate, ...] = (
    _triton("attention", "work", dtypes=_INDICES),
    _torch("attention", "work", dtypes=_INDICES),
    _cpp("linear", "any", rejects=_rejects_strided, slower=_why_cpp_is_slower),
    _torch("linear", "any"),
    *(
        make(family, mode, *rest)
        for family, mode, *rest in (
            ("norm", "rms_norm", "norm_triton:rms_norm"),
            ("norm", "add_rms_norm", "norm_triton:add_rms_norm"),
            ("activation", "silu_and_mul", "activation_triton:silu_and_mul"),
            ("activation", "gelu_and_mul", "activation_triton:gelu_and_mul"),
            ("activation", "swiglu_clamped", "activation_triton:swiglu_clamped"),
            ("rope_kv", "rope", "rope_kv_triton:rope"),
            ("rope_kv", "qk_norm_rope", "rope_kv_triton:qk_norm_rope"),
            ("rope_kv", "kv_write", "rope_kv_triton:kv_write"),
            ("rope_kv", "rope_kv_write", "rope_kv_triton:rope_kv_write"),
            ("rope_kv", "qk_norm_rope_kv_write", "rope_kv_triton:qk_norm_rope_kv_write"),
            ("sampling", "tokens", "sampling_triton:sample_tokens"),
            ("sampling", "rows", "sampling_triton:sample_rows"),
            ("sampling", "logprobs", "logprobs_triton:top_logprobs"),
        )
        for make in (_triton, lambda family, mode, *_: _torch(family, mode))
    ),
    _torch("norm", "scaled_rms_norm"),
    *(_triton("quantize", family.mode, min_arch=MIN_ARCH) for family in _QUANTIZE),
    *(_torch("quantize", family.mode) for family in _QUANTIZE),
    _cpp("sampling", "threshold", dtypes=(torch.float32,)),
    _torch("sampling", "threshold", dtypes=(torch.float32,)),
)
