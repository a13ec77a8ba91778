"""Rows to sample under grammars' masks, and the same rows masked beforehand by plain PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.sampling import Masks, Places, RowSettings, mask_logits

# Vocabularies that are no multiple of a byte, a word or a vector, with columns of padding.
WIDTHS = ((1, 0), (5, 2), (67, 3), (203, 8), (317, 0))


class MaskedCase(NamedTuple):
    """A call of `sample_rows` under masks, and the logits that give the same without."""

    logits: Tensor
    masked: Tensor
    settings: RowSettings
    places: Places
    vocab_size: int
    masks: Masks

    def call(self, *, is_greedy: bool) -> tuple[Any, ...]:
        """The op's arguments."""
        return (self.logits, *self._shared(is_greedy), *self.masks)

    def plain_call(self, *, is_greedy: bool) -> tuple[Any, ...]:
        """The op's arguments without masks."""
        return (self.masked, *self._shared(is_greedy))

    def _shared(self, is_greedy: bool) -> tuple[Any, ...]:
        return (*self.settings, *self.places, self.vocab_size, is_greedy)


def masked_case(
    logits: Tensor, by_row: RowSettings, vocab_size: int, *, stop_ids: int = 2
) -> MaskedCase:
    """A case over some logits, whose first row has a NaN that is forbidden, if there are five.

    Rows are, in turn: with some tokens allowed, with one, without a grammar, with all but some. The
    columns behind `vocab_size` are the best ones and allowed. Masks lie apart in memory, at odd
    addresses.

    Args:
        logits: [S, padded vocab], changed.
        by_row: settings of R >= S rows.
        vocab_size: real token ids.
        stop_ids: places for ids that stop a row: the first allowed token is one.
    """
    device, num_places, num_rows = logits.device, logits.shape[0], by_row.seed.shape[0]
    share = torch.tensor([0.2, 0.0, 0.0, 0.7]).repeat(-(-num_rows // 4))[:num_rows, None]
    is_allowed = torch.rand(num_rows, vocab_size) < share
    one = torch.randint(vocab_size, (num_rows,))
    one[1::8] = vocab_size - 1
    has_grammar = torch.arange(num_rows) % 4 != 2
    is_allowed[has_grammar, one[has_grammar]] = True
    rows = torch.randperm(num_rows)[:num_places]
    if num_places >= 5:
        rows = torch.cat((torch.tensor([1]), rows[rows != 1]))[:num_places]
        forbidden = (one[1] + 1) % vocab_size
        logits[0, forbidden] = float("nan")
    logits[:, vocab_size:] = 1e4
    stops = torch.full((num_rows, stop_ids), -1, dtype=torch.int32)
    stops[:, 0] = is_allowed.int().argmax(1)
    masks = Masks(_packed(is_allowed).to(device), has_grammar.to(device))
    places = Places(rows.int().to(device), stops.to(device))
    masked = logits.clone()
    masked[:, :vocab_size] = mask_logits(logits[:, :vocab_size], masks, places.rows)
    return MaskedCase(logits, masked, by_row, places, vocab_size, masks)


def _packed(is_allowed: Tensor) -> Tensor:
    """Bits of tokens [R, vocab], as part of a wider tensor; those that are no token's are set."""
    num_rows, vocab_size = is_allowed.shape
    num_bytes = -(-vocab_size // 8)
    bits = torch.ones(num_rows, num_bytes * 8, dtype=torch.uint8)
    bits[:, :vocab_size] = is_allowed
    weights = 2 ** torch.arange(8)
    wide = torch.full((num_rows, num_bytes + 2), 255, dtype=torch.uint8)
    wide[:, 1:-1] = (bits.view(num_rows, num_bytes, 8) * weights).sum(2)
    return wide[:, 1:-1]


def check_masked(case: MaskedCase, got: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    """Tokens and stops, by row: those of the logits that were masked before, and allowed ones."""
    assert torch.equal(got[0].flatten(), plain[0].flatten())
    assert torch.equal(got[1].flatten(), plain[1].flatten())
    tokens = got[0].flatten().tolist()
    for place, row in enumerate(case.places.rows.tolist()):
        has_nan = bool(case.logits[place, : case.vocab_size].isnan().any())
        assert (tokens[row] == -1) == has_nan
        if case.masks.has_grammar[row] and not has_nan:
            byte = int(case.masks.bits[row, tokens[row] // 8])
            assert byte >> tokens[row] % 8 & 1, (row, tokens[row])
