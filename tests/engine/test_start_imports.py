"""What a start imports when it compiles nothing: in a process of its own, up to the first tokens.

Dynamo and Inductor take longer to import than the rest of such a start; a module that begins to
import one of them where nothing is compiled fails here, with the name of what it brought.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.tiny_model import write_tiny_model

# Packages, and parts of torch, that no step needs once its pieces are made.
FORBIDDEN = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "torch.utils._sympy",
    "accelerate",
    "aiohttp",
    "gguf",
    "huggingface_hub",
    "matplotlib",
    "networkx",
    "rich",
    "sympy",
    "torchao",
    "transformers",
    "triton",  # its kernels are for GPUs, and this is a CPU
    "xgrammar",
)
# Beyond what `import torch` brings itself: 216 with torch 2.13, of which 151 are ours. The smallest
# of the packages above have some 60 modules; other versions of the few that are needed (tokenizers,
# safetensors, jinja2, msgspec) differ by less than what is left here.
MOST_MODULES = 256

IMPORT_ALONE = """
import json, sys
import torch
before = set(sys.modules)
import compiled_engine.engine
print(json.dumps(sorted(sys.modules.keys() - before)))
"""
FIRST_TOKENS = """
import json, sys
import torch
before = set(sys.modules)
from compiled_engine import LLM, SamplingParams
folder, cache_dir = sys.argv[1:]
llm = LLM(folder, cache_dir=cache_dir, device="cpu", enforce_eager=True, max_num_seqs=4)
(made,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
assert len(made.token_ids) == 4
print(json.dumps(sorted(sys.modules.keys() - before)))
"""


def modules_after(script: str, *arguments: Path) -> list[str]:
    """Names of the modules that a script imported beyond torch."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def forbidden_in(modules: list[str]) -> list[str]:
    """Those of `FORBIDDEN` that are among the modules, whole or in part."""
    return [
        name for name in FORBIDDEN if any(m == name or m.startswith(f"{name}.") for m in modules)
    ]


def test_what_is_forbidden_is_found_whole_and_in_part():
    modules = ["sympy", "torch._dynamo.utils", "torch.fx.experimental", "tritonclient", "rich"]
    assert forbidden_in(modules) == ["torch._dynamo", "rich", "sympy"]


def test_the_engine_is_imported_without_a_compiler():
    modules = modules_after(IMPORT_ALONE)
    assert forbidden_in(modules) == []
    assert len(modules) <= MOST_MODULES


def test_a_start_that_compiles_nothing_imports_no_compiler(tmp_path: Path):
    folder = write_tiny_model(tmp_path)
    # The run's one cache. The first start may have to build the C++ kernels, which takes Inductor.
    cache_dir = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    modules_after(FIRST_TOKENS, folder, cache_dir)
    modules = modules_after(FIRST_TOKENS, folder, cache_dir)
    assert forbidden_in(modules) == []
    assert len(modules) <= MOST_MODULES
