"""What each format costs the small model, in perplexity on prose, by rounding alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_engine.config import default_cache_dir
from compiled_engine.models.source import DEFAULT_MODEL, resolve_model
from tests.helpers.perplexity import perplexity, windows
from tests.helpers.quant_case import keep_dequantized, quantized_model

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# Format -> the largest rise, as a share: what the README states, and a quarter more.
LIMITS = {
    "int8": 0.033,
    "fp8": 0.029,
    "fp8_block": 0.021,
    "nvfp4": 0.38,
    "nvfp4_w4a4": 0.71,
    "mxfp4": 0.65,
    "int4": 0.77,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL, default_cache_dir(), with_weights=True)


@pytest.fixture(scope="module")
def plain(folder: Path) -> float:
    return perplexity(quantized_model(folder, None), windows(folder))


@pytest.mark.parametrize("name", LIMITS)
def test_perplexity_rises_no_more_than_stated(folder: Path, plain: float, name: str):
    model = keep_dequantized(quantized_model(folder, name))
    rise = perplexity(model, windows(folder)) / plain - 1
    print(f"{name}: {plain:.3f} rises by {rise:.2%}")
    assert rise <= LIMITS[name]
