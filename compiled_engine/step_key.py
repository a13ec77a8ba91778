"""What tells one step from another: the key under which its CUDA graph is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compiled_engine.sampler import Variant


class StepKey(NamedTuple):
    """What tells one captured step from another.

    A decode step (`is_mixed` false) is right for any plan too: the device decides what runs, the
    host only what it is fastest for.
    """

    num_tokens: int
    is_mixed: bool
    variant: Variant
    is_masked: bool = False  # rows with a grammar are sampled under their masks
    num_top: int = 0  # likeliest tokens recorded with each sampled one; 0 records nothing
    num_scored: int = 0  # prompt positions to score, at most; such steps are not captured
    num_score_top: int = 0  # likeliest tokens recorded with each of them

    @property
    def has_logprobs(self) -> bool:
        """Whether the step makes log probabilities."""
        return self.num_top > 0 or self.num_scored > 0


def masked_keys(keys: Iterable[StepKey], max_rows: int) -> list[StepKey]:
    """Steps that sample under masks: one for each number of rows and variant of `keys`."""
    found = {(min(key.num_tokens, max_rows), key.variant): key for key in keys}
    return [key._replace(is_masked=True) for key in found.values()]
