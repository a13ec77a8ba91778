"""What runs in threads beside a start: that it begins before, holds nothing up, and may fail."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from compiled_engine import beside, beside_load, engine, settings
from compiled_engine.beside import Beside, before_torch, import_quietly, make_context, read_ahead
from compiled_engine.beside_load import GPU_MODULES
from compiled_engine.config import EngineConfig, config_to_json
from compiled_engine.errors import ConfigError
from compiled_engine.settings import read_vocabulary
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model

LIMIT_S = 60.0

# The entry of the engine process, with an engine that is ready at once, while weights are read.
ENTRY = """
import builtins, json, sys, threading, types
import compiled_engine.beside as beside
import compiled_engine.engine_start as engine_start

ENGINE = "compiled_engine.engine_process"
is_read, is_ready, events = threading.Event(), threading.Event(), []
import_module = builtins.__import__

def read_ahead(folder):
    events.append("weights, with torch" if "torch" in sys.modules else "weights")
    is_read.set()
    is_ready.wait(30)

def noted_import(name, *arguments):
    if name == ENGINE:
        is_read.wait(30)
        events.append("engine imported")
    return import_module(name, *arguments)

def serve(endpoint, config, parent_pid, begun):
    is_ready.set()
    print(json.dumps([events, [part.phase.name for part in begun]]))
    return 7

beside.read_ahead = read_ahead
builtins.__import__ = noted_import
sys.modules[ENGINE] = types.ModuleType(ENGINE)
sys.modules[ENGINE].serve = serve
sys.argv = ["engine_start", "endpoint", sys.argv[1], "1"]
sys.exit(engine_start.main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_weights_are_read_before_torch_is_imported(folder):
    document = config_to_json(EngineConfig(model=str(folder), device="cpu"))
    command = [sys.executable, "-c", ENTRY, document]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 7, done.stderr
    events, names = json.loads(done.stdout)
    assert events == ["weights", "engine imported"]
    assert names == ["- weights, read"]


def test_imports_and_tokenizer_are_had_beside_the_load(folder, monkeypatch):
    """The load waits for neither, and what comes behind it for both."""
    events: list[str] = []
    is_loaded = threading.Event()
    load, resolve = engine._load_model, engine.resolve

    def noted_load(*arguments: Any) -> Any:
        model = load(*arguments)
        events.append("loaded")
        is_loaded.set()
        return model

    def noted_resolve(*arguments: Any, **options: Any) -> Any:
        events.append("resolved")
        return resolve(*arguments, **options)

    def slow(name: str) -> Any:
        def run(*_: Any) -> None:
            assert is_loaded.wait(LIMIT_S)
            events.append(name)

        return run

    monkeypatch.setattr(engine, "_load_model", noted_load)
    monkeypatch.setattr(engine, "resolve", noted_resolve)
    monkeypatch.setattr(beside_load, "step_modules", lambda device: ("a_module",))
    monkeypatch.setattr(beside_load, "import_quietly", slow("beside"))
    monkeypatch.setattr(beside_load, "read_vocabulary", slow("beside"))
    made = tiny_engine(folder)
    assert events == ["loaded", "beside", "beside", "resolved"]
    names = [phase.name for phase in made.start]
    assert {"- kernel modules", "- tokenizer"} <= set(names)
    assert names.index("load") < names.index("- tokenizer")


def test_a_tokenizer_that_cannot_be_read_is_the_error_it_was(folder, tmp_path):
    broken = write_tiny_model(tmp_path)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read") as caught:
        tiny_engine(broken)
    assert caught.value.param == "tokenizer"


def test_a_part_that_fails_is_forgotten():
    def fail() -> None:
        raise ImportError("not here")

    part = Beside("a part", fail)
    part.wait()
    assert part.phase.name == "- a part"
    assert 0 <= part.phase.seconds < LIMIT_S


def test_a_module_that_cannot_be_imported_keeps_its_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_broken.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "beside_sound.py").write_text("")
    import_quietly(("beside_absent", "beside_broken", "beside_sound"))
    assert "beside_sound" in sys.modules
    with pytest.raises(RuntimeError, match="no driver"):
        __import__("beside_broken")
    with pytest.raises(ImportError):
        __import__("beside_absent")


