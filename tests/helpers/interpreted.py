"""Runs a module of kernel checks in a process of its own, with Triton's CPU interpreter on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.helpers.source_tree import ROOT


def run_interpreted(module: str, *arguments: str) -> None:
    """Runs `python -m module arguments` and fails with its output if it fails."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@contextmanager
def readable_loop_bounds() -> Iterator[None]:
    """Lets loop bounds be tensors of one element, which newer numpy refuses to take as numbers."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with mock.patch.object(interpreter, "_patch_lang_tensor", patch):
        yield
