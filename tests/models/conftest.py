"""The default model, converted once a test run, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_engine.config import default_cache_dir
from compiled_engine.models.source import DEFAULT_MODEL, resolve_model
from compiled_engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The converted SmolLM2; kept in the user's cache, where `make serve` keeps it too."""
    return resolve_model(DEFAULT_MODEL, default_cache_dir())


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)
