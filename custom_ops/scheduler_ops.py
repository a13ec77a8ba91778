"""Ops of the scheduler's first half on CUDA, and how its kernels are launched.

`scheduler_plan` is all of it in one kernel; the others are its parts, for tests and measurements.
The ops take the scheduler's state as the list of its tensors and mutate it. They have no CPU form:
on a CPU the engine runs the dense form in `scheduler/`, which these are tested against.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import scheduler_args as args
from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.library import LIBRARY, NAMESPACE

PLAN_SOURCE, PAGE_SOURCE = "scheduler/plan.cu", "scheduler/page_ops.cu"
BLOCK = 1024


@functools.cache
def _kernel(source: str, name: str, block: int, shared_bytes: int, device: torch.device) -> Kernel:
    library = load_library(source, arch_of(device), cubin_dir())
    is_dependent = torch.cuda.get_device_capability(device)[0] >= 9
    with torch.cuda.device(device):
        return Kernel(
            library, name, block=block, shared_bytes=shared_bytes, is_dependent=is_dependent
        )


def launch(
    source: str,
    name: str,
    grid: int,
    struct: ctypes.Structure,
    device: torch.device,
    *,
    block: int = BLOCK,
    shared_bytes: int = 0,
) -> None:
    """Launches a kernel of `csrc/<source>` on the device's current stream.

    The first launch of a kernel compiles and loads it: it must not happen while capturing.
    """
    _kernel(source, name, block, shared_bytes, device).launch(grid, struct)


def check_sizes(sizes: Sequence[int], max_pieces: int) -> None:
    """Refuses sizes beyond the kernels' fixed arrays.

    Raises:
        ValueError: names the size and its limit.
    """
    values = dict(zip(args.STATE_SIZES, sizes, strict=True)) | {"max_pieces": max_pieces}
    for name, limit in args.LIMITS.items():
        if values[name] > limit:
            raise ValueError(f"{name} is {values[name]}; the CUDA scheduler takes at most {limit}")


def _plan(
    state: list[Tensor], inbox: list[Tensor], budget: Tensor, sizes: list[int]
) -> tuple[Tensor, ...]:
    out = _plan_fake(state, inbox, budget, sizes)
    struct = args.plan_args(state, inbox, budget, sizes, out)
    shared = args.rows_shared_bytes(struct.state.max_rows)
    launch(PLAN_SOURCE, "scheduler_plan", 1, struct, budget.device, shared_bytes=shared)
    return out


def _plan_fake(
    state: list[Tensor], inbox: list[Tensor], budget: Tensor, sizes: list[int]
) -> tuple[Tensor, ...]:
    return tuple(args.new_plan_out(state[0].shape[0], budget.device))


def _apply_inbox(state: list[Tensor], inbox: list[Tensor], sizes: list[int]) -> None:
    struct = args.apply_inbox_args(state, inbox, sizes)
    launch(PAGE_SOURCE, "scheduler_apply_inbox", 1, struct, state[0].device)


def _page_release(state: list[Tensor], sizes: list[int]) -> Tensor:
    is_pending = _page_release_fake(state, sizes)
    struct = args.release_args(state, is_pending, sizes)
    launch(PAGE_SOURCE, "scheduler_page_release", 1, struct, is_pending.device)
    return is_pending


def _page_release_fake(state: list[Tensor], sizes: list[int]) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=state[0].device)


def _page_take(state: list[Tensor], offset: Tensor, count: Tensor, sizes: list[int]) -> None:
    struct = args.take_args(state, offset, count, sizes)
    shared = args.rows_shared_bytes(struct.state.max_rows)
    launch(PAGE_SOURCE, "scheduler_page_take", 1, struct, count.device, shared_bytes=shared)


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


_PLAN_RESULT = "(" + ", ".join("Tensor" for _ in args.PLAN_TENSORS) + ")"
_define(
    f"scheduler_plan(Tensor(a!)[] state, Tensor[] inbox, Tensor budget, int[] sizes) "
    f"-> {_PLAN_RESULT}",
    _plan,
    _plan_fake,
)
_define(
    "scheduler_apply_inbox(Tensor(a!)[] state, Tensor[] inbox, int[] sizes) -> ()",
    _apply_inbox,
    lambda *_: None,
)
_define(
    "scheduler_page_release(Tensor(a!)[] state, int[] sizes) -> Tensor",
    _page_release,
    _page_release_fake,
)
_define(
    "scheduler_page_take(Tensor(a!)[] state, Tensor offset, Tensor count, int[] sizes) -> ()",
    _page_take,
    lambda *_: None,
)
