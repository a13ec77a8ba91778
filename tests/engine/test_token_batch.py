"""Columns of a step's tokens: as events, empty, and through a frame."""

from __future__ import annotations

import msgspec
import numpy as np

from compiled_engine.ipc import EngineFrame
from compiled_engine.request import TokenEvent
from compiled_engine.token_batch import TokenBatch


def batch() -> TokenBatch:
    columns = ([7, 1 << 40, 9], [0, 151_935, 3], [0, 48, 16])
    data = (np.array(column, np.int64).tobytes() for column in columns)
    return TokenBatch(*data, ends={1: "length", 2: "stop"})


def test_a_batch_is_its_events():
    expected = [
        TokenEvent(7, [0], None, 0),
        TokenEvent(1 << 40, [151_935], "length", 48),
        TokenEvent(9, [3], "stop", 16),
    ]
    assert list(batch()) == expected
    assert len(batch()) == 3


def test_forced_tokens_stand_in_front_of_their_requests_new_one():
    forced = msgspec.structs.replace(batch(), forced={1 << 40: (5, 6), 77: (8,)})
    events = list(forced)
    assert [event.token_ids for event in events] == [[0], [5, 6, 151_935], [3]]
    assert events[1].finish_reason == "length"
    data = msgspec.msgpack.encode(EngineFrame(tokens=forced))
    assert list(msgspec.msgpack.decode(data, type=EngineFrame).tokens) == events


def test_an_empty_batch_is_false():
    assert not TokenBatch()
    assert list(TokenBatch()) == []


def test_a_batch_travels_in_a_frame():
    data = msgspec.msgpack.encode(EngineFrame(tokens=batch()))
    frame = msgspec.msgpack.decode(data, type=EngineFrame)
    assert frame.tokens == batch()
