"""The inbox's way to the device: one pinned copy for all entries of a step, none without entries.

Holds the inbox tensors on the device at fixed addresses, as captured graphs need them. The host
side is a ring of pinned buffers: a buffer is written again only after the outbox has returned the
record of the step that read it, which the sizes of the two rings guarantee. Grammar masks have a
ring of their own, so that steps without them copy nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_engine.outbox import RING_RECORDS
from compiled_engine.sampler import ParamInbox, RowMask
from compiled_engine.scheduler.inbox import Inbox

ALIGNMENT = 16
# Steps with masks on their way at once, and one more.
MASK_SLOTS = 4


class DeviceInbox:
    """One step's entries on the device.

    Args:
        inbox: an empty one, for shapes and dtypes.
        param_inbox: likewise.
        device: the GPU.

    Attributes:
        inbox, param_inbox: the device tensors, always the same ones.
    """

    def __init__(self, inbox: Inbox, param_inbox: ParamInbox, device: torch.device) -> None:
        tensors = _flat(inbox) + _flat(param_inbox)
        self._places = []
        end = 0
        for tensor in tensors:
            self._places.append((end, tensor.nbytes, tensor.dtype, tensor.shape))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._device_bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self._host_bytes = torch.zeros(RING_RECORDS, end, dtype=torch.uint8, pin_memory=is_cuda)
        self._host_views = [self._views(self._host_bytes[i]) for i in range(RING_RECORDS)]
        views = iter(self._views(self._device_bytes))
        self.inbox: Inbox = _like(inbox, views)
        self.param_inbox: ParamInbox = _like(param_inbox, views)
        self._num_sent = 0
        self._empty = (inbox, param_inbox)
        self._holds_entries = True
        self.clear()

    @property
    def address(self) -> int:
        """Where the device tensors begin."""
        return self._device_bytes.data_ptr()

    def clear(self) -> None:
        """Leaves the device with no entries."""
        self.send(*self._empty, has_entries=False)

    def send(self, inbox: Inbox, param_inbox: ParamInbox, *, has_entries: bool) -> bool:
        """Queues the copy of a step's entries; False where the device has none and needs none."""
        if not has_entries and not self._holds_entries:
            return False
        slot = self._num_sent % RING_RECORDS
        for target, source in zip(
            self._host_views[slot], _flat(inbox) + _flat(param_inbox), strict=True
        ):
            target.copy_(source)
        self._device_bytes.copy_(self._host_bytes[slot], non_blocking=True)
        self._num_sent += 1
        self._holds_entries = has_entries
        return True

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in self._places
        ]


class MaskUpload:
    """The way of grammar masks to the device: as many rows are copied as there are masks.

    On a CPU they are written where they belong. Its buffers are made when the first mask comes.

    Args:
        mask_bits: from `new_mask_bits`; written here only.
        max_masks: masks of one step at most.
    """

    def __init__(self, mask_bits: Tensor, max_masks: int) -> None:
        self._target = mask_bits
        self._max_masks = max_masks
        self._pinned: tuple[Tensor, Tensor] | None = None
        self._copied: list[torch.cuda.Event] = []
        self._num_sent = 0

    def send(self, masks: Sequence[RowMask]) -> None:
        """Queues the copy of one step's masks, of a row at most one, before the step itself."""
        if not masks:
            return
        if not self._target.is_cuda:
            for mask in masks:
                self._put(self._target[mask.row], mask)
            return
        rows, bits = self._buffers()
        slot, count = self._num_sent % MASK_SLOTS, len(masks)
        # Long over: the steps that used the slot have been read since.
        self._copied[slot].synchronize()
        for place, mask in enumerate(masks):
            rows[slot, place] = mask.row
            self._put(bits[slot, place], mask)
        device = self._target.device
        self._target.index_copy_(
            0,
            rows[slot, :count].to(device, non_blocking=True),
            bits[slot, :count].to(device, non_blocking=True),
        )
        self._copied[slot].record()
        self._num_sent += 1

    @staticmethod
    def _put(target: Tensor, mask: RowMask) -> None:
        source = torch.from_numpy(mask.bits.view(np.uint8))
        target[: source.shape[0]] = source

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self._pinned is None:
            shape = (MASK_SLOTS, self._max_masks)
            self._copied = [torch.cuda.Event() for _ in range(MASK_SLOTS)]
            self._pinned = (
                torch.zeros(shape, dtype=torch.int64, pin_memory=True),
                torch.zeros(*shape, self._target.shape[1], dtype=torch.uint8, pin_memory=True),
            )
        return self._pinned


def _flat(entries: Any) -> list[Tensor]:
    if isinstance(entries, Tensor):
        return [entries]
    return [tensor for entry in entries for tensor in _flat(entry)]


def _like(entries: Any, tensors: Any) -> Any:
    """The structure of `entries` over the next of `tensors`."""
    if isinstance(entries, Tensor):
        return next(tensors)
    return type(entries)(*(_like(entry, tensors) for entry in entries))
