"""The decode attention kernels, compiled for their architectures: what no GPU is needed to see."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.custom_ops.attention_decode_cuda import SOURCE, Variant
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
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_keep_everything_in_registers(variant, arch):
    pytest.importorskip("cuda.bindings.nvrtc")
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