def test_modules_for_a_gpu_are_there_and_bring_no_compiler_of_torch():
    code = (
        f"import importlib, sys\nfor name in {GPU_MODULES!r}:\n    importlib.import_module(name)\n"
        "assert 'torch._inductor' not in sys.modules\nassert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


# --- without torch ------------------------------------------------------------------------


def test_every_safetensors_file_is_read(tmp_path):
    sizes = {"a.safetensors": 3, "b.safetensors": 0, "c.safetensors": 5000, "d.bin": 70}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert read_ahead(tmp_path) == 5003
    assert read_ahead(tmp_path / "nowhere") == 0


def test_no_more_is_read_than_memory_keeps(tmp_path, monkeypatch):
    for name in ("a.safetensors", "b.safetensors", "c.safetensors"):
        (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr(beside, "_available_bytes", lambda: 300)
    monkeypatch.setattr(beside, "READ_BYTES", 40)
    assert read_ahead(tmp_path) == 180, "up to the first call that reaches 150"
    monkeypatch.setattr(beside, "_available_bytes", lambda: 0)
    assert read_ahead(tmp_path) == 0


def test_available_memory_is_a_part_of_all():
    assert 0 < beside._available_bytes() < 2**50


@pytest.mark.parametrize(
    ("options", "has_cuda", "expected"),
    [
        ({}, False, ["- weights, read"]),
        ({}, True, ["- weights, read", "- CUDA context"]),
        ({"device": "cpu"}, True, ["- weights, read"]),
        ({"load_format": "dummy"}, True, ["- CUDA context"]),
        ({"model": "owner/name"}, False, []),
        ({"model": "smollm2-135m-instruct", "device": "cuda"}, True, ["- CUDA context"]),
    ],
    ids=["folder", "folder, GPU", "CPU asked for", "dummy", "hub", "default, GPU"],
)
def test_what_begins_before_torch(folder, monkeypatch, options, has_cuda, expected):
    made = []
    monkeypatch.setattr(beside, "_torch_has_cuda", lambda: has_cuda)
    monkeypatch.setattr(beside, "make_context", made.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    begun = before_torch(EngineConfig(**{"model": str(folder), **options}))
    for part in begun:
        part.wait()
    assert [part.phase.name for part in begun] == expected
    assert made == ["libcuda.so.1"] * expected.count("- CUDA context")


class _Driver:
    """Notes calls; the named one fails."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return 100 if name == self._failing else 0

        return call


@pytest.mark.parametrize(
    ("failing", "num_calls"), [("", 3), ("cuInit", 1), ("cuDeviceGet", 2)], ids=str
)
def test_a_context_is_made_where_there_is_a_gpu(monkeypatch, failing, num_calls):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    driver = _Driver(failing)
    make_context(driver)
    whole = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert driver.calls == whole[:num_calls]
    assert beside.os.environ["CUDA_MODULE_LOADING"] == "EAGER", "the user's own stays"


# --- the vocabulary -----------------------------------------------------------------------


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", enforce_eager=True)


def test_a_vocabulary_is_read_once_while_its_folder_stays(tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path)
    (folder / "dangling").symlink_to("nowhere")
    config, reads = _config(folder), []
    read = settings.Tokenizer.from_folder

    def noted(place: Path, **options: Any) -> Any:
        reads.append(place)
        return read(place, **options)

    monkeypatch.setattr(settings.Tokenizer, "from_folder", noted)
    first = read_vocabulary(config, folder)
    assert read_vocabulary(config, folder) == first
    assert len(reads) == 1
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 9}))
    assert 9 in read_vocabulary(config, folder)[1]
    assert 9 not in first[1]
    assert len(reads) == 2


def test_a_vocabulary_that_cannot_be_read_is_tried_again(tmp_path):
    folder = write_tiny_model(tmp_path)
    sound = (folder / "tokenizer.json").read_text()
    for text in ("{", "{"):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_vocabulary(_config(folder), folder)
    (folder / "tokenizer.json").write_text(sound)
    assert read_vocabulary(_config(folder), folder)[0] > 0
