"""What the loop knows of every seat: all of it, and what reading a step's record takes, by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from compiled_engine.outbox import (
    COLUMN_FLAGS,
    COLUMN_GEN,
    FLAG_EMITTED,
    FLAG_RETRACTED,
    NUM_COLUMNS,
)
from compiled_engine.request import Request
from compiled_engine.sampler import Variant


@dataclass
class Seat:
    """A request in a row, from submit until the row is FREE again."""

    request: Request
    row: int
    gen: int
    max_len: int
    stop_ids: tuple[int, ...]
    seed: int
    variant: Variant
    num_prompt: int
    is_over: bool = False  # finished, failed or aborted: no more events


class Started(NamedTuple):
    """Seats that have their first token and run on."""

    num_rows: int
    places: np.ndarray  # [4, N] of their columns in a record's rows, as one run of numbers
    expected: bytes  # [2, N] int64: generations, and the flags of a row that gained a token
    request_ids: bytes


class SeatColumns:
    """What the reader of records needs of every seat, by row."""

    def __init__(self, num_rows: int) -> None:
        self.gens = np.zeros(num_rows, np.int64)  # 0 = no seat
        self.request_ids = np.zeros(num_rows, np.int64)
        self.has_started = np.zeros(num_rows, np.bool_)
        self.is_over = np.zeros(num_rows, np.bool_)
        self._started: Started | None = None

    def take(self, row: int, gen: int, request_id: int) -> None:
        """A request gets the row."""
        self.gens[row], self.request_ids[row] = gen, request_id
        self.has_started[row] = self.is_over[row] = False
        self._started = None

    def start(self, row: int) -> None:
        """The row's request has its first token."""
        self.has_started[row] = True
        self._started = None

    def end(self, row: int) -> None:
        """The row's request is over."""
        self.is_over[row] = True
        self._started = None

    def leave(self, row: int) -> None:
        """The row is free."""
        self.gens[row] = 0
        self._started = None

    def retracted(self, rows: np.ndarray) -> list[int]:
        """Ids of the requests whose pages a step took back.

        Args:
            rows: [R + 1, 4] int64, those of the step's record.
        """
        is_retracted = (rows[:-1, COLUMN_FLAGS] & FLAG_RETRACTED) != 0
        # Rows whose generation differs have not seen their submit yet.
        is_ours = (self.gens > 0) & (rows[:-1, COLUMN_GEN] == self.gens) & ~self.is_over
        return list(self.request_ids[is_retracted & is_ours].tolist())

    def started(self) -> Started:
        """Kept until a seat changes: most steps ask for the same."""
        if self._started is None:
            rows = np.nonzero(self.has_started & ~self.is_over & (self.gens > 0))[0]
            places = rows * NUM_COLUMNS + np.arange(NUM_COLUMNS)[:, None]
            flags = np.full(len(rows), FLAG_EMITTED)
            expected = self.gens[rows].tobytes() + flags.tobytes()
            request_ids = self.request_ids[rows].tobytes()
            self._started = Started(len(rows), places, expected, request_ids)
        return self._started
