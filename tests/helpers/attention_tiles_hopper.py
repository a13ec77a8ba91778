"""What can be known of the Hopper tile kernel without a GPU; a program.

Compiles the kernel for sm_90a and looks at registers; checks how it cuts items into parts, by the
device's own functions run on NumPy arrays, against the same rules in plain Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from compiled_engine.custom_ops import attention_tiles_hopper_split as split
from compiled_engine.custom_ops.attention_tiles_hopper import tiles_kernel
from compiled_engine.custom_ops.attention_tiles_hopper_load import TileConfig
from tests.helpers.fused_linear_hopper import check_registers

MAX_REGISTERS = 168
INTEGERS = ("table_stride", "row_past_end", "stride_t", "stride_h", "window")
KINDS = {
    **dict.fromkeys(INTEGERS, "i32"),
    **dict.fromkeys(("log_scale", "cap_scale", "cap"), "fp32"),
    **dict.fromkeys(("out", "sinks"), "*bf16"),
    "scratch": "*fp32",
    "out_scale": "*fp32",
    "C": "constexpr",
}
# Wide heads with a window or a cap are not here: they keep one register, the address of shared
# memory, on the stack, and read it once an item.
COMPILED = (
    TileConfig(4, 1, 8, 128, 128, 16),
    TileConfig(1, 7, 28, 128, 128, 64, has_window=True, has_cap=True, has_sinks=True),
    TileConfig(8, 1, 8, 64, 128, 16, stages=3, has_window=True, has_sinks=True),
    TileConfig(2, 1, 4, 256, 64, 16, query_stages=1),
    TileConfig(4, 1, 8, 128, 128, 16, is_quantized=True),
)
MOST_PARTS = split.most_parts(132)


def compile_kernel(config: TileConfig) -> Any:
    """The kernel for sm_90a, for bf16."""
    rows = 64 // config.folded
    queries = gl.NVMMASharedLayout(128, 16, rank=3)
    pages = gl.NVMMASharedLayout(128, 16, rank=2)
    signature = {"q_desc": f"tensordesc<bf16[{rows}, {config.folded}, 64],{queries!r}>"}
    for name in ("k_desc", "v_desc"):
        signature[name] = f"tensordesc<bf16[{config.page_size}, 64],{pages!r}>"
    for name in tiles_kernel.arg_names[3:]:
        signature[name] = KINDS.get(name, "*i32")
    if config.is_quantized:
        signature["out"] = "*fp8e4nv"
    names = list(signature)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if "*" in signature[name] or name in ("stride_t", "stride_h")
    }
    source = GluonASTSource(tiles_kernel, signature, {(names.index("C"),): config}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def plain_length(blocks: list[int], groups: int, programs: int) -> int:
    """`choose_length` in plain Python."""
    longest, best = max(blocks), (1 << 62, 0, 0)
    for wanted in range(1, 33):
        length = max(-(-longest // wanted), 8)
        units = groups * sum(-(-n // length) for n in blocks)
        parts = -(-longest // length)
        cost = -(-units // programs) * (length + 2) + (parts // 2 + 1 if parts > 1 else 0)
        if units <= 3 * programs:
            best = min(best, (cost, wanted, length))
    return best[2] if best[2] < longest else 0


def on_arrays(function: Any) -> Callable[..., Any]:
    """A device function of `attention_tiles_hopper_split` as a function of NumPy arrays."""
    return function.fn


@contextmanager
def numpy_language() -> Iterator[None]:
    """Device functions of the module compute with NumPy meanwhile."""
    language = SimpleNamespace(
        arange=lambda first, end, layout: np.arange(first, end),
        associative_scan=lambda values, axis, combine: np.cumsum(values, axis),
        max=np.max, min=np.min, sum=np.sum, where=np.where, zeros_like=np.zeros_like,
        maximum=np.maximum, minimum=np.minimum, constexpr=gl.constexpr,
    )  # fmt: skip
    numbers = {
        name: value.value for name, value in vars(split).items() if isinstance(value, gl.constexpr)
    }
    with mock.patch.multiple(split, gl=language, **numbers):
        yield


def check_parts(blocks: list[int], groups: int, programs: int = 132) -> int:
    """Length and parts are as they should be, and every part is found; returns the length."""
    padded = np.zeros(split.MAX_TILES, dtype=np.int64)
    padded[: len(blocks)] = blocks
    length = int(on_arrays(split.choose_length)(padded, len(blocks), groups, programs))
    assert length == plain_length(blocks, groups, programs), (blocks, groups, programs)
    if length == 0:
        return 0
    ends = on_arrays(split.part_ends)(padded, length)
    assert groups * ends[-1] <= MOST_PARTS
    numbers = itertools.count()
    for tile, count in enumerate(blocks):
        taken = []
        parts = -(-count // length)
        first = int(ends[tile - 1]) if tile else 0
        for part in range(parts):
            found = on_arrays(split.find_part)(ends, next(numbers))
            assert tuple(map(int, found)) == (tile, first, parts)
            low, high = on_arrays(split.part_range)(7, 7 + count - 1, part, parts)
            assert high - low + 1 >= (4 if parts > 1 else 1)
            assert high - low + 1 <= length
            taken += range(low, high + 1)
            share = on_arrays(split.pack_share)(first, part, parts)
            assert on_arrays(split.unpack_share)(share) == (first, part, parts)
        assert taken == list(range(7, 7 + count))
    assert next(numbers) == ends[-1]
    return length


def main() -> None:
    """All checks."""
    assert MOST_PARTS == 3 * 132
    for config in COMPILED:
        check_registers(compile_kernel(config), MAX_REGISTERS)
    generator = np.random.default_rng(0)
    with numpy_language():
        # 32 tokens behind 64k: 16 parts of 8 items are a part for nearly every program
        assert check_parts([513], 8) == 33
        assert check_parts([4] * 16, 8) == 0
        assert check_parts([512] * 16, 8) == 0
        # the long one among short ones is cut, they are not
        assert check_parts([512, *[8] * 10], 8) < 64
        for _ in range(200):
            groups = int(generator.choice([1, 2, 8, 28]))
            tiles = int(generator.integers(1, min(131 // groups, 128) + 1))
            most = int(generator.choice([3, 20, 600, 9000]))
            check_parts(generator.integers(1, most, tiles).tolist(), groups)
    print("compiled; parts right")


if __name__ == "__main__":
    main()
