"""Parts of a start that run in threads beside the rest of it, and what of them needs no torch.

Only what waits for a disk or a driver, or computes without the interpreter's lock, gains by that:
two threads in Python code take turns. What such a part is for goes on without it if it fails, and
meets the same error by itself. Imports nothing of ours but the config and the times.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from compiled_engine.config import EngineConfig
from compiled_engine.start_times import StartPhase

# Of one call: between calls the interpreter is waited for.
READ_BYTES = 2**28


class Beside:
    """One part, from now on.

    Args:
        name: for the start table.
        work: is called in a thread; whatever it raises is dropped.
        is_awaited: the process does not end before it has ended.
    """

    def __init__(self, name: str, work: Callable[[], object], *, is_awaited: bool = True) -> None:
        self._name = name
        self._work = work
        self._begin = time.perf_counter()
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=not is_awaited)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the work has ended."""
        self._thread.join()

    @property
    def phase(self) -> StartPhase:
        """Its row of the start table: seconds that it took, up to now if it has not ended."""
        seconds = self._seconds
        if seconds is None:
            seconds = time.perf_counter() - self._begin
        return StartPhase(name=f"- {self._name}", seconds=seconds)

    def _run(self) -> None:
        with suppress(Exception):
            self._work()
        self._seconds = time.perf_counter() - self._begin


def before_torch(config: EngineConfig) -> list[Beside]:
    """Begins what a start can do while torch, which takes seconds, is imported.

    That is: reading the weights of a folder, so that they are in the page cache when they are
    loaded, and making the GPU's context.
    """
    begun = []
    folder = Path(config.model).expanduser()
    if config.load_format != "dummy" and os.path.isdir(folder):
        begun.append(Beside("weights, read", lambda: read_ahead(folder), is_awaited=False))
    if config.device != "cpu" and _torch_has_cuda():
        # Awaited: a process that ends while the driver starts may end by a signal.
        begun.append(Beside("CUDA context", lambda: make_context(ctypes.CDLL("libcuda.so.1"))))
    return begun


def read_ahead(folder: Path) -> int:
    """Reads the safetensors files of a folder into the page cache; returns how many bytes.

    Stops where they would take more than half of the memory that is available: what is read first
    would be dropped before it is loaded.

    Raises:
        OSError: a file cannot be read.
    """
    room, done = _available_bytes() // 2, 0
    with open(os.devnull, "wb") as nowhere:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                at, size = 0, os.fstat(file.fileno()).st_size
                while at < size and done < room:  # no byte is copied
                    count = os.sendfile(nowhere.fileno(), file.fileno(), at, READ_BYTES)
                    if count == 0:
                        break
                    at, done = at + count, done + count
    return done


def make_context(driver: ctypes.CDLL) -> None:
    """Starts the CUDA driver and makes the context of the first GPU, the one that torch takes.

    It is never given back. Calls through ctypes leave the interpreter's lock to other threads.

    Args:
        driver: libcuda.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its own start
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def import_quietly(names: Sequence[str]) -> None:
    """Imports modules; whoever needs one that cannot be imported gets the error by importing it."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _torch_has_cuda() -> bool:
    """Whether the installed torch is built for NVIDIA GPUs, found without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders)


def _available_bytes() -> int:
    """Memory that could be had now, page cache included."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
