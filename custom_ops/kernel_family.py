"""What a kernel family is: an op, the shape traits its candidates look at, what a call costs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import family_inputs as inputs
from compiled_engine.custom_ops.family_inputs import BenchCase, Shapes
from compiled_engine.custom_ops.library import OpSpec
from compiled_engine.custom_ops.registry import Candidate, Priority, Target

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one call must move and compute.

    Attributes:
        num_bytes: read and written once.
        num_flops: operations of products.
        is_8bit: the factors of those products are 8-bit numbers.
    """

    num_bytes: float = 0.0
    num_flops: float = 0.0
    is_8bit: bool = False


# (arguments by name, results, tokens of KV a sequence attends to) -> cost
CostFunction = Callable[[Arguments, tuple[Any, ...], int], Cost]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a candidate may lie from the reference, relative to the largest expected value.

    Attributes:
        roundings: to the result's dtype on both sides, each off by half a unit in the last place.
        terms: argument name and dim whose size is the length of the longest sum, in fp32: two
            orders of n terms lie about sqrt(n) roundings apart. Functions such as exp add some.
        why: of the roundings, for people.
    """

    roundings: float = 2.0
    terms: tuple[str, int] | None = None
    why: str = "the result, on both sides"

    def limit(self, dtype: torch.dtype, arguments: Arguments) -> float:
        """The allowed difference for results of `dtype`."""
        size = 1
        if self.terms is not None:
            size = max(1, arguments[self.terms[0]].shape[self.terms[1]])
        return self.roundings * torch.finfo(dtype).eps / 2 + (16 + 4 * math.sqrt(size)) * 2.0**-24


@dataclass(frozen=True, kw_only=True)
class KernelFamily:
    """One op that several candidates implement.

    Attributes:
        family, mode: as in `Candidate`.
        op: the op; one argument may be called `impl`, which names the candidate.
        main: argument whose device and dtype decide.
        dtype: argument that is the dtype to choose for; empty takes that of `main`.
        layout: argument that holds the format of a packed operand; empty if there is none.
        varying: trait that is the number of tokens, which a graph may leave open.
        traits: of arguments by name on a target.
        cost: of a call.
        tolerance: of its results against the reference.
        bench_cases: at the shapes of a model and a number of tokens; the examples of the op if
            there are none.
        make_real: arguments with values that a kernel can run on, shaped as the given ones; random
            floats and zero integers if there is none.
    """

    family: str
    mode: str
    op: OpSpec
    main: str = "x"
    dtype: str = ""
    layout: str = ""
    varying: str = "num_tokens"
    traits: Callable[[Arguments, Target], dict[str, int]]
    cost: CostFunction
    tolerance: Tolerance = Tolerance()
    bench_cases: Callable[[Shapes, int, torch.device], Iterable[BenchCase]] | None = None
    make_real: Callable[[Arguments, torch.device, int], dict[str, Any]] | None = None

    @property
    def place(self) -> str:
        """Family and mode as `--kernel` spells them."""
        return f"{self.family}.{self.mode}"

    @property
    def has_impl(self) -> bool:
        """The op is told the candidate's name."""
        return any(a.name == "impl" for a in self.op.overload._schema.arguments)

    def dtype_of(self, arguments: Arguments) -> torch.dtype:
        """The dtype that a kernel for a call is chosen for."""
        found = arguments[self.dtype] if self.dtype else arguments[self.main].dtype
        assert isinstance(found, torch.dtype)
        return found

    def bind(self, given: Iterable[Any], named: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A call's arguments by name, in the order of the op's, defaults filled in."""
        schema = self.op.overload._schema.arguments
        bound = dict(zip((a.name for a in schema), given, strict=False)) | dict(named or {})
        unknown = bound.keys() - {a.name for a in schema}
        assert not unknown, f"{self.op.overload} has no {', '.join(sorted(unknown))}"
        return {a.name: bound.get(a.name, a.default_value) for a in schema}

    def run(self, candidate: Candidate, arguments: Arguments, *, interpreted: bool = False) -> Any:
        """Calls a candidate of the family; `interpreted` runs Triton's on CPU tensors."""
        without = {name: value for name, value in arguments.items() if name != "impl"}
        if interpreted and candidate.interpreted:
            module, _, name = candidate.interpreted.partition(":")
            found = importlib.import_module(f"compiled_engine.custom_ops.{module}")
            return getattr(found, name)(*without.values())
        if candidate.launch is not None:
            return candidate.launch(**without)
        if candidate.priority is Priority.REFERENCE:
            return self.op.reference(*without.values())
        if self.has_impl:
            return self.op.overload(**without, impl=candidate.name)
        return self.op.overload(**without)

    def real_inputs(
        self, arguments: Arguments, device: torch.device, context: int = 1024
    ) -> dict[str, Any]:
        """Arguments with values, shaped as the given ones, which may be fake.

        `context` is how many tokens of KV each sequence should have, if the cache holds them.
        """
        made = inputs.filled(arguments, device)
        if self.make_real is None:
            return made
        return {**made, **self.make_real(arguments, device, context)}


def num_bytes(value: Any) -> int:
    """Bytes of a tensor's values, whatever it is a view of; 0 for what is none."""
    if not isinstance(value, Tensor):
        return 0
    return int(value.numel()) * value.element_size()
