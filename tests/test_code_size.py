"""Files, functions and signatures stay small enough to be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.helpers.source_tree import SourceFile, other_files, package_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 7

# Functions whose parameters are an op's schema: they are called by position with just these.
OP_SCHEMA = "the op's own schema, called by position"
MORE_PARAMETERS = {
    "custom_ops/reference.py:rope_kv_write_functional": OP_SCHEMA,
    "custom_ops/reference.py:qk_norm_rope": OP_SCHEMA,
    "custom_ops/reference.py:rope_kv_write": OP_SCHEMA,
    "custom_ops/reference.py:qk_norm_rope_kv_write_functional": OP_SCHEMA,
    "custom_ops/reference.py:qk_norm_rope_kv_write": OP_SCHEMA,
    "custom_ops/reference.py:paged_attention": OP_SCHEMA,
    "custom_ops/attention_work_spec.py:reference_work": OP_SCHEMA,
    "custom_ops/attention.py:_work_fake": OP_SCHEMA,
    "custom_ops/attention_work_triton.py:attention_work_cuda": OP_SCHEMA,
    "custom_ops/reference.py:fused_linear": OP_SCHEMA,
    "custom_ops/gemm.py:_fake_fused": OP_SCHEMA,
    "custom_ops/reference_quant.py:quantized_linear": OP_SCHEMA,
    "custom_ops/reference_quant.py:scaled_linear": OP_SCHEMA,
    "custom_ops/quant.py:_fake_quantized_linear": OP_SCHEMA,
    "custom_ops/quant.py:_fake_scaled_linear": OP_SCHEMA,
    "custom_ops/quant_kernels.py:quantized_linear_cuda": OP_SCHEMA,
    "custom_ops/quant_kernels.py:scaled_linear_cuda": OP_SCHEMA,
    "custom_ops/gemm.py:fused_linear_cuda": OP_SCHEMA,
    "custom_ops/attention.py:paged_attention_cpu": OP_SCHEMA,
    "custom_ops/rope_kv_triton.py:qk_norm_rope": OP_SCHEMA,
    "custom_ops/rope_kv_triton.py:rope_kv_write": OP_SCHEMA,
    "custom_ops/rope_kv_triton.py:qk_norm_rope_kv_write": OP_SCHEMA,
    "custom_ops/sampling.py:sample_tokens_reference": OP_SCHEMA,
    "custom_ops/sampling.py:sample_rows_reference": OP_SCHEMA,
    "custom_ops/reference_moe.py:route": OP_SCHEMA,
    "custom_ops/reference_moe.py:experts": OP_SCHEMA,
    "custom_ops/reference_moe.py:sparse_mlp": OP_SCHEMA,
    "custom_ops/moe.py:_route_fake": OP_SCHEMA,
    "custom_ops/moe.py:experts_cpu": OP_SCHEMA,
    "custom_ops/sampling_triton.py:sample_tokens": OP_SCHEMA,
    "custom_ops/sampling_triton.py:sample_rows": OP_SCHEMA,
}


def functions(file: SourceFile) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel or a part of one: pointers, sizes, strides and switches, one by one."""
    decorators = [ast.unparse(d) for d in function.decorator_list]
    return any(d.startswith(("triton.jit", "gluon.jit")) for d in decorators)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function; a kernel's long list of arguments is not counted."""
    start = function.body[0].lineno if is_kernel(function) else function.lineno
    return (function.end_lineno or 0) - start + 1


def num_positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_short():
    counts = {file.label: file.text.count("\n") for file in (*package_files(), *other_files())}
    long = {name: count for name, count in counts.items() if count > MAX_FILE_LINES}
    assert not long, f"more than {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = [
        f"{file.label}:{function.lineno}: {function.name} has {lines} lines"
        for file in (*package_files(), *other_files())
        for function in functions(file)
        if (lines := num_lines(function)) > MAX_FUNCTION_LINES
    ]
    assert not long, "\n" + "\n".join(long)


def test_signatures_are_short():
    crowded = {
        f"{file.label}:{function.name}": num_positional(function)
        for file in package_files()
        for function in functions(file)
        if num_positional(function) > MAX_POSITIONAL and not is_kernel(function)
    }
    assert crowded.keys() - MORE_PARAMETERS.keys() == set(), (
        f"more than {MAX_POSITIONAL} positional parameters: {crowded}"
    )
    assert MORE_PARAMETERS.keys() - crowded.keys() == set(), "exceptions that nobody needs"
