"""The way out: a ring of step records that the host reads at least one step later.

A record reaches the ring in one of two ways. `Outbox`: `pack` ends the step and its result is
copied behind it, with an event; this is the plain form, for any device. `RingOutbox`: the kernel
that ends the step writes the record into pinned host memory and then its number, which `read`
polls; nothing is copied or recorded, and a record can be read before the work behind it has ended.
In both, `read` waits for the one record it returns, which in the overlapped loop is an old one.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from compiled_engine.custom_ops.sampling import NO_TOKEN
from compiled_engine.custom_ops.scheduler_advance import RECORD_SLOTS
from compiled_engine.errors import EngineError
from compiled_engine.scheduler.advance import NUM_COUNTS, StepRecord

RING_RECORDS = RECORD_SLOTS
MIN_FREE_RECORDS = 8

(COLUMN_GEN, COLUMN_FLAGS, COLUMN_CACHED, COLUMN_TOKEN) = range(4)
NUM_COLUMNS = 4
FLAG_EMITTED, FLAG_FINISHED, FLAG_FREE, FLAG_FAILED, FLAG_RETRACTED = 1, 2, 4, 8, 16

# A poll costs about 0.15 µs: a record that is nearly there is seen at once, a late one cheaply.
NUM_SPINS = 200
SLEEP_SECONDS = 20e-6
# How often a reader that waits asks the device whether it still works.
CHECK_SECONDS = 0.5
NUM_LOOP_CHECKS = 8192


class HostRecord(NamedTuple):
    """One step's record on the host.

    Attributes:
        rows: [R + 1, 4] int64, columns as the `COLUMN_` constants; the ring's own memory, which
            stays as it is until the next record is read.
        counts: NUM_COUNTS numbers, places as the `COUNT_` constants of `scheduler.advance`.
    """

    rows: np.ndarray
    counts: list[int]


def pack(record: StepRecord) -> tuple[Tensor, Tensor]:
    """A step record as two int64 tensors, [R + 1, 4] and [NUM_COUNTS]."""
    flags = (
        record.emitted.long() * FLAG_EMITTED
        + record.is_finished.long() * FLAG_FINISHED
        + record.is_free.long() * FLAG_FREE
        + record.is_failed.long() * FLAG_FAILED
        + record.is_retracted.long() * FLAG_RETRACTED
    )
    columns = (record.gen.long(), flags, record.num_cached.long(), record.tokens[:, 0].long())
    return torch.stack(columns, 1), record.counts


def failure_of(row: np.ndarray) -> str:
    """Why a row with FLAG_FAILED ended, for its client, by its part [4] of a step's record."""
    token = int(row[COLUMN_TOKEN])
    if token == NO_TOKEN:
        return "the model gave no valid logits for this request (NaN)"
    return f"the sampler gave token {token} for this request: the vocabulary has no such id"


class RecordQueue(ABC):
    """The ring's host side. One writer (the step) and one reader (the loop).

    Args:
        num_rows: R + 1.
        device: where steps run.

    Attributes:
        num_unread: records written, or to be written by steps that were launched, and not read; 1
            while a loop on the device may still write some.
        waited_s: seconds that `read` has waited for records, in all.
        read_at: host clock when the newest record was there.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._rows = self._host_zeros(RING_RECORDS, num_rows, NUM_COLUMNS)
        self._counts = self._host_zeros(RING_RECORDS, NUM_COUNTS)
        # The same memory, slot by slot.
        self._views = list(zip(self._rows.numpy(), self._counts.numpy(), strict=True))
        self.num_unread = 0
        self._num_read = 0
        self.waited_s = 0.0
        self.read_at = 0.0

    def _host_zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._is_cuda)

    @property
    def has_room(self) -> bool:
        """Enough free records for the host to launch another step."""
        return self.num_unread <= RING_RECORDS - MIN_FREE_RECORDS

    @abstractmethod
    def note_launch(self) -> None:
        """A step was launched on the current stream: one more record comes."""

    def read(self) -> HostRecord:
        """The oldest unread record. Blocks until it is there."""
        assert self.num_unread > 0, "no record to read"
        number = self._num_read
        start = time.perf_counter()
        self._wait(number)
        self.read_at = now = time.perf_counter()
        self.waited_s += now - start
        self._num_read = number + 1
        self.num_unread -= 1
        return self._record_in(number % RING_RECORDS)

    def _record_in(self, slot: int) -> HostRecord:
        rows, counts = self._views[slot]
        return HostRecord(rows, counts.tolist())

    def discard(self) -> None:
        """Waits for the steps launched so far, noted or not, and forgets their records."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self._num_read += self.num_unread
        self.num_unread = 0

    def _take_slot(self) -> int:
        assert self.has_room, "the outbox is full: records must be read before more are written"
        slot = (self._num_read + self.num_unread) % RING_RECORDS
        self.num_unread += 1
        return slot

    @abstractmethod
    def _wait(self, number: int) -> None:
        """Returns once record `number`, counted from 0, is in its slot."""


