"""Perplexity of the small model on English prose that comes with Python: its own documentation."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch

from compiled_engine.models import CausalLM
from compiled_engine.tokenizer import Tokenizer

WINDOW = 512


def windows(folder: Path, count: int) -> list[torch.Tensor]:
    """`count` windows of `WINDOW` tokens of the longest topics, by name."""
    tokenizer = Tokenizer.from_folder(folder)
    longest = sorted(sorted(topics), key=lambda name: -len(topics[name]))[: 4 * count]
    ids = [tokenizer.encode(topics[name][:6000])[:WINDOW] for name in sorted(longest)]
    return [torch.tensor(each) for each in ids if len(each) == WINDOW][:count]


@torch.no_grad()
def perplexity(model: CausalLM, texts: list[torch.Tensor]) -> float:
    """exp of the mean negative log likelihood of every token but the first."""
    total, count = 0.0, 0
    for ids in texts:
        logits = model(ids, torch.arange(len(ids)))[:-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)
