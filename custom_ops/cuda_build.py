"""Builds this package's CUDA C++ sources with NVRTC, keeps the cubins on disk, loads and launches.

A source is a `.cu` file under `csrc/`; it may include only headers that stand beside it or above it
under `csrc/`, so that a cache key covers all of it. Compiling needs no GPU and no driver: only the
NVRTC library and `cuda.bindings`, which torch's CUDA wheels bring. Every kernel takes one struct as
its only argument. Imports of `cuda.bindings` stay inside functions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_engine.build_cache import load_or_build
from compiled_engine.cache_folders import CUBINS, build_dir
from compiled_engine.compile.torch_compat import raw_stream

CSRC = Path(__file__).parent / "csrc"
# Part of every cache key: raise it when launchers and kernels change how they talk to each other.
ABI_NUMBER = 1
FLAGS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class CudaBuildError(RuntimeError):
    """NVRTC refused a source, or a CUDA driver call failed; the message holds its output."""


@dataclass(frozen=True)
class CudaSource:
    """A source file with all own headers it includes.

    Attributes:
        name: path under `csrc/`, with slashes.
        text: the file.
        headers: (name as it is included, text), sorted.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cubin:
    """Compiled code of one source for one architecture.

    Attributes:
        code: what the driver loads.
        log: the compiler's output with the assembler's resource use; empty if read from disk.
    """

    code: bytes
    log: str


def cuda_sources() -> list[str]:
    """Names of all sources, sorted."""
    return sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.cu"))


def read_source(name: str) -> CudaSource:
    """Reads a source and, transitively, the headers it includes."""
    path = CSRC / name
    text = path.read_text()
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        header = pending.pop()
        if header not in headers:
            headers[header] = _find_header(path.parent, header).read_text()
            pending += _INCLUDE.findall(headers[header])
    return CudaSource(name, text, tuple(sorted(headers.items())))


def _find_header(folder: Path, header: str) -> Path:
    for base in (folder, CSRC):
        if (base / header).is_file():
            return base / header
    raise CudaBuildError(f"{header} is included but stands neither in {folder} nor in {CSRC}")


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture name to compile for, such as `sm_90a`."""
    major, minor = torch.cuda.get_device_capability(device)
    # From 9.0 on, some instructions exist only in the variant for exactly one chip.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def supported_archs() -> tuple[int, ...]:
    """Architecture numbers this NVRTC compiles for, such as 90."""
    from cuda.bindings import nvrtc

    return tuple(checked(nvrtc.nvrtcGetSupportedArchs()))


def compile_source(name: str, arch: str, flags: Iterable[str] = ()) -> Cubin:
    """Compiles `csrc/<name>` for `arch`; touches neither a GPU nor a disk cache.

    Raises:
        CudaBuildError: the source has an error; the message holds the compiler's log.
    """
    from cuda.bindings import nvrtc

    source = read_source(name)
    names = [header.encode() for header, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = checked(
        nvrtc.nvrtcCreateProgram(
            source.text.encode(), str(CSRC / name).encode(), len(names), texts, names
        )
    )
    try:
        options = [option.encode() for option in (f"-arch={arch}", *FLAGS, *flags)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaBuildError(f"{name} for {arch}: {status.name}\n{text}")
        code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return Cubin(code, text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_all(arch: str) -> dict[str, Cubin]:
    """Compiles every source for `arch`: what a machine without a GPU can check."""
    return {name: compile_source(name, arch) for name in cuda_sources()}


def cache_key(name: str, arch: str, flags: Iterable[str] = ()) -> str:
    """Key of one cubin: everything that its bytes depend on."""
    from cuda.bindings import nvrtc

    source = read_source(name)
    version = checked(nvrtc.nvrtcVersion())
    parts = (source, arch, (*FLAGS, *flags), tuple(version), ABI_NUMBER)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cached_cubin(name: str, arch: str, cache_dir: Path, flags: Iterable[str] = ()) -> Cubin:
    """The cubin from the folder `cache_dir`, compiled and put there if it is missing or damaged."""
    flags = tuple(flags)
    path = cache_dir / f"{cache_key(name, arch, flags)}.cubin"
    logs: list[str] = []

    def build() -> bytes:
        cubin = compile_source(name, arch, flags)
        logs.append(cubin.log)
        return cubin.code

    return Cubin(load_or_build(path, build), "".join(logs))


class Kernel:
    """A loaded kernel with its launch configuration. One for each call site.

    Args:
        library: from `load_library`.
        name: of the `extern "C"` function.
        block: threads of a block.
        shared_bytes: dynamic shared memory.
        is_dependent: launch while the kernel before it in the stream still runs; the kernel itself
            waits before it touches memory.
    """

    def __init__(
        self,
        library: Any,
        name: str,
        *,
        block: int,
        shared_bytes: int = 0,
        is_dependent: bool = False,
    ) -> None:
        from cuda.bindings import driver

        kernel = checked(driver.cuLibraryGetKernel(library, name.encode()))
        self._function = driver.CUfunction(int(kernel))
        self._launch = driver.cuLaunchKernelEx
        if shared_bytes:
            _allow_shared(kernel, shared_bytes)
        self._config = launch_config(block, shared_bytes, is_dependent=is_dependent)
        self._params = (ctypes.c_void_p * 1)()

    def launch(self, grid: int, args: ctypes.Structure) -> None:
        """Launches `grid` blocks on torch's current stream; `args` is copied by the call."""
        self._config.gridDimX = grid
        self._config.hStream = raw_stream(torch.cuda.current_device())
        self._params[0] = ctypes.addressof(args)
        checked(self._launch(self._config, self._function, ctypes.addressof(self._params), 0))


def launch_config(block: int, shared_bytes: int, *, is_dependent: bool) -> Any:
    """A launch of one block, to be given its grid and stream; arguments as for `Kernel`."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    if is_dependent:
        launch_attribute = driver.CUlaunchAttribute()
        kind = driver.CUlaunchAttributeID
        launch_attribute.id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        launch_attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [launch_attribute], 1
    return config


def loaded_kernel(code: bytes, name: str, shared_bytes: int) -> Any:
    """A kernel of a cubin, loaded into the driver, as `cuLaunchKernelEx` takes it.

    Not to be called while capturing.
    """
    from cuda.bindings import driver

    torch.cuda.init()
    library = checked(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))
    kernel = checked(driver.cuLibraryGetKernel(library, name.encode()))
    if shared_bytes:
        _allow_shared(kernel, shared_bytes)
    return driver.CUfunction(int(kernel))


def _allow_shared(kernel: Any, shared_bytes: int) -> None:
    """Lets a kernel have that much dynamic shared memory; by itself it may not pass 48 KiB.

    The limit belongs to the kernel, which several launch configurations may share: it only grows.
    """
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    if checked(driver.cuKernelGetAttribute(limit, kernel, device)) < shared_bytes:
        checked(driver.cuKernelSetAttribute(limit, shared_bytes, kernel, device))


@functools.cache
def load_library(name: str, arch: str, cache_dir: Path, flags: tuple[str, ...] = ()) -> Any:
    """Loads a source's cubin into the driver, once a process. Not to be called while capturing."""
    from cuda.bindings import driver

    torch.cuda.init()
    code = cached_cubin(name, arch, cache_dir, flags).code
    return checked(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))


def cubin_dir() -> Path:
    """Where launchers keep cubins."""
    return build_dir() / CUBINS


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a `cuda.bindings` call, or an error if its status is one."""
    status, *values = result
    if int(status) != 0:
        raise CudaBuildError(f"a CUDA call failed: {status.name}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
