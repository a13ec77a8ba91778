"""A tiny engine process for the tests of `IpcEngineClient`: real socket, scripted answers.

`main` loads for a moment, then answers each request with the ids 0, 1, 2, ... one a frame, until
`max_tokens`. Prompts choose oddities: [1] ends the process with a fatal frame, [2] never answers,
[3] reports a step that hangs. Control calls are done, but "flush_cache" is refused while requests
run.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from compiled_engine.ipc import ClientFrame, ControlResult, EngineFrame, EngineStatus
from compiled_engine.request import ModelLimits, Request, TokenEvent

LIMITS = ModelLimits(max_model_len=1000, vocab_size=1000, max_total_tokens=1000)
TICK_S = 0.005


class _FakeLoop:
    def __init__(self, socket: Any, frames: Any) -> None:
        self._socket = socket
        self._frames = frames
        self._running: dict[int, tuple[Request, int]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)
        self._status = EngineStatus(phase="ready", limits=LIMITS)
        self._results: list[ControlResult] = []
        self._queue_s: dict[int, float] = {}

    def receive(self) -> bool:
        """Takes all waiting frames; returns whether a shutdown was among them."""
        while self._socket.poll(0):
            frame = self._decoder.decode(self._socket.recv())
            if frame.submits or frame.aborts:
                self._frames.put(([r.request_id for r in frame.submits], frame.aborts))
            for request_id in frame.aborts:
                self._running.pop(request_id, None)
            for request in frame.submits:
                self._running[request.request_id] = (request, 0)
                self._queue_s[request.request_id] = 0.25
            for call in frame.controls:
                is_refused = call.action == "flush_cache" and self._running
                refusal = "busy" if is_refused else None
                self._results.append(
                    ControlResult(call_id=call.call_id, refusal=refusal, path=call.folder)
                )
            if frame.shutdown:
                return True
        return False

    def step(self) -> bool:
        """Sends one frame; returns whether it was the last one."""
        frame = EngineFrame(
            status=self._status,
            control_results=self._results,
            queue_s=self._queue_s,
            retracted=dict.fromkeys(self._running, 1),
        )
        self._results, self._queue_s = [], {}
        for request_id, (request, count) in list(self._running.items()):
            match request.prompt_token_ids:
                case [1]:
                    frame.fatal = "told to"
                case [2]:
                    continue
                case [3]:
                    self._status.step_age_s += 1.0
                    continue
            is_last = count + 1 == request.params.max_tokens
            reason = "length" if is_last else None
            frame.events.append(TokenEvent(request_id, [count], reason))
            if is_last:
                del self._running[request_id]
            else:
                self._running[request_id] = (request, count + 1)
        # An event nobody waits for must do no harm.
        frame.events.append(TokenEvent(-1, [0], None))
        self._socket.send(self._encoder.encode(frame))
        return frame.fatal is not None


def main(endpoint: str, frames: Any) -> None:
    """Runs until a shutdown frame comes or the script says so."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(endpoint)
    loading = EngineFrame(status=EngineStatus(phase="loading"))
    socket.send(msgspec.msgpack.encode(loading))
    time.sleep(0.05)
    loop = _FakeLoop(socket, frames)
    while not loop.receive():
        if loop.step():
            break
        time.sleep(TICK_S)
    socket.close(linger=500)
    context.term()
