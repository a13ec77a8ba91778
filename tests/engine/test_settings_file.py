"""`--config`: what a file may say, what wins over it, and whom it was tuned for."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from compiled_engine import LLM, cli
from compiled_engine.commands.flags import config_from_args
from compiled_engine.config import EngineConfig, config_from_json, config_to_json
from compiled_engine.device import pick_device
from compiled_engine.errors import ConfigError
from compiled_engine.models.config import load_model_config
from compiled_engine.settings_file import read_settings_file
from compiled_engine.tuned_for import tuned_here, warn_if_tuned_elsewhere
from tests.helpers.commands import refusal
from tests.helpers.tiny_model import write_tiny_model

TEXT = """
chunked_prefill_size = 128
max_step_ms = 15
enable_prefix_caching = false
kernels = ["attention=torch"]
kernel_config = "kernels.toml"
dtype = "float32"
"""
VALUES = {
    "chunked_prefill_size": 128,
    "max_step_ms": 15.0,
    "enable_prefix_caching": False,
    "kernels": ("attention=torch",),
    "kernel_config": Path("kernels.toml"),
    "dtype": "float32",
}
COMMANDS = ["serve", "generate", "warmup", "info", "bench latency", "bench throughput", "tune"]


def written(folder: Path, text: str, name: str = "settings.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def parsed(*argv: object) -> EngineConfig:
    args = cli.build_parser()[0].parse_args([str(word) for word in argv])
    return config_from_args(EngineConfig, args)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_gives_the_settings_of_every_command(command, tmp_path):
    path = written(tmp_path, TEXT)
    config = parsed(*command.split(), "model", "--config", path)
    assert config == EngineConfig(model="model", config_file=path, **VALUES)
    assert config_from_json(config_to_json(config)) == config


def test_json_says_the_same(tmp_path):
    plain = {**VALUES, "kernels": ["attention=torch"], "kernel_config": "kernels.toml"}
    path = written(tmp_path, json.dumps(plain), "settings.json")
    assert read_settings_file(path).values == VALUES


def test_a_flag_wins_over_the_file(tmp_path):
    path = written(tmp_path, "chunked_prefill_size = 128\nmax_num_seqs = 4\n")
    config = parsed("serve", "--config", path, "--chunked-prefill-size", "64")
    assert (config.chunked_prefill_size, config.max_num_seqs) == (64, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_sequences = 4", "max_num_sequences: no such setting of the engine"),
        ("port = 4", "port: no such setting of the engine (the server's are flags only)"),
        ('model = "m"', "model: give it as MODEL"),
        ('config_file = "f"', "config_file: a file cannot name another"),
        ("trust_remote_code = true", "only the flag --trust-remote-code can allow that"),
        ("allow_pickle = true", "only the flag --allow-pickle can allow that"),
        ('max_num_seqs = "4"', "max_num_seqs: '4' is no whole number"),
        ("max_num_seqs = true", "max_num_seqs: True is no whole number"),
        ("max_num_seqs = 4.0", "max_num_seqs: 4.0 is no whole number"),
        ("max_num_seqs = 0", "--max-num-seqs is 0; allowed is 1 to 4096"),
        ("enforce_eager = 1", "enforce_eager: 1 is no true or false"),
        ("kernels = 'attention=torch'", "kernels: 'attention=torch' is no list of names"),
        ('dtype = "int8"', "dtype: 'int8' is none of auto, bfloat16, float16, float32"),
        ("max_num_seqs", "is no TOML"),
        ("tuned = 3", "tuned: is no table"),
        ("[tuned]\nmodel = 'm'", "tuned: model_digest, device missing"),
        ("[tuned]\nspeed = 'm'", "tuned.speed: no such key"),
        ("[tuned]\nmodel = 3", "tuned.model: 3 is no text"),
        ("[tuned.versions]\ntorch = 3", "tuned.versions: {'torch': 3} is no table of texts"),
    ],
)
def test_what_no_setting_is_is_refused_by_name(text, said, tmp_path, capsys):
    path = written(tmp_path, text)
    line = refusal(capsys, "info", "model", "--config", path)
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "is no UTF-8 text"), (b"[]", "holds no table of settings"), (None, "No such")],
)
def test_what_cannot_be_read_is_refused(content, said, tmp_path, capsys):
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_bytes(content)
    assert said in refusal(capsys, "serve", "--config", path)


def test_python_takes_the_file_too(tmp_path):
    path = written(tmp_path, "max_num_seqs = 2\nenforce_eager = true\nmax_model_len = 64\n")
    folder = write_tiny_model(tmp_path / "model")
    llm = LLM(str(folder), config_file=str(path), device="cpu", max_model_len=48)
    assert llm.engine.settings.max_num_seqs == 2
    assert llm.engine.settings.max_model_len == 48
    with pytest.raises(ConfigError, match="no such setting"):
        LLM(str(folder), config_file=written(tmp_path, "speed = 1\n"))


def test_a_file_for_another_model_or_device_costs_one_warning(tmp_path, caplog):
    model = load_model_config(write_tiny_model(tmp_path / "model"))
    device = pick_device("cpu")
    config = EngineConfig(model=str(tmp_path / "model"))
    here = tuned_here(config, model, device)

    def warnings(digest: str, name: str) -> list[str]:
        text = f'[tuned]\nmodel = "m"\nmodel_digest = "{digest}"\ndevice = "{name}"\n'
        caplog.clear()
        path = written(tmp_path, text)
        with caplog.at_level(logging.WARNING):
            warn_if_tuned_elsewhere(replace(config, config_file=path), model, device)
        return [record.getMessage() for record in caplog.records]

    assert warnings(here.model_digest, here.device) == []
    (line,) = warnings("0123", here.device)
    assert "tuned for the model m (0123; here" in line
    assert "compiled-engine tune" in line
    (line,) = warnings(here.model_digest, "NVIDIA H200")
    assert f"tuned for NVIDIA H200 (here {here.device})" in line
    (line,) = warnings("0123", "NVIDIA H200")
    assert "and for NVIDIA H200" in line


def test_the_digest_is_of_the_shape_not_of_the_place(tmp_path):
    def digest(name: str, **changes: object) -> str:
        folder = write_tiny_model(tmp_path / name)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        config = EngineConfig(model=str(folder))
        return tuned_here(config, load_model_config(folder), pick_device("cpu")).model_digest

    assert digest("one") == digest("two")
    assert digest("one") != digest("three", rope_theta=5000.0)


def test_a_start_says_whom_its_file_was_tuned_for(tmp_path, caplog):
    text = '[tuned]\nmodel = "m"\nmodel_digest = "0123"\ndevice = "NVIDIA H200"\n'
    path = written(tmp_path, text)
    folder = write_tiny_model(tmp_path / "model")
    LLM(str(folder), config_file=path, device="cpu", enforce_eager=True, max_model_len=64)
    (line,) = [m for m in caplog.messages if "was tuned for" in m]
    assert str(path) in line


def test_a_file_that_vanished_does_not_stop_a_restart(tmp_path, caplog):
    model = load_model_config(write_tiny_model(tmp_path / "model"))
    config = EngineConfig(model="m", config_file=tmp_path / "gone.toml")
    warn_if_tuned_elsewhere(config, model, pick_device("cpu"))
    assert "is not checked" in caplog.text
