"""The engine process: builds an engine, runs its loop, speaks frames with the API process.

Run as `python -m compiled_engine.engine_process ENDPOINT CONFIG_JSON PARENT_PID`. The API process
binds the endpoint. Exit codes: 0 asked to stop, 2 the configuration cannot work (the last frame
says why), 4 the engine failed (likewise), 5 the API process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace

import msgspec
import zmq

from compiled_engine.config import EngineConfig, LoadFormat, config_from_json
from compiled_engine.device import device_note
from compiled_engine.engine import Engine, build_engine
from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.ipc import STATUS_INTERVAL_S, ClientFrame, EngineFrame, EngineStatus
from compiled_engine.models.source import resolve_model
from compiled_engine.request import Request, TokenEvent, validate_request
from compiled_engine.settings import BuildProgress, find_model

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

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.channel = channel
        self._is_stopping = False

    def run(self) -> None:
        """Serves until a shutdown frame arrives."""
        status = self.channel.status
        status.phase = "ready"
        status.phase_detail = ""
        status.limits = self.engine.limits
        if self.engine.memory is not None:
            status.memory = dict(self.engine.memory.rows())
        self._update_status()
        self.channel.send(EngineFrame())
        while not self._is_stopping:
            self._turn()

    def _turn(self) -> None:
        """One round: take frames in, launch a step if there is work, send what it gave."""
        has_unread = self.loop.executor.outbox.num_unread > 0
        is_idle = not (self.loop.has_work or has_unread)
        events = self._take_in(IDLE_WAIT_MS if is_idle else 0)
        # Reading the last records waits for the device too: it may hang there as well.
        self.channel.busy_since = time.monotonic()
        tokens = None
        if self.loop.has_work:
            tokens = self.loop.step()
        elif has_unread:
            events += self.loop.drain()
        self.channel.busy_since = None
        if tokens or events or self.channel.is_status_due():
            self._update_status()
            self.channel.send(EngineFrame(tokens=tokens or None, events=events))

    def _take_in(self, wait_ms: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for frame in self.channel.receive(wait_ms):
            for request in frame.submits:
                refused = self._submit(request)
                if refused is not None:
                    events.append(refused)
            for request_id in frame.aborts:
                self.loop.abort(request_id)
            self._is_stopping = self._is_stopping or frame.shutdown
        return events

    def _submit(self, request: Request) -> TokenEvent | None:
        """Queues a request, or returns the event that ends it: never trusts the other side."""
        try:
            validate_request(request, self.engine.limits)
        except InvalidRequestError as error:
            return TokenEvent(request.request_id, [], "error", 0, error.message)
        self.loop.submit(request)
        return None

    def _update_status(self) -> None:
        status, stats = self.channel.status, self.loop.stats
        status.num_steps = stats.num_steps
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
        status.num_scheduler_errors = stats.num_scheduler_errors
        status.num_recompiles = self.engine.driver.refresh().num_recompiles


def serve(endpoint: str, config: EngineConfig, parent_pid: int) -> int:
    """Builds and runs the engine; returns the process's exit code."""
    channel = Channel(endpoint, parent_pid)

    def report(phase: str, label: str, done: int, total: int) -> None:
        channel.status.phase = "loading" if phase == "loading" else "compiling"
        channel.status.phase_detail = f"{label} ({done}/{total})"

    try:
        channel.status.device_note = device_note(config.device)
        config = _find_folders(config, channel.status, report)
        EngineServer(build_engine(config, report), channel).run()
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


def main() -> int:
    """Entry point of the process."""
    # Ctrl-C reaches the whole group; the API process drains and then says so in a frame.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    level = os.environ.get("COMPILED_ENGINE_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoint, config, parent_pid = sys.argv[1:4]
    return serve(endpoint, config_from_json(config), int(parent_pid))


if __name__ == "__main__":
    sys.exit(main())
