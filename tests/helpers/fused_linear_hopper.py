"""What can be known of the Hopper kernel of `fused_linear` without a GPU; a program.

Compiles the kernel for sm_90a and looks at registers; checks who does which part of the work.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from compiled_engine.custom_ops.gemm_skinny_hopper import hopper_kernel
from compiled_engine.custom_ops.gemm_skinny_hopper_device import Constants, first_unit, owner

POINTERS = {"partials": "*fp32", "counters": "*i32"}
SCALARS = {"C": "constexpr", "eps": "fp32"}
INTEGERS = ("num_tokens", "num_outputs", "num_tiles", "residual_stride", "lead", "l2_blocks")
COMPILED = (
    Constants(4096, 8, 1, 128, 32, 6, 4, False, False, True, False),
    Constants(4096, 32, 2, 64, 64, 5, 4, True, True, True, True),
)


def compile_kernel(constants: Constants, max_registers: int) -> Any:
    """The kernel for sm_90a, for bf16."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    signature = {"w_desc": f"tensordesc<bf16[64, 64],{layout!r}>"}
    signature["x_desc"] = f"tensordesc<bf16[{constants.tokens}, 64],{layout!r}>"
    for name in hopper_kernel.arg_names[2:]:
        kind = "i32" if name in INTEGERS else POINTERS.get(name, "*bf16")
        signature[name] = SCALARS.get(name, kind)
    names = list(signature)
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in signature[name]
    }
    source = GluonASTSource(hopper_kernel, signature, {(names.index("C"),): constants}, aligned)
    options = {"num_warps": 4, "maxnreg": max_registers, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_registers(compiled: Any, max_registers: int) -> None:
    """No more registers than asked for, and nothing on a stack."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+)|STACK:(\d+)", usage)[:2]
    assert int(registers[0]) <= max_registers, usage
    assert int(stack[1]) == 0, usage


def check_shares(num_tiles: int, blocks: int, num_programs: int) -> None:
    """Every unit has one owner, stretches differ by one unit at most, owners are found."""
    units = num_tiles * blocks
    starts = [first_unit.fn(p, num_programs, units) for p in range(num_programs + 1)]
    assert starts[0] == 0
    assert starts[-1] == units
    lengths = {b - a for a, b in itertools.pairwise(starts)}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1
    for program in range(num_programs):
        stretch = range(starts[program], starts[program + 1])
        assert {owner.fn(unit, num_programs, units) for unit in stretch} == {program}


if __name__ == "__main__":
    for constants in COMPILED:
        check_registers(compile_kernel(constants, 80), 80)
    for num_tiles, blocks, num_programs in ((96, 32, 132), (5, 7, 35), (64, 3, 64), (7, 11, 1)):
        check_shares(num_tiles, blocks, num_programs)
    print("no spills; shares right")
