"""What compiled code of one engine start depends on, as named parts.

Two starts whose parts are equal may use each other's code; the first part that differs says why
not. Knows neither how the parts are found nor where the code is kept; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

# Of keys and of the folders that are named after them: raise it when the parts change meaning.
FORMAT = 1
SOURCES = "source."
_ABSENT = "nothing"


@dataclass(frozen=True)
class StartKey:
    """Everything that compiled code depends on.

    Attributes:
        parts: dotted name -> value, such as "flags.block_size" -> "16"; those under "source." are
            hashes of modules.
    """

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """24 hex digits; equal for equal parts, on any machine."""
        document = json.dumps([FORMAT, sorted(self.parts.items())])
        return hashlib.sha256(document.encode()).hexdigest()[:24]

    def differences(self, other: StartKey) -> list[str]:
        """What differs, in words with this key's value first; empty if the keys are equal."""
        names = sorted(self.parts.keys() | other.parts.keys())
        found = []
        for name in names:
            here, there = self.parts.get(name, _ABSENT), other.parts.get(name, _ABSENT)
            if here != there:
                is_hash = name.startswith(SOURCES)
                found.append(name if is_hash else f"{name} ({here}, there {there})")
        return found

    def to_json(self) -> str:
        """A document for people and for `from_json`."""
        return json.dumps({"format": FORMAT, "parts": dict(sorted(self.parts.items()))}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> StartKey:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is no such document, or one of another format.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"no key of format {FORMAT}")
        parts = document.get("parts")
        if not isinstance(parts, dict) or not all(isinstance(v, str) for v in parts.values()):
            raise ValueError("a key without parts")
        return cls(parts)
