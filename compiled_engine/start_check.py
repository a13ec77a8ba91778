"""Whether a start would find everything it compiles in the cache, found out without building it.

Loads no weights, makes no engine and writes nothing: works out the start's key, looks for what the
last complete start under it used, and verifies that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_engine.build_cache import file_problem
from compiled_engine.cache_folders import KERNELS, PROGRAMS, TRITON
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import (
    entry_problem,
    miss_reason,
    read_record,
)
from compiled_engine.config import EngineConfig
from compiled_engine.device import pick_device
from compiled_engine.engine import kept_ops
from compiled_engine.key_parts import keeps_pieces, start_key
from compiled_engine.memory import is_needs, needs_name
from compiled_engine.settings import ANY_PAGES, check_options, preview, scheduler_shape


@dataclass(frozen=True)
class StartCheck:
    """What a start would find.

    Attributes:
        digest: of the start's key; empty where nothing is compiled.
        num_sound: entries and files that are there and sound.
        problems: (what would be made anew, why).
        missing: those that another process could make. Not what only the start itself makes: what
            cannot be kept, and measurements of its memory.
    """

    digest: str
    num_sound: int
    problems: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, str], ...] = ()


def check_start(config: EngineConfig) -> StartCheck:
    """Looks at everything that a start with `config` would ask the cache for.

    Raises:
        ConfigError: as `build_engine`.
    """
    if config.enforce_eager:
        return StartCheck("", 0, ())
    if not keeps_pieces(config):
        return StartCheck("", 0, (("every piece", "--dump-graphs: caches are not read"),))
    key = preview_key(config)
    base = Path(config.cache_dir)
    record = read_record(base, key.digest)
    if record is None:
        reason = miss_reason(base / PROGRAMS, key)
        problem = ("every piece", reason)
        return StartCheck(key.digest, 0, (problem,), (problem,))
    needs = needs_name(config.cudagraph_mode)
    problems = [(name, "it cannot be kept") for name in record.unkept]
    for name in (needs if is_needs(entry) else entry for entry in record.entries):
        reason = entry_problem(base, key.digest, name)
        problems += [(name, reason)] if reason else []
    for name in record.files:
        # Measurements are plain text that is checked when it is read; Triton checks nothing.
        is_sealed = Path(name).parts[0] not in (KERNELS, TRITON)
        reason = file_problem(base / name) if is_sealed else _absence(base / name)
        problems += [(name, reason)] if reason else []
    asked = len(record.unkept) + len(record.entries) + len(record.files)
    own = {*record.unkept, needs}
    missing = tuple(problem for problem in problems if problem[0] not in own)
    return StartCheck(key.digest, asked - len(problems), tuple(problems), missing)


def preview_key(config: EngineConfig) -> StartKey:
    """The key that a start with `config` would have.

    Raises:
        ConfigError: as `build_engine`.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = pick_device(config.device)
    check_options(config, device)
    driver = CompileDriver(config, kept_ops=kept_ops(device), device_type=device.type)
    # The key of a GPU's start does not depend on the pages that fit, unless torch schedules there.
    is_any = device.type == "cuda" and config.scheduler != "torch"
    settings, model_config = preview(config, num_pages=ANY_PAGES if is_any else None)
    shape = scheduler_shape(config, settings)
    return start_key(config, settings, shape, model_config, driver)


def _absence(path: Path) -> str:
    return "" if path.is_file() else "it is not there"
