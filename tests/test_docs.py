"""The documents name what is there: modules, flags, docstrings, exit codes."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from compiled_engine.config import EngineConfig, ServerConfig
from tests.helpers.source_tree import PACKAGE, ROOT, SourceFile, package_files

MAP = ROOT / PACKAGE / "README.md"
README = ROOT / "README.md"


def test_the_map_lists_every_module():
    listed = set(re.findall(r"^\| `([\w./]+\.py)` \|", MAP.read_text(), re.MULTILINE))
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
                if (
                    is_public(inner)
                    and not has_docstring(inner)
                    and not is_known_method(node, inner)
                ):
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
        names = [
            flag,
            f"no-{flag}",
            {
                "disable-passes": "disable-pass",
                "enable-passes": "enable-pass",
                "kernels": "kernel",
                "config-file": "config",
            }.get(flag, flag),
        ]
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


def worked_example(heading: str) -> str:
    """The first Python block under a heading of the README."""
    found = re.search(
        rf"^## {heading}$.*?```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"no Python block under {heading!r}"
    return found[1]


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_model_of_the_readme_equals_hugging_face(tmp_path: Path, monkeypatch):
    """The worked example is followed to the letter, and held to the definition of right."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from compiled_engine.models import config as models_config
    from compiled_engine.models.weights import build_model, load_weights

    path = tmp_path / "qwen2.py"
    path.write_text(worked_example("Add a model"))
    spec = importlib.util.spec_from_file_location("readme_qwen2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    theirs = Qwen2ForCausalLM(tiny).float().eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith(".bias"):  # Hugging Face starts them at 0, which would hide them
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "model")
    supported = models_config.SUPPORTED_ARCHITECTURES | {"Qwen2ForCausalLM": "qwen2"}
    monkeypatch.setattr(models_config, "SUPPORTED_ARCHITECTURES", supported)
    config = models_config.load_model_config(tmp_path / "model")
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    mine = build_model(module.Qwen2ForCausalLM, config, **options)
    load_weights(mine, tmp_path / "model", **options)
    token_ids = torch.arange(20) * 7 % 64
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
        got = mine(token_ids, torch.arange(20))
    assert (got - expected).abs().max() / expected.abs().max() < 1e-4
