"""Calls of `quantized_linear` for tests of its kernels, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiled_engine.custom_ops import quant_packed, reference, reference_quant
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.quant_packed import PackedConfig, Prepared, QuantOperands

EPS = 1e-6
# Rounding of the output; of x behind a norm, where another order of its sum may change a last bit.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


_ONE = PackedConfig(1, 2, 2)


def in_ring(config: PackedConfig) -> PackedConfig:
    """The same sizes of the kernel that has a ring."""
    return replace(config, is_ring=True)


@dataclass(frozen=True)
class Call:
    """Formats, sizes, what stands around the product (b, n, r, g), and the kernel's sizes."""

    format: str
    activation_format: str
    num_tokens: int
    num_outputs: int
    size: int
    parts: str = ""
    config: PackedConfig = _ONE
    dtype: torch.dtype = torch.bfloat16
    has_zero: bool = False
    has_offsets: bool = False

    @property
    def label(self) -> str:
        sizes = f"T{self.num_tokens}-N{self.num_outputs}-K{self.size}"
        name = str(self.dtype).removeprefix("torch.")
        activations = self.activation_format or "plain"
        zeros = "-offsets" * self.has_offsets
        return f"{self.format}-{activations}-{sizes}-{self.parts}-{name}{zeros}"

    def operands(self, device: str = "cpu") -> QuantOperands:
        """Seeded; x and the residual are parts of wider tensors."""
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype).to(device)

        rows = self.num_outputs * (2 if "g" in self.parts else 1)
        packed = quantize_weight(normal(rows, self.size) * self.size**-0.5, self.format)
        zero = None
        if self.has_zero:
            zero = torch.randint(0, 16, packed.scale.shape, generator=generator).byte().to(device)
        if self.has_offsets:  # of the size of scales, so that none hides the other
            zero = normal(*packed.scale.shape) * packed.scale.to(self.dtype)
        is_static = self.activation_format == "fp8_tensor"
        residual = normal(self.num_tokens, self.num_outputs + 8)[:, : self.num_outputs]
        return QuantOperands(
            x=(3 * normal(self.num_tokens, self.size + 16))[:, : self.size],
            weight=packed.weight,
            scale=packed.scale,
            zero=zero,
            global_scale=packed.global_scale,
            input_scale=torch.tensor([0.02], device=device) if is_static else None,
            bias=normal(rows) if "b" in self.parts else None,
            format=self.format,
            activation_format=self.activation_format,
            norm_weight=normal(self.size) if "n" in self.parts else None,
            eps=EPS,
            residual=residual if "r" in self.parts else None,
            is_gated="g" in self.parts,
        )


_TWO = PackedConfig(2, 2, 1)
_TURNS = PackedConfig(1, 2, 2, blocks=1)
CALLS = (
    Call("fp8_channel", "fp8_token", 1, 40, 400, "bnr"),
    Call("fp8_channel", "fp8_token", 9, 37, 400, "gr", _TWO),
    Call("fp8_tensor", "fp8_tensor", 1, 37, 272, "ng", _TURNS),
    Call("fp8_block", "fp8_block", 1, 300, 400, "r"),
    Call("fp8_block", "fp8_block", 3, 132, 400, "g"),
    Call("fp8_token_block", "fp8_block", 1, 20, 272, "n"),
    Call("fp8_channel", "", 17, 37, 400, "gb", _TWO),
    Call("int8_channel", "int8_token", 1, 37, 400, "nr"),
    Call("int8_channel", "int8_token", 5, 90, 400, "", _TURNS),
    Call("nvfp4", "", 1, 77, 416, "nr", _TURNS),
    Call("nvfp4", "", 17, 37, 416, "bnrg", _TWO, torch.float16),
    Call("nvfp4", "fp8_token", 3, 37, 416, "b"),
    Call("mxfp4", "", 1, 37, 1056, "n"),
    Call("mxfp4", "", 6, 37, 96, "", PackedConfig(1, 2, 1), torch.float16),
    Call("int4_group", "", 1, 37, 1024, "n", has_zero=True),
    Call("int4_group", "", 6, 37, 416, "r"),
    Call("mxfp4", "", 1, 37, 96, "b"),
    Call("int4_group", "", 1, 37, 1024, "n", has_offsets=True),
    Call("int4_group", "", 1, 40, 416, "g", _TWO, torch.float16, has_offsets=True),
    Call("int4_group", "", 6, 37, 416, "r", has_offsets=True),
    Call("int4_group", "", 17, 21, 416, "gb", _TWO, torch.float16, has_offsets=True),
)


def prepare(operands: QuantOperands, config: PackedConfig) -> Prepared:
    """As `quant_packed.prepare`, by plain bodies where that runs a kernel of its own."""
    x, activation_format = operands.x, operands.activation_format
    needs_work = operands.norm_weight is not None or activation_format
    if x.shape[0] == 1 and (needs_work or config.is_ring) and not config.is_apart:
        return quant_packed.prepare(operands, config)
    if operands.norm_weight is not None:
        x = reference.rms_norm(x, operands.norm_weight, operands.eps)
    if activation_format:
        q, scale = reference_quant.quantize(x, activation_format, operands.input_scale)
        return Prepared(q, scale, quant_packed.INT8 if q.dtype == torch.int8 else quant_packed.E4M3)
    return Prepared(x, None, quant_packed.VALUES)


def exact_result(operands: QuantOperands) -> Tensor:
    """The layer in float64, of x quantised as the plain body does."""
    x, size = operands.x, operands.x.shape[1]
    if operands.norm_weight is not None:
        x = reference.rms_norm(x, operands.norm_weight, operands.eps)
    if operands.activation_format:
        q, scale = reference_quant.quantize(x, operands.activation_format, operands.input_scale)
        layout = reference_quant.ACTIVATION_FORMATS[operands.activation_format]
        x = reference_quant.dequantize(q, scale, None, None, layout, size, torch.float32)
    weight = reference_quant.dequantize(*operands[1:5], operands.format, size, torch.float32)
    y = x.double() @ weight.double().T
    if operands.bias is not None:
        y = y + operands.bias.double()
    if operands.is_gated:
        gate, value = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * value
    return y if operands.residual is None else y + operands.residual.double()
