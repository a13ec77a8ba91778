"""Custom ops. Importing this package registers every schema, body and fake; it needs torch only.

`ALL_OPS` lists them; generic tests and the pass pipeline walk it.
"""

from compiled_engine.custom_ops.activation import (
    GELU_AND_MUL,
    SILU_AND_MUL,
    SWIGLU_CLAMPED,
    gelu_and_mul,
    silu_and_mul,
)
from compiled_engine.custom_ops.attention import (
    ATTENTION_WORK,
    PAGED_ATTENTION,
    PAGED_ATTENTION_QUANT,
    LayerCache,
    PagedContext,
    attention,
)
from compiled_engine.custom_ops.gemm import FUSED_LINEAR, LINEAR
from compiled_engine.custom_ops.library import OpSpec
from compiled_engine.custom_ops.moe import (
    EXPERTS,
    ROUTE,
    Activation,
    ExpertWeights,
    Routes,
    experts,
    route,
)
from compiled_engine.custom_ops.moe_block import SPARSE_MLP
from compiled_engine.custom_ops.norm import ADD_RMS_NORM, RMS_NORM, SCALED_RMS_NORM, rms_norm
from compiled_engine.custom_ops.quant import dequantize, quantize
from compiled_engine.custom_ops.quant_kernels import QUANT_OPS
from compiled_engine.custom_ops.rope_kv import (
    KV_WRITE,
    PLAIN_WRITES,
    QK_NORM_ROPE,
    QK_NORM_ROPE_KV_WRITE,
    ROPE,
    ROPE_KV_WRITE,
    kv_write,
    qk_norm_rope,
    rope,
)
from compiled_engine.custom_ops.sampling import (
    SAMPLE_ROWS,
    SAMPLE_TOKENS,
    SAMPLING_THRESHOLD,
    TOP_LOGPROBS,
    sampling_threshold,
)

ALL_OPS: tuple[OpSpec, ...] = (
    RMS_NORM,
    SCALED_RMS_NORM,
    ADD_RMS_NORM,
    SILU_AND_MUL,
    GELU_AND_MUL,
    SWIGLU_CLAMPED,
    LINEAR,
    FUSED_LINEAR,
    ROPE,
    QK_NORM_ROPE,
    KV_WRITE,
    ROPE_KV_WRITE,
    QK_NORM_ROPE_KV_WRITE,
    *PLAIN_WRITES.values(),
    ATTENTION_WORK,
    PAGED_ATTENTION,
    PAGED_ATTENTION_QUANT,
    ROUTE,
    EXPERTS,
    SPARSE_MLP,
    SAMPLING_THRESHOLD,
    SAMPLE_TOKENS,
    SAMPLE_ROWS,
    TOP_LOGPROBS,
    *QUANT_OPS,
)

__all__ = [
    "ALL_OPS",
    "Activation",
    "ExpertWeights",
    "LayerCache",
    "OpSpec",
    "PagedContext",
    "Routes",
    "attention",
    "dequantize",
    "experts",
    "gelu_and_mul",
    "kv_write",
    "qk_norm_rope",
    "quantize",
    "rms_norm",
    "rope",
    "route",
    "sampling_threshold",
    "silu_and_mul",
]
