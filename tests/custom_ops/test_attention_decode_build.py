"""The decode attention kernels, compiled for their architectures: what no GPU is needed to see."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.custom_ops.attention_decode_cuda import SOURCE, Variant
from compiled_engine.custom_ops.attention_decode_kernels import (
    DecodeConfig,
    merge_kernel,
    split_kernel,
)
from compiled_engine.custom_ops.attention_tiles_portable import tiles_kernel
from compiled_engine.custom_ops.attention_work_plan import Places, WorkConfig, plan_kernel
from compiled_engine.custom_ops.attention_work_triton import scan_kernel
from compiled_engine.custom_ops.cuda_build import compile_source
from tests.helpers.cubin_copies import copies

VARIANTS = {
    "8b": Variant(128, 4, 2, 2, True, False, False),
    "8b-few-rows": Variant(128, 4, 2, 2, False, False, False),
    "8b-cap": Variant(128, 4, 2, 2, True, True, False),
    "mha-64-half": Variant(64, 1, 3, 2, True, False, True),
    "gqa-5-80": Variant(80, 5, 3, 2, True, False, False),
    "mqa-8-96": Variant(96, 8, 3, 2, True, False, False),
    "gqa-16": Variant(128, 16, 2, 2, True, True, True),
    "8b-quantized": Variant(128, 4, 2, 2, True, False, False, is_quantized=True),
    "mha-64-half-quantized": Variant(64, 1, 3, 2, True, False, True, is_quantized=True),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_keep_everything_in_registers(variant, arch):
    pytest.importorskip("cuda.bindings.nvrtc")
    if variant.is_quantized and arch == "sm_80":
        pytest.skip("has no conversion to 8 bits, and is not chosen")
    made = compile_source(SOURCE, arch, variant.flags)
    log = made.log
    if arch == "sm_90a":
        total, wrong = copies(made.code)
        assert total > 0
        assert wrong == 0, "ptxas encoded a copy with a cache policy wrongly"
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert frames == [("0", "0")], log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * 128 * variant.resident <= 65536


def decode_kernel_config(*, is_quantized: bool) -> DecodeConfig:
    """Of the shape of Qwen3-8B, with groups, for 8 rows."""
    return DecodeConfig(
        num_heads=32,
        num_kv_heads=8,
        group=4,
        head_dim=128,
        padded_dim=128,
        page_size=16,
        rows=16,
        width=16,
        group_rows=64,
        lanes=32,
        units=2048,
        has_groups=True,
        has_window=False,
        has_cap=False,
        has_sinks=True,
        block=64,
        stages=3,
        group_stages=2,
        prefetch=64,
        merge_block=16,
        value_bytes=2,
        early=True,
        pdl=True,
        is_quantized=is_quantized,
    )


TILES = {
    "ROWS": 128, "FOLDED": 4, "GROUPS": 1, "NUM_GROUPS": 8, "CHUNK": 128, "DIM": 128,
    "PADDED_DIM": 128, "BLOCK": 64, "PAGE": 16, "HAS_WINDOW": False, "HAS_CAP": False,
    "HAS_SINKS": True, "ROUND_FIRST": False,
}  # fmt: skip


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("kernel", [split_kernel, merge_kernel, tiles_kernel])
def test_the_triton_kernels_write_16_bits_or_8(kernel, is_quantized):
    kinds = {
        **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16"),
        **dict.fromkeys(("partials", "sums", "sinks", "out_scale"), "*fp32"),
        **dict.fromkeys(("scale", "soft_cap", "log_scale", "cap_scale", "cap"), "fp32"),
        **dict.fromkeys(("work", "block_table", "table", "seq_rows", "seq_lens"), "*i32"),
        **dict.fromkeys(("starts", "tile_seq", "tile_start", "num_tiles"), "*i32"),
        **dict.fromkeys(("C", *TILES, "QUANTIZED"), "constexpr"),
        "positions": "*i64",
    }
    if is_quantized:
        kinds["out"] = "*fp8e4nv"
    given = TILES | {"QUANTIZED": is_quantized}
    given["C"] = decode_kernel_config(is_quantized=is_quantized)
    names = kernel.arg_names
    signature = {name: kinds.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in given.items() if name in names}
    source = ASTSource(kernel, signature, constants)
    options = {"num_warps": 8 if kernel is tiles_kernel else 4, "num_stages": 2}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ("e4m3x2.f32" in text) == is_quantized


def plan_config(count: int, *, is_decode: bool) -> WorkConfig:
    return WorkConfig(
        padded=max(4, count),
        num_seqs=count,
        num_lanes=33,
        padded_lanes=64,
        width=16,
        query_tile_tokens=16,
        page_size=16,
        min_pages=8,
        lanes=32,
        units=2048,
        is_decode=is_decode,
        has_groups=count >= 4,
        pdl=True,
    )


@pytest.mark.parametrize(("count", "is_decode"), [(1, True), (64, True), (256, False)])
@pytest.mark.parametrize("kernel", [scan_kernel, plan_kernel], ids=["scan", "plan"])
def test_the_work_kernels_compile_for_a_gpu(kernel, count, is_decode):
    """Their interpreter takes more Python than the compiler does."""
    kinds = {
        "table_stride": "i32",
        "at": Places(*["i32"] * len(Places._fields)),
        "C": "constexpr",
        "token_rows": "*i64",
        "positions": "*i64",
    }
    signature = {name: kinds.get(name, "*i32") for name in kernel.arg_names}
    constants = {(len(signature) - 1,): plan_config(count, is_decode=is_decode)}
    source = ASTSource(kernel, signature, constants)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 4, "launch_pdl": True}
    text = triton.compile(source, target=target, options=options).asm["ptx"]
    assert "griddepcontrol.wait" in text
    assert "griddepcontrol.launch_dependents" not in text, "later kernels read the list early"
