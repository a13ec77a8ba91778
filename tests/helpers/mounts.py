"""Commands that see a folder as read-only, or as a small disk, as mounts of their own."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
SMALL = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'


def mounted(how: str, folder: Path, *words: str) -> list[str]:
    """`words` as a command for which `folder`, which is there, is `READ_ONLY` or `SMALL`.

    Skips the test where nothing may be mounted.
    """
    if not _may_mount():
        pytest.skip("only root may mount, and not in every container")
    return ["unshare", "-m", "sh", "-c", how, str(folder), *words]


@functools.cache
def _may_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", SMALL, "/mnt", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
