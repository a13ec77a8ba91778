"""What tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.browser import Browser, running_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; skips where there is none."""
    with running_browser() as running:
        yield running
