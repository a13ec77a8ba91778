"""Default sampling values that come with a model. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiled_engine.errors import ConfigError

_FILE = "generation_config.json"


def default_sampling(folder: Path) -> dict[str, Any]:
    """The `SamplingParams` fields of a model folder's generation_config.json; the rest is left out.

    Raises:
        ConfigError: the file is there and is no JSON object.
    """
    from compiled_engine.request import SamplingParams

    path = folder / _FILE
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no JSON object", param="model")
    return {name: settings[name] for name in SamplingParams.__struct_fields__ if name in settings}
