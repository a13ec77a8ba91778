"""Runs a command of the CLI in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_engine.cli import main


def run(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict[str, Any]:
    """The document on the last line of a command that must exit with `code`."""
    assert main([str(word) for word in argv]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The line that a command prints which must be refused."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err
