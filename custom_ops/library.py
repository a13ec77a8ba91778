"""The `ce` op namespace, and how a contract file adds an op to it.

An op is a name for a piece of mathematics. Its body is the plain-torch reference; passes match the
name, and the last step of the pass pipeline expands what no pass took into that same body.
Importing this module registers nothing; the contract files (norm, activation, rope_kv, attention)
do.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library

logger = logging.getLogger(__name__)

NAMESPACE = "ce"


class _Library(Library):
    """A library that knows its launchers on a GPU: torch has them, and does not say."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE, "DEF")
        self.gpu_kernels: dict[str, Callable[..., Any]] = {}  # by the op's qualified name

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """As torch's own."""
        super().impl(op_name, fn, dispatch_key, **options)
        if dispatch_key == "CUDA":
            self.gpu_kernels[f"{NAMESPACE}::{op_name}"] = fn


LIBRARY = _Library()
# dtype codes of the C++ kernels
CPU_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class OpSpec:
    """One registered op.

    Attributes:
        name: name inside the namespace.
        overload: the `OpOverload` that appears in graphs.
        reference: plain-torch body with the op's own signature.
        functional_reference: for ops that mutate: same arguments, returns the op's results followed
            by the new value of each mutated argument, in schema order. None for pure ops.
        is_expandable: False for ops that always run their own kernel (attention).
        example_inputs: (dtype, device, seed) -> argument tuples for the generic tests.
    """

    name: str
    overload: Any
    reference: Callable[..., Any]
    functional_reference: Callable[..., tuple[torch.Tensor, ...]] | None
    is_expandable: bool
    example_inputs: Callable[[torch.dtype, torch.device, int], list[tuple[Any, ...]]]


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    example_inputs: Callable[[torch.dtype, torch.device, int], list[tuple[Any, ...]]],
    functional_reference: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    is_expandable: bool = True,
) -> OpSpec:
    """Registers schema, body and fake of one op, and returns its description."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return OpSpec(name, overload, reference, functional_reference, is_expandable, example_inputs)


@functools.cache
def note_plain_body(op: str, reason: str) -> None:
    """Warns, once for each op and reason, that a GPU runs an op's plain body in place of a kernel.

    `reason` is why the kernel cannot serve, such as "the weight is not contiguous".
    """
    logger.warning("%s runs as plain PyTorch, slower than its kernel: %s", op, reason)
