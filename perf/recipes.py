"""`python -m perf.recipes MODEL [flags of tune]`: a file of settings for a model, measured here.

Runs `compiled-engine tune`, for a shape of `model_shapes` without weights, and keeps what it writes
as `perf/recipes/<machine>/<model>.toml`, in place of an older one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from compiled_engine.cli import main as run_command
from perf.machine import machine_name
from perf.model_shapes import SHAPES, write_folder

FOLDER = Path(__file__).parent / "recipes"


def main(argv: Sequence[str]) -> int:
    """The exit code of `tune`; nothing is changed unless that is 0."""
    if not argv or argv[0].startswith("-"):
        print(f"{__doc__}\nshapes: {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    name, *flags = argv
    kept = FOLDER / machine_name() / f"{Path(name).name}.toml"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        written = Path(place) / kept.name
        model = name
        if name in SHAPES:
            model = str(write_folder(Path(place) / name, SHAPES[name].config))
            flags = [*SHAPES[name].flags, *flags]
        code = run_command(["tune", model, "--output", str(written), *flags])
        if code == 0:
            written.replace(kept)
            print(f"kept as {kept}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
