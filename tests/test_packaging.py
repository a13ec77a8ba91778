"""What `pyproject.toml` says about packages is what is there, and a wheel holds one import name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.source_tree import MAPPED_FOLDERS, PACKAGE, ROOT, package_files, pyproject


def setuptools_table() -> dict[str, Any]:
    tool: Any = pyproject()["tool"]
    return tool["setuptools"]


def test_packages_list_names_every_folder_with_an_init():
    folders = {file.module for file in package_files() if file.path.name == "__init__.py"}
    assert sorted(setuptools_table()["packages"]) == sorted(folders)


def test_every_folder_with_python_files_has_an_init():
    folders = {file.path.parent for file in package_files()}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing


def test_package_dir_maps_the_folders():
    mapping = setuptools_table()["package-dir"]
    expected = {f"{PACKAGE}.{folder}": folder for folder in MAPPED_FOLDERS}
    assert mapping == {PACKAGE: PACKAGE, **expected}


@pytest.mark.parametrize("folder", MAPPED_FOLDERS)
def test_link_resolves_to_its_sibling(folder):
    link = ROOT / PACKAGE / folder
    assert link.is_symlink(), f"{link} must be a link (git config core.symlinks true)"
    assert link.readlink() == Path("..") / folder
    assert link.resolve() == ROOT / folder


def test_package_data_covers_every_other_file():
    data = setuptools_table()["package-data"]
    bases = {
        package: ROOT / folder for package, folder in setuptools_table()["package-dir"].items()
    }
    uncovered = []
    for package, base in bases.items():
        for path in base.rglob("*"):
            relative = path.relative_to(base)
            is_own = not any(
                (base / parent).is_symlink() for parent in [relative, *relative.parents]
            )
            if not is_own or path.is_dir() or "__pycache__" in path.parts:
                continue
            if path.suffix in (".py", ".md"):
                continue
            if not any(fnmatch(relative.as_posix(), pattern) for pattern in data.get(package, [])):
                uncovered.append(str(path.relative_to(ROOT)))
    assert not uncovered, f"files that would be missing from the wheel: {uncovered}"


@pytest.mark.slow
def test_wheel_holds_only_the_package(tmp_path):
    # From a copy: setuptools leaves a build folder behind, and takes files from an old one.
    source, target = tmp_path / "source", tmp_path / "wheel"
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(target), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {PACKAGE}
    for name in ("py.typed", "custom_ops/csrc/paged_attention_cpu.cpp", "server/static/index.html"):
        assert f"{PACKAGE}/{name}" in names
    for path in (ROOT / "server" / "static").iterdir():
        assert f"{PACKAGE}/server/static/{path.name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert len(names) == len(set(names))
