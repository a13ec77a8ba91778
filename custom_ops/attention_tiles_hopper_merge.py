"""Results of the Hopper tile kernel: stored, or left in parts and added up by whoever comes last.

    m = max_i m_i, total = sum_i 2^(f (m_i - m)) total_i, acc = sum_i 2^(f (m_i - m)) acc_i

of the parts' row maxima m_i, row sums total_i and sums of weighted values acc_i; f makes base-2
exponents of scores. Each of the two consumers leaves its 64 rows in scratch memory: after `HEAD`
words of counters, [parts, 2, 64 * (head_dim + 2)] fp32, each acc row by row, then m, then total.
Whichever comes last, by a counter of the item's first part and the consumer, adds the parts up in
order, so results do not depend on who that was.

Places are tuples: the consumer, the tile's first token, its number of tokens, its first head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_engine.custom_ops.attention_tiles_hopper_split import unpack_share

# words before the parts: the counter that items are drawn from, and two for every part
HEAD = gl.constexpr(1024)
HALF = gl.constexpr(64)  # rows of a consumer
COLUMNS = gl.constexpr(32)  # that are added up at a time
AT_ONCE = gl.constexpr(4)  # parts whose loads are under way together
LOG2E = gl.constexpr(1.4426950408889634)
NEGATIVE = gl.constexpr(float("-inf"))


@gluon.jit
def finite(m: gl.tensor) -> gl.tensor:
    """0 for a row that has seen no key yet, so that no difference of infinities arises."""
    return gl.where(m == NEGATIVE, 0.0, m)


@gluon.jit
def _unknown(row: gl.tensor) -> gl.tensor:
    """The same rows. The compiler takes them for new ones, so that it computes what depends on them
    here, and does not keep it in registers while blocks are taken."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_sinks(
    total: gl.tensor, m: gl.tensor, sinks: gl.tensor, factor: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    """Row sums with the weights of the sinks, if there are any; `sinks` of the tile's heads."""
    if C.has_sinks:
        row = _unknown(gl.arange(0, HALF, layout=m.type.layout))
        sink = gl.load(sinks + row % C.folded).to(gl.float32)
        total += gl.exp2(sink * LOG2E - finite(m) * factor)
    return total


@gluon.jit
def store(
    target: gl.tensor,
    acc: gl.tensor,
    place: gl.tensor,
    dtype: gl.constexpr,
    C: gl.constexpr,
) -> None:
    """Writes a consumer's rows to `target`: from which column on, scale of e4m3, strides."""
    out, out_scale, strides = target
    side, token, num_tokens, head = place
    layout: gl.constexpr = acc.type.layout
    row = _unknown(gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)))
    mine = side * (HALF // C.folded) + row // C.folded
    at = out + (token + mine).to(gl.int64) * strides[0] + (head + row % C.folded) * strides[1]
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    inside = (mine < num_tokens)[:, None] & (column >= 0)[None, :]
    result = acc.to(dtype)
    if C.is_quantized:
        scaled = result.to(gl.float32) * (1.0 / gl.load(out_scale))
        result = gl.minimum(gl.maximum(scaled, -448.0), 448.0).to(gl.float8e4nv)
    gl.store(at[:, None] + column[None, :], result, mask=inside)


@gluon.jit
def leave_part(
    acc: gl.tensor,
    m: gl.tensor,
    total: gl.tensor,
    scratch: gl.tensor,
    share: gl.tensor,
    place: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Leaves one consumer's sums of a part; whether all of the item's parts are there now.

    Args:
        acc: [64, head_dim], of weighted values.
        m: [64], row maxima.
        total: [64], row sums.
        scratch: see the module docstring.
        share: see `pack_share`.
        place: where the result belongs; rows of no token are not left.
        C: the kernel's `TileConfig`.
    """
    side, _, num_tokens, _ = place
    first, part, parts = unpack_share(share)
    SIZE: gl.constexpr = HALF * (C.head_dim + 2)
    mine = scratch + HEAD + ((first + part) * 2 + side) * SIZE
    layout: gl.constexpr = acc.type.layout
    row = _unknown(gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, layout))
    at = mine + row * C.head_dim
    is_token = side * (HALF // C.folded) + row // C.folded < num_tokens
    inside = is_token[:, None] & (column >= 0)[None, :]
    gl.store(at[:, None] + column[None, :], acc, mask=inside)
    at = mine + HALF * C.head_dim + _unknown(gl.arange(0, HALF, layout=m.type.layout))
    gl.store(at, m)
    gl.store(at + HALF, total)
    gl.thread_barrier()  # the counter's release covers this thread's own writes only
    counter = scratch.to(gl.pointer_type(gl.int32), bitcast=True) + 1 + first * 2 + side
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1


@gluon.jit
def _add_part(sums: gl.tensor, part: gl.tensor, factor: gl.tensor) -> gl.tensor:
    acc, m, total = sums
    acc_part, m_part, total_part = part
    m_new = gl.maximum(m, m_part)
    m_scaled = finite(m_new) * factor
    shrink = gl.exp2(m * factor - m_scaled)
    weight = gl.exp2(m_part * factor - m_scaled)
    acc = acc * shrink[:, None] + acc_part * weight[:, None]
    return acc, m_new, total * shrink + total_part * weight


@gluon.jit
def add_parts(
    scratch: gl.tensor,
    share: gl.tensor,
    target: gl.tensor,
    sinks: gl.tensor,
    place: gl.tensor,
    factor: gl.tensor,
    dtype: gl.constexpr,
    C: gl.constexpr,
) -> None:
    """Adds up one consumer's rows of all parts of an item, and writes the result.

    Rows of no token add up what others left there; they are not written.
    """
    side, _, _, head = place
    out, out_scale, strides = target
    first, _, parts = unpack_share(share)
    SIZE: gl.constexpr = HALF * (C.head_dim + 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    row = _unknown(gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    item = scratch + HEAD + (first * 2 + side) * SIZE
    for begin in range(0, C.head_dim, COLUMNS):
        acc = gl.full([HALF, COLUMNS], 0.0, gl.float32, layout)
        m = gl.full([HALF], NEGATIVE, gl.float32, gl.SliceLayout(1, layout))
        total = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for i in range(0, parts, AT_ONCE):
            loaded: gl.tuple = ()
            for j in gl.static_range(AT_ONCE):
                # Past the last part: that one again, with no weight.
                part = item + gl.minimum(i + j, parts - 1) * (2 * SIZE)
                at = part + begin + row * C.head_dim
                values = gl.load(at[:, None] + column[None, :], cache_modifier=".cg")
                at = part + HALF * C.head_dim + row
                m_part = gl.load(at, cache_modifier=".cg")
                m_part = gl.where(i + j < parts, m_part, NEGATIVE)
                total_part = gl.load(at + HALF, cache_modifier=".cg")
                loaded = loaded + ((values, m_part, total_part),)  # noqa: RUF005
            for j in gl.static_range(AT_ONCE):
                acc, m, total = _add_part((acc, m, total), loaded[j], factor)
        total = add_sinks(total, m, sinks + head, factor, C)
        acc = acc * (1.0 / total)[:, None]
        store((out + begin, out_scale, strides), acc, place, dtype, C)
