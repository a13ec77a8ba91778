"""The way out: a ring of step records that the host reads at least one step later.

`pack` is the device half and the end of every step. Records are copied into the ring without
waiting; `read` waits for the one record it returns, which in the overlapped loop is an old one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled_engine.scheduler.advance import NUM_COUNTS, StepRecord

RING_RECORDS = 64
MIN_FREE_RECORDS = 8

(COLUMN_GEN, COLUMN_FLAGS, COLUMN_CACHED, COLUMN_TOKEN) = range(4)
FLAG_EMITTED, FLAG_FINISHED, FLAG_FREE = 1, 2, 4


@dataclass(frozen=True)
class HostRecord:
    """One step's record on the host.

    Attributes:
        rows: [R + 1, 4] int64, columns as the `COLUMN_` constants.
        counts: [NUM_COUNTS] int64, places as the `COUNT_` constants of `scheduler.advance`.
    """

    rows: np.ndarray
    counts: np.ndarray


def pack(record: StepRecord) -> tuple[Tensor, Tensor]:
    """A step record as two int64 tensors, [R + 1, 4] and [NUM_COUNTS]."""
    flags = (
        record.emitted.long() * FLAG_EMITTED
        + record.is_finished.long() * FLAG_FINISHED
        + record.is_free.long() * FLAG_FREE
    )
    columns = (record.gen.long(), flags, record.num_cached.long(), record.tokens[:, 0].long())
    return torch.stack(columns, 1), record.counts


class Outbox:
    """The ring. One writer (the step) and one reader (the loop)."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._rows = torch.zeros(RING_RECORDS, num_rows, 4, dtype=torch.int64, pin_memory=is_cuda)
        self._counts = torch.zeros(RING_RECORDS, NUM_COUNTS, dtype=torch.int64, pin_memory=is_cuda)
        self._events = [torch.cuda.Event() for _ in range(RING_RECORDS)] if is_cuda else None
        self._num_written = 0
        self._num_read = 0

    @property
    def num_unread(self) -> int:
        """Records written and not read yet."""
        return self._num_written - self._num_read

    @property
    def has_room(self) -> bool:
        """Enough free records for the host to launch another step."""
        return self.num_unread <= RING_RECORDS - MIN_FREE_RECORDS

    def write(self, rows: Tensor, counts: Tensor) -> None:
        """Copies a packed record into the next place; does not wait for the device."""
        assert self.has_room, "the outbox is full: records must be read before more are written"
        slot = self._num_written % RING_RECORDS
        self._rows[slot].copy_(rows, non_blocking=True)
        self._counts[slot].copy_(counts, non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        self._num_written += 1

    def read(self) -> HostRecord:
        """The oldest unread record. Blocks on its event."""
        assert self.num_unread > 0, "no record to read"
        slot = self._num_read % RING_RECORDS
        if self._events is not None:
            self._events[slot].synchronize()
        self._num_read += 1
        return HostRecord(self._rows[slot].numpy().copy(), self._counts[slot].numpy().copy())
