"""Faults on purpose, for tests of what clients see: `COMPILED_ENGINE_FAULT=KIND@STEP[:SECONDS]`.

The engine process reads the variable once, at its start; without it nothing of this runs. Kinds:

- `raise`: the host fails before the step.
- `exit`: the process ends at once, without a word.
- `sleep`: the host sleeps before the step.
- `oom`: the model part of the step raises torch's out-of-memory error; with CUDA graphs, that of
  the next step that is not replayed.
- `abort`: every request is given up before the step.
- `nan`: the newest request's cached values become NaN, so its logits of the step are: of the first
  step from this one on in which its last page is not shared.
- `token`: the sampler gives the newest request an id that the vocabulary does not have: in the
  first step from this one on that computes it; with CUDA graphs, the first such not replayed.
- `retract`: the newest request's pages are taken back before the step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from compiled_engine.errors import ConfigError
from compiled_engine.loop import StepLoop
from compiled_engine.pieces import Sampler, StepPieces
from compiled_engine.sampler import Sampled
from compiled_engine.scheduler.state import BLOCKED, PREFILL, RETRACTED

VARIABLE = "COMPILED_ENGINE_FAULT"
FaultKind = Literal["raise", "exit", "sleep", "oom", "abort", "nan", "token", "retract"]
EXIT_FAULT = 99


class Fault:
    """One fault at one step.

    Args:
        kind: what goes wrong.
        step: in which step since the engine's start, from 1.
        seconds: how long it sleeps.
    """

    def __init__(self, kind: FaultKind, step: int, seconds: float = 0.0) -> None:
        self.kind = kind
        self.step = step
        self.seconds = seconds
        self._victim: int | None = None  # request that is spoilt
        self._is_spent = False
        self._pieces: StepPieces | None = None  # whose samplers can be made to go wrong
        self._spoilt_row: int | None = None  # by the next call of a sampler

    def before_step(self, loop: StepLoop) -> bool:
        """Acts if the next step is the one; returns whether every request is to be given up."""
        if self.kind in ("nan", "token") and loop.stats.num_steps + 1 >= self.step:
            self._spoil_newest(loop)
        if loop.stats.num_steps + 1 != self.step:
            return False
        if self.kind == "raise":
            raise RuntimeError(f"fault on purpose at step {self.step}")
        if self.kind == "exit":
            os._exit(EXIT_FAULT)
        if self.kind == "sleep":
            time.sleep(self.seconds)
        if self.kind == "oom":
            self._spoil_head(loop)
        if self.kind == "retract":
            _retract_newest(loop)
        return self.kind == "abort"

    def _spoil_head(self, loop: StepLoop) -> None:
        """The next call of the model's head runs out of memory, and only that."""
        pieces = loop.executor.pieces
        head: Callable[[Tensor], Tensor] = pieces.head

        def spoilt(_: Tensor) -> Tensor:
            pieces.head = head  # type: ignore[method-assign,assignment]
            raise torch.OutOfMemoryError(f"fault on purpose at step {self.step}")

        pieces.head = spoilt  # type: ignore[method-assign,assignment]

    def _spoil_newest(self, loop: StepLoop) -> None:
        """NaN into the newest request's cache, or no token to it, until it has ended."""
        rows = loop.rows_in_use()
        if self._victim is None and rows:
            self._victim = next(reversed(rows))
        if self._victim is None or self._is_spent:
            return
        if self._victim not in rows:
            self._is_spent, self._spoilt_row = True, None
        elif self.kind == "nan":
            _spoil_cache(loop, rows[self._victim])
        else:
            self._spoil_token(loop.executor.pieces, rows[self._victim])

    def _spoil_token(self, pieces: StepPieces, row: int) -> None:
        self._spoilt_row = row
        if self._pieces is not pieces:
            self._pieces = pieces
            for variant, sampler in pieces.sample.items():
                pieces.sample[variant] = partial(self._sample, sampler, pieces.vocab_size)

    def _sample(self, sampler: Sampler, vocab_size: int, *arguments: object) -> Sampled:
        """Goes wrong once, so that no graph is captured of it."""
        sampled = sampler(*arguments)
        row, self._spoilt_row = self._spoilt_row, None
        if row is None:
            return sampled
        tokens = sampled.tokens.clone()
        tokens[row] = vocab_size
        return sampled._replace(tokens=tokens)


def _spoil_cache(loop: StepLoop, row: int) -> None:
    """NaN in place of the last computed token's values, unless its page may be shared."""
    executor = loop.executor
    state, page_size = executor.state, executor.shape.page_size
    group = state.groups[0]
    last = (state.num_computed[row].long() - 1).clamp_min(0)
    page = group.block_table[row, last // page_size].long()
    is_running = (state.state[row] >= PREFILL) & (state.state[row] <= BLOCKED)
    is_own = is_running & (state.num_computed[row] > 0) & (group.uid[page] == 0)
    # Nobody reads the null page.
    page = torch.where(is_own, page, 0)
    values = executor.caches[-1].v_cache
    values[page, last % page_size] = float("nan")


def _retract_newest(loop: StepLoop) -> None:
    """What `plan` does to a victim under page pressure."""
    in_use = loop.rows_in_use()
    if not in_use:
        return
    request_id, row = list(in_use.items())[-1]
    state = loop.executor.state
    row_state = state.state[row]
    is_resident = (row_state >= PREFILL) & (row_state <= BLOCKED)
    state.num_retractions.add_(is_resident)
    # Asking the device makes it wait, which a step's own record does not need.
    loop.stats.note_retracted([request_id] if is_resident else [])
    row_state.copy_(torch.where(is_resident, RETRACTED, row_state))


def fault_of(text: str | None) -> Fault | None:
    """The fault that `VARIABLE`'s value asks for; None for none.

    Raises:
        ConfigError: it is no such value.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\w+)@(\d+)(?::(\d+(?:\.\d+)?))?", text)
    if match is None or match[1] not in get_args(FaultKind):
        raise ConfigError(f"{VARIABLE} is {text!r}; it must be KIND@STEP or KIND@STEP:SECONDS")
    return Fault(cast("FaultKind", match[1]), int(match[2]), float(match[3] or 0))
