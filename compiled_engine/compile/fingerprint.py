"""Parts of a start key that neither a model nor a flag decides: sources, versions, the device.

Sources are hashed by module name, never by path, so a wheel, a checkout and a copy of either agree.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from compiled_engine import __version__
from compiled_engine.compile.start_key import SOURCES
from compiled_engine.device import instruction_sets

# A module counts if what it holds is compiled or captured, or decides what is. These packages hold
# little else, so they count whole; of the modules beside them, those that the functions of a step
# are made of, that is: all that `SOURCE_ROOTS` import, directly or not, but `EXEMPT_MODULES`.
SOURCE_PACKAGES = ("compile", "custom_ops", "models", "passes", "scheduler")
SOURCE_ROOTS = ("kv_cache", "pieces", "step")
SOURCE_MODULES = (
    "kv_cache",
    "layer_kinds",
    "layout",
    "logprobs",
    "outbox",
    "pieces",
    "sampler",
    "step",
    "step_key",
    "upload",
)
EXEMPT_MODULES = {
    "config": "its values are parts of the key",
    "counters": "counts what was done",
    "errors": "words for people",
    "logprob_data": "what the host is given",
    "request": "what the host is asked for",
    "step_times": "how long steps take, for the host",
}
SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")

# The compilers read options from variables with these prefixes; the names below say where they
# work and what they print.
_VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_")
_HARMLESS_VARIABLES = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_WORKER_START",
        "TORCHDYNAMO_VERBOSE",
        "TRITON_CACHE_DIR",
        "TRITON_CACHE_MANAGER",
        "TRITON_DUMP_DIR",
        "TRITON_HOME",
        "TRITON_PRINT_AUTOTUNING",
    }
)


def fixed_parts(device: torch.device) -> dict[str, str]:
    """Everything that neither the model nor a flag decides."""
    return {
        **portable_parts(),
        **environment_parts(os.environ),
        **device_parts(device),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def portable_parts() -> dict[str, str]:
    """Which installation made a key: its version, sources, and the versions of its compilers."""
    return {"engine.version": __version__, **source_parts(), **version_parts(("triton",))}


def source_parts() -> dict[str, str]:
    """ "source.<module>" -> hash, of every module that counts; other sources by their file name."""
    parts = {}
    for base in _folders("compiled_engine"):
        for name in SOURCE_MODULES:
            parts[SOURCES + name] = _hash((base / f"{name}.py").read_bytes())
    for package in SOURCE_PACKAGES:
        for base in _folders(f"compiled_engine.{package}"):
            for path in source_files(base):
                name = module_name(package, path.relative_to(base))
                parts[SOURCES + name] = _hash(path.read_bytes())
    return parts


def modules_digest(names: Iterable[str]) -> str:
    """16 hex digits over the sources of modules of this package, in the order given."""
    (base,) = _folders("compiled_engine")
    return _hash(b"\0".join((base / f"{name}.py").read_bytes() for name in names))


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    return [Path(base) for base in spec.submodule_search_locations or ()]


def source_files(base: Path) -> Iterator[Path]:
    """Every source file below a folder."""
    for folder, subfolders, names in os.walk(base, followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        for name in names:
            if name.endswith(SOURCE_SUFFIXES):
                yield Path(folder, name)


def module_name(package: str, path: Path) -> str:
    """Dotted name of a module of a package; "<package>/<path>" for a source in another language."""
    if path.suffix != ".py":
        return f"{package}/{path.as_posix()}"
    return ".".join((package, *path.with_suffix("").parts)).removesuffix(".__init__")


def version_parts(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python, torch, its CUDA, and of the named packages."""
    found = {
        "versions.python": ".".join(platform.python_version_tuple()[:2]),
        "versions.torch": torch.__version__,
        "versions.cuda": str(torch.version.cuda),
    }
    for package in packages:
        try:
            found[f"versions.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[f"versions.{package}"] = "not installed"
    return found


def environment_parts(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that the compilers read as options, such as TORCHINDUCTOR_MAX_AUTOTUNE."""
    return {
        f"environment.{name}": value
        for name, value in variables.items()
        if name.startswith(_VARIABLES) and name not in _HARMLESS_VARIABLES
    }


def device_parts(device: torch.device) -> dict[str, str]:
    """What code is made for: the GPU, whichever of its kind; or the CPU and how many threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device.kind": "cuda",
            "device.name": properties.name,
            "device.capability": f"{properties.major}.{properties.minor}",
            "device.multiprocessors": str(properties.multi_processor_count),
        }
    return {
        "device.kind": "cpu",
        "device.machine": f"{platform.system()} {platform.machine()}",
        "device.instructions": instruction_sets(),
        # Inductor writes the number into its loops.
        "device.threads": str(torch.get_num_threads()),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
