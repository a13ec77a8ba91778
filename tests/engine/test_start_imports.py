"""What a start imports when it compiles nothing, and beside what: in processes of their own.

Dynamo and Inductor take longer to import than the rest of such a start; a module that begins to
import one of them where nothing is compiled fails here, with the name of what it brought. So does
one that has the engine's process wait for the server's imports.
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

# `serve` with an engine process that is only noted: what was imported before, and that it ended.
SERVE = """
import json, sys
import compiled_engine.commands.engine_child as engine_child

class NotedChild:
    exitcode = None

    def __init__(self, endpoint, config):
        print("started", json.dumps(sorted(sys.modules)), flush=True)
        if sys.argv[2] == "only":
            raise SystemExit
        sys.modules["aiohttp"] = None

    def stop(self, *, can_obey):
        print("stopped", flush=True)

engine_child.EngineChild = NotedChild
from compiled_engine.cli import main
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--device", "cpu"]))
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


def test_serve_starts_the_engine_before_it_imports_the_server(tmp_path: Path):
    command = [sys.executable, "-c", SERVE, str(tmp_path), "only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    word, _, modules = done.stdout.partition(" ")
    assert word == "started"
    packages = {name.partition(".")[0] for name in json.loads(modules)}
    heavy = {"aiohttp", "jinja2", "prometheus_client", "tokenizers", "torch", "transformers", "zmq"}
    assert packages & heavy == set()
    assert "settings" in done.stderr, "the settings are printed before the engine is started"


def test_a_server_that_cannot_be_imported_ends_the_engine_with_it(tmp_path: Path):
    command = [sys.executable, "-c", SERVE, str(tmp_path), "and fail"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "import of aiohttp halted" in done.stderr.splitlines()[-1]
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["started", "stopped"]
