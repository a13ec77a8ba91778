"""Rotary embeddings written out over heads become one op for queries and keys.

    before:  c, s = cat(cos, cos), cat(sin, sin)                    cos, sin [T, D / 2] fp32
             q2 = q * c + cat(-q[..., D / 2:], q[..., :D / 2]) * s  q [H, T, D] or [T, H, D]
             k2 = k * c + cat(-k[..., D / 2:], k[..., :D / 2]) * s
             kv_write(k2, ...);  paged_attention(q2, ...)
    after:   q2, k2 = ce.rope(q, k, cos, sin)

and, where q and k are RMS norms over a head, `ce.qk_norm_rope`. Where neighbours turn together,
`q * c + flatten(stack(-q[..., 1::2], q[..., ::2])) * s` with each angle twice in a row, the op is
told so (interleaved). Where a part of a head turns, the
first R values, `q` is that slice, and the rest is put behind `q2` again: the op is given all of the
head and angles [T, R / 2]. Which of two is the key is known by
what becomes of it: it is written.
Conditions: both halves (or all neighbours) of the cosines and sines are the same tensor, as
`models/hf_model.py` makes them; q and k have one dtype; their norms one eps and weights of it.
Numerics: the op works in fp32 with angles in fp32, the spelling in the model's dtype with angles
rounded to it; equal in fp32.
Source: `rotate_half` of transformers' modelling code.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    args_of,
    calls,
    copy_meta,
    functionalized_calls,
    is_call,
    is_same_size,
    sliced,
    value_of,
)
from compiled_engine.passes.remove_no_ops import fold_views

NAME = "lift_rope"
_CONVERT = torch.ops.prims.convert_element_type.default


class _Rotated(NamedTuple):
    """Heads that are rotated: `output` from `heads`; the axis of the tokens; the angles.

    `interleaved`: neighbours are.
    """

    output: Node
    heads: Node
    token_axis: int
    cos: Node
    sin: Node
    interleaved: bool


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many pairs of queries and keys became one op."""
    found = [
        rotated
        for node in calls(graph, torch.ops.aten.add.Tensor)
        if (rotated := _rotated(node)) is not None
    ]
    if not found:
        return 0
    keys = {_behind_views(w.kwargs["k"]) for w in _writes(graph)}
    queries = {
        _behind_views(args_of(n)[0]) for n in calls(graph, torch.ops.ce.paged_attention.default)
    }
    matches = 0
    for key in [r for r in found if r.output in keys]:
        for query in [r for r in found if r.output in queries]:
            is_alike = query.cos is key.cos and query.sin is key.sin
            is_alike = is_alike and query.interleaved == key.interleaved
            if is_alike and _lift(graph, query, key):
                queries.discard(query.output)
                matches += 1
                break
    graph.eliminate_dead_code()
    if matches:
        fold_views(graph)
    return matches


def _writes(graph: Graph) -> list[Node]:
    return list(functionalized_calls(graph, torch.ops.ce.kv_write.default))


def _behind_views(node: Any) -> Any:
    """What a chain of views of whole dims shows."""
    aten = torch.ops.aten
    views = (aten.permute.default, aten.squeeze.dim, aten.unsqueeze.default)
    while isinstance(node, Node) and node.target in views:
        node = args_of(node)[0]
    return node


