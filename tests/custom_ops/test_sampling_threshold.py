"""The cut-off of top-k, top-p and min-p: kernel and reference against a plain sort in Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import reference, sampling_threshold

IMPLEMENTATIONS = [
    pytest.param(sampling_threshold, id="kernel"),
    pytest.param(reference.sampling_threshold, id="reference"),
]


def kept_by_oracle(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that are left, by the definition: min-p, then top-k, then top-p over what is left.

    Values equal to the last kept one are kept too.
    """
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    top = logits[order[0]]
    kept = [i for i in order if min_p == 0 or logits[i] >= top + math.log(min_p)]
    if 0 < top_k < len(kept):
        kept = [i for i in kept if logits[i] >= logits[kept[top_k - 1]]]
    if top_p < 1:
        weights = [math.exp(logits[i] - top) for i in kept]
        wanted, total = top_p * math.fsum(weights), 0.0
        for place, weight in enumerate(weights):
            total += weight
            if total >= wanted:
                kept = [i for i in kept if logits[i] >= logits[kept[place]]]
                break
    return set(kept)


def row(logits: list[float], top_k: int, top_p: float, min_p: float) -> tuple[Tensor, ...]:
    return (
        torch.tensor([logits]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )


def kept_by(implementation, arguments: tuple[Tensor, ...]) -> list[set[int]]:
    logits = arguments[0]
    cut = implementation(*arguments)
    assert cut.dtype == torch.float32
    return [set(torch.nonzero(x >= c).flatten().tolist()) for x, c in zip(logits, cut, strict=True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 300, 1003])
def test_kept_sets_equal_the_sort(implementation, vocab):
    generator = torch.Generator().manual_seed(vocab)
    rows = 60
    logits = torch.randn(rows, vocab, generator=generator) * 3
    top_k = torch.randint(-1, vocab + 3, (rows,), generator=generator).int()
    top_p = 1 - 0.95 * torch.rand(rows, generator=generator)
    min_p = torch.rand(rows, generator=generator).square() * 0.5
    top_p[::3], min_p[1::3], top_k[2::3] = 1.0, 0.0, 0
    kept = kept_by(implementation, (logits, top_k, top_p, min_p))
    for i in range(rows):
        values = logits[i].tolist()
        wanted = kept_by_oracle(values, int(top_k[i]), float(top_p[i]), float(min_p[i]))
        # The running sum may cross top_p one token later or earlier where it nearly equals it.
        differing = kept[i] ^ wanted
        assert len(differing) <= 1, (i, differing)
        if differing:
            assert is_on_the_edge(values, wanted, differing.pop(), float(top_p[i]))


def is_on_the_edge(logits: list[float], kept: set[int], token: int, top_p: float) -> bool:
    """With or without `token` the kept share is within rounding of top_p."""
    top = max(logits)
    share = [math.exp(x - top) for x in logits]
    smaller = math.fsum(share[i] for i in kept - {token})
    return abs(smaller / math.fsum(share) - top_p) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, {0, 1, 2, 3}),
        (-1, 1.0, 0.0, {0, 1, 2, 3}),
        (1, 1.0, 0.0, {2}),
        (3, 1.0, 0.0, {2, 0, 3}),
        (99, 1.0, 0.0, {0, 1, 2, 3}),
        (0, 1e-6, 0.0, {2}),
        (0, 0.6, 0.0, {2}),
        (0, 0.7, 0.0, {2, 0}),
        (0, 1.0, 1.0, {2}),
        (0, 1.0, 0.3, {2, 0}),
        # top-p acts on what top-k left: 0.64 / 0.88 reaches 0.7 with the first token alone.
        (2, 0.7, 0.0, {2}),
    ],
)
def test_by_hand(implementation, top_k, top_p, min_p, kept):
    """Probabilities 0.24, 0.03, 0.64, 0.09."""
    logits = [math.log(p) for p in (0.24, 0.03, 0.64, 0.09)]
    assert kept_by(implementation, row(logits, top_k, top_p, min_p)) == [kept]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_at_the_cut_are_all_kept(implementation):
    assert kept_by(implementation, row([2.0, 1.0, 1.0, 1.0, 0.0], 2, 1.0, 0.0)) == [{0, 1, 2, 3}]
    assert kept_by(implementation, row([1.0] * 5, 2, 0.3, 0.5)) == [{0, 1, 2, 3, 4}]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("low", [-1e30, float("-inf")], ids=["lowest", "minus-infinity"])
def test_forbidden_tokens_are_cut_away(implementation, low):
    logits = [low, 1.0, low, 0.5, low]
    for top_k, top_p, min_p in ((2, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01), (4, 0.99, 0.0)):
        kept = kept_by(implementation, row(logits, top_k, top_p, min_p))[0]
        # With k beyond the allowed tokens the cut may be the lowest value itself.
        assert kept - {0, 2, 4} == {1, 3}
        assert top_k == 4 or kept == {1, 3}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_negative_zero_and_signs_keep_their_order(implementation):
    logits = [-0.0, 0.0, -1.0, 1.0, -2.0, 1e-30, -1e-30]
    assert kept_by(implementation, row(logits, 2, 1.0, 0.0)) == [{3, 5}]
    assert kept_by(implementation, row(logits, 6, 1.0, 0.0)) == [{0, 1, 2, 3, 5, 6}]


def test_rows_do_not_depend_on_each_other():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 500, generator=generator)
    top_k = torch.randint(0, 500, (16,), generator=generator).int()
    top_p = torch.rand(16, generator=generator).clamp_min(0.01)
    min_p = torch.rand(16, generator=generator) * 0.2
    together = sampling_threshold(logits, top_k, top_p, min_p)
    for i in range(16):
        one = slice(i, i + 1)
        alone = sampling_threshold(logits[one], top_k[one], top_p[one], min_p[one])
        assert torch.equal(alone[0], together[i])
