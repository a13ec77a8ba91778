"""Every candidate against its family's reference, over seeded shapes.

Cases are the op's own examples (odd, empty and strided ones among them) and, for what has them, the
bench's at a small model. A candidate that can run on the device and that no case fits has failed
too: it would be checked by nothing. What is tagged deterministic must give the same bits twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.family_inputs import Shapes
from compiled_engine.custom_ops.kernel_family import KernelFamily
from compiled_engine.custom_ops.registry import (
    DETERMINISTIC_TAG,
    Candidate,
    KernelRegistry,
    Target,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter cuts bf16 off instead of rounding it.
INTERPRETED_DTYPES = (torch.float32, torch.float16)
NUM_TOKENS = {"cuda": (1, 2, 7, 16, 33, 64, 100, 300), "cpu": (1, 2, 7, 33)}
SMALL = {
    "cuda": Shapes(
        hidden=1024, inner=2048, num_heads=8, num_kv_heads=2, vocab_size=4099, context=100
    ),
    "cpu": Shapes(
        hidden=128, inner=192, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=515, context=40
    ),
}
OK, FAILED, SKIPPED = "OK", "FAIL", "-"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one candidate did in one dtype.

    Attributes:
        place, name: family and mode, candidate.
        dtype: of the inputs; empty where it did not run in any.
        num_cases: that it can serve.
        worst: largest difference, over the allowed one.
        limit: allowed difference where it was worst, relative to the largest expected value.
        why: what the tolerance is made of.
        status: "OK", "FAIL", or "-" for one that cannot run here.
        reason: of a failure, or why it cannot run here.
    """

    place: str
    name: str
    dtype: str
    num_cases: int
    worst: float
    limit: float
    why: str
    status: str
    reason: str


