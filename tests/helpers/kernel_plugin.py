"""A tiny installed distribution with a kernel plugin: a module and its metadata in a folder."""

from __future__ import annotations

import itertools
from pathlib import Path

# Module names are never used twice: a library of ops cannot be registered again.
_NUMBERS = itertools.count()

SOURCE = """
import torch
from torch.library import Library

from compiled_engine.custom_ops.registry import Candidate, Priority

LIBRARY = Library("{module}", "DEF")
LIBRARY.define("{schema}")


def body(x, weight, eps):
    x = x + 0.0
    return torch.ops.ce.rms_norm.default(x, weight, eps) {change}


LIBRARY.impl("norm", body, "CompositeExplicitAutograd")
torch.library.register_fake("{module}::norm", lambda x, weight, eps: torch.empty_like(x))


def kernels():
    {before}
    return [
        Candidate(
            family="{family}",
            mode="rms_norm",
            name="{name}",
            priority=Priority.SPECIALIZED,
            launch=torch.ops.{module}.norm.default,
            tags=("deterministic",),
        )
    ]
"""


PLAIN = {
    "name": "theirs",
    "family": "norm",
    "schema": "norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "change": "",
    "before": "pass",
}


def install(folder: Path, **options: str) -> str:
    """Writes module and metadata into `folder`, to be put on the path; returns the module's name.

    Args:
        folder: made if missing.
        **options: in the place of `PLAIN`: name and family of the candidate, the schema of its op,
            what changes the result (such as "* 2"), a statement that runs when it is loaded.
    """
    module = f"kernel_plugin_{next(_NUMBERS)}"
    metadata = folder / f"{module}-1.5.dist-info"
    metadata.mkdir(parents=True)
    text = SOURCE.format(**{**PLAIN, **options, "module": module})
    (folder / f"{module}.py").write_text(text)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
    entry = f"[compiled_engine.kernels]\nfast = {module}:kernels\n"
    (metadata / "entry_points.txt").write_text(entry)
    return module
