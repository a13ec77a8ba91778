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
        "torch": _torch_version(),
        "triton": _version("triton"),
        "transformers": metadata.version("transformers"),
    }


def _torch_version() -> str:
    """With the build (`+cu130`), which the package's own metadata leaves out."""
    import torch

    return str(torch.__version__)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def clocks() -> dict[str, Any]:
    """Clocks, power and limits of the first GPU at this moment; empty without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(device, sm),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(device, memory),
            "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(device, sm),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
        }
    except pynvml.NVMLError as error:
        return {"clocks": str(error)}
    finally:
        pynvml.nvmlShutdown()


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
