"""The outbox: records in order, full and empty rings, and the ring that steps write themselves."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from compiled_engine import outbox as outbox_module
from compiled_engine.errors import EngineError
from compiled_engine.outbox import (
    COLUMN_TOKEN,
    MIN_FREE_RECORDS,
    RING_RECORDS,
    Outbox,
    RecordQueue,
    RingOutbox,
)
from compiled_engine.scheduler.advance import NUM_COUNTS

CPU = torch.device("cpu")
NUM_ROWS = 5


def write_like_the_kernel(outbox: RingOutbox, value: int) -> None:
    """What `scheduler_advance` does: the record, then its number."""
    ring = outbox.ring
    step = int(ring.step_counter)
    slot = step % RING_RECORDS
    ring.rows[slot] = value
    ring.counts[slot] = value
    ring.step_counter.add_(1)
    ring.sequence[slot] = step + 1


def write(outbox: RecordQueue, value: int) -> None:
    if isinstance(outbox, RingOutbox):
        write_like_the_kernel(outbox, value)
    else:
        assert isinstance(outbox, Outbox)
        rows = torch.full((NUM_ROWS, 4), value, dtype=torch.int64)
        outbox.stage(rows, torch.full((NUM_COUNTS,), value, dtype=torch.int64))
    outbox.note_launch()


@pytest.fixture(params=[Outbox, RingOutbox])
def outbox(request):
    return request.param(NUM_ROWS, CPU)


def test_records_come_in_order(outbox):
    for value in range(3 * RING_RECORDS):
        write(outbox, value)
        if outbox.num_unread == 3:
            record = outbox.read()
            assert np.all(record.rows == value - 2)
            assert record.counts == [value - 2] * NUM_COUNTS
    assert outbox.num_unread == 2


def test_a_record_does_not_change_until_the_next_is_read(outbox):
    """The host launches as many steps as it may; each writes its record."""
    write(outbox, 1)
    record = outbox.read()
    while outbox.has_room:
        write(outbox, 2)
    assert np.all(record.rows == 1)
    assert record.counts == [1] * NUM_COUNTS


def test_a_full_ring_is_refused(outbox):
    while outbox.has_room:
        write(outbox, 0)
    assert outbox.num_unread == RING_RECORDS - MIN_FREE_RECORDS + 1
    with pytest.raises(AssertionError, match="full"):
        outbox.note_launch()


def test_nothing_to_read(outbox):
    with pytest.raises(AssertionError, match="no record"):
        outbox.read()


def test_discard_forgets_records(outbox):
    for value in range(5):
        write(outbox, value)
    outbox.discard()
    assert outbox.num_unread == 0
    write(outbox, 9)
    assert np.all(outbox.read().rows == 9)


def test_discard_forgets_steps_that_nobody_noted():
    outbox = RingOutbox(NUM_ROWS, CPU)
    for value in range(RING_RECORDS + 3):
        write_like_the_kernel(outbox, value)
    outbox.discard()
    write(outbox, 7)
    assert outbox.num_unread == 1
    assert np.all(outbox.read().rows == 7)


def test_a_staged_record_is_read_after_its_launch_is_noted():
    outbox = Outbox(NUM_ROWS, CPU)
    outbox.stage(torch.ones(NUM_ROWS, 4).long(), torch.ones(NUM_COUNTS).long())
    assert outbox.num_unread == 0
    outbox.note_launch()
    assert np.all(outbox.read().rows == 1)


def test_read_waits_for_the_number():
    outbox = RingOutbox(NUM_ROWS, CPU)
    outbox.note_launch()
    records = []
    reader = threading.Thread(target=lambda: records.append(outbox.read()), daemon=True)
    reader.start()
    time.sleep(0.05)
    assert not records, "read before the record was written"
    write_like_the_kernel(outbox, 4)
    reader.join(timeout=10)
    assert records[0].rows[0, COLUMN_TOKEN] == 4


def test_a_number_of_the_last_round_is_not_taken_for_the_next():
    outbox = RingOutbox(NUM_ROWS, CPU)
    for value in range(RING_RECORDS):
        write(outbox, value)
        outbox.read()
    outbox.note_launch()
    reader = threading.Thread(target=outbox.read, daemon=True)
    reader.start()
    reader.join(timeout=0.05)
    assert reader.is_alive(), "an old record was taken for a new one"
    write_like_the_kernel(outbox, 0)
    reader.join(timeout=10)


def test_a_record_that_never_comes_is_an_error(monkeypatch):
    monkeypatch.setattr(outbox_module, "CHECK_SECONDS", 0.01)
    outbox = RingOutbox(NUM_ROWS, CPU)
    monkeypatch.setattr(outbox, "_is_device_idle", lambda: True)
    write(outbox, 0)
    outbox.read()
    outbox.note_launch()
    with pytest.raises(EngineError, match="never wrote record 1"):
        outbox.read()


class Loop:
    """A running loop on the device, as the outbox sees it."""

    ended_at: int | None = None
    num_read = 0

    def note_read(self, num_read: int) -> None:
        self.num_read = num_read


def test_a_loop_begins_with_nothing_unread_and_is_told_of_every_record():
    outbox, loop = RingOutbox(NUM_ROWS, CPU), Loop()
    for value in range(RING_RECORDS + 7):
        write(outbox, value)
        outbox.read()
    outbox.note_loop(loop)
    assert loop.num_read == RING_RECORDS + 7
    for value in range(2):
        write_like_the_kernel(outbox, value)
    loop.ended_at = RING_RECORDS + 9
    for value in range(2):
        record = outbox.read_loop()
        assert record is not None
        assert np.all(record.rows == value)
        assert loop.num_read == RING_RECORDS + 8 + value
    assert outbox.read_loop() is None
    write(outbox, 5)
    assert np.all(outbox.read().rows == 5)
