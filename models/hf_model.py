"""A model of transformers' own code in the pieces the engine works with: embed, layers, head.

The code runs as it stands, over one sequence [1, T]; `hf_plan` has found out how its layers are
called. `embed` runs the whole forward with taps in the place of the layers and keeps what they were
called with; `head` runs it with the residual stream in the place of their result. What of such a
forward nobody needs, a compiler drops. Does not own weights (`hf_load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.models.hf_attention import INTERFACE, LayerView, register_interfaces
from compiled_engine.models.hf_config import HfModelConfig, transformers_config
from compiled_engine.models.hf_linears import merge_linears
from compiled_engine.models.hf_plan import (
    LayerCall,
    LayerTap,
    ModelPlan,
    Prepared,
    PreparedKind,
    TapLog,
    call_model,
    find_layers,
    plan_model,
    refuse_model,
)
from compiled_engine.models.layers import CausalLM, DecoderLayer

# Tokens that a model is tried with before it is served.
NUM_PROBED = 17
# Tensors that are made for the layers in front of them, each [T, ...].
Carried = tuple[Tensor, ...]
# How two halves of a tensor are equal: its halves, or its neighbours.
Doubled = Literal["", "half", "pairs"]


def new_model(config: HfModelConfig, *, dtype: torch.dtype) -> Any:
    """transformers' model with uninitialised parameters, on the device that is torch's default.

    Raises:
        ConfigError: its class does not take attention from outside.
    """
    from transformers import AutoModelForCausalLM

    register_interfaces()
    try:
        theirs = AutoModelForCausalLM.from_config(
            new_config(config),
            attn_implementation=INTERFACE,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
        )
    except Exception as error:  # the model's own code: whatever it raises is the reason
        reason = f"it cannot be made with attention of ours: {type(error).__name__}: {error}"
        refuse_model(config.architecture, reason, error)
    return prepared_model(theirs)


def new_config(config: HfModelConfig) -> Any:
    """transformers' config of the model, a new one."""
    theirs = transformers_config(config.folder, trust_remote_code=config.trust_remote_code)
    theirs.use_cache = False
    return theirs


def prepared_model(theirs: Any) -> Any:
    """transformers' model, in place: for inference, with experts of ours."""
    # Only now: older versions refuse a name of others while a model is made.
    theirs.config._experts_implementation = INTERFACE
    return theirs.eval()


