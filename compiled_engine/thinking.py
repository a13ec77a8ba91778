"""How far a request has thought, by its tokens, and which tokens end its thinking.

The helper of `grammar_rows` for requests with a budget. It reads the tokens' bytes, so a marker
counts however the model has cut it into tokens; a marker that has to be forced is written as the
tokenizer would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from compiled_engine.request import ThinkingBudget

# A row that nothing has to be forced on any more runs this many tokens without a mask.
WITHOUT_END = 2**30


class ThinkingState:
    """Follows one answer.

    Args:
        budget: of the request.
        token_bytes: text of every token id.

    Attributes:
        forced: the token that must come next; None where any may.
    """

    def __init__(self, budget: ThinkingBudget, token_bytes: Sequence[bytes]) -> None:
        self._budget = budget
        self._token_bytes = token_bytes
        self._opening = budget.opening.encode()
        self._enders = tuple(text.encode() for text in (budget.closing, *budget.enders))
        self._longest = max(map(len, (self._opening, *self._enders)))
        self._place: Literal["before", "inside", "after"] = "before" if self._opening else "inside"
        self._text = b""  # what a marker may still begin in
        self._num_used = 0
        self._num_forced = 0
        self._prepare()

    @property
    def num_free(self) -> int:
        """Tokens that may follow before one could have to be forced."""
        left = self._budget.max_tokens - self._num_used
        if self._place == "after":
            return WITHOUT_END
        # The next token may be the one that completes the opening.
        return left if self._place == "inside" else left + 1

    def take(self, token: int) -> None:
        """The answer's next token."""
        if self.forced is not None:
            self._num_forced += 1
            if self._num_forced == len(self._budget.closing_ids):
                self._num_forced = 0
                self._end()
        elif self._place != "after":
            self._text += self._token_bytes[token]
            if self._place == "inside":
                self._think()
            else:
                self._wait()
        self._prepare()

    def _think(self) -> None:
        self._num_used += 1
        if any(ender in self._text for ender in self._enders):
            self._end()
        else:
            self._text = self._text[-self._longest :]

    def _wait(self) -> None:
        """Before a possible opening: at the answer's start or, where it reopens, anywhere."""
        text = self._text if self._budget.reopens else self._text.lstrip()
        place = text.find(self._opening)
        if place == 0 or (place > 0 and self._budget.reopens):
            self._place, self._text = "inside", text[place + len(self._opening) :]
        elif self._budget.reopens:
            self._text = text[-self._longest :]
        elif not self._opening.startswith(text):
            self._place = "after"

    def _end(self) -> None:
        self._place, self._text = ("before" if self._budget.reopens else "after"), b""

    def _prepare(self) -> None:
        is_used_up = self._place == "inside" and self._num_used >= self._budget.max_tokens
        self.forced = self._budget.closing_ids[self._num_forced] if is_used_up else None
