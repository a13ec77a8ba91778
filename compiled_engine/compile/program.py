"""A compiled piece as data: what it reads, the calls it is made of, its kernels, what it returns.

Inductor writes a Python function that launches kernels one after another, and the kernels. Both are
kept here without Inductor: a program that is loaded runs with neither Dynamo nor AOTAutograd nor
Inductor imported. Its inputs are expressions over the arguments of the function that was compiled,
as Dynamo wrote them. A program is code: load only what this machine or somebody trusted made.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from compiled_engine.compile.program_kernels import CpuKernel, GpuKernel, load_cpu, load_gpu
from compiled_engine.custom_ops.cuda_build import CudaBuildError

# What a loader meets where memory, files or `/proc` are short; the dynamic linker's is ImportError.
_SHORTAGES = (OSError, MemoryError, ImportError, torch.OutOfMemoryError, CudaBuildError)
# Classes of results come from here and from nowhere else.
_PACKAGE = "compiled_engine"


class ProgramError(RuntimeError):
    """Bytes that are no program, or one that can never run here."""


class ProgramLoadError(ProgramError):
    """A program that cannot be loaded now: something that it needs is short."""


class Kind(msgspec.Struct, frozen=True):
    """What a graph was specialised on.

    Attributes:
        shape, stride: None where any size is taken.
        dtype: as "torch.bfloat16".
        device: as "cuda".
    """

    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    dtype: str
    device: str

    def takes(self, tensor: Tensor) -> bool:
        """Whether the graph may be given `tensor`."""
        return (
            len(self.shape) == tensor.dim()
            and all(a is None or a == b for a, b in zip(self.shape, tensor.shape, strict=True))
            and all(a is None or a == b for a, b in zip(self.stride, tensor.stride(), strict=True))
            and self.dtype == str(tensor.dtype)
            and self.device == tensor.device.type
        )


class ProgramInput(msgspec.Struct, frozen=True):
    """One input of the graph.

    Attributes:
        source: an expression over `L`, the function's arguments by name.
        argument: the name of the argument it begins with.
        kind: of a tensor; None for a size.
    """

    source: str
    argument: str
    kind: Kind | None


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled piece.

    Attributes:
        name: the piece's.
        inputs: in the order in which the function `call` takes them, in one list.
        outputs: how the results become what the piece returns: nested lists, see `rebuilder`.
        source: of a function `call(args)`, which empties `args` and returns a tuple of tensors.
        cpu_kernels, gpu_kernels: what it launches beside registered ops.
        externs: names of `torch` that it calls as `extern_kernels.NAME`.
        num_matches: matches by pass, as when it was compiled.
        num_expansions: semantic ops that no pass took.
    """

    name: str
    inputs: tuple[ProgramInput, ...]
    outputs: list[Any]
    source: str
    cpu_kernels: tuple[CpuKernel, ...]
    gpu_kernels: tuple[GpuKernel, ...]
    externs: tuple[str, ...]
    num_matches: dict[str, int]
    num_expansions: int

    @property
    def num_kernels(self) -> int:
        """Kernels that Inductor wrote for it."""
        return len(self.cpu_kernels) + len(self.gpu_kernels)

    def to_bytes(self) -> bytes:
        """All of it in one piece."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """The program in `data`.

        Raises:
            ProgramError: it is none, or of another version of this code.
        """
        try:
            return msgspec.msgpack.decode(data, type=Program)
        except msgspec.MsgspecError as error:
            raise ProgramError(f"this is no program: {error}") from error


class LoadedProgram:
    """A program that can be called.

    Args:
        program: what was compiled.
        parameters: names of the function's parameters, in order.

    Raises:
        ProgramError: it cannot run here, or its expressions name other parameters.
        ProgramLoadError: memory or files do not suffice now.

    Attributes:
        inputs, outputs: the program's.
        bind: the graph's inputs, as a list, for the function's arguments.
        call: the graph's results for such a list, which it empties.
        rebuild: what the function returns, from the results and its arguments.
    """

    def __init__(self, program: Program, parameters: list[str]) -> None:
        unknown = {i.argument for i in program.inputs} - set(parameters)
        if unknown:
            raise ProgramError(f"{program.name}: no parameters {', '.join(sorted(unknown))}")
        self.program = program
        self.inputs = program.inputs
        self.outputs = program.outputs
        self.bind = binder(parameters, [item.source for item in program.inputs])
        self.rebuild = rebuilder(parameters, program.outputs)
        try:
            self.call = _load_call(program)
        except _SHORTAGES as error:
            raise ProgramLoadError(f"{program.name} cannot be loaded: {error}") from error
        except Exception as error:  # whatever a foreign machine or version may do
            raise ProgramError(f"{program.name} cannot run here: {error}") from error


def binder(parameters: list[str], sources: list[str]) -> Callable[..., list[Any]]:
    """A function from the parameters' values to the values of expressions over `L`."""
    values = ", ".join(over_parameters(source) for source in sources)
    return _made(f"def made({', '.join(parameters)}):\n    return [{values}]", {})


def over_parameters(source: str) -> str:
    """An expression over `L` as one over the parameters themselves."""
    return re.sub(r"L\['(\w+)'\]", r"\1", source)


def rebuilder(parameters: list[str], outputs: list[Any]) -> Callable[..., Any]:
    """From (results, *arguments) to what the piece returns.

    An output is one of ["result", place], ["argument", expression], ["none"], ["tuple", [outputs]]
    and ["record", "module:Class", [outputs]] for a named tuple.
    """
    classes: dict[str, Any] = {}

    def written(output: list[Any]) -> str:
        match output:
            case ["result", int(place)]:
                return f"results[{place}]"
            case ["argument", str(source)]:
                return over_parameters(source)
            case ["none"]:
                return "None"
            case ["tuple", items]:
                return "(" + "".join(f"{written(item)}, " for item in items) + ")"
            case ["record", str(path), items]:
                name = f"class_{len(classes)}"
                classes[name] = _class_at(path)
                return f"{name}({', '.join(written(item) for item in items)})"
        raise ProgramError(f"unknown output {output}")

    text = written(outputs)
    return _made(f"def made(results, {', '.join(parameters)}):\n    return {text}", classes)


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ProgramError(f"{path} is no class of this package")
    return getattr(importlib.import_module(module), name)


def _made(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope = {"__builtins__": {}, **names}
    exec(compile(source, "<program>", "exec"), scope)
    return scope["made"]


def _load_call(program: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
    scope = wrapper_names()
    scope["extern_kernels"] = _Externs(program.externs)
    scope |= {kernel.name: load_cpu(kernel) for kernel in program.cpu_kernels}
    scope |= {kernel.name: load_gpu(kernel) for kernel in program.gpu_kernels}
    exec(compile(program.source, f"<program {program.name}>", "exec"), scope)
    call: Callable[[list[Any]], tuple[Any, ...]] = scope["call"]
    return call


class _Externs:
    """Products and such, which Inductor's function calls by torch's own names for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(self, name, getattr(torch, name))


def wrapper_names() -> dict[str, Any]:
    """What Inductor's function may use beside kernels; the names are Inductor's (2.11 to 2.14)."""
    guards: Any = torch._C._dynamo.guards
    names = {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "aten": torch.ops.aten,
        "device": torch.device,
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "empty_strided_cuda": guards._empty_strided_cuda,
        "reinterpret_tensor": guards._reinterpret_tensor,
    }
    if hasattr(guards, "copy_if_misaligned"):  # from torch 2.13 on
        names["copy_if_misaligned"] = guards.copy_if_misaligned
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return names if stream is None else {**names, "get_raw_stream": stream}
