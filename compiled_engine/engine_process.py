"""The engine process: builds an engine, runs its loop, speaks frames with the API process.

`engine_start` is its entry; the API process binds the endpoint. Exit codes: 0 asked to stop, 2 the
configuration cannot work (the last frame says why), 4 the engine failed (likewise), 5 the API
process is gone. Faults on purpose: `faults`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from compiled_engine.beside import Beside
from compiled_engine.config import EngineConfig, LoadFormat
from compiled_engine.device import device_note
from compiled_engine.engine import Engine, build_engine
from compiled_engine.errors import ConfigError, EngineError, InvalidRequestError
from compiled_engine.faults import VARIABLE, Fault, fault_of
from compiled_engine.ipc import (
    STATUS_INTERVAL_S,
    ClientFrame,
    ControlCall,
    ControlResult,
    EngineFrame,
    EngineStatus,
)
from compiled_engine.models.source import resolve_model
from compiled_engine.profiler import StepProfiler
from compiled_engine.request import FinishReason, Request, TokenEvent, validate_request
from compiled_engine.settings import BuildProgress, find_model
from compiled_engine.start_times import StartPhase, process_age_s

EXIT_STOPPED, EXIT_CONFIG, EXIT_FAILED, EXIT_ORPHANED = 0, 2, 4, 5
IDLE_WAIT_MS = 100

logger = logging.getLogger(__name__)


class Channel:
    """The engine's end of the socket. Heartbeats come from a thread while the engine is busy.

    A lock serialises the socket. A waiting `receive` holds it for at most `IDLE_WAIT_MS`; every
    frame sent postpones the next heartbeat, so a running engine sends none.
    """

    def __init__(self, endpoint: str, parent_pid: int) -> None:
        self.status = EngineStatus()
        self.busy_since: float | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 500)
        # No high-water mark: a send that waits for a stopped API process would hold the lock, and
        # the heartbeat could not notice that process's death.
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        self._last_sent = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)
        self._parent = parent_pid
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def send(self, frame: EngineFrame) -> None:
        """Sends one frame with the current status."""
        since = self.busy_since
        self.status.step_age_s = 0.0 if since is None else time.monotonic() - since
        frame.status = self.status
        with self._lock:
            self._socket.send(self._encoder.encode(frame))
            self._last_sent = time.monotonic()

    def receive(self, wait_ms: int) -> list[ClientFrame]:
        """Every frame that is here; waits up to `wait_ms` for a first one."""
        frames: list[ClientFrame] = []
        with self._lock:
            while self._socket.poll(wait_ms if not frames else 0):
                frames.append(self._decoder.decode(self._socket.recv()))
        return frames

    def close(self) -> None:
        """Sends what is queued and closes the socket."""
        self._is_closed.set()
        self._thread.join()
        with self._lock:
            self._socket.close()
        self._context.term()

    def is_status_due(self) -> bool:
        """Nothing was sent for `STATUS_INTERVAL_S`."""
        return time.monotonic() - self._last_sent >= STATUS_INTERVAL_S

    def _beat(self) -> None:
        while not self._is_closed.wait(STATUS_INTERVAL_S / 2):
            if os.getppid() != self._parent:
                os._exit(EXIT_ORPHANED)
            if self.is_status_due():
                self.send(EngineFrame())


class EngineServer:
    """Runs an engine's loop and turns frames into requests and events into frames."""

    def __init__(self, engine: Engine, channel: Channel, fault: Fault | None = None) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.loop.executor.survives_out_of_memory = True
        self.channel = channel
        self._fault = fault
        self._profiler = StepProfiler()
        self._is_stopping = False
        self._is_paused = False
        self._flushes: list[ControlCall] = []  # wait for the last rows to be given back
        self._results: list[ControlResult] = []

    def run(self) -> None:
        """Serves until a shutdown frame arrives."""
        status = self.channel.status
        status.phase = "ready"
        status.phase_detail = ""
        status.limits = self.engine.limits
        if self.engine.memory is not None:
            status.memory = dict(self.engine.memory.rows())
        self._update_status()
        self.channel.send(EngineFrame(start=self.engine.start))
        while not self._is_stopping:
            self._turn()
        if self._profiler.is_running:
            self._stop_profile()

    def _turn(self) -> None:
        """One round: take frames in, launch a step if there is work, send what it gave."""
        has_unread = self.loop.executor.outbox.num_unread > 0
        is_idle = not (self._may_step or has_unread)
        events = self._take_in(IDLE_WAIT_MS if is_idle else 0)
        # Reading the last records waits for the device too: it may hang there as well.
        self.channel.busy_since = time.monotonic()
        tokens = None
        if self._may_step:
            if self._fault is not None and self._fault.before_step(self.loop):
                text = "the engine gave the request up"
                events += self._give_up(self.loop.rows_in_use(), "abort", text)
            tokens = self.loop.step()
            events += self._end_what_was_too_large()
            if self._profiler.note_step():
                self._stop_profile()
        elif has_unread:
            events += self.loop.drain()
        else:  # what was compiled meanwhile is not taken up at the cost of the next request
            self.loop.executor.before_launch()
        events += self.loop.take_refusals()
        events += self._flush_if_idle()
        self.channel.busy_since = None
        if tokens or events or self._results or self.channel.is_status_due():
            self._update_status()
            results, self._results = self._results, []
            self.channel.send(
                EngineFrame(
                    tokens=tokens or None,
                    events=events,
                    queue_s=self.loop.queue_times.take(),
                    grammar_s=self.loop.take_grammar_waits(),
                    retracted=self.loop.stats.take_retracted(),
                    control_results=results,
                )
            )

    @property
    def _may_step(self) -> bool:
        """There is work, and nobody paused it; the last rows are given back even so."""
        return self.loop.has_work and not (self._is_paused and self._has_requests)

    @property
    def _has_requests(self) -> bool:
        return self.loop.num_running + self.loop.num_waiting > 0

    def _take_in(self, wait_ms: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for frame in self.channel.receive(wait_ms):
            for request in frame.submits:
                refused = self._submit(request)
                if refused is not None:
                    events.append(refused)
            for request_id in frame.aborts:
                self.loop.abort(request_id)
            for call in frame.controls:
                self._control(call)
            self._is_stopping = self._is_stopping or frame.shutdown
        return events

    # --- control --------------------------------------------------------------------------

    def _control(self, call: ControlCall) -> None:
        match call.action:
            case "flush_cache":
                self._flushes.append(call)
                return
            case "pause":
                self._is_paused = True
            case "continue":
                self._is_paused = False
            case "start_profile":
                self._start_profile(call)
                return
            case "stop_profile":
                self._stop_profile(call)
                return
        self._results.append(ControlResult(call_id=call.call_id))

    def _flush_if_idle(self) -> list[TokenEvent]:
        """Empties the prefix cache for whoever asked, or refuses while there are requests."""
        if not self._flushes:
            return []
        if self._has_requests:
            refusal = (
                f"{self.loop.num_running} requests run and {self.loop.num_waiting} wait: the cache "
                "can be flushed only when there are none"
            )
        elif self.loop.has_work:
            return []  # rows that ended are given back by the next steps
        else:
            refusal = None
            events = self.loop.drain()
            self.loop.reset_prefix_cache()
        calls, self._flushes = self._flushes, []
        self._results += [ControlResult(call_id=c.call_id, refusal=refusal) for c in calls]
        return [] if refusal else events

    def _start_profile(self, call: ControlCall) -> None:
        refusal, path = None, ""
        if self._profiler.is_running:
            refusal = "a profile runs already"
        else:
            try:
                path = str(self._profiler.start(Path(call.folder), call.num_steps))
            except OSError as error:
                refusal = f"the profile folder cannot be written to: {error}"
        self._results.append(ControlResult(call_id=call.call_id, refusal=refusal, path=path))

    def _stop_profile(self, call: ControlCall | None = None) -> None:
        """Writes the trace; without a call the profile ends by itself."""
        refusal, path = None, ""
        if not self._profiler.is_running:
            refusal = "no profile runs"
        else:
            self.channel.busy_since = None  # however long this takes, no step hangs
            try:
                path = str(self._profiler.stop())
                logger.info("wrote %s", path)
            except (OSError, RuntimeError) as error:
                refusal = f"the trace cannot be written: {error}"
                logger.warning("%s", refusal)
        if call is not None:
            self._results.append(ControlResult(call_id=call.call_id, refusal=refusal, path=path))

    # --- failures -------------------------------------------------------------------------

    def _end_what_was_too_large(self) -> list[TokenEvent]:
        """Ends the requests that made a step run out of memory; the others go on."""
        given = self.loop.executor.take_out_of_memory()
        if given is None:
            return []
        rows = self.loop.rows_in_use()
        served = [n for n, row in rows.items() if given[row]]
        # Prompts; without one, the request that came last.
        largest = [n for n in served if given[rows[n]] > 1] or served[-1:]
        if not largest:
            raise EngineError("a step ran out of memory and no request can be blamed")
        logger.error("a step ran out of memory: %d requests end with an error", len(largest))
        text = "the step that computed this request ran out of memory; send less at once"
        return self._give_up(largest, "error", text)

    def _give_up(
        self, request_ids: Iterable[int], reason: FinishReason, text: str
    ) -> list[TokenEvent]:
        events = []
        for request_id in request_ids:
            self.loop.abort(request_id)
            events.append(TokenEvent(request_id, [], reason, 0, text))
        return events

    def _submit(self, request: Request) -> TokenEvent | None:
        """Queues a request, or returns the event that ends it: never trusts the other side."""
        try:
            validate_request(request, self.engine.limits)
        except InvalidRequestError as error:
            return TokenEvent(request.request_id, [], "error", 0, error.message, is_refusal=True)
        self.loop.submit(request)
        return None

    def _update_status(self) -> None:
        status, stats = self.channel.status, self.loop.stats
        status.num_steps = stats.num_steps
        status.is_paused = self._is_paused
        status.num_requests_running = self.loop.num_running
        status.num_requests_waiting = self.loop.num_waiting
        status.num_pages_total = self.loop.executor.shape.num_pages - 1
        status.num_pages_active = stats.num_pages_active
        status.num_pages_cached = stats.num_pages_cached
        status.num_pages_free = stats.num_pages_free
        status.num_retractions = stats.num_retractions
        status.num_prompt_tokens = stats.num_prompt_tokens
        status.num_cached_tokens = stats.num_cached_tokens
        status.num_generated_tokens = stats.num_generated_tokens
        status.num_jumped_tokens = stats.num_jumped_tokens
        status.num_scheduler_errors = stats.num_scheduler_errors
        status.num_recompiles = self.engine.driver.refresh().num_recompiles


def serve(
    endpoint: str, config: EngineConfig, parent_pid: int, begun: Sequence[Beside] = ()
) -> int:
    """Builds and runs the engine; returns the process's exit code.

    Args:
        endpoint: address that the API process binds.
        config: of the engine.
        parent_pid: the API process.
        begun: what already runs beside, for the start table.
    """
    channel = Channel(endpoint, parent_pid)

    def report(phase: str, label: str, done: int, total: int) -> None:
        channel.status.phase = "loading" if phase == "loading" else "compiling"
        channel.status.phase_detail = f"{label} ({done}/{total})"

    try:
        fault = fault_of(os.environ.get(VARIABLE))
        channel.status.device_note = device_note(config.device)
        config = _find_folders(config, channel.status, report)
        imports = StartPhase(name="imports", seconds=process_age_s())
        engine = build_engine(config, report)
        engine.start.insert(0, imports)
        engine.start += [part.phase for part in begun]
        EngineServer(engine, channel, fault).run()
    except ConfigError as error:
        channel.send(EngineFrame(fatal=error.message))
        return EXIT_CONFIG
    except Exception as error:
        traceback.print_exc()
        channel.send(EngineFrame(fatal=f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    finally:
        channel.close()
    return EXIT_STOPPED


def _find_folders(
    config: EngineConfig, status: EngineStatus, progress: BuildProgress
) -> EngineConfig:
    """`config` with the folders that hold the model and its tokenizer, which go into `status`.

    The API process, which has no torch, loads the tokenizer from there while the weights load.
    """
    folder = find_model(config, progress)
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = str(resolve_model(config.tokenizer, config.cache_dir, with_weights=False))
    status.model_folder, status.tokenizer_folder = str(folder), tokenizer or str(folder)
    # A converted GGUF file is a folder of safetensors from here on.
    load_format: LoadFormat = "auto" if config.load_format == "gguf" else config.load_format
    return replace(config, model=str(folder), tokenizer=tokenizer, load_format=load_format)
