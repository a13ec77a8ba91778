"""Seeds under which the drawn token tells where a row was cut, to the token.

Of a row's candidates the last that the limits keep wins under one seed, and the first that they
drop would win under the other; so a kernel whose cut is off by one value draws another token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.sampling import RowSettings, gumbel_noise

# Of the winner over the second: logarithms of two libraries differ by less.
_MARGIN = 1e-4


class Probe(NamedTuple):
    """Rows to sample, [n, vocab] with their settings, and the tokens [n] i64 that must come out."""

    logits: Tensor
    settings: RowSettings
    expected: Tensor


def head_and_tail(rows: int, head: int, vocab_size: int, device: str = "cpu") -> Tensor:
    """Nearly flat logits of `head` tokens, then many that weigh about as much as a few of them."""
    logits = torch.randn(rows, vocab_size, device=device) * 0.3
    logits[:, head:] -= 12.0
    return logits


def boundary_probe(
    logits: Tensor, settings: RowSettings, head: int, *, num_seeds: int = 2000
) -> Probe:
    """Two rows for each of `logits` whose kept tokens are all below `head`, where seeds are found.

    Args:
        logits: [S, vocab] of a kernel's dtype; `num_seeds` times `head` should fit in memory.
        settings: of the rows; the seeds are not read.
        head: tokens that may be kept.
        num_seeds: tried for a row, from 0 on.
    """
    divisor = settings.temperature[:, None]
    scaled = (logits.float() / divisor).clamp_min(-1e30)
    cut = reference.sampling_threshold(scaled, settings.top_k, settings.top_p, settings.min_p)
    rows, seeds, tokens = [], [], []
    for i in range(logits.shape[0]):
        if bool((scaled[i, head:] >= cut[i]).any()):
            continue
        x, seed = scaled[i, :head], torch.arange(num_seeds, device=logits.device)
        noisy = x + gumbel_noise(seed, settings.position[i].expand(num_seeds), head)
        is_kept = x >= cut[i]
        winner = _winner(noisy, is_kept)
        last = is_kept & (x == x[is_kept].min())
        found = [(winner, (winner >= 0) & last[winner])]
        if not bool(is_kept.all()):
            first_dropped = ~is_kept & (x == x[~is_kept].max())
            wrong = _winner(noisy, is_kept | first_dropped)
            found.append((winner, (winner >= 0) & (wrong >= 0) & first_dropped[wrong]))
        for winners, is_telling in found:
            if bool(is_telling.any()):
                place = int(is_telling.int().argmax())
                rows.append(i)
                seeds.append(place)
                tokens.append(int(winners[place]))
    index = torch.tensor(rows, device=logits.device, dtype=torch.int64)
    chosen = RowSettings(*(t[index] for t in settings))
    chosen = chosen._replace(seed=torch.tensor(seeds, device=logits.device, dtype=torch.int64))
    return Probe(logits[index], chosen, torch.tensor(tokens, device=logits.device))


def _winner(noisy: Tensor, is_candidate: Tensor) -> Tensor:
    """Token of the largest noisy logit of each seed [n], -1 where the second is too close."""
    masked = torch.where(is_candidate, noisy, -1e30)
    best = masked.topk(min(2, masked.shape[1]), dim=1)
    is_clear = best.values[:, 0] - best.values[:, -1] > _MARGIN
    is_clear |= torch.tensor(masked.shape[1] == 1, device=masked.device)
    return torch.where(is_clear, best.indices[:, 0], -1)
