"""How long mixed steps take, so that the host can keep them below a limit.

Used by `--max-step-ms`: while requests decode, a prompt is computed in chunks no larger than what
fits into the limit. Time is modelled as a measured part for the tokens alone and a part for
attention that grows with the context in front of the chunk; the latter's rate is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Share of the limit that is planned for: the model is never exact.
PLANNED_SHARE = 0.9
MIN_CONTEXT_TO_LEARN = 2048


def shortest_times(keys: Mapping[int, Any], run: Callable[[Any], None]) -> dict[int, float]:
    """Seconds on the GPU of `run(key)` by the key's number: the shortest of three times."""
    seconds: dict[int, float] = {}
    for number, key in keys.items():
        taken = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(key)
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        seconds[number] = min(taken)
    return seconds


class StepTimes:
    """Largest chunk within a limit.

    Args:
        limit_s: seconds a step may take.
        base_s: measured seconds by token count, without context.
        attention_s: first guess of the seconds one token costs for each token of its context.
    """

    def __init__(self, limit_s: float, base_s: Mapping[int, float], attention_s: float) -> None:
        self._limit_s = limit_s
        self._base_s = dict(sorted(base_s.items()))
        self._attention_s = attention_s

    def with_limit(self, limit_s: float) -> StepTimes:
        """The same measurements and another limit."""
        return StepTimes(limit_s, self._base_s, self._attention_s)

    def estimate(self, num_tokens: int, context: int) -> float:
        """Seconds of a step of one of the measured sizes."""
        return self._base_s[num_tokens] + self._attention_s * num_tokens * context

    def most_tokens(self, context: int) -> int:
        """The largest measured size within the limit; the smallest one if none is."""
        planned = self._limit_s * PLANNED_SHARE
        fitting = [n for n in self._base_s if self.estimate(n, context) <= planned]
        return max(fitting, default=min(self._base_s))

    def learn(self, num_tokens: int, context: int, seconds: float) -> None:
        """Takes in what a step took; times of steps with little context say nothing new."""
        if num_tokens not in self._base_s or context < MIN_CONTEXT_TO_LEARN:
            return
        seen = max(0.0, seconds - self._base_s[num_tokens]) / (num_tokens * context)
        # Up at once, down slowly: a step that is too long is worse than one that is too short.
        # What is far off was a pause of the host; it counts as a step twice as slow as expected.
        seen = min(seen, 2 * self._attention_s)
        self._attention_s = max(seen, 0.9 * self._attention_s + 0.1 * seen)
