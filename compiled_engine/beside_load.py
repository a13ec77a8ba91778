"""What a start does in threads while it loads weights: what it needs right after them.

Loading waits for files and copies. Meanwhile the tokenizer is read, without the interpreter's lock,
and on a GPU the modules are imported that launchers of kernels import when they are first called:
Triton, the driver's bindings and the kernels. On a CPU a step imports nothing that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from compiled_engine.beside import Beside, import_quietly
from compiled_engine.config import EngineConfig
from compiled_engine.settings import read_vocabulary
from compiled_engine.start_table import StartMeter
from compiled_engine.start_times import StartTimes

# The row of the start table that says how long a start waited for them.
BESIDE = "beside the load"

_OPS = "compiled_engine.custom_ops"
# Of a model in 16 bits; what others need is imported when they need it.
GPU_MODULES = (
    "cuda.bindings.driver",
    "cuda.bindings.nvrtc",
    "triton",
    f"{_OPS}.attention_work_triton",
    f"{_OPS}.attention_decode",
    f"{_OPS}.norm_triton",
    f"{_OPS}.rope_kv_triton",
    f"{_OPS}.activation_triton",
    f"{_OPS}.sampling_triton",
)


def step_modules(device: torch.device) -> tuple[str, ...]:
    """Names of modules that the first steps import; none of them waits for a later one."""
    return GPU_MODULES if device.type == "cuda" else ()


@contextmanager
def working_beside(
    config: EngineConfig, device: torch.device, times: StartTimes, meter: StartMeter
) -> Iterator[None]:
    """Begins them, and waits for them once the block has ended.

    Args:
        config: of the start; `config.model` is a folder.
        device: that it runs on.
        times: get the wait.
        meter: gets what they took.
    """
    begun = []
    modules = step_modules(device)
    if modules:
        begun.append(Beside("kernel modules", partial(import_quietly, modules)))
    folder = Path(config.tokenizer or config.model).expanduser().resolve()
    if (folder / "tokenizer.json").exists():  # transformers' imports would only take turns
        begun.append(Beside("tokenizer", partial(read_vocabulary, config, folder)))
    yield
    with times.measure(BESIDE):
        for part in begun:
            part.wait()
    meter.note_beside(begun)
