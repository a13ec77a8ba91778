"""What each fusion pass does to a step of the default model, and to one of an 8B shape on a GPU.

Kernels, kernels that Inductor writes, and bytes of a decode step with all passes and without each
of them, read from traces: no code is generated and no GPU is needed. Times of the same are a part
of `gpu_models`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_engine.config import DEFAULT_MODEL
from perf.gates import matches_of
from perf.rows import Measured, Outcome

NAME = "passes"
NUM_TOKENS = 8
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id of the one for the CPU.
    """

    model: str = DEFAULT_MODEL


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises ConfigError if the model cannot be traced."""
    from perf.model_shapes import QWEN3_8B, write_folder

    measured = list(_passes(options.model, None, note))
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder), QWEN3_8B.config)
        measured += _passes(str(model), 90, note)
    return Outcome(measured=measured, seed=None)


def _passes(model: str, arch: int | None, note: Note) -> Iterator[Measured]:
    from compiled_engine.passes.names import PASS_NAMES

    place = f"sm_{arch}" if arch else "cpu"
    whole = _explain(model, arch, ())
    for name, matches in matches_of(whole).items():
        if name not in PASS_NAMES:
            continue
        note(f"{place}: {name}")
        case = f"{place} {name}"
        yield Measured(metric="matches", unit="count", case=case, values=[matches])
        for state, report in (("on", whole), ("off", _explain(model, arch, (name,)))):
            totals = report.totals
            for metric, value in (
                ("pass_kernels_per_step", totals.num_kernels),
                ("pass_generated_kernels_per_step", totals.num_generated),
                ("pass_bytes_per_step", totals.num_bytes),
            ):
                yield Measured(metric=metric, unit="count", case=f"{case} {state}", values=[value])


def _explain(model: str, arch: int | None, disabled: tuple[str, ...]) -> Any:
    from compiled_engine.config import EngineConfig
    from compiled_engine.explain.build import Request, explain_model
    from compiled_engine.kernels.ceilings import Ceilings

    device: Any = "auto" if arch else "cpu"
    config = EngineConfig(model=model, device=device, disable_passes=disabled)
    return explain_model(
        Request(
            config=config,
            num_tokens=NUM_TOKENS,
            arch=arch,
            ceilings=Ceilings(1e12, 1e14),
            is_measured=False,
        )
    )
