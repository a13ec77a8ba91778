"""The CUDA decode kernel on CPU tensors: the same source, on emulated warps and matrix products."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from compiled_engine.custom_ops import cuda_build
from compiled_engine.custom_ops.attention_decode_cuda import KERNEL, SOURCE, CudaDecode, DecodeArgs
from tests.helpers import cuda_emulator

MATRIX = Path(__file__).with_name("emulated_matrix.h")
LIMITS = (232448, 233472)  # of shared memory
_CALL = """
static void call(const void* args) {{ {name}(*(const DecodeArgs*)args); }}
extern "C" int emulate(
    const void* args, unsigned size, unsigned grid, unsigned block, unsigned order
) {{
    if (size != sizeof(DecodeArgs))
        return emulator::wrong_size("DecodeArgs", sizeof(DecodeArgs), size);
    return emulator::run(call, args, grid, block, order);
}}
"""


def run_emulated(
    call: CudaDecode,
    out: Tensor,
    order: int = cuda_emulator.ASCENDING,
    fresh: Sequence[Tensor] = (),
) -> int:
    """Runs the call's kernel to its end.

    Args:
        call: to be run.
        out: its results.
        order: of threads; blocks must ascend, so not DESCENDING.
        fresh: what the kernel before this one writes, each contiguous.

    Returns:
        Copies, each of 16 bytes of keys or values, made before the kernel waited for that one.

    Raises:
        EmulatorError: threads wait for ever or at different barriers, or something of `fresh` was
            copied before the kernel waited.
    """
    library = _library(call.variant(LIMITS).flags)
    ends = [end for t in fresh for end in (t.data_ptr(), t.data_ptr() + t.nbytes)]
    ranges = (ctypes.c_void_p * len(ends))(*ends)
    library.forbid(ranges, len(fresh))
    args = call.arguments(out)
    if library.emulate(ctypes.byref(args), ctypes.sizeof(DecodeArgs), call.grid, 128, order):
        raise cuda_emulator.EmulatorError(library.emulator_message().decode())
    return int(library.num_early_copies())


@functools.cache
def _library(flags: tuple[str, ...]) -> ctypes.CDLL:
    source = cuda_build.read_source(SOURCE)
    path = cuda_build.CSRC / SOURCE
    text = f'#include "{cuda_emulator.HEADER}"\n#include "{MATRIX}"\n#line 1 "{path}"\n'
    text += source.text + _CALL.format(name=KERNEL)
    headers = (source.headers, cuda_emulator.HEADER.read_text(), MATRIX.read_text())
    key = hashlib.sha256(repr((text, headers, flags, cuda_emulator.FLAGS)).encode())
    folder = Path(tempfile.gettempdir()) / "compiled-engine-emulator"
    folder.mkdir(exist_ok=True)
    built = folder / f"{key.hexdigest()}.so"
    if not built.exists():
        fresh = built.with_suffix(f".{os.getpid()}.tmp")
        include = (f"-I{path.parent}", f"-I{cuda_build.CSRC}")
        options = (*cuda_emulator.FLAGS, *flags, *include)
        command = ["g++", *options, "-x", "c++", "-", "-o", str(fresh)]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        fresh.replace(built)
    library = ctypes.CDLL(str(built))
    library.emulator_message.restype = ctypes.c_char_p
    return library
