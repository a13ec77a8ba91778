"""Which tensor of a checkpoint goes where: names and shapes, and the order of rows.

Owns the mapping from a checkpoint's tensors to (fused, stacked) parameters. Does not read files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.moe import Experts, SparseCausalLM
from compiled_engine.models.quant_linear import QuantLinear

# Bytes of a group of 32 values in published 4-bit checkpoints.
_BLOCK_BYTES = 16


@dataclass(frozen=True)
class Target:
    """Where a checkpoint's tensor goes.

    Attributes:
        memory: contiguous part of a parameter, of as many elements as the tensor.
        shape: of the tensor in the checkpoint.
        arranged: a view of a tensor of that shape in the order of `memory`; None for the same
            order. Applied to what was copied, once all of it is there.
    """

    memory: Tensor
    shape: tuple[int, ...]
    arranged: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def arrange(self) -> None:
        """Brings the copied elements into the parameter's order, in place."""
        if self.arranged is not None:
            ordered = self.arranged(self.memory.view(self.shape)).contiguous()
            self.memory.copy_(ordered.view(self.memory.shape))


def checkpoint_targets(model: CausalLM, names: Collection[str]) -> dict[str, Target]:
    """Checkpoint tensor name -> where it goes.

    Args:
        model: its parameters have storage.
        names: of the checkpoint's tensors; they decide between the forms a checkpoint may have.
    """
    targets: dict[str, Target] = {}
    for name, parameter in plain_parameters(model):
        layer, _, kind = name.rpartition(".")
        if layer.endswith(".experts"):
            assert isinstance(model, SparseCausalLM), type(model)
            targets.update(_expert_targets(model, name, parameter, names))
            continue
        start = 0
        for part, rows in parts_of(model, layer, parameter.shape[0]).items():
            memory = parameter[start : start + rows]
            target = Target(memory, tuple(memory.shape))
            targets[_file_name(model, f"{part}.{kind}", names)] = target
            start += rows
        assert start == parameter.shape[0], (name, start, parameter.shape)
    return targets


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters but those that `quant_weights` fills."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_filled = isinstance(module, QuantLinear)
            is_filled |= isinstance(module, Experts) and bool(module.layout)
            if not is_filled or name not in module.fixed_dtypes:
                yield f"{path}.{name}", parameter


def parts_of(model: CausalLM, layer: str, num_rows: int) -> dict[str, int]:
    """Name and rows of each checkpoint layer that the model's `layer` holds, in order."""
    path, _, last = layer.rpartition(".")
    if last not in model.packed_modules:
        return {layer: num_rows}
    names = [f"{path}.{part}" for part in model.packed_modules[last]]
    return dict(zip(names, _part_rows(model.config, last, num_rows), strict=True))


def _file_name(model: CausalLM, name: str, names: Collection[str]) -> str:
    """Our name, or the checkpoint's own for it."""
    return name if name in names else model.published_name(name)


def _part_rows(config: ModelConfig, module: str, num_rows: int) -> tuple[int, ...]:
    """Rows of each part of a fused matrix."""
    if module == "qkv_proj":
        kv_size = config.num_kv_heads * config.head_dim
        return (config.num_heads * config.head_dim, kv_size, kv_size)
    if module == "gate_up_proj":
        return (num_rows // 2,) * 2
    raise AssertionError(f"no row counts are known for the fused module {module}")


def _expert_targets(
    model: SparseCausalLM, name: str, parameter: nn.Parameter, names: Collection[str]
) -> Iterator[tuple[str, Target]]:
    """Targets of one stacked parameter of all experts."""
    if model.is_interleaved:
        yield _interleaved_target(name, parameter)
    elif name in names:
        yield name, Target(parameter, tuple(parameter.shape))
    else:
        prefix, _, kind = name.rpartition(".")
        gate, up, down = model.expert_names
        parts = (gate, up) if kind.startswith("gate_up_proj") else (down,)
        for expert, matrix in enumerate(parameter):
            for part, memory in zip(parts, matrix.chunk(len(parts)), strict=True):
                theirs = _file_name(model, f"{prefix}.{expert}.{part}.weight", names)
                yield theirs, Target(memory, tuple(memory.shape))


def _interleaved_target(name: str, parameter: nn.Parameter) -> tuple[str, Target]:
    """gpt-oss: packed in blocks, or plain with rows and columns swapped."""
    num_experts, *sizes = parameter.shape
    deinterleaved = _deinterleaved if ".gate_up_proj" in name else None
    if name.endswith("_scale"):
        return f"{name}s", Target(parameter, tuple(parameter.shape), deinterleaved)
    if name.endswith("_bias"):
        return name, Target(parameter, tuple(parameter.shape), deinterleaved)
    if parameter.dtype == torch.uint8:
        blocks = (num_experts, sizes[0], sizes[1] // _BLOCK_BYTES, _BLOCK_BYTES)
        return f"{name}_blocks", Target(parameter, blocks, deinterleaved)

    def turned(tensor: Tensor) -> Tensor:
        tensor = tensor.transpose(1, 2)
        return tensor if deinterleaved is None else deinterleaved(tensor)

    return name, Target(parameter, (num_experts, sizes[1], sizes[0]), turned)


def _deinterleaved(tensor: Tensor) -> Tensor:
    """[E, 2 n, ...] of gate and up row in turn, as all rows of the gate and then those of up."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2)
