"""Our kernels on small shapes, to be run under NVIDIA's compute-sanitizer, from the project's root:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
        python tools/memcheck.py [PART ...]

Calls every op with its examples (part `ops`), then prompts and decode steps of tiny engines without
graphs (parts named after their families). An op that raises ends it with exit code 1. Errors of
calls into the driver are not reported: a program asks it for functions that may not be there.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# Each tensor an allocation of its own: what lies behind its end is nobody's.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
# What the helpers of the tests take for the run's cache; every engine below is told of its own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())

import torch

from compiled_engine.custom_ops import ALL_OPS
from compiled_engine.request import SamplingParams
from tests.helpers.engines import run_requests, tiny_engine
from tests.helpers.gpu_engine import OPTIONS, SHAPE
from tests.helpers.tiny_model import write_tiny_model

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss")
PROMPTS = [[3 + i % 200 for i in range(length)] for length in (1, 17, 100, 300)]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(
        temperature=0.9, top_p=0.9, top_k=20, seed=1, max_tokens=3, ignore_eos=True, logprobs=2
    ),
)


def run_ops() -> None:
    """Every op with its examples in bf16."""
    for op in ALL_OPS:
        for arguments in op.example_inputs(torch.bfloat16, torch.device("cuda"), 0):
            op.overload(*arguments)
        torch.cuda.synchronize()


def run_engine(family: str) -> None:
    """Prompts alone and beside decoding rows, greedy and drawn."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", family=family, **SHAPE)
        engine = tiny_engine(
            model,
            **{
                **OPTIONS,
                "enforce_eager": True,
                "cudagraph_mode": "none",
                "max_num_seqs": 16,
                "max_total_tokens": 4096,
                "cache_dir": Path(folder) / "cache",
            },
        )
        for params in PARAMS:
            run_requests(engine, PROMPTS, params, stagger=2)
    torch.cuda.synchronize()


def main() -> None:
    """Runs all of it, or the parts that are named, and says what is done."""
    assert torch.cuda.is_available(), "needs an NVIDIA GPU"
    parts: list[tuple[str, Callable[[], None]]] = [("ops", run_ops)]
    parts += [(family, lambda family=family: run_engine(family)) for family in FAMILIES]  # type: ignore[misc]
    wanted = sys.argv[1:] or [name for name, _ in parts]
    unknown = set(wanted) - {name for name, _ in parts}
    if unknown:
        sys.exit(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(n for n, _ in parts)}"
        )
    faulthandler.enable()
    for name, run in parts:
        if name not in wanted:
            continue
        start = time.perf_counter()
        run()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
