"""Whether a file of settings was measured for this model and this device.

The file is `--config`'s; what it says stands in its table `tuned`. See `settings_file`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.device import describe_device
from compiled_engine.errors import ConfigError
from compiled_engine.key_parts import model_parts
from compiled_engine.models import ModelConfig
from compiled_engine.settings_file import TunedFor, read_settings_file

logger = logging.getLogger(__name__)


def tuned_here(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> TunedFor:
    """What a measurement of this model on this device is for."""
    parts = json.dumps(model_parts(model_config), sort_keys=True)
    return TunedFor(
        model=Path(config.model).name,
        model_digest=hashlib.sha256(parts.encode()).hexdigest()[:16],
        device=device_name(device),
    )


def device_name(device: torch.device) -> str:
    """The vendor's name; of a CPU with the threads that compute."""
    info = describe_device(device)
    return info.name if info.kind == "cuda" else f"{info.name}, {info.num_units} threads"


def warn_if_tuned_elsewhere(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> None:
    """Logs one warning if the values of `--config` were measured for something else."""
    if config.config_file is None:
        return
    try:
        tuned = read_settings_file(config.config_file).tuned
    except ConfigError as error:  # its values were taken in before: a start goes on without it
        logger.warning("%s: what it was tuned for is not checked", error.message)
        return
    if tuned is None:
        return
    here = tuned_here(config, model_config, device)
    others = []
    if tuned.model_digest != here.model_digest:
        others.append(f"the model {tuned.model} ({tuned.model_digest}; here {here.model_digest})")
    if tuned.device != here.device:
        others.append(f"{tuned.device} (here {here.device})")
    if others:
        logger.warning(
            "--config %s was tuned for %s: its values hold, and may not suit; write another with "
            "`compiled-engine tune`, or leave --config out",
            config.config_file,
            " and for ".join(others),
        )
