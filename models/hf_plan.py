"""Looks at a model of transformers' own code once, without storage: how to call it in pieces.

The model's forward is run on shapes alone: its decoder layers are replaced by taps that note what
each was called with, then every layer is called once by itself. What comes out is a `ModelPlan`:
which tensors the code in front of the layers makes for them, each layer's arguments, its window,
which layers are alike to the last op, and which linears read the same tensor. A model that does not
fit is refused here, by name and with the reason, before any weight is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.errors import ConfigError
from compiled_engine.models.hf_attention import AttentionCall, LayerView, MaskRequest, window_of

# Two lengths that are no size of anything else: what differs between them is the token dim.
LENGTHS = (11, 13)


class Prepared(NamedTuple):
    """A tensor made in front of the layers: its place in the tuple that carries them to a layer."""

    place: int


class Mask(NamedTuple):
    """The place of the layer's mask, which takes the `LayerView`."""


class PreparedKind(NamedTuple):
    """A prepared tensor: the dims of size 1 in front of the tokens' dim, and its dtype."""

    num_dims: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerCall:
    """How one decoder layer is called.

    Attributes:
        args: positional arguments behind the hidden states: constants, `Prepared`, `Mask`, or
            tuples of them.
        kwargs: named ones likewise.
        window: tokens a query sees at most; 0 is no limit.
        num_returned: length of the tuple the layer returns; 0 if it returns a tensor.
        kind: equal for layers that do the same with other weights.
    """

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    window: int
    num_returned: int = 0
    kind: int = 0

    def filled(
        self, prepared: Sequence[Tensor], view: LayerView
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for one call."""
        args = [_fill(slot, prepared, view) for slot in self.args]
        return args, {name: _fill(slot, prepared, view) for name, slot in self.kwargs}


def _fill(slot: Any, prepared: Sequence[Tensor], view: LayerView) -> Any:
    if isinstance(slot, Prepared):
        return prepared[slot.place]
    if isinstance(slot, Mask):
        return view
    if isinstance(slot, tuple):
        return tuple(_fill(part, prepared, view) for part in slot)
    return slot


@dataclass(frozen=True)
class ModelPlan:
    """How a model is called in pieces.

    Attributes:
        layers: one call a decoder layer, in order.
        prepared: what is known of each prepared tensor, in order.
        shared: groups of names of linears, relative to a layer, that read one tensor; by kind.
        num_heads, num_kv_heads, head_dim: of every layer's attention.
    """

    layers: tuple[LayerCall, ...]
    prepared: tuple[PreparedKind, ...]
    shared: tuple[tuple[tuple[str, ...], ...], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class TapLog:
    """What taps saw in one forward, and what the first of them lets through.

    Attributes:
        calls: hidden states, arguments and keywords of each call, in order.
        output: given on instead of the hidden states; None lets them through.
    """

    calls: list[tuple[int, Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    output: Tensor | None = None


class LayerTap(nn.Module):
    """Stands where a decoder layer was; notes its arguments and computes nothing."""

    def __init__(self, log: TapLog, index: int, num_returned: int, replaced: nn.Module) -> None:
        super().__init__()
        # The loop over the layers may read plain attributes, such as the kind of attention.
        for name, value in vars(replaced).items():
            if not name.startswith("_") and not isinstance(value, (nn.Module, Tensor)):
                setattr(self, name, value)
        self.tap_log = log
        self.tap_index = index
        self.num_returned = num_returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, or what the log says instead, in the layer's own form."""
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        self.tap_log.calls.append((self.tap_index, hidden, args, kwargs))
        output = hidden if self.tap_log.output is None else self.tap_log.output
        return (output, *[None] * (self.num_returned - 1)) if self.num_returned else output


def find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, str]:
    """The module that owns the list of decoder layers, and the list's name.

    Raises:
        ConfigError: no list of that length.
    """
    found = [
        (name.count("."), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise ConfigError(f"it has no list of {num_layers} layers")
    owner, _, name = min(found)[1].rpartition(".")
    return model.get_submodule(owner), name


def plan_model(model: nn.Module, num_layers: int, name: str) -> ModelPlan:
    """Looks at a model without storage; leaves it as it was.

    Raises:
        ConfigError: it cannot be served in pieces; names the model and says why.
    """
    try:
        with torch.no_grad():
            return _plan(model, num_layers)
    except ConfigError as error:
        refuse_model(name, str(error), error)
    except Exception as error:  # the model's own code: whatever it raises is the reason
        text = str(error).strip().splitlines() or [type(error).__name__]
        refuse_model(name, f"its code cannot be run on shapes alone: {text[0]}", error)


def refuse_model(name: str, reason: str, cause: Exception) -> NoReturn:
    """Raises the ConfigError that says why transformers' code of a model is not served."""
    raise ConfigError(
        f"{name} has no model file here, and transformers' code of it cannot be served: {reason}",
        param="architectures",
    ) from cause


def _plan(model: nn.Module, num_layers: int) -> ModelPlan:
    owner, name = find_layers(model, num_layers)
    layers = list(getattr(owner, name))
    first, second = (_calls(model, owner, name, length) for length in LENGTHS)
    prepared: list[Tensor] = []
    calls = [_layer_call(seen, prepared) for seen in first]
    others: list[Tensor] = []
    if [_layer_call(seen, others) for seen in second] != calls:
        raise ConfigError("its layers are called differently for other numbers of tokens")
    kinds_of_prepared = tuple(
        PreparedKind(_token_dim(a, b), a.dtype) for a, b in zip(prepared, others, strict=True)
    )
    hidden = first[0][1]
    looks = [
        _look(layer, call, hidden, prepared) for layer, call in zip(layers, calls, strict=True)
    ]
    attention = looks[0].attention
    for index, look in enumerate(looks):
        if look.attention[:3] != attention[:3]:
            raise ConfigError(
                f"layer {index} has heads of another shape than layer 0: {look.attention[:3]}, "
                f"not {attention[:3]}"
            )
    signatures = list(
        dict.fromkeys(
            (look.signature, call.window) for look, call in zip(looks, calls, strict=True)
        )
    )
    kinds = [
        signatures.index((look.signature, call.window))
        for look, call in zip(looks, calls, strict=True)
    ]
    plans = tuple(
        LayerCall(call.args, call.kwargs, call.window, look.num_returned, kind)
        for call, look, kind in zip(calls, looks, kinds, strict=True)
    )
    shared = tuple(looks[kinds.index(kind)].shared for kind in range(len(signatures)))
    _, num_heads, head_dim = attention.query
    return ModelPlan(plans, kinds_of_prepared, shared, num_heads, attention.key[1], head_dim)


def _calls(model: nn.Module, owner: nn.Module, name: str, length: int) -> list[Any]:
    """What the layers are called with; each returns a tensor, or a tuple that holds it first."""
    try:
        return _tapped(model, owner, name, length, num_returned=0)
    except ConfigError:
        raise
    except Exception as error:  # the model's own code, given a tensor where it takes a tuple
        try:
            return _tapped(model, owner, name, length, num_returned=1)
        except Exception:  # the first is the one that says why
            raise error from None


def _tapped(
    model: nn.Module, owner: nn.Module, name: str, length: int, *, num_returned: int
) -> list[Any]:
    """One forward with taps in the place of the layers; what each was called with."""
    layers = getattr(owner, name)
    log = TapLog()
    taps = (LayerTap(log, index, num_returned, layer) for index, layer in enumerate(layers))
    setattr(owner, name, nn.ModuleList(taps))
    try:
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        call_model(model, input_ids=ids, position_ids=ids)
    finally:
        setattr(owner, name, layers)
    order = [call[0] for call in log.calls]
    if order != list(range(len(layers))):
        raise ConfigError(
            f"its layers are called in the order {order[:8]}, not one after the other"
        )
    if any(call[1] is not log.calls[0][1] for call in log.calls[1:]):
        raise ConfigError("something stands between its layers")
    return log.calls


def call_model(model: nn.Module, **inputs: Tensor) -> Any:
    """A forward over one sequence [1, T] (`input_ids` or `inputs_embeds`), without a cache."""
    positions = inputs["position_ids"]
    # A mask that hides nothing: without one, transformers looks for several sequences in one.
    seen = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    return model(attention_mask=seen, use_cache=False, **inputs)


def _layer_call(seen: Any, prepared: list[Tensor]) -> LayerCall:
    """The call as slots; tensors not seen before are put behind `prepared`."""
    _, hidden, args, kwargs = seen
    requests: list[MaskRequest] = []

    def slot(value: Any) -> Any:
        if isinstance(value, MaskRequest):
            requests.append(value)
            return Mask()
        if value is hidden:
            raise ConfigError("its layers take the hidden states twice")
        if isinstance(value, Tensor):
            place = next((i for i, made in enumerate(prepared) if made is value), len(prepared))
            if place == len(prepared):
                prepared.append(value)
            return Prepared(place)
        if isinstance(value, (tuple, list)):
            return tuple(slot(part) for part in value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ConfigError(f"its layers take a {type(value).__name__}")

    slots = tuple(slot(value) for value in args)
    named = tuple((name, slot(value)) for name, value in kwargs.items())
    if not requests:
        raise ConfigError("its layers are given no mask, so nothing says what a token may see")
    if len({id(request) for request in requests}) > 1:
        raise ConfigError("its layers are given several masks")
    return LayerCall(slots, named, window_of(requests[0]))


def _token_dim(one: Tensor, other: Tensor) -> int:
    differing = [i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
    if len(differing) != 1 or any(size != 1 for size in one.shape[: differing[0]]):
        raise ConfigError(
            f"its layers take a tensor of shape {tuple(one.shape)} for {LENGTHS[0]} tokens, which "
            "is none of one row a token"
        )
    return differing[0]


class _Look(NamedTuple):
    """What one call of one layer showed."""

    signature: str
    attention: AttentionCall
    num_returned: int
    shared: tuple[tuple[str, ...], ...]


def _look(layer: nn.Module, call: LayerCall, hidden: Tensor, prepared: list[Tensor]) -> _Look:
    """Calls a layer on shapes alone."""
    noted: list[AttentionCall] = []
    args, kwargs = call.filled(prepared, LayerView(call.window, None, None, noted))
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: inputs.__setitem__(name, given[0])
        )
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    ]
    recorder = _OpRecorder([hidden, *prepared, *layer.parameters(), *layer.buffers()])
    try:
        with recorder:
            returned = layer(hidden, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if len(noted) != 1:
        raise ConfigError(
            f"a {type(layer).__name__} calls transformers' attention {len(noted)} times: linear "
            "attention, state-space layers and attention of a layer's own are not served"
        )
    (attention,) = noted
    if attention.problem:
        raise ConfigError(attention.problem)
    if attention.key != attention.value:
        raise ConfigError(f"its keys {attention.key} and values {attention.value} differ in shape")
    first = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(first, Tensor) or first.shape != hidden.shape:
        raise ConfigError(f"a {type(layer).__name__} returns no hidden states")
    if isinstance(returned, tuple) and any(part is not None for part in returned[1:]):
        raise ConfigError(f"a {type(layer).__name__} returns more than hidden states")
    num_returned = len(returned) if isinstance(returned, tuple) else 0
    return _Look(recorder.digest(), attention, num_returned, _shared_inputs(layer, inputs))


def _shared_inputs(layer: nn.Module, inputs: dict[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Groups of linears of one parent that read the same tensor, in the order they are called."""
    groups: dict[tuple[str, int, bool], list[str]] = {}
    for name, tensor in inputs.items():
        has_bias = layer.get_submodule(name).bias is not None
        groups.setdefault((name.rpartition(".")[0], id(tensor), has_bias), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


class _OpRecorder(TorchDispatchMode):
    """Notes every op with its operands by number, so that two layers can be told apart."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._kept = list(known)  # ids of freed tensors would be given again
        self._numbers = {id(tensor): i for i, tensor in enumerate(known)}
        self._text = [self._describe(tensor) for tensor in known]

    def digest(self) -> str:
        """A hash of all that was noted."""
        return hashlib.sha256("\n".join(self._text).encode()).hexdigest()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._text.append(f"{func} {self._describe(args)} {self._describe(kwargs)}")
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._kept.append(made)
                self._numbers[id(made)] = len(self._numbers)
                self._text.append(self._describe(made))
        return result

    def _describe(self, value: Any) -> str:
        if isinstance(value, Tensor):
            number = self._numbers.get(id(value), "new")
            return f"{number}:{value.dtype}{list(value.shape)}{list(value.stride())}"
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(self._describe(part) for part in value)}]"
        if isinstance(value, dict):
            return self._describe(sorted(value.items()))
        return repr(value)
