"""Runs the package's CUDA kernels on CPU tensors: the same sources, compiled by g++ with fibers.

Owns the build and the call. What a thread, a barrier and an atomic are is in `cuda_emulator.h`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from compiled_engine.custom_ops import cuda_build

HEADER = Path(__file__).with_suffix(".h")
KERNEL = re.compile(
    r"__global__ void(?: __launch_bounds__\([\w, ]+\))? (\w+)"
    r"\(const __grid_constant__ (\w+) \w+\)"
)
ASCENDING, DESCENDING = 0, 1
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w")
_TRAMPOLINE = """
static void call_{name}(const void* args) {{ {name}(*(const {args}*)args); }}
extern "C" int emulate_{name}(
    const void* args, unsigned size, unsigned grid, unsigned block, unsigned order
) {{
    if (size != sizeof({args})) return emulator::wrong_size("{args}", sizeof({args}), size);
    return emulator::run(call_{name}, args, grid, block, order);
}}
"""


class EmulatorError(AssertionError):
    """A kernel waits for ever, or its threads wait at different barriers."""


class Emulated:
    """One source file under `csrc/`, ready to run.

    Args:
        name: such as `scheduler/plan.cu`.
        block: threads of a block, a multiple of 32.
        order: in which threads run between two barriers: ascending, descending, or a seed above 1.
    """

    def __init__(self, name: str, block: int = 64, order: int = ASCENDING) -> None:
        self.block = block
        self.order = order
        self._library = _library(name)

    def launch(self, kernel: str, grid: int, args: ctypes.Structure) -> None:
        """Runs a kernel to its end.

        Raises:
            EmulatorError: as above.
        """
        call = getattr(self._library, f"emulate_{kernel}")
        size = ctypes.sizeof(args)
        if call(ctypes.byref(args), size, grid, self.block, self.order):
            text = self._library.emulator_message().decode()
            raise EmulatorError(f"{kernel}: {text}")


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    source = cuda_build.read_source(name)
    path = cuda_build.CSRC / name
    parts = [source.text]
    for kernel, args in KERNEL.findall(source.text):
        parts.append(_TRAMPOLINE.format(name=kernel, args=args))
    text = f'#include "{HEADER}"\n#line 1 "{path}"\n' + "\n".join(parts)
    key = hashlib.sha256(repr((text, source.headers, HEADER.read_text(), FLAGS)).encode())
    folder = Path(tempfile.gettempdir()) / "compiled-engine-emulator"
    folder.mkdir(exist_ok=True)
    built = folder / f"{key.hexdigest()}.so"
    if not built.exists():
        fresh = built.with_suffix(f".{os.getpid()}.tmp")
        include = (f"-I{path.parent}", f"-I{cuda_build.CSRC}")
        command = ["g++", *FLAGS, *include, "-x", "c++", "-", "-o", str(fresh)]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        fresh.replace(built)
    library = ctypes.CDLL(str(built))
    library.emulator_message.restype = ctypes.c_char_p
    return library
