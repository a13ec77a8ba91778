"""The Triton kernels of `fused_linear` that get chosen, compiled for an H200 on any machine.

A program; its arguments name models. For the products of models of several sizes every kernel is
compiled with the sizes that it would run with: it must fit into shared memory and keep its sums in
registers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from compiled_engine.custom_ops import gemm
from compiled_engine.custom_ops.gemm_choice import pick_config
from compiled_engine.custom_ops.gemm_skinny import Config, HopperConfig, RowConfig, TileConfig
from compiled_engine.custom_ops.gemm_skinny_hopper import hopper_kernel, max_registers
from compiled_engine.custom_ops.gemm_skinny_hopper_device import PANEL, Constants
from compiled_engine.custom_ops.gemm_skinny_row import row_kernel
from compiled_engine.custom_ops.gemm_skinny_tile import tile_kernel
from tests.helpers.fused_linear import MODELS, Product

SHARED_BYTES = 232448  # of one program, at most
STACK_BYTES = 32  # of a thread, outside the loops
TOKENS = (1, 8, 16, 32)  # others are padded to these
NOT_POINTERS = {"eps": "fp32", "partials": "*fp32", "counters": "*i32"}
INTEGERS = (
    "num_tokens", "num_outputs", "num_tiles", "x_stride", "residual_stride", "lead", "l2_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    kernel: str
    num_tokens: int
    product: Product


def jobs_of(products: tuple[Product, ...]) -> list[Job]:
    """Every Triton kernel that can serve the products, for every padded number of tokens."""
    found = []
    for num_tokens in TOKENS:
        for product in products:
            traits = {**product.traits(num_tokens), "is_hopper": 1}
            able = [c.name for c in gemm.CANDIDATES if c.rejects(traits) is None]
            names = [
                name for name in able if name not in ("mma", "wide", "cublaslt", "library", "torch")
            ]
            found += [Job(name, num_tokens, product) for name in names]
    return found


def constants_for(job: Job, config: Config) -> dict[str, Any]:
    """The constexpr arguments of the row and the tile kernel."""
    product = job.product
    found: dict[str, Any] = {
        "SIZE": product.size,
        "GATED": "g" in product.parts,
        "HAS_BIAS": "b" in product.parts,
        "HAS_NORM": "n" in product.parts,
        "HAS_RESIDUAL": "r" in product.parts,
        "PDL": True,
    }
    if isinstance(config, RowConfig):
        ahead = min(config.ahead, -(-product.size // config.block))
        return found | {"ROWS": config.rows, "BLOCK": config.block, "AHEAD": ahead}
    assert isinstance(config, TileConfig)
    return found | {
        "TOKENS": max(8, job.num_tokens),
        "ROWS": config.rows,
        "BLOCK": config.block,
        "SPLIT": config.split,
        "STAGES": config.stages,
        "L2_FIRST": config.l2_first,
        "THREADS": 32 * config.num_warps,
    }


def hopper_constants(job: Job, config: HopperConfig) -> Constants:
    """As the launcher makes them."""
    product, parts = job.product, job.product.parts
    return Constants(
        size=product.size,
        tokens=max(8, job.num_tokens),
        panels=config.rows // PANEL.value,
        block=config.block,
        blocks=-(-product.size // config.block),
        stages=config.stages,
        x_stages=config.x_stages,
        is_gated="g" in parts,
        has_bias="b" in parts,
        has_norm="n" in parts,
        has_residual="r" in parts,
    )


def _compile(source: type, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> Any:
    signature = {}
    for name in kernel.arg_names:
        kind = "i32" if name in INTEGERS else NOT_POINTERS.get(name, "*bf16")
        signature[name] = "constexpr" if name in constants else kind
    if "C" in constants:
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        signature["w_desc"] = f"tensordesc<bf16[64, 64],{layout!r}>"
        signature["x_desc"] = f"tensordesc<bf16[{constants['C'].tokens}, 64],{layout!r}>"
    names = list(signature)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if "*" in signature[name] or name in ("x_stride", "residual_stride")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    made = source(kernel, signature, values, aligned)
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)


def compile_job(job: Job) -> Any:
    """The compiled kernel, with the sizes it is launched with."""
    config = pick_config(job.kernel, job.product.traits(job.num_tokens))
    if isinstance(config, HopperConfig):
        constants = hopper_constants(job, config)
        options = {"num_warps": 4, "maxnreg": max_registers(constants), "launch_pdl": True}
        return _compile(GluonASTSource, hopper_kernel, {"C": constants}, options)
    kernel = row_kernel if isinstance(config, RowConfig) else tile_kernel
    options = {"num_warps": config.num_warps, "launch_pdl": True}
    return _compile(ASTSource, kernel, constants_for(job, config), options)


def stack_bytes(compiled: Any) -> int:
    """What a thread keeps in memory for want of registers."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", usage))


def check(job: Job) -> str | None:
    """What is wrong with the compiled kernel."""
    compiled = compile_job(job)
    if compiled.metadata.shared > SHARED_BYTES:
        return f"{job}: {compiled.metadata.shared} bytes of shared memory"
    stack = stack_bytes(compiled)
    limit = 0 if job.kernel == "hopper" else STACK_BYTES
    return f"{job}: {stack} bytes of stack" if stack > limit else None


if __name__ == "__main__":
    wanted = [job for name in sys.argv[1:] or MODELS for job in jobs_of(MODELS[name])]
    wrong = [problem for job in wanted if (problem := check(job)) is not None]
    assert not wrong, "\n".join(wrong)
    print(f"{len(wanted)} kernels fit")