def check_kernels(
    registry: KernelRegistry,
    device: torch.device,
    *,
    only: str = "",
    num_seeds: int = 2,
    note: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Checks all candidates, or those of a family or "family.mode"; `note` gets each result."""
    results = []
    for family in FAMILIES:
        if only not in ("", family.family, family.place):
            continue
        for candidate in registry.of(family.family, family.mode):
            for result in _check(family, candidate, device, num_seeds):
                note(result)
                results.append(result)
    return results


def _check(
    family: KernelFamily, candidate: Candidate, device: torch.device, num_seeds: int
) -> Iterator[Result]:
    target = Target.of(device)
    reason = candidate.device_rejection(target)
    interpreted = reason is not None and device.type == "cpu" and is_interpreted(candidate)
    blank: dict[str, Any] = {"place": family.place, "name": candidate.name, "why": ""}
    blank |= {"dtype": "", "num_cases": 0, "worst": 0.0, "limit": 0.0}
    if reason is not None and not interpreted:
        if candidate.interpreted and device.type == "cpu":
            reason += "; TRITON_INTERPRET=1 runs it here"
        yield Result(**blank, status=SKIPPED, reason=reason)
        return
    dtypes = INTERPRETED_DTYPES if interpreted else DTYPES
    checked = [d for d in dtypes if d in candidate.dtypes] or [torch.float32]
    num_cases = 0
    for dtype in checked:
        result = _check_dtype(family, candidate, device, dtype, num_seeds, interpreted=interpreted)
        num_cases += result.num_cases
        if result.num_cases or result.status == FAILED:
            yield result
    if not num_cases:
        yield Result(**blank, status=FAILED, reason="no case fits it: it is checked by nothing")


def is_interpreted(candidate: Candidate) -> bool:
    """Whether its Triton kernel runs on CPU tensors in this process."""
    return bool(candidate.interpreted) and os.environ.get("TRITON_INTERPRET") == "1"


def _check_dtype(
    family: KernelFamily,
    candidate: Candidate,
    device: torch.device,
    dtype: torch.dtype,
    num_seeds: int,
    *,
    interpreted: bool,
) -> Result:
    target = Target("cuda", 80) if interpreted else Target.of(device)
    num_cases, worst, allowed, failure = 0, 0.0, 0.0, ""
    for label, arguments in cases(family, device, dtype, num_seeds, is_small=interpreted):
        traits = family.traits(arguments, target)
        layout = str(arguments[family.layout]) if family.layout else ""
        if candidate.rejection(target, family.dtype_of(arguments), traits, layout) is not None:
            continue
        num_cases += 1
        try:
            share, limit = _compare(family, candidate, arguments, interpreted=interpreted)
        except Exception as error:  # a kernel that cannot be built or launched has failed
            failure = failure or f"{label}: {type(error).__name__}: {error}"
            continue
        if share > 1 and not failure:
            failure = f"{label}: off by {share:.1f} times what is allowed"
        worst, allowed = max((worst, allowed), (share, limit))
    return Result(
        place=family.place,
        name=candidate.name,
        dtype=str(dtype).removeprefix("torch."),
        num_cases=num_cases,
        worst=worst,
        limit=allowed,
        why=family.tolerance.why,
        status=FAILED if failure else OK,
        reason=failure,
    )


def cases(
    family: KernelFamily,
    device: torch.device,
    dtype: torch.dtype,
    num_seeds: int,
    *,
    is_small: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Labels and arguments by name: the examples of the op, then the bench's at a small model."""
    for seed in range(num_seeds):
        for index, given in enumerate(family.op.example_inputs(dtype, device, seed)):
            yield f"example {index}, seed {seed}", family.bind(given)
    if family.bench_cases is None or is_small:
        return
    small = SMALL[device.type]
    shapes = Shapes(**{**small.__dict__, "dtype": dtype})
    for num_tokens in NUM_TOKENS[device.type]:
        torch.manual_seed(num_tokens)
        for case in family.bench_cases(shapes, num_tokens, device):
            yield case.label, family.bind(case.make())


def _compare(
    family: KernelFamily, candidate: Candidate, arguments: dict[str, Any], *, interpreted: bool
) -> tuple[float, float]:
    """Largest difference over the allowed one, and that.

    Raises:
        AssertionError: shapes or dtypes differ, or bits from run to run.
    """
    theirs = copied(arguments)
    expected = [*as_tuple(family.op.reference(*_without_impl(theirs))), *written(family, theirs)]

    def run() -> list[Tensor]:
        mine = copied(arguments)
        results = as_tuple(family.run(candidate, mine, interpreted=interpreted))
        return [*results, *written(family, mine)]

    got = run()
    assert len(got) == len(expected), f"{len(got)} results, expected {len(expected)}"
    if DETERMINISTIC_TAG in candidate.tags:
        again = run()
        same = all(same_bits(a, b) for a, b in zip(got, again, strict=True))
        assert same, "tagged deterministic, and gives other bits the second time"
    worst, allowed = 0.0, 0.0
    for mine, other in zip(got, expected, strict=True):
        share, limit = _difference(mine, other, family, arguments)
        worst, allowed = max((worst, allowed), (share, limit))
    return worst, allowed


def _difference(
    got: Tensor, expected: Tensor, family: KernelFamily, arguments: dict[str, Any]
) -> tuple[float, float]:
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{got.dtype}, expected {expected.dtype}"
    if got.numel() == 0:
        return 0.0, 0.0
    if not got.dtype.is_floating_point:
        assert torch.equal(got, expected), f"{int((got != expected).sum())} integers differ"
        return 0.0, 0.0
    got, other = got.double(), expected.double()
    assert torch.equal(got.isnan(), other.isnan()), "NaN in other places than the reference's"
    limit = family.tolerance.limit(expected.dtype, arguments)
    finite = other.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), other[~finite].nan_to_num()), "infinities differ"
    if not bool(finite.any()):
        return 0.0, limit
    scale = other[finite].abs().max().clamp_min(1e-30)
    return float((got[finite] - other[finite]).abs().max() / scale) / limit, limit


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with tensors of their own, strides kept."""
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """Results of an op, none as an empty tuple."""
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def written(family: KernelFamily, arguments: dict[str, Any]) -> list[Tensor]:
    """Arguments that the op mutates; of a cache without page 0, which has no owner."""
    found = []
    for argument in family.op.overload._schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            value = arguments[argument.name]
            found.append(value[1:] if "cache" in argument.name else value)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _without_impl(arguments: dict[str, Any]) -> list[Any]:
    return [value for name, value in arguments.items() if name != "impl"]
