"""Cases of the `fused_linear` kernels, checked against float64; as a program: all, on the CPU.

The program wants `TRITON_INTERPRET=1`. Results must agree with the exact ones of the same inputs up
to the rounding of the output and, on tensor cores, of `x` times the norm's weight. The interpreter
cuts bf16 off instead of rounding it and cannot multiply matrices of it, so it runs every case in
fp32, and the fp16 ones as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiled_engine.custom_ops import gemm_skinny
from compiled_engine.custom_ops.gemm_choice import pick_config
from compiled_engine.custom_ops.gemm_skinny import (
    Config,
    HopperConfig,
    MmaConfig,
    Operands,
    RowConfig,
    TileConfig,
    WideConfig,
)

EPS = 1e-6
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}


@dataclass(frozen=True)
class Case:
    """One call: sizes, what stands before and after the product (b, n, r, g), and the tiles."""

    num_tokens: int
    num_outputs: int
    size: int
    parts: str
    config: Config
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        sizes = f"T{self.num_tokens}-N{self.num_outputs}-K{self.size}"
        return f"{kernel_of(self.config)}-{sizes}-{self.parts or 'plain'}-{name}"


def kernel_of(config: Config) -> str:
    """The kernel that a configuration is for."""
    names = {
        RowConfig: "row",
        TileConfig: "tile",
        HopperConfig: "hopper",
        MmaConfig: "mma",
        WideConfig: "wide",
    }
    return names[type(config)]


@dataclass(frozen=True)
class Product:
    """A weight [rows, size] and what stands before and after the product (b, n, r, g)."""

    rows: int
    size: int
    parts: str

    def traits(self, num_tokens: int) -> dict[str, int]:
        """Of a call that no kernel but those for Hopper has anything against."""
        return {
            "num_tokens": num_tokens,
            "rows": self.rows,
            "size": self.size,
            "is_gated": "g" in self.parts,
            "has_norm": "n" in self.parts,
            "has_bias": "b" in self.parts,
            "has_residual": "r" in self.parts,
            "is_residual_aligned": 1,
            "has_one_dtype": 1,
            "is_weight_contiguous": 1,
            "is_last_dim_contiguous": 1,
            "is_aligned": 1,
            "is_hopper": 0,
            "has_nvrtc": 1,
            "has_cublaslt": 1,
        }

    def case(self, num_tokens: int, kernel: str) -> Case:
        """A call with the sizes that are chosen for the kernel."""
        outputs = self.rows // (2 if "g" in self.parts else 1)
        config = pick_config(kernel, self.traits(num_tokens))
        return Case(num_tokens, outputs, self.size, self.parts, config)


def products_of(
    hidden: int, intermediate: int, query_size: int, kv_size: int, vocab: int
) -> tuple[Product, ...]:
    """The products of a decode step: qkv, o, gate and up, down, head."""
    return (
        Product(query_size + 2 * kv_size, hidden, "n"),
        Product(hidden, query_size, "r"),
        Product(2 * intermediate, hidden, "ng"),
        Product(hidden, intermediate, "r"),
        Product(vocab, hidden, "n"),
    )


MODELS = {
    "Qwen3-8B": products_of(4096, 12288, 4096, 1024, 151936),
    "Llama-3.2-1B": products_of(2048, 8192, 2048, 512, 128256),
    "SmolLM2-135M": products_of(576, 1536, 576, 192, 49152),
    "tiny": products_of(256, 512, 256, 128, 1000),
}
ODD_TOKENS = (3, 5, 7, 13, 27)

FP16 = torch.float16
CASES = (
    Case(1, 9, 96, "", RowConfig(2, 64, 1, 4)),
    Case(1, 7, 128, "bnr", RowConfig(4, 64, 2, 4)),
    Case(1, 5, 144, "bnrg", RowConfig(4, 64, 2, 4)),
    Case(1, 3, 64, "ng", RowConfig(2, 128, 3, 4), FP16),
    Case(2, 20, 64, "", TileConfig(16, 32, 1, 3, 64, 2)),
    Case(3, 17, 80, "bnr", TileConfig(16, 32, 1, 3, 32, 2)),
    Case(8, 13, 96, "bnrg", TileConfig(16, 32, 1, 3, 0, 2)),
    Case(7, 24, 144, "nr", TileConfig(16, 32, 2, 3, 32, 2)),
    Case(17, 9, 160, "bnrg", TileConfig(32, 32, 3, 3, 0, 4)),
    Case(5, 16, 64, "nr", TileConfig(16, 64, 1, 2, 0, 2), FP16),
    Case(13, 20, 80, "ng", TileConfig(16, 32, 1, 3, 32, 1)),
    Case(27, 12, 96, "nr", TileConfig(32, 64, 2, 3, 32, 2)),
)
# Of a kernel that no interpreter runs.
HOPPER_CASES = (
    Case(1, 9, 96, "", HopperConfig(64, 64, 4, 2, 1, 0, 0)),
    Case(3, 70, 144, "bnr", HopperConfig(64, 64, 3, 2, 2, 1, 1)),
    Case(8, 200, 1040, "bnrg", HopperConfig(128, 64, 4, 3, 0, 0, 2)),
    Case(8, 4096, 4096, "nr", HopperConfig(64, 128, 6, 4, 0, 3, 4)),
    Case(17, 517, 2064, "nr", HopperConfig(128, 64, 4, 4, 3, 99, 0)),
    Case(32, 1500, 1024, "ng", HopperConfig(128, 64, 5, 4, 0, 2, 8)),
    Case(33, 20000, 256, "r", HopperConfig(64, 64, 6, 6, 0, 0, 4)),
    Case(64, 130, 1024, "bnrg", HopperConfig(256, 64, 3, 3, 3, 0, 4)),
    Case(5, 90, 512, "bnr", HopperConfig(64, 128, 3, 2, 2, 0, 2), FP16),
)


def exact_result(operands: Operands) -> Tensor:
    """`fused_linear` of the operands in float64."""
    x, weight, bias, norm_weight, eps, residual, is_gated = operands
    x64 = x.double()
    if norm_weight is not None:
        x64 = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps) * norm_weight.double()
    y = x64 @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if is_gated:
        gate, value = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * value
    return y if residual is None else y + residual.double()


def make_operands(case: Case, device: str) -> Operands:
    """Seeded operands; x and the residual are parts of wider tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    rows = case.num_outputs * (2 if "g" in case.parts else 1)
    return Operands(
        x=(3 * normal(case.num_tokens, case.size + 16))[:, : case.size],
        weight=normal(rows, case.size) * case.size**-0.5,
        bias=normal(rows) if "b" in case.parts else None,
        norm_weight=normal(case.size) if "n" in case.parts else None,
        eps=EPS,
        residual=(
            normal(case.num_tokens, case.num_outputs + 8)[:, : case.num_outputs]
            if "r" in case.parts
            else None
        ),
        is_gated="g" in case.parts,
    )


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact result; NaN if anything is NaN."""
    return float((got.double() - exact).norm() / exact.norm())


def check_case(case: Case, device: str) -> None:
    """Runs the case twice, for counters that a first run must leave as they were."""
    operands = make_operands(case, device)
    exact = exact_result(operands)
    kernel = kernel_of(case.config)
    limit = LIMITS[case.dtype]
    for _ in range(2):
        got = gemm_skinny.launch(kernel, operands, case.config)
        assert got.shape == exact.shape, case.label
        assert got.dtype == case.dtype, case.label
        error = relative_error(got, exact)
        assert error <= limit, f"{case.label}: {error:.2e}, allowed {limit:.2e}"


if __name__ == "__main__":
    for one in CASES:
        check_case(replace(one, dtype=torch.float32), "cpu")
        if one.dtype == FP16:
            check_case(one, "cpu")
    print(f"{len(CASES)} cases right")