class Outbox(RecordQueue):
    """Records are copied into the ring behind the step."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device)
        self._events: list[torch.cuda.Event] = []
        if self._is_cuda:
            self._events = [torch.cuda.Event() for _ in range(RING_RECORDS)]
        self._staged_rows = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.int64, device=device)
        self._staged_counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)

    def stage(self, rows: Tensor, counts: Tensor) -> None:
        """Puts a packed record where `note_launch` takes it from; may be captured."""
        self._staged_rows.copy_(rows)
        self._staged_counts.copy_(counts)

    def note_launch(self) -> None:
        """A step that ends by `stage` was launched on the current stream: one more record comes."""
        slot = self._take_slot()
        self._rows[slot].copy_(self._staged_rows, non_blocking=True)
        self._counts[slot].copy_(self._staged_counts, non_blocking=True)
        if self._events:
            self._events[slot].record()

    def _wait(self, number: int) -> None:
        if self._events:
            self._events[number % RING_RECORDS].synchronize()


class RecordRing(NamedTuple):
    """Where the kernel that ends a step writes; see `csrc/scheduler/advance.cuh`."""

    rows: Tensor  # [RING_RECORDS, R + 1, 4] i64, pinned
    counts: Tensor  # [RING_RECORDS, NUM_COUNTS] i64, pinned
    sequence: Tensor  # [RING_RECORDS] i64, pinned: 1 + the step whose record stands in the slot
    step_counter: Tensor  # i64 on the device: steps ended so far


class RunningLoop(Protocol):
    """What the outbox must know of a loop of steps on the device."""

    @property
    def ended_at(self) -> int | None:
        """Steps since the start when it ended, None while it runs."""

    def note_read(self, num_read: int) -> None:
        """Tells it how many records have been read since the start."""


class RingOutbox(RecordQueue):
    """Steps write their records into the ring by themselves.

    Every step does, also one that nobody noted: after such steps (a warm-up) `discard` must be
    called before the next `note_launch`.

    Attributes:
        ring: for the kernel.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device)
        sequence = self._host_zeros(RING_RECORDS)
        step_counter = torch.zeros((), dtype=torch.int64, device=device)
        self.ring = RecordRing(self._rows, self._counts, sequence, step_counter)
        self._sequence = sequence.numpy().data  # an entry costs less than an array's
        self._load_order = threading.Lock()
        self._running: RunningLoop | None = None

    def note_launch(self) -> None:
        """A step was launched: one more record comes."""
        assert self._running is None, "a loop is running"
        self._take_slot()

    def note_loop(self, running: RunningLoop) -> None:
        """A loop of steps was launched: records come until it ends. All others have been read."""
        assert self.num_unread == 0, "records of earlier steps must be read first"
        # It counts all steps since the start, those before it too: they have been read.
        running.note_read(self._num_read)
        self._running = running
        self.num_unread = 1

    def read_loop(self) -> HostRecord | None:
        """The next record of the running loop; None once it has ended and all were read."""
        assert self._running is not None, "no loop is running"
        number = self._num_read
        slot = number % RING_RECORDS
        num_polls = 0
        while self._sequence[slot] != number + 1:
            ended_at = self._running.ended_at
            # The loop says so behind its last record: look at the slot once more.
            if ended_at is not None and number >= ended_at:
                self._running = None
                self.num_unread = 0
                return None
            num_polls += 1
            if num_polls > NUM_SPINS:
                time.sleep(SLEEP_SECONDS)
            if num_polls % NUM_LOOP_CHECKS == 0 and self._is_device_idle():
                assert self._running.ended_at is not None, "the loop ended without saying so"
        with self._load_order:
            pass
        self._num_read = number + 1
        self._running.note_read(number + 1)
        return self._record_in(slot)

    def discard(self) -> None:
        """Waits for the steps launched so far, noted or not, and forgets their records."""
        super().discard()
        self._num_read = int(self.ring.step_counter)

    def _wait(self, number: int) -> None:
        slot, expected = number % RING_RECORDS, number + 1
        for _ in range(NUM_SPINS):
            if self._sequence[slot] == expected:
                break
        else:
            self._sleep_until(slot, expected)
        # Where the processor may swap loads, this keeps those of the record behind the poll.
        with self._load_order:
            pass

    def _sleep_until(self, slot: int, expected: int) -> None:
        next_check = time.monotonic() + CHECK_SECONDS
        while self._sequence[slot] != expected:
            time.sleep(SLEEP_SECONDS)
            if time.monotonic() < next_check:
                continue
            next_check += CHECK_SECONDS
            if self._is_device_idle() and self._sequence[slot] != expected:
                raise EngineError(f"the device is idle and never wrote record {expected - 1}")

    def _is_device_idle(self) -> bool:
        """Whether all launched work has ended.

        Raises:
            torch.AcceleratorError: the device reports a failed kernel.
        """
        return self._is_cuda and torch.cuda.current_stream(self.device).query()
