"""A process that makes some of the parts of a start, for the start that launched it.

It has a model of a layer or two with made-up weights and a few pages, so it needs no checkpoint and
little memory; what it compiles goes into the cache under the key of the whole model's start. Prints
one line of JSON for each part it has made, and at the end one with what all of them cost.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from compiled_engine.build_parts import Part, PartMaker, list_parts
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.store import EntryStore
from compiled_engine.config import EngineConfig, config_from_json
from compiled_engine.device import pick_device
from compiled_engine.engine import kept_ops
from compiled_engine.key_parts import start_key
from compiled_engine.kv_cache import allocate
from compiled_engine.layer_kinds import layer_kinds
from compiled_engine.models import ARCHITECTURES, ModelConfig
from compiled_engine.models.weights import build_model, init_dummy_weights, outline_model
from compiled_engine.pieces import StepPieces
from compiled_engine.settings import (
    ANY_PAGES,
    Settings,
    cache_geometry,
    preview,
    scheduler_shape,
)
from compiled_engine.start_table import MAKING, StartMeter


def shortened(config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """The config of a short model with each kind of this one's layers, which ends as it does."""
    outline = outline_model(ARCHITECTURES[config.architecture], config, dtype=dtype)
    kinds = layer_kinds(outline.layers)
    count = max(kinds.index(kind) for kind in set(kinds)) + 1
    count = kinds.index(kinds[-1], count - 1) + 1  # and ends as it does
    return replace(config, num_layers=count, windows=config.windows[:count])


def open_maker(config: EngineConfig) -> tuple[PartMaker, list[Part]]:
    """What makes parts, and all parts there are."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = pick_device(config.device)
    is_gpu = device.type == "cuda"
    # Code for a GPU takes any number of pages, and who asks for memory there may find none free.
    settings, model_config = preview(config, num_pages=ANY_PAGES if is_gpu else None)
    driver = CompileDriver(config, kept_ops=kept_ops(device), device_type=device.type)
    key = start_key(config, settings, scheduler_shape(config, settings), model_config, driver)
    driver.store = EntryStore(Path(config.cache_dir), key)
    maker = _maker(config, settings, shortened(model_config, settings.dtype), driver)
    return maker, list_parts(maker.pieces.versions, is_gpu=is_gpu, scheduler=settings.scheduler)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone: its end of standard input closes."""
    # Not by `sys.stdin`, whose lock Python must have back when it ends.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _maker(
    config: EngineConfig, settings: Settings, model_config: ModelConfig, driver: CompileDriver
) -> PartMaker:
    device, shape = settings.device, scheduler_shape(config, settings)
    architecture = ARCHITECTURES[model_config.architecture]
    model = build_model(architecture, model_config, dtype=settings.dtype, device=device)
    init_dummy_weights(model, config.seed)
    caches = allocate(cache_geometry(config, model.config, settings.dtype), shape.num_pages, device)
    plain = CompileDriver(replace(config, enforce_eager=True))
    compiled, twins = (
        StepPieces(
            model,
            shape,
            settings.vocab_size,
            made_by,
            is_gpu=device.type == "cuda",
            scheduler=settings.scheduler,
        )
        for made_by in (driver, plain)
    )
    maker = PartMaker(model, caches, compiled, settings.buckets, driver)
    maker.open(twins)
    return maker


def main() -> int:
    """Entry point: the config as JSON, which worker this is, how many there are."""
    level = os.environ.get("COMPILED_ENGINE_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config, index, count = config_from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    maker, parts = open_maker(config)
    meter = StartMeter(maker.driver.times)
    with maker.driver.times.measure("first steps"):
        for part in parts[index::count]:
            start = time.perf_counter()
            maker.make(part)
            seconds = round(time.perf_counter() - start, 3)
            unkept = [piece.name for piece in maker.driver.pieces if piece.is_unkept]
            line = {"part": part.name, "seconds": seconds, "unkept": unkept}
            print(json.dumps(line), flush=True)
    made = [asdict(phase) for phase in meter.phases(maker.driver) if phase.name in MAKING]
    print(json.dumps({"phases": made}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