def _rotated(node: Node) -> _Rotated | None:
    """Takes `x * c + rotate(x) * s` apart."""
    if len(args_of(node)) != 2 or node.kwargs:
        return None
    aten = torch.ops.aten
    straight, turned = args_of(node)
    if not is_call(straight, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
        return None
    heads, cos = args_of(straight)
    half_turned, sin = args_of(turned)
    if not all(isinstance(n, Node) for n in (heads, cos, half_turned, sin)):
        return None
    interleaved = _turns_neighbours(half_turned, heads)
    if interleaved is None:
        return None
    value = value_of(heads)
    angles = [_angles(n, value, interleaved=interleaved) for n in (cos, sin)]
    if angles[0] is None or angles[1] is None or angles[0][1] != angles[1][1]:
        return None
    heads = _before_widening(heads, node)
    output = node
    if value_of(node).dtype != value_of(heads).dtype:
        # Angles or heads in fp32 make a product in fp32, which is rounded then.
        users = list(node.users)
        if len(users) != 1 or not is_call(users[0], _CONVERT):
            return None
        output = users[0]
        if value_of(output).dtype != value_of(heads).dtype:
            return None
    output, heads = _with_rest(output, heads)
    return _Rotated(output, heads, angles[0][1], angles[0][0], angles[1][0], interleaved)


def _turns_neighbours(node: Node, heads: Node) -> bool | None:
    """Whether `node` has neighbours of `heads` turned, not halves; None if it has neither.

    Both may be casts to fp32 of such.
    """
    if (
        is_call(node, _CONVERT)
        and is_call(heads, _CONVERT)
        and args_of(node)[1:] == args_of(heads)[1:]
    ):
        node, heads = args_of(node)[0], args_of(heads)[0]
    if _is_turn_of_neighbours(node, heads):
        return True
    return False if _is_half_turn(node, heads) else None


def _before_widening(heads: Node, product: Node) -> Node:
    """What heads in fp32 were made from, if the product is rounded to its dtype again."""
    if not is_call(heads, _CONVERT) or value_of(heads).dtype != torch.float32:
        return heads
    source, users = args_of(heads)[0], list(product.users)
    is_narrow = value_of(source).dtype in (torch.bfloat16, torch.float16)
    is_rounded = len(users) == 1 and is_call(users[0], _CONVERT)
    if not is_narrow or not is_rounded or value_of(users[0]).dtype != value_of(source).dtype:
        return heads
    return source


def _with_rest(output: Node, heads: Node) -> tuple[Node, Node]:
    """Whole heads, turned and as they were, if `heads` is the first part and the rest follows."""
    cut, users = sliced(heads), list(output.users)
    if cut is None or len(users) != 1 or not is_call(users[0], torch.ops.aten.cat.default):
        return output, heads
    source, axis, start, stop = cut
    joined, last = users[0], value_of(source).dim() - 1
    parts, *dim = args_of(joined)
    is_behind = axis == last and start == 0 and dim in ([-1], [last])
    if not is_behind or len(parts) != 2 or parts[0] is not output:
        return output, heads
    size = value_of(source).shape[-1]
    if stop % 2 or size % 2 or not _is_slice(parts[1], source, stop, size):
        return output, heads
    return joined, source


def _is_half_turn(node: Node, heads: Node) -> bool:
    """`node` is `cat(-second half, first half)` of the last dim of `heads`."""
    aten = torch.ops.aten
    if not is_call(node, aten.cat.default) or len(args_of(node)) != 2:
        return False
    value = value_of(heads)
    size = value.shape[-1]
    parts, dim = args_of(node)
    if dim not in (-1, value.dim() - 1) or not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return False
    if not isinstance(size, int) or not is_call(parts[0], aten.neg.default):
        return False
    second, first = args_of(parts[0])[0], parts[1]
    return _is_slice(second, heads, size // 2, size) and _is_slice(first, heads, 0, size // 2)


def _is_turn_of_neighbours(node: Node, heads: Node) -> bool:
    """`node` is `flatten(stack(-values of odd places, values of even places))` of the last dim."""
    aten = torch.ops.aten
    value = value_of(heads)
    if not is_call(node, aten.reshape.default) or value_of(node).dim() != value.dim():
        return False
    if not all(map(is_same_size, value_of(node).shape, value.shape)):
        return False
    joined = args_of(node)[0]
    if not is_call(joined, aten.cat.default) or value_of(joined).dim() != value.dim() + 1:
        return False
    parts, *dim = args_of(joined)
    if dim not in ([-1], [value.dim()]) or len(parts) != 2:
        return False
    if not all(is_call(p, aten.unsqueeze.default) for p in parts):
        return False
    # Pairs of one value each: so the new dim is the last one.
    is_last = all(args_of(p)[1] in (-1, value.dim()) for p in parts)
    odd, even = (args_of(p)[0] for p in parts)
    if not is_last or not is_call(odd, aten.neg.default):
        return False
    return _is_every_second(args_of(odd)[0], heads, 1) and _is_every_second(even, heads, 0)


def _is_every_second(node: Any, source: Node, start: int) -> bool:
    """`source[..., start::2]`."""
    if not is_call(node, torch.ops.aten.slice.Tensor) or len(args_of(node)) != 5:
        return False
    base, dim, first, stop, step = args_of(node)
    value = value_of(source)
    is_place = base is source and dim % value.dim() == value.dim() - 1
    size = value.shape[-1]
    if not is_place or not isinstance(size, int) or size % 2:
        return False
    return (first or 0) == start and step == 2 and (stop is None or stop >= size)


def _is_slice(node: Any, source: Node, start: int, stop: int) -> bool:
    last = value_of(source).dim() - 1
    return sliced(node) == (source, last, start, stop)


def _angles(node: Node, heads: torch.Tensor, *, interleaved: bool) -> tuple[Node, int] | None:
    """The half [T, D / 2] fp32 that is doubled and spread over heads; the axis of the tokens."""
    shape = value_of(node).shape
    inner = _behind_casts(node)
    half = _repeated(inner) if interleaved else _doubled(inner)
    if half is None or value_of(half).dtype != torch.float32 or value_of(half).dim() != 2:
        return None
    num_tokens, size = value_of(half).shape
    if heads.dim() != 3 or not is_same_size(2 * size, heads.shape[-1]):
        return None
    padded = (*(1,) * (3 - len(shape)), *shape)
    for axis in (1, 0):
        expected = [1, 1, 2 * size]
        expected[axis] = num_tokens
        if all(map(is_same_size, padded, expected)) and is_same_size(heads.shape[axis], num_tokens):
            return half, axis
    return None


def _behind_casts(node: Any) -> Any:
    """What a chain of casts and new dims of size 1 shows."""
    while is_call(node, torch.ops.aten.unsqueeze.default) or is_call(node, _CONVERT):
        node = args_of(node)[0]
    return node


def _behind_clones(node: Any) -> Any:
    while is_call(node, torch.ops.aten.clone.default):
        node = args_of(node)[0]
    return node


def _expanded_copy(node: Any) -> tuple[torch.Size, torch.Size, Node] | None:
    """Of `reshape(expand(unsqueeze(x)))`: its shape, that of the expanded, and the unsqueezed."""
    aten = torch.ops.aten
    if not is_call(node, aten.reshape.default):
        return None
    spread = _behind_clones(args_of(node)[0])
    if not is_call(spread, aten.expand.default):
        return None
    added = args_of(spread)[0]
    if not is_call(added, aten.unsqueeze.default):
        return None
    return value_of(node).shape, value_of(spread).shape, added


def _repeated(node: Any) -> Node | None:
    """`x` of `repeat_interleave(x, 2)` over the last dim, which may be half of a doubled table."""
    if (copied := _expanded_copy(node)) is None:
        return None
    shape, spread, added = copied
    if value_of(added).dim() != len(spread):
        return None
    source = args_of(added)[0]
    is_last = args_of(added)[1] in (-1, len(spread) - 1) and spread[-1] == 2
    is_whole = is_same_size(shape[-1], 2 * spread[-2]) and len(shape) == len(spread) - 1
    if not is_last or not is_whole or value_of(source).dim() != len(shape):
        return None
    source = _behind_casts(source)
    if (cut := sliced(source)) is None:
        return source if isinstance(source, Node) else None
    table, axis, start, stop = cut
    doubled = _doubled(_behind_casts(table))
    is_half = axis == value_of(table).dim() - 1 and start == 0
    if doubled is None or not is_half or not is_same_size(stop, value_of(doubled).shape[-1]):
        return None
    return doubled


def _doubled(node: Any) -> Node | None:
    """`x` of `cat(x, x)`, also as a compiler writes it: an expanded copy, reshaped."""
    aten = torch.ops.aten
    if is_call(node, aten.cat.default):
        parts = args_of(node)[0]
        is_pair = len(parts) == 2 and parts[0] is parts[1]
        is_last = args_of(node)[1:] in ((-1,), (value_of(node).dim() - 1,))
        return parts[0] if is_pair and is_last else None
    if (copied := _expanded_copy(_behind_clones(node))) is None:
        return None
    shape, spread, added = copied
    if len(spread) != 3 or spread[1] != 2:
        return None
    source = args_of(added)[0]
    is_middle = args_of(added)[1] in (1, -2) and value_of(source).dim() == 2
    is_whole = len(shape) == 2 and is_same_size(shape[1], 2 * spread[2])
    return source if is_middle and is_whole else None


def _lift(graph: Graph, query: _Rotated, key: _Rotated) -> bool:
    if query.token_axis != key.token_axis:
        return False
    if value_of(query.heads).dtype != value_of(key.heads).dtype:
        return False
    before = _place(graph, query, key)
    if before is None:
        return False
    with graph.inserting_before(before):
        q, k = _by_token(graph, query), _by_token(graph, key)
        norms = _norms(q, k)
        if norms is None:
            op: Any = torch.ops.ce.rope.default
            arguments: tuple[Any, ...] = (q, k, query.cos, query.sin)
        else:
            op = torch.ops.ce.qk_norm_rope.default
            q_norm, k_norm = norms
            arguments = (
                args_of(q_norm)[0], args_of(k_norm)[0], args_of(q_norm)[1], args_of(k_norm)[1],
                query.cos, query.sin, args_of(q_norm)[2],
            )  # fmt: skip
        if query.interleaved:
            arguments = (*arguments, True)
        rope = graph.call_function(op, arguments)
        rope.meta["val"] = tuple(value_of(n).new_empty(value_of(n).shape) for n in (q, k))
        for index, rotated in enumerate((query, key)):
            item = graph.call_function(operator.getitem, (rope, index))
            item.meta["val"] = rope.meta["val"][index]
            if rotated.token_axis == 1:
                item = graph.call_function(torch.ops.aten.permute.default, (item, [1, 0, 2]))
                copy_meta(item, rotated.output)
            rotated.output.replace_all_uses_with(item)
    graph.eliminate_dead_code()
    return True


def _place(graph: Graph, query: _Rotated, key: _Rotated) -> Node | None:
    """The first node that reads either; what both are made from is moved in front of it.

    Compilers put keys, their write, and only then queries. None if one is made from the other.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    before = min((*query.output.users, *key.output.users), key=order.__getitem__)
    found: set[Node] = set()
    open_nodes = [node for r in (query, key) for node in (r.heads, r.cos, r.sin)]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found and order[node] >= order[before]:
            if node is before:
                return None
            found.add(node)
            open_nodes.extend(node.all_input_nodes)
    for node in sorted(found, key=order.__getitem__):
        before.prepend(node)
    return before


def _by_token(graph: Graph, rotated: _Rotated) -> Node:
    """The heads as [T, H, D]."""
    heads = rotated.heads
    if rotated.token_axis == 0:
        return heads
    permute = torch.ops.aten.permute.default
    if is_call(heads, permute) and list(args_of(heads)[1]) == [1, 0, 2]:
        source = args_of(heads)[0]
        assert isinstance(source, Node)
        return source
    moved = graph.call_function(permute, (heads, [1, 0, 2]))
    moved.meta["val"] = value_of(heads).permute(1, 0, 2)
    return moved


def _norms(q: Node, k: Node) -> tuple[Node, Node] | None:
    """The RMS norms of every head in front of the rotation, if both have one of the same kind."""
    rms_norm = torch.ops.ce.rms_norm.default
    if not is_call(q, rms_norm) or not is_call(k, rms_norm) or args_of(q)[2] != args_of(k)[2]:
        return None
    if any(value_of(args_of(n)[1]).dtype != value_of(n).dtype for n in (q, k)):
        return None
    return q, k