class HfLayer(nn.Module):
    """One decoder layer behind the interface of our own layers: [T, hidden] to [T, hidden].

    Args:
        block: transformers' layer.
        call: how it is called.
        kinds: of the prepared tensors.
        doubled: how prepared tensors are carried as half of them, in fp32, because the other one
            is the same: the first "half", or the first of each of its "pairs"; "" as they are.
            Such are the cosines and sines of rotary embeddings.
    """

    def __init__(
        self,
        block: nn.Module,
        call: LayerCall,
        kinds: tuple[PreparedKind, ...],
        doubled: tuple[Doubled, ...],
    ) -> None:
        super().__init__()
        self.block = block
        self.call = call
        self.kind = call.kind  # tells layers apart that other constants do not
        self.kinds = kinds
        self.doubled = doubled

    def forward(
        self,
        residual: Tensor,
        rotary: Carried,
        cache: LayerCache | None = None,
        ctx: PagedContext | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """The stream behind the layer: of all rows, or of those that `keep` [S] int64 names."""
        hidden = self.run(residual, rotary, LayerView(self.call.window, cache, ctx))
        return hidden if keep is None else hidden[keep]

    def run(self, residual: Tensor, rotary: Carried, view: LayerView) -> Tensor:
        """The stream behind the layer, with `view` for its attention."""
        prepared = [
            self._restored(tensor, kind, how)
            for tensor, kind, how in zip(rotary, self.kinds, self.doubled, strict=True)
        ]
        args, kwargs = self.call.filled(prepared, view)
        out = self.block(residual.unsqueeze(0), *args, **kwargs)
        return (out[0] if self.call.num_returned else out).squeeze(0)

    @staticmethod
    def _restored(tensor: Tensor, kind: PreparedKind, how: Doubled) -> Tensor:
        if how == "half":
            tensor = torch.cat((tensor, tensor), -1).to(kind.dtype)
        elif how == "pairs":
            tensor = tensor.repeat_interleave(2, -1).to(kind.dtype)
        for _ in range(kind.num_dims):
            tensor = tensor.unsqueeze(0)
        return tensor


class HfCausalLM(CausalLM):
    """A decoder-only model of transformers' code; the interface of `CausalLM`.

    Args:
        config: of a folder.
        theirs: the model with its weights; None makes one without storage.
        plan: how it is called; None looks at `theirs`, which then has no storage.

    Raises:
        ConfigError: it cannot be served; says why.
    """

    has_short_last_layer = False
    is_foreign = True

    def __init__(
        self, config: HfModelConfig, theirs: Any = None, plan: ModelPlan | None = None
    ) -> None:
        nn.Module.__init__(self)
        if theirs is None:
            with torch.device("meta"):
                theirs = new_model(config, dtype=getattr(torch, config.dtype))
        if plan is None:
            plan = plan_model(theirs, config.num_layers, config.architecture)
        # What attention was seen to do, whatever the config calls it.
        self.config = replace(
            config,
            num_heads=plan.num_heads,
            num_kv_heads=plan.num_kv_heads,
            head_dim=plan.head_dim,
        )
        owner, name = find_layers(theirs, config.num_layers)
        blocks = list(getattr(owner, name))
        for block, call in zip(blocks, plan.layers, strict=True):
            for names in plan.shared[call.kind]:
                merge_linears(block, names)
        self._log = TapLog()
        taps = [
            LayerTap(self._log, index, call.num_returned, block)
            for index, (block, call) in enumerate(zip(blocks, plan.layers, strict=True))
        ]
        setattr(owner, name, nn.ModuleList(taps))
        self.shell = theirs
        self.plan = plan
        self._doubled = self._find_doubled()
        self._hf_layers = [
            HfLayer(block, call, plan.prepared, self._doubled)
            for block, call in zip(blocks, plan.layers, strict=True)
        ]
        self.blocks = nn.ModuleList(self._hf_layers)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers in order."""
        return list(self.blocks)  # type: ignore[arg-type]

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Carried]:  # type: ignore[override]
        """Token ids and positions [T] to the first layer's residual, and what layers need."""
        residual, prepared = self._prepare(token_ids, positions)
        carried = []
        for tensor, kind, how in zip(prepared, self.plan.prepared, self._doubled, strict=True):
            for _ in range(kind.num_dims):
                tensor = tensor.squeeze(0)
            if how:
                tensor = _halves(tensor, how)[0].float()
            carried.append(tensor)
        return residual.squeeze(0), tuple(carried)

    def _prepare(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the first layer gets and what all of them do, as transformers' code makes it."""
        self._log.calls.clear()
        call_model(
            self.shell, input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0)
        )
        found: dict[int, Tensor] = {}
        for call, (_, _, args, kwargs) in zip(self.plan.layers, self._log.calls, strict=True):
            _match(call.args, args, found)
            for name, slot in call.kwargs:
                _match(slot, kwargs[name], found)
        hidden = self._log.calls[0][1]
        self._log.calls.clear()
        return hidden, [found[index] for index in range(len(found))]

    def head(self, residual: Tensor) -> Tensor:
        """Residual stream behind the last layer [S, hidden] to logits [S, vocab_size]."""
        self._log.output = residual.unsqueeze(0)
        # Whatever is in front of the layers is not read.
        positions = torch.zeros(residual.shape[:1], dtype=torch.long, device=residual.device)
        out = call_model(
            self.shell, inputs_embeds=residual.unsqueeze(0), position_ids=positions.unsqueeze(0)
        )
        self._log.calls.clear()
        self._log.output = None
        return out.logits.squeeze(0)

    def check_rows(self) -> None:
        """Makes sure that tokens meet in attention only: elsewhere their order must not matter.

        Raises:
            ConfigError: something else mixes tokens, such as a convolution; it would mix those of
                different requests.
        """
        device = next(self.shell.parameters()).device
        positions = torch.arange(NUM_PROBED, device=device)
        positions = positions % self.config.max_position_embeddings
        # No neighbours stay neighbours.
        moved = torch.arange(NUM_PROBED, device=device) * 5 % NUM_PROBED
        with torch.no_grad():
            plain = self.embed(positions, positions)
            turned = self.embed(positions[moved], positions[moved])
            before = zip((plain[0], *plain[1]), (turned[0], *turned[1]), strict=True)
            # Whole numbers are places: whether they matter shows in the layers.
            pairs = [
                ("what is in front of the layers", *pair)
                for pair in before
                if pair[0].is_floating_point()
            ]
            firsts = {layer.kind: layer for layer in reversed(self._hf_layers)}
            for layer in firsts.values():
                one, other = (
                    layer.run(*given, LayerView(0, None, None, [])) for given in (plain, turned)
                )
                pairs.append((f"a {type(layer.block).__name__}", one, other))
        for what, one, other in pairs:
            if not _is_mostly_equal(one[moved], other):
                refuse_model(
                    self.config.architecture,
                    f"{what} mixes tokens outside of attention",
                    ValueError("rows depend on their order"),
                )

    def _find_doubled(self) -> tuple[Doubled, ...]:
        """How halves of prepared tensors are equal, seen at the first positions."""
        device = next(self.shell.parameters()).device
        if device.type == "meta":
            return tuple("" for _ in self.plan.prepared)
        positions = torch.arange(NUM_PROBED, device=device)
        positions = positions % self.config.max_position_embeddings
        with torch.no_grad():
            _, prepared = self._prepare(positions % self.config.vocab_size, positions)
        return tuple(
            _how_doubled(tensor, kind.num_dims)
            for tensor, kind in zip(prepared, self.plan.prepared, strict=True)
        )


def _match(slot: Any, value: Any, found: dict[int, Tensor]) -> None:
    """Notes the tensor of each `Prepared` slot."""
    if isinstance(slot, Prepared):
        found[slot.place] = value
    elif isinstance(slot, tuple) and not hasattr(slot, "_fields"):
        for part, given in zip(slot, value, strict=True):
            _match(part, given, found)


def _is_mostly_equal(one: Tensor, other: Tensor) -> bool:
    """Whether most rows agree; a few may not, where a near-tie of experts fell the other way."""
    one, other = (x.float().reshape(x.shape[0], -1) for x in (one, other))
    close = (one - other).abs().amax(-1) <= 0.02 * one.abs().amax().clamp_min(1e-30)
    return int(close.sum()) * 2 > one.shape[0]


def _how_doubled(tensor: Tensor, dims: int) -> Doubled:
    if not tensor.is_floating_point() or tensor.dim() != dims + 2 or tensor.shape[-1] % 2:
        return ""
    ways: tuple[Doubled, ...] = ("half", "pairs")
    return next((how for how in ways if bool(torch.equal(*_halves(tensor, how)))), "")


def _halves(tensor: Tensor, how: Doubled) -> tuple[Tensor, Tensor]:
    """Both halves of the last dim."""
    if how == "pairs":
        return tensor[..., ::2], tensor[..., 1::2]
    first, second = tensor.chunk(2, dim=-1)
    return first, second
