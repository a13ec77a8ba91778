"""Frames between the API process and the engine process, and the socket they travel on.

One binary frame a step each way, never one a token. Both ends are non-blocking on the engine side;
the API side awaits. The socket lives in a private folder, so only this user's processes reach it.
"""

from __future__ import annotations

import os
import tempfile
from typing import Literal

import msgspec

from compiled_engine.request import ModelLimits, Request, TokenEvent
from compiled_engine.start_times import StartPhase
from compiled_engine.token_batch import TokenBatch

Phase = Literal["loading", "compiling", "ready", "draining"]

STATUS_INTERVAL_S = 0.25

ControlAction = Literal["flush_cache", "pause", "continue", "start_profile", "stop_profile"]


class ControlCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something the engine is to do between two steps, once.

    Attributes:
        call_id: comes back in the result.
        folder: where a profile is written.
        num_steps: a profile ends by itself after so many steps; 0 waits for "stop_profile".
    """

    call_id: int
    action: ControlAction
    folder: str = ""
    num_steps: int = 0


class ControlResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a `ControlCall`.

    Attributes:
        refusal: why it cannot be done in the present state; None if it was done.
        path: of the file that a profile goes into.
    """

    call_id: int
    refusal: str | None = None
    path: str = ""


class EngineStatus(msgspec.Struct, kw_only=True):
    """Counters and gauges of the engine, sent with a step's events and every `STATUS_INTERVAL_S`.

    Totals only grow. Gauges are as of the newest step record read back from the device.
    `step_age_s` is the age of the last finished step while work exists, else 0. While it loads,
    `phase_detail` is "label (done/total)". `device_note` says where it runs, if that may surprise.
    The folders are empty until the engine has found them. `memory` says where a GPU's memory went,
    by name in bytes; empty on a CPU. While `is_paused`, requests wait and no step is launched.
    """

    phase: Phase = "loading"
    phase_detail: str = ""
    is_paused: bool = False
    num_steps: int = 0
    step_age_s: float = 0.0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_pages_total: int = 0
    num_pages_active: int = 0
    num_pages_cached: int = 0
    num_pages_free: int = 0
    num_retractions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_jumped_tokens: int = 0
    num_scheduler_errors: int = 0
    num_recompiles: int = 0
    device_note: str = ""
    model_folder: str = ""
    tokenizer_folder: str = ""
    memory: dict[str, int] = {}
    limits: ModelLimits | None = None


class ClientFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """API process -> engine process."""

    submits: list[Request] = []
    aborts: list[int] = []
    controls: list[ControlCall] = []
    shutdown: bool = False


class EngineFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Engine process -> API process. `fatal` is the last frame of an engine that cannot go on.

    `tokens` are those of a step; `events` are those of requests that were refused, and of several
    steps at once. `queue_s` has, for requests that got a row, the seconds they waited for it;
    `grammar_s`, for requests under masks that got a row or ended, those that compiling and making
    the masks took so far. `retracted` says how often requests were retracted since the frame
    before. `start` says where the time of the start went, once.
    """

    tokens: TokenBatch | None = None
    events: list[TokenEvent] = []
    queue_s: dict[int, float] = {}
    grammar_s: dict[int, float] = {}
    retracted: dict[int, int] = {}
    control_results: list[ControlResult] = []
    status: EngineStatus | None = None
    fatal: str | None = None
    start: list[StartPhase] = []


def new_endpoint() -> str:
    """A fresh `ipc://` address in a folder only this user can enter."""
    folder = tempfile.mkdtemp(prefix="compiled-engine-")
    return f"ipc://{os.path.join(folder, 'engine.sock')}"


def remove_endpoint(endpoint: str) -> None:
    """Deletes the socket file and its folder; missing ones are fine."""
    path = endpoint.removeprefix("ipc://")
    if os.path.exists(path):
        os.unlink(path)
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        os.rmdir(folder)
