"""Which step the host launches next, from numbers that are one step old.

Whatever is chosen, the device's plan is right: too small a step delays, too large a one pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compiled_engine.prefix_guess import PrefixGuess
from compiled_engine.sampler import Variant
from compiled_engine.scheduler.advance import (
    COUNT_RESIDENT_ROWS,
    COUNT_STEP_TOKENS,
    COUNT_WANTED_TOKENS,
)
from compiled_engine.step import StepExecutor
from compiled_engine.step_key import StepKey
from compiled_engine.step_times import StepTimes


class Seen(NamedTuple):
    """What the loop knows when it chooses.

    Attributes:
        num_live: requests in rows that go on.
        num_seats: rows in use.
        unstarted: row -> prompt tokens, of those without a token yet.
        counts: of the newest record, zeros before the first.
        num_prompt_places: places for prompts in steps that were launched and not read.
        num_forced: tokens that grammars put on rows now, not counted yet.
    """

    num_live: int
    num_seats: int
    unstarted: dict[int, int]
    counts: Sequence[int]
    num_prompt_places: int
    num_forced: int = 0

    @property
    def num_ungranted(self) -> int:
        """Tokens that rows on the device wanted and did not get."""
        return self.counts[COUNT_WANTED_TOKENS] - self.counts[COUNT_STEP_TOKENS]


class StepChoice:
    """Chooses steps.

    Args:
        executor: whose steps.
        guess: what prompts on their way will find cached.
        step_times: limits the time of mixed steps; None does not.

    Attributes:
        max_tokens: places that a step where prompts wait has at most; what an engine was built for,
            or fewer, to see how it would do with those.
    """

    def __init__(
        self, executor: StepExecutor, guess: PrefixGuess, step_times: StepTimes | None
    ) -> None:
        self._executor = executor
        self._guess = guess
        self.step_times = step_times
        self.max_tokens = executor.buckets[-1]

    def choose(self, seen: Seen, variant: Variant) -> StepKey:
        """The step to launch where prompts wait: places for what the device could use.

        Rows that run get a place each, unserved prompts what they still want, waiting prompts what
        is new in them.
        """
        executor = self._executor
        if executor.reads_plans:
            return executor.key_of(self.max_tokens, variant, is_mixed=True)
        wanted = seen.num_live + seen.num_ungranted + seen.num_forced
        if seen.counts[COUNT_RESIDENT_ROWS] < seen.num_seats:
            wanted += self._guess.num_needed()
        # Steps launched and not read yet have served part of that already.
        wanted = max(seen.num_live, wanted - seen.num_prompt_places)
        if self.step_times is not None and seen.num_live > len(seen.unstarted):
            most = self.step_times.most_tokens(_context(seen))
            wanted = min(wanted, max(most, seen.num_live))
        return executor.key_of(min(wanted, self.max_tokens), variant, is_mixed=True)

    def learn(self, seen: Seen, key: StepKey, seconds: float) -> None:
        """Notes what a mixed step took."""
        if self.step_times is not None:
            self.step_times.learn(key.num_tokens, _context(seen), seconds)


def _context(seen: Seen) -> int:
    """Tokens in front of the prompt chunks that are computed now, at most."""
    longest = max(seen.unstarted.values(), default=0)
    return max(0, longest - seen.num_ungranted)
