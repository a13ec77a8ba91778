"""The import layers: who may import whom, checked on the source text and in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.helpers.source_tree import PACKAGE, ROOT, SourceFile, package_files

# The heavy packages that some layers must not touch at all, even inside a function.
HEAVY = ("torch", "transformers", "xgrammar", "triton")


@dataclass(frozen=True)
class Layer:
    """A row of the table. A module may import from lower numbers.

    Attributes:
        number: of the layer; a row of the same number is a stricter part of it.
        modules: names inside the package, `*` matches everything below.
        own: it may also import modules of its own row.
        only: if given, the only modules of ours it may import, its own row apart.
        never: modules of ours it may not import although they are lower.
        no_packages: packages of others it may not import.
        no_packages_at_import: the same, but only outside functions.
    """

    number: int
    modules: tuple[str, ...]
    own: bool = False
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()
    no_packages: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()


BASE = (
    "errors",
    "config",
    "request",
    "token_batch",
    "logprob_data",
    "counters",
    "build_cache",
    "cache_folders",
    "start_times",
    "trusted_files",
    "settings_file",
    "beside",
)
# Triton loads it by its name, when it first looks for a kernel.
OF_TRITON = ("triton_cache",)
TEXT = ("ipc", "tokenizer", "detokenizer", "chat_template")
# The first row that matches a module is its row.
LAYERS: tuple[Layer, ...] = (
    Layer(0, BASE, own=True, no_packages=HEAVY),
    Layer(1, OF_TRITON),
    Layer(1, ("device", "compile.torch_compat"), no_packages=("transformers", "xgrammar")),
    # Modules of Triton kernels import it, and are imported by launchers when they first run.
    Layer(2, ("custom_ops", "custom_ops.*"), own=True, lazily=("triton",)),
    Layer(3, ("passes", "passes.*"), own=True, never=("models",)),
    Layer(
        3,
        ("models", "models.*"),
        own=True,
        only=("errors", "custom_ops", "custom_ops.*"),
        never=("passes",),
    ),
    Layer(4, ("compile", "compile.*"), own=True, never=("models",)),
    Layer(
        5,
        (
            "scheduler",
            "scheduler.*",
            "layer_kinds",
            "layout",
            "kv_cache",
            "sampler",
            "outbox",
            "grammar",
            "grammar_compiler",
            "grammar_rows",
            "jump_forward",
            "thinking",
            "logprobs",
        ),
        own=True,
        never=("models", "passes", "compile"),
    ),
    Layer(
        6,
        (
            "pieces",
            "prefix_guess",
            "loop_stats",
            "seats",
            "logprob_rows",
            "upload",
            "step",
            "step_times",
            "memory",
            "loop",
            "step_choice",
            "step_key",
            "queue_times",
            "warmup",
            "build_parts",
            "kernels",
            "kernels.*",
        ),
        own=True,
    ),
    Layer(7, TEXT, own=True, only=BASE, no_packages=("torch", "xgrammar", "triton")),
    Layer(
        7,
        (
            "settings",
            "key_parts",
            "build_ahead",
            "build_worker",
            "cross_builds",
            "cross_compile",
            "described_gpu",
            "eager_first",
            "start_table",
            "start_check",
            "plain_attention",
            "quant_report",
            "engine",
            "engine_process",
            "engine_start",
            "beside_load",
            "faults",
            "profiler",
            "llm",
            "explain",
            "explain.*",
            "bench",
            "bench.*",
            "tune",
            "tune.*",
            "tuned_for",
        ),
        own=True,
    ),
    Layer(8, ("server", "server.*"), own=True, only=(*BASE, *TEXT), no_packages=HEAVY),
    Layer(9, ("cli", "commands", "commands.*"), own=True),
)
# The package itself holds the version and two names that it loads on first use.
ROOT_MAY_IMPORT = ("llm", "request")
# The tokenizer turns to transformers for folders without a tokenizer.json, inside a function.
LAZY_PACKAGES = {"tokenizer": ("transformers",)}


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    line: int
    target: str
    is_local: bool


@dataclass
class Checker:
    """Finds the imports that break the table."""

    files: list[SourceFile]
    problems: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        known = {file.module for file in self.files}
        self._imports = {file.name: list(imports_of(file, known)) for file in self.files}
        for file in self.files:
            row = row_of(file.name)
            if row is None and file.name:
                self.problems.append(
                    f"{file.label}:1: module {file.name} is in no layer: add it to the table"
                )
                continue
            for found in self._imports[file.name]:
                self._check(file, row, found)
        return self.problems

    def _is_heavy(self, name: str, packages: tuple[str, ...]) -> bool:
        """The module imports one of the packages as soon as it is imported."""
        return any(
            not found.is_local and found.target.split(".")[0] in packages
            for found in self._imports.get(name, ())
        )

    def _check(self, file: SourceFile, row: Layer | None, found: Import) -> None:
        where = f"{file.label}:{found.line}:"
        if not is_ours(found.target):
            package = found.target.split(".")[0]
            banned = row is not None and package in row.no_packages
            if banned and not (found.is_local and package in LAZY_PACKAGES.get(file.name, ())):
                assert row is not None
                self.problems.append(f"{where} layer {row.number} ({file.name}) imports {package}")
            return
        target = found.target.removeprefix(PACKAGE).removeprefix(".")
        if not target:  # the version
            return
        if row is None:
            if target not in ROOT_MAY_IMPORT:
                self.problems.append(f"{where} the package itself imports {target}")
            return
        target_row = row_of(target)
        if target_row is None:
            self.problems.append(f"{where} imports {target}, which is in no layer")
        elif (
            not found.is_local
            and self._is_heavy(target, target_row.lazily)
            and not self._is_heavy(file.name, target_row.lazily)
        ):
            self.problems.append(
                f"{where} layer {row.number} ({file.name}) imports {target} at import, which holds "
                f"kernels"
            )
        elif not may_import(row, target, target_row):
            self.problems.append(
                f"{where} layer {row.number} ({file.name}) imports layer {target_row.number} "
                f"({target})"
            )


def may_import(row: Layer, target: str, target_row: Layer) -> bool:
    if target_row is row:
        return row.own
    if row.only is not None and not matches(target, row.only):
        return False
    if any(matches(target, (name, f"{name}.*")) for name in row.never):
        return False
    # A stricter part of a layer stands below the rest of it.
    return target_row.number < row.number or (row.number == 7 and target_row.modules == TEXT)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def row_of(name: str) -> Layer | None:
    return next((row for row in LAYERS if matches(name, row.modules)), None)


def is_ours(target: str) -> bool:
    return target == PACKAGE or target.startswith(f"{PACKAGE}.")


def imports_of(file: SourceFile, known: set[str]) -> Iterator[Import]:
    """Every import, those under TYPE_CHECKING and inside functions too."""
    for node, is_local in file.imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, is_local)
        else:
            assert node.level == 0, f"{file.label}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                target = longer if longer in known else node.module
                yield Import(node.lineno, target, is_local)


def test_every_import_fits_the_table():
    problems = Checker(package_files()).run()
    assert not problems, "\n" + "\n".join(problems)


def test_every_row_but_the_planned_ones_has_modules():
    names = {file.name for file in package_files()}
    planned = {"grammar", "warmup"}
    patterns = {pattern for row in LAYERS for pattern in row.modules} - planned
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    assert not unused, f"rows of the table without a module: {sorted(unused)}"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        (
            "passes/fuse_x.py",
            "def f():\n    from compiled_engine import loop",
            "passes/fuse_x.py:2: layer 3 (passes.fuse_x) imports layer 6 (loop)",
        ),
        (
            "passes/fuse_x.py",
            "import compiled_engine.models.llama",
            "passes/fuse_x.py:1: layer 3 (passes.fuse_x) imports layer 3 (models.llama)",
        ),
        (
            "server/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.nn",
            "server/x.py:3: layer 8 (server.x) imports torch",
        ),
        (
            "custom_ops/x.py",
            "from compiled_engine.custom_ops import norm_triton",
            "custom_ops/x.py:1: layer 2 (custom_ops.x) imports custom_ops.norm_triton at import, "
            "which holds kernels",
        ),
        (
            "compiled_engine/outbox_x.py",
            "",
            "compiled_engine/outbox_x.py:1: module outbox_x is in no layer: add it to the table",
        ),
        (
            "models/x.py",
            "from compiled_engine.config import EngineConfig",
            "models/x.py:1: layer 3 (models.x) imports layer 0 (config)",
        ),
        (
            "compiled_engine/scheduler/x.py",
            "from compiled_engine.compile import torch_compat",
            "compiled_engine/scheduler/x.py:1: layer 5 (scheduler.x) imports layer 1 "
            "(compile.torch_compat)",
        ),
    ],
    ids=["local", "sibling", "type-checking", "triton", "unlisted", "models-config", "scheduler"],
)
def test_a_wrong_import_is_reported(path, source, message):
    name = path.removesuffix(".py").replace("/", ".")
    module = name if name.startswith(PACKAGE) else f"{PACKAGE}.{name}"
    wrong = InMemoryFile(ROOT / path, module)
    wrong.__dict__["text"] = source
    assert problems_of(wrong) == [message]


class InMemoryFile(SourceFile):
    """A file that is not on the disk."""


def problems_of(extra: SourceFile) -> list[str]:
    """What the checker says about one file among all others."""
    problems = Checker([*package_files(), extra]).run()
    return [problem for problem in problems if problem.startswith(f"{extra.label}:")]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("custom_ops/x.py", "def f():\n    from compiled_engine.custom_ops import norm_triton"),
        (
            "custom_ops/x.py",
            "import triton\nfrom compiled_engine.custom_ops import norm_triton",
        ),
        ("compiled_engine/loop_x.py", None),
        ("server/x.py", "from compiled_engine import __version__"),
    ],
    ids=["lazy-kernels", "kernels", "no-such-file", "version"],
)
def test_allowed_imports_are_not_reported(path, source):
    if source is None:
        assert row_of("loop_x") is None
        return
    extra = InMemoryFile(ROOT / path, f"{PACKAGE}.{path.removesuffix('.py').replace('/', '.')}")
    extra.__dict__["text"] = source
    assert problems_of(extra) == []


def run_fresh(code: str, folder: Path) -> None:
    """Runs code in an interpreter that has imported nothing of ours."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


BLOCK = """
import sys
for name in {names!r}:
    sys.modules[name] = None
"""


def test_the_server_imports_without_torch(tmp_path):
    blocked = BLOCK.format(names=HEAVY)
    run_fresh(blocked + "import compiled_engine.server.app", tmp_path)


def test_custom_ops_import_without_triton(tmp_path):
    code = BLOCK.format(names=("triton",)) + (
        "import compiled_engine.custom_ops as ops\n"
        "import torch\n"
        "x = torch.ones(2, 8)\n"
        "assert ops.rms_norm(x, torch.ones(8), 1e-5).shape == (2, 8)\n"
        "assert 'torch._inductor' not in sys.modules, 'importing the ops imported Inductor'\n"
    )
    run_fresh(code, tmp_path)


def test_the_package_imports_no_torch(tmp_path):
    code = (
        "import sys, compiled_engine\n"
        "from compiled_engine import SamplingParams\n"
        "heavy = [n for n in ('torch', 'transformers', 'numpy', 'aiohttp') if n in sys.modules]\n"
        "assert not heavy, heavy"
    )
    run_fresh(code, tmp_path)
