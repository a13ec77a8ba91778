"""What other engines gave at the same work: data with its source, for the tables of a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

VALUES = Path(__file__).with_name("peers") / "values.json"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer's value of one row.

    Attributes:
        name: of the peer, with its version.
        value: in the row's unit; text, since some are ranges.
        floor: the least that is possible, in the row's unit; empty if it is not known.
        source: where the value comes from.
    """

    name: str
    value: str
    floor: str
    source: str


def read_peers(path: Path = VALUES) -> dict[tuple[str, str], Peer]:
    """(scenario, row key) -> the peer's value."""
    found = {}
    for group in json.loads(path.read_text()):
        for scenario, entries in group["values"].items():
            for key, (value, floor) in entries.items():
                found[scenario, key] = Peer(
                    name=group["name"], value=value, floor=floor, source=group["source"]
                )
    return found
