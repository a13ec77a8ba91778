"""Perplexity of the small model on English prose that comes with Python: its own documentation."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch

from compiled_engine.models import CausalLM
from compiled_engine.tokenizer import Tokenizer

NUM_WINDOWS, WINDOW = 12, 512
_NUM_CANDIDATES, _MIN_TOKENS = 24, 512


def windows(folder: Path) -> list[torch.Tensor]:
    """The beginnings of some of the longest topics, as token ids."""
    tokenizer = Tokenizer.from_folder(folder)
    longest = sorted(sorted(topics), key=lambda name: -len(topics[name]))[:_NUM_CANDIDATES]
    ids = [tokenizer.encode(topics[name][:6000]) for name in sorted(longest)]
    long_enough = [each for each in ids if len(each) >= _MIN_TOKENS]
    return [torch.tensor(each[:WINDOW]) for each in long_enough[:NUM_WINDOWS]]


@torch.no_grad()
def perplexity(model: CausalLM, texts: list[torch.Tensor]) -> float:
    """exp of the mean negative log likelihood of every token but the first."""
    total, count = 0.0, 0
    for ids in texts:
        logits = model(ids, torch.arange(len(ids)))[:-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)
