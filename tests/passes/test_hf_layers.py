"""Layers of transformers' code through all passes: counts a family, ops left, and equal numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.models.config import load_model_config
from compiled_engine.models.hf_config import HfModelConfig
from compiled_engine.models.hf_load import build_hf_model
from compiled_engine.models.hf_model import HfCausalLM, HfLayer
from compiled_engine.passes.pattern import functionalized_calls
from compiled_engine.passes.pipeline import LIFTS
from tests.helpers.hf_models import write_hf_config
from tests.helpers.pass_harness import Harness, op_counts

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

NUM_PAGES, PAGE_SIZE = 97, 8
KEPT = frozenset(
    {
        "rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "rope_kv_write",
        "qk_norm_rope_kv_write", "route",
    }
)  # fmt: skip
# Family -> matches of the passes that look for something, and ops in the layer behind them.
LINEAR_PAGED = {"linear": 4, "paged_attention": 1}
ROUTED = {"route": 1, "experts": 1, "paged_attention": 1}
LAYERS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "phi3": (
        {"lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1, "fuse_add_rms_norm": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "granite": (
        {"merge_linears": 2, "lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "qwen2": (
        {"merge_linears": 2, "lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    # Norms behind attention and MLP, which are expanded for the compiler to fuse with the adds.
    "olmo2": (
        {"merge_linears": 2, "lift_rms_norm": 4, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "gemma2": (
        {"merge_linears": 2, "lift_rms_norm": 4, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"gelu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    # Norms of every head too.
    "gemma3": (
        {"merge_linears": 2, "lift_rms_norm": 6, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"gelu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "olmoe": (
        {"merge_linears": 1, "lift_rms_norm": 4, "lift_rope": 1, "lift_route": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 3, "add_rms_norm": 1, "rope_kv_write": 1, "linear": 3, **ROUTED},
    ),
    # With an expert that every token goes through, and its gate.
    "qwen2_moe": (
        {"merge_linears": 2, "lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "lift_route": 1, "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, "linear": 6,
         **ROUTED},
    ),
    # A softmax of the chosen.
    "granitemoe": (
        {"merge_linears": 1, "lift_rms_norm": 2, "lift_rope": 1, "lift_route": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "rope_kv_write": 1, "linear": 3, **ROUTED},
    ),
    # Sigmoids, chosen with a bias; norms of all queries and all keys.
    "minimax_m2": (
        {"merge_linears": 1, "lift_rms_norm": 4, "lift_rope": 1, "lift_route": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 3, "add_rms_norm": 1, "rope_kv_write": 1, "linear": 3, **ROUTED},
    ),
    # Groups of experts; rotary embeddings of half of each head.
    "glm4_moe": (
        {"merge_linears": 2, "lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "lift_route": 1, "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, "linear": 5,
         **ROUTED},
    ),
    # Layer norms, and rotary embeddings of a quarter of each head.
    "stablelm": (
        {"merge_linears": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    # Rotary embeddings that turn neighbours: of half of each head, of heads in fp32, with angles
    # that are carried doubled or each twice in a row.
    "glm4": (
        {"merge_linears": 1, "lift_rms_norm": 4, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 3, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "cohere": (
        {"merge_linears": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_qk_norm_rope_kv": 1},
        {"silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "ernie4_5": (
        {"merge_linears": 2, "lift_rms_norm": 2, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "rope_kv_write": 1, **LINEAR_PAGED},
    ),
    "qwen3": (
        {"merge_linears": 2, "lift_rms_norm": 4, "lift_gated_activation": 1, "lift_rope": 1,
         "fuse_add_rms_norm": 1, "fuse_qk_norm_rope_kv": 1},
        {"rms_norm": 1, "add_rms_norm": 1, "silu_and_mul": 1, "qk_norm_rope_kv_write": 1,
         **LINEAR_PAGED},
    ),
}  # fmt: skip
# Passes that count views and casts, of which there are as many as the code happens to have, and
# those that are not for such layers.
NOT_COUNTED = {"remove_no_ops", "flatten_batch", "decode_attention", "choose_kernels"}


def make(folder: Path, family: str, dtype: torch.dtype) -> HfCausalLM:
    if family == "qwen3":  # has a file here, which is not asked
        from tests.helpers.tiny_model import write_tiny_model

        write_tiny_model(folder, family="qwen3")
    else:
        write_hf_config(folder, family)
    config = load_model_config(folder, "transformers")
    assert isinstance(config, HfModelConfig)
    return build_hf_model(config, dtype=dtype, device=torch.device("cpu"), dummy_seed=0)


def step_of(model: HfCausalLM, dtype: torch.dtype) -> tuple[LayerCache, PagedContext]:
    """A mixed step: a decode row, an extending row of three tokens, a padding token."""
    shape = (NUM_PAGES, PAGE_SIZE, model.config.num_kv_heads, model.config.head_dim)
    torch.manual_seed(0)
    cache = LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    first = torch.tensor([4, 7, 11, 11]) * PAGE_SIZE
    ctx = PagedContext(
        torch.cat((first + torch.tensor([1, 7, 0, 1]), torch.tensor([-1]))),
        torch.tensor([[3, 4, 0], [0, 0, 0], [90, 7, 11]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([10, 18], dtype=torch.int32),
        torch.tensor([0, 1, 4], dtype=torch.int32),
        torch.tensor([0, 2, 2, 2, 1]),
        torch.tensor([9, 15, 16, 17, 0]),
        torch.empty(0, dtype=torch.int32),
    )
    return cache, ctx


def call(
    layer: HfLayer,
    residual: Tensor,
    rotary: tuple[Tensor, ...],
    cache: LayerCache,
    ctx: PagedContext,
) -> Tensor:
    return layer(residual, rotary, cache, ctx)


@pytest.mark.parametrize(
    ("family", "size"),
    [*((family, "static") for family in LAYERS), ("gemma3", "dynamic"), ("olmoe", "dynamic")],
)
def test_counts_of_a_layer(tmp_path: Path, family: str, size: str):
    dtype = torch.bfloat16
    model = make(tmp_path, family, dtype)
    cache, ctx = step_of(model, dtype)
    with torch.no_grad():
        residual, rotary = model.embed(torch.tensor([5, 6, 7, 8, 9]), ctx.positions)
        mine = LayerCache(*(tensor.clone() for tensor in cache))
        expected = call(model.blocks[0], residual, rotary, cache, ctx)
    if size == "dynamic":
        for tensor in (residual, *rotary, ctx.slot_mapping, ctx.token_rows, ctx.positions):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=512)
    found = Harness(kept_ops=KEPT).run(call, model.blocks[0], residual, rotary, mine, ctx)
    for node in functionalized_calls(found.after, torch.ops.ce.rope_kv_write.default):
        assert node.kwargs["interleaved"] is (family in ("glm4", "cohere", "ernie4_5"))
    matches, ops = LAYERS[family]
    counted = {k: v for k, v in found.counters.num_matches.items() if v and k not in NOT_COUNTED}
    assert counted == matches | {"use_linear_op": ops["linear"]}
    assert op_counts(found.after) == ops
    # 16 bits: the ops round less than the spellings.
    for got, wanted in ((found.outputs, expected), *zip(mine, cache, strict=True)):
        assert (got - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.parametrize("disabled", [(), tuple(module.NAME for module in LIFTS)])
@pytest.mark.parametrize("family", ["olmo2", "gemma3", "stablelm", "glm4_moe", "glm4"])
def test_numbers_stay_in_fp32(tmp_path: Path, family: str, disabled: tuple[str, ...]):
    dtype = torch.float32
    model = make(tmp_path, family, dtype)
    cache, ctx = step_of(model, dtype)
    with torch.no_grad():
        residual, rotary = model.embed(torch.tensor([5, 6, 7, 8, 9]), ctx.positions)
        mine = LayerCache(*(tensor.clone() for tensor in cache))
        expected = call(model.blocks[0], residual, rotary, cache, ctx)
    harness = Harness(disabled=disabled)
    found = harness.run(call, model.blocks[0], residual, rotary, mine, ctx)
    torch.testing.assert_close(found.outputs, expected)
    torch.testing.assert_close(mine, cache)
    left = set(op_counts(found.after)) - {"experts"}
    assert left == {"linear", "paged_attention"}
