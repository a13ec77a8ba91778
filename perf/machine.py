"""What a row says about the machine: names, versions, and how idle it was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from compiled_engine.device import describe_device, pick_device

BUSY_BELOW_IDLE_PERCENT = 80


def machine_name() -> str:
    """Folder name of this machine's results: device and number of processors."""
    info = describe_device(pick_device("auto"))
    name = re.sub(r"[^A-Za-z0-9]+", "-", info.name).strip("-").lower()
    return name if info.kind == "cuda" else f"{name}-{os.cpu_count()}cpu"


def environment() -> dict[str, Any]:
    """Device, driver and versions."""
    info = describe_device(pick_device("auto"))
    return {
        "device": info.name,
        "arch": info.arch,
        "driver": info.driver,
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


def idle_percent() -> int | None:
    """Idle processor time over one second, by vmstat; None where that is not installed."""
    try:
        result = subprocess.run(["vmstat", "1", "2"], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return None
    *_, header, _first, last = result.stdout.strip().splitlines()
    return int(last.split()[header.split().index("id")])


def commit() -> str:
    """Short id of the commit, with "+" if files differ from it; "unknown" outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
