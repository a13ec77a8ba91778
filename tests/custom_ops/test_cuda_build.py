"""The build of CUDA sources, as far as a machine without a GPU can see it."""

from __future__ import annotations

import ctypes
import re
import warnings

import pytest
import torch

from compiled_engine.custom_ops import cuda_build
from compiled_engine.custom_ops.cuda_build import (
    CudaBuildError,
    cache_key,
    cached_cubin,
    compile_source,
    cuda_sources,
    read_source,
    supported_archs,
)

pytest.importorskip("cuda.bindings.nvrtc")

ADD = """
#include "one.cuh"
struct Args { int* value; };
extern "C" __global__ void add(const __grid_constant__ Args args) {
    atomicAdd(args.value, ONE + gridDim.x);
}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources with one kernel in it."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "add.cu").write_text(ADD)
    (folder / "one.cuh").write_text('#include "zero.cuh"\n#define ONE (ZERO + 1)\n')
    (folder / "zero.cuh").write_text("#define ZERO 0\n")
    monkeypatch.setattr(cuda_build, "CSRC", folder)
    return folder


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", cuda_sources())
def test_every_source_compiles_without_spills(name, arch):
    log = compile_source(name, arch).log
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert frames, log
    assert all(frame == ("0", "0") for frame in frames), log
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    # Blocks of attention have 128 threads, of packed weights 256, those of the scheduler 1024.
    assert max(registers) <= (255 if name.startswith(("attention/", "packed/")) else 64), registers


def test_nvrtc_says_what_it_supports():
    assert {80, 90, 100} <= set(supported_archs())


def test_headers_are_found_transitively(sources):
    assert [name for name, _ in read_source("add.cu").headers] == ["one.cuh", "zero.cuh"]
    (sources / "zero.cuh").unlink()
    with pytest.raises(CudaBuildError, match=r"zero\.cuh is included"):
        read_source("add.cu")


def test_key_covers_sources_flags_and_architecture(sources, monkeypatch):
    keys = [cache_key("add.cu", "sm_80"), cache_key("add.cu", "sm_90a")]
    keys.append(cache_key("add.cu", "sm_80", ("-G",)))
    (sources / "zero.cuh").write_text("#define ZERO 1\n")
    keys.append(cache_key("add.cu", "sm_80"))
    monkeypatch.setattr(cuda_build, "ABI_NUMBER", cuda_build.ABI_NUMBER + 1)
    keys.append(cache_key("add.cu", "sm_80"))
    assert len(set(keys)) == len(keys)
    assert cache_key("add.cu", "sm_80") == keys[-1]


def test_second_time_is_read_from_disk(sources, tmp_path, monkeypatch):
    first = cached_cubin("add.cu", "sm_80", tmp_path / "cache")
    monkeypatch.setattr(cuda_build, "compile_source", None)
    second = cached_cubin("add.cu", "sm_80", tmp_path / "cache")
    assert first.code == second.code
    assert first.code.startswith(b"\x7fELF")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_damaged_entry_is_one_warning_and_a_compilation(sources, tmp_path):
    first = cached_cubin("add.cu", "sm_80", tmp_path)
    (path,) = tmp_path.glob("*.cubin")
    for damage in (b"", path.read_bytes()[:-1], b"x" * 100):
        path.write_bytes(damage)
        with pytest.warns(UserWarning, match="built again: it is damaged") as seen:
            again = cached_cubin("add.cu", "sm_80", tmp_path)
        assert len(seen) == 1
        assert again.code == first.code
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_cubin("add.cu", "sm_80", tmp_path).code == first.code


def test_error_holds_the_compilers_log(sources):
    (sources / "zero.cuh").write_text("#define ZERO nonsense\n")
    with pytest.raises(CudaBuildError, match=r'(?s)add\.cu for sm_80: .*"nonsense" is undefined'):
        compile_source("add.cu", "sm_80")


class AddArgs(ctypes.Structure):
    """Of the kernel above."""

    _fields_ = (("value", ctypes.c_void_p),)


@pytest.mark.gpu
@pytest.mark.parametrize("is_dependent", [False, True])
def test_kernel_runs(sources, tmp_path, is_dependent):
    device = torch.device("cuda", torch.cuda.current_device())
    if is_dependent and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs sm_90")
    library = cuda_build.load_library("add.cu", cuda_build.arch_of(device), tmp_path)
    kernel = cuda_build.Kernel(
        library, "add", block=32, shared_bytes=64 * 1024, is_dependent=is_dependent
    )
    value = torch.zeros(1, dtype=torch.int32, device=device)
    for grid in (1, 2):
        kernel.launch(grid, AddArgs(value.data_ptr()))
    assert value.item() == 32 * 2 + 64 * 3


@pytest.mark.gpu
def test_missing_kernel_is_an_error(sources, tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    library = cuda_build.load_library("add.cu", cuda_build.arch_of(device), tmp_path / "cache")
    with pytest.raises(CudaBuildError, match="CUDA_ERROR_NOT_FOUND"):
        cuda_build.Kernel(library, "subtract", block=32)
