"""The only place that asks which device there is and what it can do."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.errors import ConfigError

# Instruction sets that a C++ compiler may use by itself when it may use all there are.
_X86_SETS = (
    *("abm", "adx", "amx", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse", "ssse"),
    *("vaes", "vpclmul"),
)


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What `info` prints and defaults follow from.

    Attributes:
        kind: "cuda" or "cpu".
        name: as the vendor calls it.
        total_bytes: memory of the device.
        arch: "sm_90" and the like; the CPU's best vector extension.
        num_units: multiprocessors, or the threads torch will use.
        driver: NVIDIA driver version; empty on a CPU.
    """

    kind: str
    name: str
    total_bytes: int
    arch: str
    num_units: int
    driver: str = ""


def pick_device(name: str) -> torch.device:
    """`auto` is the first NVIDIA GPU if torch can use one, else the CPU.

    Raises:
        ConfigError: a GPU is asked for and none can be used.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: torch sees no usable NVIDIA GPU (driver missing, or a CPU build of "
            "torch); install a CUDA build of torch, or use --device cpu",
            param="device",
        )
    use_cuda = has_cuda if name == "auto" else name == "cuda"
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def describe_device(device: torch.device) -> DeviceInfo:
    """Name, memory and capability of `device`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            kind="cuda",
            name=properties.name,
            total_bytes=properties.total_memory,
            arch=f"sm_{properties.major}{properties.minor}",
            num_units=properties.multi_processor_count,
            driver=nvidia_driver() or "",
        )
    return DeviceInfo(
        kind="cpu",
        name=_cpu_name(),
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        arch=torch.backends.cpu.get_cpu_capability(),
        num_units=torch.get_num_threads(),
    )


def device_note(name: str) -> str:
    """What a user who asked for device `name` should be told once; empty if nothing.

    Raises:
        ConfigError: see `pick_device`.
    """
    if name != "auto" or pick_device(name).type == "cuda":
        return ""
    driver = nvidia_driver()
    if driver is not None:
        return (
            f"NVIDIA driver {driver} is here, but torch {torch.__version__} cannot use the GPU: "
            "running on the CPU"
        )
    return "no NVIDIA GPU: running on the CPU"


def nvidia_driver() -> str | None:
    """Driver version by NVML, or None without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version: Any = pynvml.nvmlSystemGetDriverVersion()
        return str(version)
    finally:
        pynvml.nvmlShutdown()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def instruction_sets(cpuinfo: str | None = None) -> str:
    """What this CPU's code may be made of: torch's name for the vectors, and a hash of all sets.

    Args:
        cpuinfo: text of /proc/cpuinfo; None reads it.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            cpuinfo = ""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((v.split() for n, _, v in lines if n.strip() in ("flags", "Features")), [])
    if platform.machine() in ("x86_64", "AMD64"):
        flags = [flag for flag in flags if flag.startswith(_X86_SETS)]
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability()} {digest[:8]}"
