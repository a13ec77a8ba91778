"""Compiles the grammars of requests, off the step loop, within limits, each text once.

`GrammarService.start` returns at once; a few threads do the work: they have the grammar tried in
another process (see `grammar_compiler`) and then compile it here. Nothing is loaded before the
first grammar.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from compiled_engine.errors import InvalidRequestError
from compiled_engine.grammar_compiler import (
    WALL_LIMIT_S,
    Compiler,
    TokenTable,
    Trial,
    Verdict,
    Vocabularies,
    short_message,
    vocabularies_of,
)
from compiled_engine.jump_forward import TextEncoder
from compiled_engine.request import GrammarSpec

NUM_THREADS = 4
# A grammar that waits longer for its turn is refused: others are being compiled all the time.
QUEUE_LIMIT_S = 30.0
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20
# A refusal is remembered, but not for ever: the machine may only have been busy.
REFUSAL_SECONDS = 60.0
# How long the other process may need to start.
START_LIMIT_S = 60.0


@dataclass
class _Entry:
    future: Future[Any]
    num_bytes: int = 0
    forget_at: float | None = None


class GrammarService:
    """Compiled grammars by their text.

    Args:
        load_tokens: called once, in a thread, before the first compile.
        encodes: make an `encoder`.

    Attributes:
        encoder: of forced text; there once a grammar was compiled, if it is wanted at all.
    """

    def __init__(self, load_tokens: Callable[[], TokenTable], *, encodes: bool = True) -> None:
        self._load_tokens = load_tokens
        self._encodes = encodes
        self.encoder: TextEncoder | None = None
        self._table: TokenTable | None = None  # until the compiler is there
        self._entries: OrderedDict[GrammarSpec | None, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec | None, _Entry, float] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._compiler: Compiler | None = None
        self._vocabularies: Vocabularies | None = None
        self._trials: TrialProcess | None = None
        self._loaded_at = 0.0
        weakref.finalize(self, _stop_threads, self._jobs)

    @property
    def compiler(self) -> Compiler:
        """Makes matchers; there once a grammar was compiled."""
        assert self._compiler is not None
        return self._compiler

    def start(self, spec: GrammarSpec | None) -> Future[Any]:
        """Begins to compile, unless that was done before; the result is shared.

        Without a grammar the result is the text of every token id, and `compiler` is there. The
        future's exception is an InvalidRequestError with a message for the client.
        """
        now = time.monotonic()
        with self._lock:
            entry = self._entries.get(spec)
            if entry is not None and (entry.forget_at is None or now < entry.forget_at):
                self._entries.move_to_end(spec)
                return entry.future
            entry = _Entry(Future())
            self._entries[spec] = entry
            self._entries.move_to_end(spec)
        if not self._threads:
            work = weakref.WeakMethod(self._work)
            self._threads = [
                threading.Thread(target=_serve, args=(self._jobs, work), daemon=True)
                for _ in range(NUM_THREADS)
            ]
            for thread in self._threads:
                thread.start()
        self._jobs.put((spec, entry, now))
        return entry.future

    def _work(self, spec: GrammarSpec | None, entry: _Entry, queued_at: float) -> None:
        try:
            compiled = self._compile(spec, queued_at)
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                error = InvalidRequestError(f"the grammar cannot be compiled: {error}")
            entry.forget_at = time.monotonic() + REFUSAL_SECONDS
            entry.future.set_exception(error)
        else:
            entry.num_bytes = int(compiled.memory_size_bytes) if spec is not None else 0
            entry.future.set_result(compiled)
        self._evict()

    def _compile(self, spec: GrammarSpec | None, queued_at: float) -> Any:
        compiler, trials = self._loaded()
        if spec is None:
            return compiler.token_bytes
        if time.monotonic() - max(queued_at, self._loaded_at) > QUEUE_LIMIT_S:
            raise InvalidRequestError(
                f"too many grammars are being compiled: this one has waited for {QUEUE_LIMIT_S:g} s"
            )
        refusal = trials.run(spec)
        if refusal is not None:
            raise InvalidRequestError(refusal)
        try:
            return compiler.compile(spec)
        except RuntimeError as error:
            raise InvalidRequestError(short_message(error)) from error

    def _loaded(self) -> tuple[Compiler, TrialProcess]:
        with self._loading:
            if self._vocabularies is None:
                self._table = self._load_tokens()
                self._vocabularies = vocabularies_of(self._table)
            if self._trials is None or not self._trials.is_alive:
                self._trials = TrialProcess(self._vocabularies)
            if self._compiler is None:
                compiler = Compiler(self._vocabularies)
                if self._encodes:
                    self.encoder = self._new_encoder(compiler)
                self._compiler, self._table = compiler, None
                # Waits until it has started.
                self._trials.run(GrammarSpec("json_object"), START_LIMIT_S + WALL_LIMIT_S)
                self._loaded_at = time.monotonic()
            return self._compiler, self._trials

    def _new_encoder(self, compiler: Compiler) -> TextEncoder:
        table = self._table
        assert table is not None
        return TextEncoder.from_backend(table.backend, compiler.token_bytes, table.special_ids)

    def _evict(self) -> None:
        """Forgets what was not used for longest, where there is too much."""
        with self._lock:
            total = sum(entry.num_bytes for entry in self._entries.values())
            for spec in list(self._entries):
                if len(self._entries) <= MAX_CACHED and total <= MAX_CACHED_BYTES:
                    break
                if self._entries[spec].future.done():
                    total -= self._entries.pop(spec).num_bytes


def _serve(jobs: queue.SimpleQueue[Any], work: weakref.WeakMethod[Any]) -> None:
    """Runs jobs until None comes or their service is gone."""
    while (job := jobs.get()) is not None:
        method = work()
        if method is None:
            return
        method(*job)
        del method, job


def _stop_threads(jobs: queue.SimpleQueue[Any]) -> None:
    for _ in range(NUM_THREADS):
        jobs.put(None)


class TrialProcess:
    """The process that tries grammars; see `grammar_compiler`. Usable from several threads.

    Args:
        vocabularies: what it compiles for.
    """

    def __init__(self, vocabularies: Vocabularies) -> None:
        # It must find the same modules and must not touch the GPU.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "compiled_engine.grammar_compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self._waiting: dict[int, Future[str | None]] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_process, self._process)
        thread = threading.Thread(
            target=_read_verdicts, args=(self._process, self._waiting), daemon=True
        )
        thread.start()
        self._write(msgspec.json.encode(vocabularies))

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def run(self, spec: GrammarSpec, limit_s: float = 2 * WALL_LIMIT_S) -> str | None:
        """Why the grammar is refused, or None. Blocks for at most `limit_s`."""
        trial = Trial(next(self._numbers), spec)
        future: Future[str | None] = Future()
        self._waiting[trial.number] = future
        try:
            self._write(msgspec.json.encode(trial))
            return future.result(limit_s)
        except (OSError, TimeoutError):
            self._end()
            return "the process that compiles grammars has ended; try again"
        finally:
            self._waiting.pop(trial.number, None)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()


def _read_verdicts(
    process: subprocess.Popen[bytes], waiting: dict[int, Future[str | None]]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        verdict = msgspec.json.decode(line, type=Verdict)
        future = waiting.get(verdict.number)
        if future is not None:
            future.set_result(verdict.error)
    for future in list(waiting.values()):
        if not future.done():
            future.set_result("the process that compiles grammars has ended; try again")


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
