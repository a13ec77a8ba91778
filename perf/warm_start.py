"""A start in a process of its own, and what its engine then does: run as `python -m
perf.warm_start FOLDER CACHE_DIR`.

Prints one JSON document: what the start took, compiled and imported, and rows of the engine's
steps. Nothing is imported before the start that the start does not import itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    """Starts, looks, measures, prints."""
    folder, cache_dir = Path(sys.argv[1]), Path(sys.argv[2])
    from perf import tiny

    begin = tiny.processor_s()
    engine = tiny.build(folder, cache_dir)
    seconds = tiny.processor_s() - begin
    modules = sorted(sys.modules)
    found = {
        "seconds": seconds,
        "modules": modules,
        "counters": {k: v for k, v in asdict(engine.driver.refresh()).items() if type(v) is int},
    }
    from perf.step_gates import count_steps, time_steps

    eager = tiny.build(folder, cache_dir, is_eager=True)
    rows = [*count_steps(engine), *time_steps(engine, eager)]
    print(json.dumps(found | {"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
