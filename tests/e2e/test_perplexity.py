"""What each format costs the small model, in perplexity on prose, by rounding alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_engine.config import default_cache_dir
from compiled_engine.models.source import DEFAULT_MODEL, resolve_model
from tests.helpers.perplexity import perplexity, windows
from tests.helpers.quant_case import keep_dequantized, quantized_model

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NUM_WINDOWS = 6
# Format -> the largest rise, as a share.
LIMITS = {
    "int8": 0.01,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL, default_cache_dir(), with_weights=True)


@pytest.fixture(scope="module")
def plain(folder: Path) -> float:
    return perplexity(quantized_model(folder, None), windows(folder, NUM_WINDOWS))


@pytest.mark.parametrize("name", LIMITS)
def test_perplexity_rises_no_more_than_stated(folder: Path, plain: float, name: str):
    model = keep_dequantized(quantized_model(folder, name))
    rise = perplexity(model, windows(folder, NUM_WINDOWS)) / plain - 1
    print(f"{name}: {plain:.3f} rises by {rise:.2%}")
    assert rise <= LIMITS[name]
