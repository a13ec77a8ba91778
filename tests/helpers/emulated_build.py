"""Builds a CUDA source for the CPU together with headers that spell the machine it runs on."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from compiled_engine.custom_ops import cuda_build
from tests.helpers import cuda_emulator


@functools.cache
def emulated_library(
    name: str, machine: tuple[str, ...], call: str, flags: tuple[str, ...]
) -> ctypes.CDLL:
    """The library of `csrc/<name>`.

    Args:
        name: of the source.
        machine: headers beside this file, included first, after the emulator's own.
        call: C++ that comes last: what the library offers.
        flags: of the compiler.
    """
    source, path = cuda_build.read_source(name), cuda_build.CSRC / name
    headers = (cuda_emulator.HEADER, *(Path(__file__).with_name(header) for header in machine))
    text = "".join(f'#include "{header}"\n' for header in headers)
    text += f'#line 1 "{path}"\n{source.text}{call}'
    contents = [header.read_text() for header in headers]
    key = hashlib.sha256(repr((text, source.headers, contents, flags)).encode())
    folder = Path(tempfile.gettempdir()) / "compiled-engine-emulator"
    folder.mkdir(exist_ok=True)
    built = folder / f"{key.hexdigest()}.so"
    if not built.exists():
        fresh = built.with_suffix(f".{os.getpid()}.tmp")
        options = (*cuda_emulator.FLAGS, *flags, f"-I{path.parent}", f"-I{cuda_build.CSRC}")
        command = ["g++", *options, "-x", "c++", "-", "-o", str(fresh)]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        fresh.replace(built)
    library = ctypes.CDLL(str(built))
    library.emulator_message.restype = ctypes.c_char_p
    return library
