"""The package's own source files, by module name, for the tests of our rules.

Files are parsed, never imported, so the rules hold without an installation.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "compiled_engine"
# Folders beside the package that are installed inside it.
MAPPED_FOLDERS = ("custom_ops", "models", "passes", "server")


@dataclass(frozen=True)
class SourceFile:
    """One Python file.

    Attributes:
        path: real path, never through a link.
        module: dotted name it is imported by; empty for files that are not part of the package.
    """

    path: Path
    module: str

    @property
    def name(self) -> str:
        """The module without the package, such as `passes.pipeline`; the package itself is ''."""
        return self.module.removeprefix(PACKAGE).removeprefix(".")

    @property
    def label(self) -> str:
        """Path from the repository's root."""
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
        """All import statements, and whether each stands inside a function."""
        found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
        pending: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while pending:
            node, is_local = pending.pop()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.append((node, is_local))
            is_local = is_local or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            # No expression holds a statement.
            children = ast.iter_child_nodes(node)
            pending += [(child, is_local) for child in children if not isinstance(child, ast.expr)]
        return sorted(found, key=lambda pair: pair[0].lineno)


@cache
def package_files() -> tuple[SourceFile, ...]:
    """Every Python file of the package, the mapped folders under their import names."""
    found = []
    for folder in (PACKAGE, *MAPPED_FOLDERS):
        base = ROOT / folder
        prefix = folder if folder == PACKAGE else f"{PACKAGE}.{folder}"
        for path in _python_files(base):
            parts = list(path.relative_to(base).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found.append(SourceFile(path, ".".join((prefix, *parts))))
    return tuple(found)


@cache
def other_files() -> tuple[SourceFile, ...]:
    """Python files of the repository outside the package: tests and perf."""
    return tuple(
        SourceFile(path, "") for base in ("tests", "perf") for path in _python_files(ROOT / base)
    )


def pyproject() -> dict[str, object]:
    """The parsed `pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _python_files(base: Path) -> Iterator[Path]:
    if not base.is_dir():
        return
    for path in sorted(base.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path
