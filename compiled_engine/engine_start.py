"""Entry of the engine process: begins what needs no torch, then imports the engine, which does.

Run as `python -m compiled_engine.engine_start ENDPOINT CONFIG_JSON PARENT_PID`; exit codes and
frames are those of `engine_process`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from compiled_engine.beside import before_torch
from compiled_engine.config import config_from_json


def main() -> int:
    """Runs the engine process to its end; returns the exit code."""
    # Ctrl-C reaches the whole group; the API process drains and then says so in a frame.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    level = os.environ.get("COMPILED_ENGINE_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoint, document, parent_pid = sys.argv[1:4]
    config = config_from_json(document)
    begun = before_torch(config)
    from compiled_engine.engine_process import serve

    return serve(endpoint, config, int(parent_pid), begun)


if __name__ == "__main__":
    sys.exit(main())
