"""What transformers' modelling code calls instead of its own attention, masks and experts.

Registered with transformers' interfaces under `INTERFACE`; a model built with that name calls these
functions. A decoder layer hands its `attention_mask` on to attention untouched, so that argument
carries what our attention needs: `LayerView`. Imports transformers inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import LayerCache, PagedContext, attention, kv_write
from compiled_engine.custom_ops.moe import ExpertWeights, Routes, experts
from compiled_engine.errors import ConfigError

INTERFACE = "compiled_engine"

# Keywords of an attention call that change nothing here: dropout is off, and masks and caches are
# ours. A window is read from the mask that the model asks for, which is what its own eager code
# computes with.
_IGNORED = frozenset(
    {
        "dropout", "sliding_window", "position_ids", "cache_position", "use_cache",
        "output_attentions", "output_hidden_states", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k",
        "max_length_q", "max_length_k", "position_embeddings", "layer_idx", "past_key_values",
        "cache", "output_router_logits", "num_items_in_batch", "logits_to_keep", "return_dict",
    }
)  # fmt: skip


class MaskRequest(NamedTuple):
    """The mask a model asks transformers for, not made: whether a query sees a key.

    `rule(batch, head, query, key)` is transformers' own function over index tensors.
    """

    rule: Callable[..., Any]
    local_size: int | None


class AttentionCall(NamedTuple):
    """One call of attention, seen while a model is looked at: shapes are [tokens, heads, dim]."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    problem: str


class LayerView(NamedTuple):
    """What attention of one layer needs; stands in the place of the layer's mask.

    Attributes:
        window: tokens a query sees at most, itself included; 0 is no limit.
        cache: the layer's KV pages; None for one full sequence.
        ctx: the step's tensors; None for one full sequence.
        calls: takes a note of each call instead of computing, while a model is looked at.
    """

    window: int
    cache: LayerCache | None
    ctx: PagedContext | None
    calls: list[AttentionCall] | None = None


def register_interfaces() -> None:
    """Makes `INTERFACE` known to transformers. Again is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(INTERFACE, attend)
    AttentionMaskInterface.register(INTERFACE, request_mask)
    experts_interface = _experts_interface()
    if experts_interface is not None:
        experts_interface.register(INTERFACE, run_experts)


def _experts_interface() -> Any:
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:  # before transformers had one
        return None
    return ExpertsInterface


def request_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> MaskRequest:
    """What transformers calls where a model asks for a mask."""
    return MaskRequest(mask_function, local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of q, k, v [1, heads, T, dim]; writes k and v into the cache in place.

    Returns:
        [1, T, heads, dim], as transformers' own attention functions.
    """
    view = attention_mask
    assert isinstance(view, LayerView), f"{type(module).__name__} was not given a layer's view"
    sinks = options.pop("s_aux", None)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if view.calls is not None:
        problem = _problem(options, sinks)
        view.calls.append(AttentionCall(tuple(q.shape), tuple(k.shape), tuple(v.shape), problem))
        return (q.contiguous() * scaling).unsqueeze(0), None
    if view.cache is not None and view.ctx is not None:
        kv_write(k, v, view.cache.k_cache, view.cache.v_cache, view.ctx.slot_mapping)
    out = attention(
        q,
        k,
        v,
        view.cache,
        view.ctx,
        float(scaling),
        window=view.window,
        soft_cap=float(softcap or 0.0),
        sinks=sinks,
    )
    return out.unsqueeze(0), None


def _problem(options: dict[str, Any], sinks: Tensor | None) -> str:
    """What of a call our attention cannot express; "" if nothing."""
    given = sorted(
        name for name, value in options.items() if value is not None and name not in _IGNORED
    )
    if given:
        return f"its attention takes {', '.join(given)}"
    if options.get("is_causal") is False:
        return "its attention looks ahead"
    if sinks is not None and sinks.dim() != 1:
        return f"its attention sinks have {sinks.dim()} dimensions"
    return ""


def window_of(request: Any) -> int:
    """The window of a mask request: tokens a query sees, 0 for all before it.

    Raises:
        ConfigError: the mask is no causal one with or without a window; says what is there instead.
    """
    if not isinstance(request, MaskRequest):
        given = "no mask" if request is None else f"a mask of type {type(request).__name__}"
        raise ConfigError(f"its layers take {given}, not one that transformers makes")
    window = request.local_size or 0
    edge = window or 8
    edges = sorted({0, 1, 2, edge - 1, edge, edge + 1, 2 * edge, 3 * edge + 1})
    # On the CPU, whatever the default device is: a model is looked at without storage.
    queries = torch.tensor(edges, device="cpu")
    keys = torch.arange(3 * edge + 2, device="cpu")
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    queries = queries[:, None]
    expected = keys <= queries
    if window:
        expected &= keys > queries - window
    try:
        seen = request.rule(zero, zero, queries, keys)
    except Exception as error:  # the rule is the model's own code and may do anything
        raise ConfigError(f"its mask cannot be read ({error})") from error
    is_known = isinstance(seen, Tensor) and seen.device.type == "cpu"
    if not is_known or not bool((seen.expand(expected.shape) == expected).all()):
        raise ConfigError(
            "its mask is neither causal nor a causal window: attention in chunks, blocks or both "
            "directions is not served"
        )
    return window


def run_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A mixture's experts by `ce.experts`: x [T, h], ids and weights [T, k] to [T, h].

    `module` holds stacked matrices as transformers does: gate_up_proj [E, 2i, h], down_proj
    [E, h, i]. Other kinds of experts (`experts_problem`) stay transformers' own grouped products.
    """
    if experts_problem(module):
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, x, ids, weights)
    routes = routes_of(weights, ids, module.gate_up_proj.shape[0])
    return experts(x, routes, ExpertWeights(module.gate_up_proj, module.down_proj))


def routes_of(weights: Tensor, ids: Tensor, num_experts: int) -> Routes:
    """What `experts` takes for weights and ids [T, k]; a pass knows this spelling, `lift_route`."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    edges = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(sorted_ids, edges, out_int32=True)
    return Routes(weights.float(), ids.int(), order.int(), offsets)


def experts_problem(module: Any) -> str:
    """Why `run_experts` cannot stand for a module of experts; "" if it can."""
    for name, plain in (
        ("has_gate", True),
        ("has_bias", False),
        ("is_transposed", False),
        ("is_concatenated", True),
        ("has_post_expert_norm", False),
    ):
        if getattr(module, name, plain) != plain:
            return f"{name} is {not plain}"
    own_gate = getattr(type(module)._apply_gate, "__name__", "")
    if own_gate != "_default_apply_gate":
        return "gate and up are combined in a way of their own"
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
        return f"the activation is {type(activation).__name__}"
    return ""
