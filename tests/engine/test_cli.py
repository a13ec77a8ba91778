"""The command line: flags from config fields, refusals, what each command imports and prints."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiled_engine import cli
from compiled_engine.commands.defaults import default_sampling
from compiled_engine.commands.flags import changed_fields, config_from_args, flags_of
from compiled_engine.commands.generate import _print_answer
from compiled_engine.commands.progress import PhaseProgress, split_detail, stderr_console
from compiled_engine.commands.settings_table import print_settings
from compiled_engine.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from compiled_engine.errors import ConfigError
from compiled_engine.models import source
from compiled_engine.request import Request, SamplingParams, TokenEvent
from tests.helpers.fake_engine import ByteTokenizer
from tests.helpers.tiny_model import write_tiny_model

MAX_HELP_CPU_S = 0.5

# For each field a value that is not its default, as typed on the command line.
ENGINE_VALUES = {
    "model_impl": ("transformers", "transformers"),
    "tokenizer": ("other", "other"),
    "load_format": ("dummy", "dummy"),
    "dtype": ("float32", "float32"),
    "quantization": ("int8", "int8"),
    "quantize_lm_head": (None, True),
    "device": ("cpu", "cpu"),
    "max_model_len": ("77", 77),
    "max_num_seqs": ("3", 3),
    "chunked_prefill_size": ("64", 64),
    "block_size": ("32", 32),
    "kv_cache_dtype": ("fp8_e4m3", "fp8_e4m3"),
    "max_total_tokens": ("4096", 4096),
    "gpu_memory_utilization": ("0.5", 0.5),
    "enable_prefix_caching": (None, False),
    "jump_forward": ("off", "off"),
    "enforce_eager": (None, True),
    "overlap_schedule": ("off", "off"),
    "cudagraph_mode": ("none", "none"),
    "check_graphs": (None, True),
    "scheduler": ("torch", "torch"),
    "device_loop": (None, True),
    "max_step_ms": ("15", 15.0),
    "enable_passes": ("use_linear_op", ("use_linear_op",)),
    "disable_passes": ("fuse_add_rms_norm", ("fuse_add_rms_norm",)),
    "dump_graphs": ("/graphs", Path("/graphs")),
    "inductor_pdl": (None, True),
    "kernels": ("attention=torch", ("attention=torch",)),
    "kernel_objective": ("determinism", "determinism"),
    "kernel_config": ("/kernels.toml", Path("/kernels.toml")),
    "config_file": ("/dev/null", Path("/dev/null")),
    "seed": ("5", 5),
    "trust_remote_code": (None, True),
    "allow_pickle": (None, True),
    "cache_dir": ("/somewhere", Path("/somewhere")),
    "num_threads": ("2", 2),
    "compile_jobs": ("3", 3),
    "compile_mode": ("eager-first", "eager-first"),
}
SERVER_VALUES = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "served_model_name": ("name", "name"),
    "api_key": ("secret", "secret"),
    "max_queued_requests": ("7", 7),
    "max_queued_tokens": ("8", 8),
    "max_body_bytes": ("2048", 2048),
    "max_n": ("2", 2),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("none", "none"),
    "drain_timeout_s": ("1.5", 1.5),
    "engine_timeout_s": ("2.5", 2.5),
    "api_key_file": ("/keys", Path("/keys")),
    "max_requests_per_key": ("3", 3),
    "max_tokens_per_key": ("4", 4),
    "ready_timeout_s": ("2.5", 2.5),
    "restart_engine": ("2", 2),
    "weight_version": ("v2", "v2"),
    "profile_dir": ("/traces", Path("/traces")),
    "access_log": (None, False),
    "log_prompts": (None, True),
    "otlp_traces_endpoint": ("http://collector:4318", "http://collector:4318"),
}


def _argument(name: str, text: str | None) -> list[str]:
    flag = flags_of(name)[0]
    if text is None:
        is_on = name in ("enable_prefix_caching", "access_log")
        return [f"--no-{flag[2:]}" if is_on else flag]
    return [flag, text]


def _exit_code(capsys, *argv: str) -> tuple[int, str]:
    """Exit code and standard error of a call that must fail."""
    try:
        code = cli.main(argv)
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr().err


def test_value_tables_cover_every_field():
    assert ENGINE_VALUES.keys() == {f.name for f in fields(EngineConfig)} - {"model"}
    assert SERVER_VALUES.keys() == {f.name for f in fields(ServerConfig)}


@pytest.mark.parametrize("command", ["serve", "generate", "warmup", "info", "bench latency"])
def test_every_engine_field_is_reachable_by_its_flag(command):
    words = [w for name, (text, _) in ENGINE_VALUES.items() for w in _argument(name, text)]
    args = cli.build_parser()[0].parse_args([*command.split(), "some/model", *words])
    wanted = {name: value for name, (_, value) in ENGINE_VALUES.items()}
    assert config_from_args(EngineConfig, args) == EngineConfig(model="some/model", **wanted)


def test_every_server_field_is_reachable_by_its_flag():
    words = [w for name, (text, _) in SERVER_VALUES.items() for w in _argument(name, text)]
    args = cli.build_parser()[0].parse_args(["serve", *words])
    wanted = {name: value for name, (_, value) in SERVER_VALUES.items()}
    assert config_from_args(ServerConfig, args) == ServerConfig(**wanted)


def test_flags_left_out_keep_the_defaults_of_the_config():
    args = cli.build_parser()[0].parse_args(["serve"])
    config = config_from_args(EngineConfig, args)
    assert config == EngineConfig(model=DEFAULT_MODEL)
    assert config_from_args(ServerConfig, args) == ServerConfig()
    assert changed_fields(config) == {"model"}


def test_default_model_is_the_one_that_is_resolved():
    assert DEFAULT_MODEL == source.DEFAULT_MODEL


def test_vllm_name_of_the_step_size_is_an_alias():
    args = cli.build_parser()[0].parse_args(["serve", "--max-num-batched-tokens", "64"])
    assert config_from_args(EngineConfig, args).chunked_prefill_size == 64


def test_disable_pass_may_be_repeated():
    args = cli.build_parser()[0].parse_args(
        ["serve", "--disable-pass", "one", "--disable-pass", "two"]
    )
    assert config_from_args(EngineConfig, args).disable_passes == ("one", "two")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["serve", "--max-model-length", "5"],
            "--max-model-length; the nearest one is --max-model-len",
        ),
        (
            ["serve", "--max-model=5"],
            "unknown flag --max-model; the nearest one is --max-model-len",
        ),
        (["bench", "serve", "--concurency", "5"], "the nearest one is --concurrency"),
        (["serve", "--qqqqqqqqqqqq"], "unknown flag --qqqqqqqqqqqq"),
        (["info", "model", "another"], "'another' is one argument too many"),
        (["serve", "--port", "abc"], "--port: invalid int value: 'abc'"),
        (["serve", "--port", "70000"], "--port is 70000; allowed is 0 to 65535"),
        (["serve", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["serve", "--otlp-traces-endpoint", "collector:4317"], "begin with http:// or https://"),
        (["serve", "--block-size", "3"], "--block-size is 3; it must be a power of two"),
        (["warmup", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2.0"),
        (["generate", "--logit-bias", "x=1"], "--logit-bias x=1: expected ID=VALUE"),
        (["generate", "--raw", "--system", "s"], "--system has no place in a --raw prompt"),
        (["bench", "latency", "--num-repeats", "0"], "--num-repeats is 0; allowed is at least 1"),
        (["bench", "serve", "--num-requests", "0"], "--num-requests is 0; allowed is at least 1"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached"),
        (["info", "/no/such/folder"], "/no/such/folder"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "COMMAND"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_bad_input_ends_with_code_2_and_one_line(argv, said, capsys):
    code, err = _exit_code(capsys, *argv)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("compiled-engine")


def test_sampling_value_out_of_range_names_the_flag(capsys):
    code, err = _exit_code(capsys, "generate", "--top-p", "2", "-p", "hi")
    assert code == 2
    assert err == "compiled-engine generate: error: top_p is 2.0; allowed is (0, 1]\n"


@pytest.mark.parametrize(
    "command",
    [
        *("", "serve", "generate", "warmup", "info", "bench", "bench latency", "bench throughput"),
        *("cache", "cache ls", "cache import"),
    ],
)
def test_help_prints_and_ends_with_code_0(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"usage: compiled-engine {command}".rstrip() in out
    if command in ("", "serve"):
        assert "exit codes:" in out


def test_help_answers_at_once_and_loads_nothing_heavy():
    code = (
        "import sys; from compiled_engine import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'rich', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < MAX_HELP_CPU_S


def test_modules_of_the_serving_process_do_not_import_torch_or_extras():
    modules = ", ".join(
        f"compiled_engine.{name}"
        for name in (
            "bench.load",
            "bench.report",
            "commands.defaults",
            "commands.engine_child",
            "commands.progress",
            "commands.serve",
            "commands.served_engine",
            "commands.settings_table",
            "server.app",
            "server.tracing",
            "tokenizer",
        )
    )
    blocked = "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['opentelemetry']"
    code = f"import sys; {blocked} = None\nimport {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_table_marks_what_was_given_and_hides_the_key(capsys):
    print_settings(
        stderr_console(),
        EngineConfig(model="m", max_num_seqs=4),
        ServerConfig(api_key="very-secret"),
    )
    err = capsys.readouterr().err
    assert re.search(r"^\*  --max-num-seqs +4", err, re.MULTILINE)
    assert re.search(r"^\*  --api-key +\(set\)", err, re.MULTILINE)
    assert re.search(r"^   --block-size +16", err, re.MULTILINE)
    assert "very-secret" not in err


def test_progress_without_a_terminal_is_two_lines_a_phase(capsys):
    with PhaseProgress(stderr_console()) as progress:
        for done in range(100):
            progress.update("loading", "weights", done, 100)
        progress.update("compiling", "plan", 0, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+ s$", "N s", line) for line in lines] == [
        "loading ...",
        "loading: done in N s",
        "compiling ...",
        "compiling: done in N s",
    ]


def test_phase_detail_splits_into_label_and_numbers():
    assert split_detail("model (one token) (3/9)") == ("model (one token)", 3, 9)
    assert split_detail("no numbers") == ("no numbers", 0, 0)


def test_default_sampling_takes_only_sampling_fields(tmp_path):
    settings = {"temperature": 0.6, "top_k": 20, "eos_token_id": 2, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}
    SamplingParams(**default_sampling(tmp_path))
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        default_sampling(tmp_path)
    assert default_sampling(tmp_path / "none") == {}


def test_info_shows_versions_device_and_choices(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    argv = ["info", str(folder), "--max-num-seqs", "3", "--device", "cpu", "--json"]
    assert cli.main(argv) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"torch", "transformers", "compiled-engine"} <= shown["versions"].keys()
    assert shown["device"]["kind"] == "cpu"
    choices = shown["choices"]
    assert choices["folder"] == str(folder)
    assert choices["dtype"] == "float32"
    assert choices["max_model_len"] == 512
    assert choices["rows"] == 3
    assert choices["kv_pool_tokens"] == 3 * 512
    assert choices["attention"].startswith("ce.paged_attention")
    assert cli.main(argv[:-1]) == 0
    out = capsys.readouterr().out
    for title in ("versions", "device", "choices", "max model len"):
        assert title in out


class _ScriptedLoop:
    """Gives one token a step, then ends by length."""

    def __init__(self, token_ids: list[int]) -> None:
        self.left = list(token_ids)
        self.has_work = True

    def submit(self, request: Request) -> None:
        self.request_id = request.request_id

    def step(self) -> list[TokenEvent]:
        token_id = self.left.pop(0)
        self.has_work = bool(self.left)
        reason = None if self.left else "length"
        return [TokenEvent(self.request_id, [token_id], reason)]

    def abort(self, request_id: int) -> None:
        self.has_work = False

    def drain(self) -> list[TokenEvent]:
        return []


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, ""), (1, "ab"), (3, "abacx")])
def test_generate_min_tokens_are_searched_for_no_stop_string(capsys, min_tokens, shown):
    params = SamplingParams(stop=("a",), min_tokens=min_tokens)
    request = Request(request_id=1, prompt_token_ids=[1], params=params)
    engine = SimpleNamespace(loop=_ScriptedLoop(list(b"abacx")))
    _print_answer(engine, ByteTokenizer(), request)
    assert capsys.readouterr().out == f"{shown}\n"


def test_generate_streams_an_answer_and_stops_at_a_stop_string(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_tiny_model(tmp_path / "model")
    argv = ["generate", str(folder), "--prompt", "hello", "--enforce-eager", "--max-num-seqs", "1"]
    argv += ["--chunked-prefill-size", "32"]
    argv += ["--device", "cpu", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    argv += ["--cache-dir", str(tmp_path)]
    assert cli.main(argv) == 0
    first = capsys.readouterr()
    # The tokenizer is found as the model is, not only as a plain path.
    assert cli.main([*argv, "--raw", "--tokenizer", "~/model"]) == 0
    assert capsys.readouterr().out != first.out
    assert first.out.endswith("\n")
    assert len(first.out) > 1
    assert cli.main([*argv, "--stop", first.out[0]]) == 0
    assert capsys.readouterr().out == "\n"


def test_warmup_without_compiling_says_so(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    argv = ["warmup", str(folder), "--enforce-eager", "--max-num-seqs", "1", "--device", "cpu"]
    assert cli.main([*argv, "--cache-dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "--enforce-eager: nothing is compiled" in captured.out
    document = json.loads(captured.out.splitlines()[-1])
    assert document["counters"]["num_inductor_compiles"] == 0
    assert document["pieces"] == []
    phases = [phase["name"] for phase in document["phases"]]
    assert phases[:2] == ["imports", "load"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drain_timeout_s", float("nan")),
        ("drain_timeout_s", -1.0),
        ("engine_timeout_s", -1.0),
        ("engine_timeout_s", float("inf")),
        ("served_model_name", ""),
        ("api_key", ""),
        ("port", 65536),
    ],
)
def test_server_config_value_out_of_range_names_its_flag(field, value):
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} is"):
        ServerConfig(**{field: value})
