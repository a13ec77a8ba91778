"""What every op owes, over the registry: reference equals kernel, schema, fakes, empty inputs.

The generic tests run each op's own example inputs in every dtype; what is special to an op is in a
file of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_engine.custom_ops import ALL_OPS, OpSpec
from compiled_engine.custom_ops.library import NAMESPACE
from tests.helpers.tolerances import assert_close

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{name}")
    for op in ALL_OPS
    for name, dtype in DTYPES.items()
]


# Kernels that keep in fp32 what the reference rounds: norm, product, gate and sum; probabilities.
# The two may lie one rounding apart for each, and one for the result. References of quantised
# products round both factors to 16 bits, of which kernels take the exact values.
LOOSER_ON_A_GPU = {
    "fused_linear": 5.0,
    "paged_attention": 2.0,
    "paged_attention_quant": 2.0,  # or the next of two 8-bit values
    "experts": 5.0,
    "sparse_mlp": 6.0,  # those of `experts`, and the norm
    "quantized_linear": 7.0,
    "scaled_linear": 3.0,
}


def examples(op: OpSpec, dtype: torch.dtype, device: str) -> list[tuple[Any, ...]]:
    return op.example_inputs(dtype, torch.device(device), 0)


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    if outputs is None:
        return ()
    return outputs if isinstance(outputs, tuple) else (outputs,)


def mutated_indices(op: OpSpec) -> list[int]:
    return [
        i
        for i, argument in enumerate(op.overload._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]


def assert_same_tensors(op: OpSpec, got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype
        is_rounded = a.is_cuda and a.dtype.is_floating_point and a.itemsize <= 2
        factor = LOOSER_ON_A_GPU.get(op.name, 1.0) if is_rounded else 1.0
        assert_close(f"{op.name} output {i}", a, b, factor=factor)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_registered_op_equals_its_reference(op: OpSpec, dtype: torch.dtype, device: str):
    for arguments in examples(op, dtype, device):
        mine, theirs = copied(arguments), copied(arguments)
        got = as_tuple(op.overload(*mine))
        expected = as_tuple(op.reference(*theirs))
        assert_same_tensors(op, got, expected)
        written = mutated_indices(op)
        for i, (a, b, original) in enumerate(zip(mine, theirs, arguments, strict=True)):
            if not isinstance(a, Tensor):
                continue
            if i in written:
                # Page 0 has no owner: padding may land in it or nowhere.
                is_cache = "cache" in op.overload._schema.arguments[i].name
                a, b = (a[1:], b[1:]) if is_cache else (a, b)
                assert_close(f"{op.name} argument {i}", a, b)
            else:
                assert torch.equal(a, original), f"{op.name} wrote into argument {i}"


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_functional_reference_equals_the_mutable_one(op: OpSpec, dtype: torch.dtype):
    if op.functional_reference is None:
        assert not mutated_indices(op), "an op that mutates needs a functional reference"
        return
    for arguments in examples(op, dtype, "cpu"):
        mine, theirs = copied(arguments), copied(arguments)
        got = as_tuple(op.functional_reference(*mine))
        results = as_tuple(op.reference(*theirs))
        expected = (*results, *(theirs[i] for i in mutated_indices(op)))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        for a, b in zip(mine, arguments, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b), "the functional body mutates"


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_fake_outputs_look_like_real_ones(op: OpSpec, dtype: torch.dtype):
    for arguments in examples(op, dtype, "cpu"):
        real = as_tuple(op.overload(*copied(arguments)))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            fake = as_tuple(op.overload(*fakes))
        assert len(fake) == len(real)
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            assert a.stride() == b.stride(), f"{op.name} of {[describe(x) for x in arguments]}"


def strided(value: Any, how: str) -> Any:
    """The same values as part of a wider tensor, or with the first two dims stored swapped."""
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.dtype.is_floating_point:
        return value
    if how == "sliced":
        return torch.cat((value, value), 1)[:, : value.shape[1]]
    return value.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("how", ["sliced", "transposed"])
@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ALL_OPS])
def test_strided_inputs_give_the_same_values_and_true_fakes(op: OpSpec, how: str):
    for arguments in examples(op, torch.float32, "cpu"):
        changed = [
            a if "cache" in argument.name else strided(a, how)
            for a, argument in zip(copied(arguments), op.overload._schema.arguments, strict=True)
        ]
        got, expected = as_tuple(op.overload(*changed)), as_tuple(op.overload(*copied(arguments)))
        assert_same_tensors(op, got, expected)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in changed]
            fake = as_tuple(op.overload(*fakes))
        assert [a.stride() for a in fake] == [a.stride() for a in got], describe(changed[0])


def describe(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def checkable(tests: tuple[str, ...], arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """Without the schema's test where an argument is fp8: it compares tensors by `allclose`.

    torch has none for fp8; that inputs stay as they are is tested above too.
    """
    has_fp8 = any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    return tuple(test for test in tests if test != "test_schema" or not has_fp8)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_opcheck(op: OpSpec, dtype: torch.dtype):
    for arguments in examples(op, dtype, "cpu"):
        tests = checkable(("test_schema", "test_faketensor"), arguments)
        torch.library.opcheck(op.overload, copied(arguments), test_utils=tests)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ALL_OPS])
def test_opcheck_with_dynamic_shapes(op: OpSpec):
    """The whole of opcheck, once an op: it traces with symbolic sizes, which costs a second."""
    arguments = examples(op, torch.float32, "cpu")[0]
    everything = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
        "test_aot_dispatch_dynamic",
    )
    tests = checkable(everything, arguments)
    torch.library.opcheck(op.overload, copied(arguments), test_utils=tests)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ALL_OPS])
def test_examples_hold_an_empty_case_and_a_larger_one(op: OpSpec):
    firsts = [arguments[0] for arguments in examples(op, torch.float32, "cpu")]
    assert any(first.numel() == 0 for first in firsts), "no empty example"
    assert any(first.shape[0] > 1 for first in firsts)


def test_names_are_unique_and_registered():
    names = [op.name for op in ALL_OPS]
    assert len(names) == len(set(names))
    assert all(op.overload.namespace == NAMESPACE for op in ALL_OPS)
    assert all(op.overload._schema.name == f"{NAMESPACE}::{op.name}" for op in ALL_OPS)


def test_ops_that_mutate_have_a_functional_reference():
    for op in ALL_OPS:
        if mutated_indices(op):
            assert op.functional_reference is not None
