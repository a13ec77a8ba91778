"""Kernels of a program, loaded without the compilers that made them.

On a CPU a kernel is a Python extension module, loaded from memory; on a GPU it is a cubin that
Triton made, launched through the driver. `program_record` says how they are taken out of Inductor.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch

# Triton's names of types of kernel arguments that are no pointers.
_SCALARS = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class CpuKernel(msgspec.Struct, frozen=True):
    """A compiled C++ kernel.

    Attributes:
        name: as the program calls it.
        library: an extension module with one function, `kernel`.
    """

    name: str
    library: bytes


class GpuKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled Triton kernel.

    Attributes:
        name: as the program calls it: `NAME.run(*arguments, stream=...)`.
        function: its name in the cubin.
        cubin: for one architecture.
        arguments: names of what `run` takes.
        parameters: names and Triton types of those that the kernel itself takes.
        num_scratch: further pointers behind them, of which none is used.
        grid: three expressions over the arguments.
        grid_prefix: statements before them.
        num_warps, shared_bytes: of a block.
        is_dependent: it is launched while the kernel before it still runs.
    """

    name: str
    function: str
    cubin: bytes
    arguments: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    num_scratch: int
    grid: tuple[str, str, str]
    grid_prefix: tuple[str, ...]
    num_warps: int
    shared_bytes: int
    is_dependent: bool


def load_cpu(kernel: CpuKernel) -> Callable[..., None]:
    """The kernel as a function of tensors and numbers.

    The library never touches a disk: the loader reads it from a file in memory.
    """
    # Where the library finds the function that gives a tensor's address (torch 2.11 to 2.14).
    guards: Any = torch._C._dynamo.guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    digest = hashlib.sha256(kernel.library)
    name = f"{digest.hexdigest()[:16]}.kernel"
    file = os.memfd_create("kernel")
    try:
        with open(file, "wb", closefd=False) as target:
            target.write(kernel.library)
        loader = importlib.machinery.ExtensionFileLoader(name, _spelling(file, digest.digest()))
        spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        os.close(file)
    function: Callable[..., None] = module.kernel
    return function


def _spelling(file: int, digest: bytes) -> str:
    """A path of an open file that no other library is loaded by.

    The dynamic linker takes a path that it has seen for the library it had then, whatever is there
    now; numbers of files come again, so the path has a detour for each bit of the content's digest.
    """
    bits = int.from_bytes(digest[:8], "big")
    detours = ("../fd/" if bits >> place & 1 else "./" for place in range(64))
    return f"/proc/self/fd/{''.join(detours)}{file}"


class TritonLauncher:
    """Launches one kernel; made by `load_gpu`.

    Attributes:
        run: takes the kernel's arguments and `stream`, an address.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run


def load_gpu(kernel: GpuKernel) -> TritonLauncher:
    """The kernel, loaded into the driver. Not to be called while capturing.

    Raises:
        CudaBuildError: the driver does not take it.
    """
    from cuda.bindings import driver

    from compiled_engine.custom_ops.cuda_build import checked, launch_config, loaded_kernel

    types = [t for _, t in kernel.parameters] + ["*i8"] * kernel.num_scratch
    fields = [
        (f"p{place}", ctypes.c_void_p if t.startswith("*") else _SCALARS[t])
        for place, t in enumerate(types)
    ]
    values = type("Values", (ctypes.Structure,), {"_fields_": fields})()
    base = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * max(1, len(fields)))(
        *(base + getattr(type(values), name).offset for name, _ in fields)
    )
    scope: dict[str, Any] = {
        "values": values,
        "pointers": ctypes.addressof(pointers),
        "keep": pointers,
        "config": launch_config(
            kernel.num_warps * 32, kernel.shared_bytes, is_dependent=kernel.is_dependent
        ),
        "function": loaded_kernel(kernel.cubin, kernel.function, kernel.shared_bytes),
        "launch": driver.cuLaunchKernelEx,
        "checked": checked,
    }
    exec(compile(_launcher_source(kernel), f"<launcher of {kernel.name}>", "exec"), scope)
    run: Callable[..., None] = scope["run"]
    return TritonLauncher(run)


def _launcher_source(kernel: GpuKernel) -> str:
    """A function that fills in the values and launches; nothing is launched for an empty grid."""
    x, y, z = kernel.grid
    lines = [f"def run({', '.join(kernel.arguments)}, *, stream):"]
    for place, (name, t) in enumerate(kernel.parameters):
        value = f"{name}.data_ptr()" if t.startswith("*") else name
        lines.append(f"    values.p{place} = {value}")
    lines += [f"    {line}" for line in kernel.grid_prefix]
    lines += [
        f"    x, y, z = {x}, {y}, {z}",
        "    if x * y * z == 0:",
        "        return",
        "    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z",
        "    config.hStream = stream",
        "    checked(launch(config, function, pointers, 0))",
    ]
    return "\n".join(lines)
