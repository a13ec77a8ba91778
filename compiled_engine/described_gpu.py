"""Stands in for a GPU that is not here: answers what code asks of it, and holds tensors "on" it.

Tensors are fake ones on the CPU that say they are on the GPU: they have shapes, strides and
addresses, and no values. Ops of ours on them run the launchers of a GPU, whose launches then come
to nothing, and everything else runs as far as shapes go. For a process that uses no GPU before or
after: launchers remember what they were told of the device. Private names of torch and Triton; seen
in torch 2.11 to 2.13 and Triton 3.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.compile.torch_compat import fake_mode, real_tensors
from compiled_engine.errors import ConfigError

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
# Where storages of fake tensors "begin": aligned as an allocator's.
_ADDRESS = 1 << 20
_WARP_SIZE = 32
# Properties as modes see them.
_IS_CUDA, _IS_CPU = (vars(torch._C.TensorBase)[name].__get__ for name in ("is_cuda", "is_cpu"))


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU as launchers see it.

    Attributes:
        arch: as compilers name it, such as "sm_90a".
        name: of the GPU whose sizes these are.
        num_multiprocessors: of it.
        block_bytes: shared memory of a block of threads, at most.
        processor_bytes: shared memory of a multiprocessor.
    """

    arch: str
    name: str
    num_multiprocessors: int
    block_bytes: int
    processor_bytes: int

    @property
    def number(self) -> int:
        """Compute capability as major * 10 + minor."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor."""
        return divmod(self.number, 10)


_SMALL, _MIDDLE, _LARGE = (101376, 102400), (166912, 167936), (232448, 233472)
CHIPS = tuple(
    Chip(arch=arch, name=name, num_multiprocessors=count, block_bytes=sizes[0],
         processor_bytes=sizes[1])
    for arch, name, count, sizes in (
        ("sm_80", "NVIDIA A100", 108, _MIDDLE),
        ("sm_86", "NVIDIA A10", 72, _SMALL),
        ("sm_89", "NVIDIA L40S", 142, _SMALL),
        ("sm_90a", "NVIDIA H200", 132, _LARGE),
        ("sm_100a", "NVIDIA B200", 148, _LARGE),
        ("sm_120a", "NVIDIA RTX PRO 6000 Blackwell", 188, _SMALL),
    )
)  # fmt: skip


def find_chip(arch: str) -> Chip:
    """The chip of an architecture; "sm_90" is "sm_90a", which is what starts compile for.

    Raises:
        ConfigError: it is none of those that are known; lists them.
    """
    for chip in CHIPS:
        if arch in (chip.arch, chip.arch.rstrip("a")):
            return chip
    known = ", ".join(chip.arch for chip in CHIPS)
    raise ConfigError(f"--target-arch {arch} is not known; known are {known}", param="target_arch")


@contextmanager
def described_gpu(chip: Chip) -> Iterator[None]:
    """Answers questions about GPUs with this one; calls of the CUDA driver come to nothing."""
    import cuda.bindings
    from cuda.bindings import driver

    from compiled_engine.custom_ops.cuda_build import Kernel

    major, minor = chip.capability
    properties = SimpleNamespace(
        name=chip.name,
        major=major,
        minor=minor,
        multi_processor_count=chip.num_multiprocessors,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=chip.block_bytes,
        shared_memory_per_multiprocessor=chip.processor_bytes,
        warp_size=_WARP_SIZE,
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda _: nullcontext(),
        "get_device_capability": lambda _=None: chip.capability,
        "get_device_properties": lambda _=None: properties,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(cuda.bindings, "driver", _NoDriver(driver)))
        stack.enter_context(mock.patch.object(Kernel, "launch", return_value=None))
        yield


class _NoDriver:
    """The CUDA driver's bindings; every call succeeds and does nothing."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and name[2:3].isupper()):
            return getattr(self._bindings, name)
        made = self._bindings.CUtensorMap() if name == "cuTensorMapEncodeTiled" else 0
        return lambda *_: (0, made)


class _TritonDriver:
    """What Triton asks a driver while it compiles."""

    def __init__(self, chip: Chip) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", chip.number, _WARP_SIZE)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


@contextmanager
def triton_for(chip: Chip, on_launch: Callable[[Any], None]) -> Iterator[None]:
    """Launches of Triton kernels compile them for the chip, or find them in the cache, and end.

    `on_launch` is called with the kernel before each.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        on_launch(self)
        return plain(self, *args, grid=grid, warmup=True, **options)

    with (
        mock.patch.object(driver, "_active", _TritonDriver(chip)),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield


class _OnGpu(TorchFunctionMode):
    """Has fake tensors say that they are on the GPU; what is asked for there is made on the CPU.

    Tensors in pinned memory are real ones.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items()}
        if func == _IS_CUDA:
            return _is_fake(args[0])
        if func in (_IS_CPU, torch.Tensor.is_pinned):
            return not _is_fake(args[0])
        if func == torch.Tensor.data_ptr and _is_fake(args[0]):
            return _ADDRESS + args[0].storage_offset() * args[0].itemsize
        if kwargs.pop("pin_memory", False) or func == torch.Tensor.numpy:
            with real_tensors():
                return func(*args, **kwargs)
        return func(*map(_here, args), **kwargs)


def _here(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return _CPU if is_gpu else value


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


class _Launches(TorchDispatchMode):
    """Runs the launchers of our ops in place of their shapes alone."""

    def __init__(
        self,
        kernels: Mapping[str, Callable[..., Any]],
        on_gpu: _OnGpu,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._on_gpu = on_gpu
        self._on_error = on_error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = self._kernels.get(func.name())
        if kernel is not None:
            try:
                with self, self._on_gpu:
                    return kernel(*args, **kwargs)
            except Exception as error:  # whatever a launcher asks a GPU that is not here
                self._on_error(func.name(), error)
        return func(*args, **kwargs)


@contextmanager
def tensors_on_gpu(
    kernels: Mapping[str, Callable[..., Any]], on_error: Callable[[str, Exception], None]
) -> Iterator[None]:
    """Tensors of the block are fake ones on the GPU, within `described_gpu`.

    Args:
        kernels: launchers by the name of their op.
        on_error: called with the op and what its launcher raised; its result is then made without.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    on_gpu = _OnGpu()
    plain: Any = FakeTensor.device

    def device(tensor: FakeTensor) -> torch.device:
        # Torch's own code, which runs without the mode, is told the truth.
        is_asked = torch.overrides._get_current_function_mode() is on_gpu
        return GPU if is_asked else plain.fget(tensor)

    with (
        mock.patch.object(FakeTensor, "device", property(device)),
        torch.no_grad(),
        fake_mode(),
        _Launches(kernels, on_gpu, on_error),
        on_gpu,
    ):
        yield


@contextmanager
def tensors_here() -> Iterator[None]:
    """Within `tensors_on_gpu`: fake tensors are on the CPU, and there is no GPU."""
    with (
        torch.overrides._pop_mode_temporarily(),
        real_tensors(),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        yield
