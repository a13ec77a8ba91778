"""The engine process's server without a process or a socket, turned by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from compiled_engine.engine import Engine
from compiled_engine.engine_process import EngineServer
from compiled_engine.faults import Fault
from compiled_engine.ipc import ClientFrame, ControlCall, EngineFrame, EngineStatus
from compiled_engine.request import Request, SamplingParams, TokenEvent
from tests.helpers.engines import GREEDY

PROMPTS = [[5 + i, 6, 7, 8, 9, 10 + i, 11] for i in range(4)]


class _Channel:
    """The engine's end of the socket, without a socket: what comes in is scripted."""

    def __init__(self) -> None:
        self.status = EngineStatus()
        self.busy_since: float | None = None
        self.incoming: list[ClientFrame] = []
        self.sent: list[EngineFrame] = []

    def send(self, frame: EngineFrame) -> None:
        self.sent.append(frame)

    def receive(self, wait_ms: int) -> list[ClientFrame]:
        taken, self.incoming = self.incoming, []
        return taken

    def is_status_due(self) -> bool:
        return False


class TurnedEngine:
    """An `EngineServer` turned by hand.

    Attributes:
        tokens: by request id.
        ends: last event by request id.
        queue_s: what the frames said of it, by request id.
        retracted: likewise, summed up.
    """

    def __init__(self, engine: Engine, fault: Fault | None = None) -> None:
        self.channel = _Channel()
        self.loop = engine.loop
        self.server = EngineServer(engine, self.channel, fault)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, TokenEvent] = {}
        self.queue_s: dict[int, float] = {}
        self.retracted: Counter[int] = Counter()
        self._num_read = 0

    def turn(self, frame: ClientFrame | None = None) -> None:
        """One round, in which the frame arrives."""
        if frame is not None:
            self.channel.incoming.append(frame)
        self.server._turn()
        for sent in self.channel.sent[self._num_read :]:
            self.queue_s |= sent.queue_s
            self.retracted.update(sent.retracted)
            for event in (*sent.events, *(sent.tokens or ())):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    self.ends[event.request_id] = event
        self._num_read = len(self.channel.sent)

    def submit(
        self, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = GREEDY
    ) -> None:
        """Submits a request for each prompt, numbered from 0."""
        self.turn(
            ClientFrame(
                submits=[
                    Request(request_id=i, prompt_token_ids=prompt, params=params)
                    for i, prompt in enumerate(prompts)
                ]
            )
        )

    def finish(self, num_requests: int = len(PROMPTS)) -> None:
        """Turns until so many requests have ended and nothing is left to do."""
        for _ in range(300):
            if len(self.ends) == num_requests and not self.loop.has_work:
                return
            self.turn()
        raise AssertionError("requests do not end")

    def call(self, action: str, **options: Any) -> tuple[str | None, str]:
        """Refusal and path of a control call."""
        self.turn(ClientFrame(controls=[ControlCall(call_id=7, action=action, **options)]))
        for _ in range(20):
            results = [r for frame in self.channel.sent for r in frame.control_results]
            if results:
                for frame in self.channel.sent:
                    frame.control_results.clear()
                assert [result.call_id for result in results] == [7]
                return results[0].refusal, results[0].path
            self.turn()
        raise AssertionError(f"{action} was never answered")
