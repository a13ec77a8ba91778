"""API keys: whose a key is, and whether it may use the control routes.

The operator's key (`--api-key`) opens every route. Keys of `--api-key-file` have a name, limits of
their own, and open every route but those that control the server for all.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from compiled_engine.errors import ConfigError

OPERATOR = ""


class ApiKeys:
    """The keys that are taken.

    Args:
        operator_key: None for none.
        names_by_key: further keys.
    """

    def __init__(self, operator_key: str | None, names_by_key: dict[str, str]) -> None:
        named = {key: name for key, name in names_by_key.items() if key != operator_key}
        if operator_key is not None:
            named[operator_key] = OPERATOR
        self._entries = [(key.encode(), name) for key, name in named.items()]

    @property
    def are_needed(self) -> bool:
        """Whether calls must bring a key at all."""
        return bool(self._entries)

    def name_of(self, given: bytes) -> str | None:
        """Name of a key, `OPERATOR` for the operator's; None for a wrong one.

        Takes the same time wherever a wrong key differs.
        """
        found = None
        for key, name in self._entries:
            if hmac.compare_digest(given, key):
                found = name
        return found


def read_keys(path: Path | None) -> dict[str, str]:
    """Key -> name from a file with a line `NAME KEY` for each; "#" starts a comment line.

    Raises:
        ConfigError: the file cannot be read, or a line is none of these.
    """
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {path} cannot be read: {error}", param="api_key_file"
        ) from error
    names_by_key: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1] in names_by_key:
            # The line itself may hold a key: it is not shown.
            raise ConfigError(
                f"--api-key-file {path}, line {number}: a line is `NAME KEY`, each key once",
                param="api_key_file",
            )
        names_by_key[words[1]] = words[0]
    if not names_by_key:
        raise ConfigError(f"--api-key-file {path} holds no key", param="api_key_file")
    return names_by_key
