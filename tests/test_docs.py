"""The documents name what is there: modules, flags, docstrings, exit codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest

from compiled_engine.config import EngineConfig, ServerConfig
from tests.helpers.source_tree import PACKAGE, ROOT, SourceFile, package_files

MAP = ROOT / PACKAGE / "README.md"
README = ROOT / "README.md"


def test_the_map_lists_every_module():
    listed = set(re.findall(r"^\| `([\w./]+)` \|", MAP.read_text(), re.MULTILINE))
    modules = {file.label for file in package_files() if file.path.name != "__init__.py"}
    modules = {label.removeprefix(f"{PACKAGE}/") for label in modules}
    assert modules - listed == set(), "modules that the map does not list"
    assert listed - modules == set(), "modules of the map that do not exist"


def has_docstring(node: ast.AST) -> bool:
    assert isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return ast.get_docstring(node) is not None


def is_public(node: ast.AST) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
        not node.name.startswith("_")
    )


def undocumented(file: SourceFile) -> Iterator[str]:
    """Public things without a docstring; methods that override one are exempt by name."""
    if not has_docstring(file.tree):
        yield f"{file.label}:1: the module"
    for node in file.tree.body:
        if not is_public(node):
            continue
        assert isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if not has_docstring(node):
            yield f"{file.label}:{node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if is_public(inner) and not has_docstring(inner) and not is_known_method(node, inner):
                    yield f"{file.label}:{inner.lineno}: {node.name}.{inner.name}"  # type: ignore[attr-defined]


def is_known_method(owner: ast.ClassDef, method: ast.AST) -> bool:
    """Methods whose meaning a base class states: `forward` of a torch module, an override."""
    assert isinstance(method, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return method.name == "forward" or (bool(owner.bases) and method.name in OVERRIDES)


# Names that a base class in this repository or in a library documents.
OVERRIDES = ("position", "collect")


def test_public_things_have_docstrings():
    missing = [line for file in package_files() for line in undocumented(file)]
    assert not missing, "\n" + "\n".join(missing)


def flag_rows() -> dict[str, str]:
    """Flag name -> default, from the README's tables."""
    return dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]*?) \|", README.read_text(), re.MULTILINE))


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig], ids=["engine", "server"])
def test_the_readme_lists_every_flag_with_its_default(config):
    rows = flag_rows()
    for field in fields(config):
        if field.name == "model":
            continue
        flag = field.name.replace("_", "-")
        names = [flag, f"no-{flag}", flag.removesuffix("es") if flag == "disable-passes" else flag]
        found = next((name for name in names if name in rows), None)
        assert found, f"--{flag} is missing from the README's table"
        default = field.default
        if isinstance(default, (int, float, str)) and not isinstance(default, bool):
            assert rows[found].strip("` ").replace(",", "") == str(default), flag


def test_the_readme_names_every_make_target():
    targets = re.findall(r"^([\w-]+):$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = README.read_text()
    missing = [t for t in targets if t not in ("help", "clean") and f"make {t}" not in text]
    assert targets
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", f"{PACKAGE}/README.md"])
def test_links_lead_somewhere(name):
    path = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{name} links to {target}"
