"""An engine without a model: every step gives each running request the next token of a list.

It speaks the frames of `ipc` as the engine process does, so the server in front of it is the real
one. Each request's tokens are those of the list from a place that its prompt's first token names.

Run as `python -m perf.instant_engine ENDPOINT TOKENS STEP_MS LOG`: one step every STEP_MS, the
monotonic time of each request's tokens written to LOG when the server shuts it down.
"""

from __future__ import annotations

import array
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from compiled_engine.ipc import ClientFrame, EngineFrame, EngineStatus
from compiled_engine.request import FinishReason, ModelLimits, Request
from compiled_engine.token_batch import TokenBatch

MAX_MODEL_LEN = 4096
IDLE_WAIT_MS = 100


class InstantEngine:
    """The rows of such an engine.

    Args:
        token_ids: what requests are given, one after another, from the start again at the end.
        vocab_size: of the tokenizer that reads them.

    Attributes:
        is_stopping: a shutdown frame came.
        num_steps: given so far.
    """

    def __init__(self, token_ids: list[int], vocab_size: int) -> None:
        self.is_stopping = False
        self._token_ids = token_ids
        self._limits = ModelLimits(
            max_model_len=MAX_MODEL_LEN, vocab_size=vocab_size, max_total_tokens=MAX_MODEL_LEN
        )
        self.num_steps = 0
        self._running: dict[int, tuple[int, int]] = {}  # request -> next place, tokens left
        self._names: dict[int, int] = {}  # request -> first token of its prompt
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)

    @property
    def has_work(self) -> bool:
        """Whether a step would give tokens."""
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        """What the running requests are called: the first token of their prompts."""
        return [self._names[request_id] for request_id in self._running]

    def take(self, data: bytes) -> None:
        """Takes one frame of the server."""
        frame = self._decoder.decode(data)
        for request in frame.submits:
            self._submit(request)
        for request_id in frame.aborts:
            self._running.pop(request_id, None)
        self.is_stopping = self.is_stopping or frame.shutdown

    def _submit(self, request: Request) -> None:
        first = request.prompt_token_ids[0]
        self._names[request.request_id] = first
        left = request.params.max_tokens or 1
        self._running[request.request_id] = (first % len(self._token_ids), left)

    def step(self) -> bytes:
        """One more token for each running request, and the status, as one frame."""
        ids, token_ids = array.array("q"), array.array("q")
        ends: dict[int, FinishReason] = {}
        for number, (request_id, (place, left)) in enumerate(list(self._running.items())):
            ids.append(request_id)
            token_ids.append(self._token_ids[place])
            self._running[request_id] = ((place + 1) % len(self._token_ids), left - 1)
            if left == 1:
                ends[number] = "length"
                del self._running[request_id]
        self.num_steps += 1
        nothing_cached = bytes(8 * len(ids))
        tokens = TokenBatch(ids.tobytes(), token_ids.tobytes(), nothing_cached, ends)
        status = EngineStatus(
            phase="ready",
            limits=self._limits,
            num_steps=self.num_steps,
            num_requests_running=len(self._running),
        )
        return self._encoder.encode(EngineFrame(tokens=tokens or None, status=status))


def run(endpoint: str, engine: InstantEngine, step_s: float) -> dict[int, list[float]]:
    """Serves until the server shuts it down; a step that is late does not move those after it.

    Returns:
        First prompt token -> monotonic times in seconds at which the request's tokens left.
    """
    context = zmq.Context()
    socket: Any = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(endpoint)
    sent: dict[int, list[float]] = {}
    due = time.monotonic()
    while not engine.is_stopping:
        wait_s = due - time.monotonic() if engine.has_work else IDLE_WAIT_MS / 1000
        while not engine.is_stopping and socket.poll(max(0, int(wait_s * 1000))):
            engine.take(socket.recv())
            wait_s = due - time.monotonic()
        if engine.has_work:
            time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + step_s, time.monotonic())
        names = engine.running
        data = engine.step()
        now_s = time.monotonic()
        for name in names:
            sent.setdefault(name, []).append(now_s)
        socket.send(data)
    socket.close(linger=500)
    context.term()
    return sent


def main() -> None:
    """See the module."""
    endpoint, tokens, step_ms, log = sys.argv[1:5]
    # The server has its processors for itself.
    others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
    if others:
        os.sched_setaffinity(0, others)
    given = json.loads(Path(tokens).read_text())
    engine = InstantEngine(given["token_ids"], given["vocab_size"])
    sent = run(endpoint, engine, float(step_ms) / 1000)
    Path(log).write_text(json.dumps(sent))


if __name__ == "__main__":
    main()
