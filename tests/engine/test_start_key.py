"""The start key: whatever compiled code depends on makes another key, and nothing else does."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.build_ahead import missing_parts
from compiled_engine.compile import fingerprint
from compiled_engine.compile.fingerprint import (
    EXEMPT_MODULES,
    SOURCE_MODULES,
    SOURCE_PACKAGES,
    SOURCE_ROOTS,
    SOURCE_SUFFIXES,
    environment_parts,
    source_parts,
)
from compiled_engine.compile.torch_compat import changed_options
from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.device import instruction_sets
from compiled_engine.key_parts import IRRELEVANT_FIELDS, RELEVANT_FIELDS
from compiled_engine.start_check import preview_key
from tests.helpers.source_tree import ROOT, package_files
from tests.helpers.tiny_model import write_tiny_model
from tests.test_import_layers import imports_of

BASE: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "chunked_prefill_size": 32,
    "max_model_len": 64,
}
# Field -> another value of it, on a CPU.
RELEVANT_VALUES = {
    "dtype": "bfloat16",
    "quantization": "int8",
    "max_model_len": 128,
    "max_num_seqs": 5,
    "chunked_prefill_size": 64,
    "block_size": 32,
    "max_total_tokens": 128,
    "enable_prefix_caching": False,
    "disable_passes": ("fuse_add_rms_norm",),
    "kernels": ("attention=torch",),
    "kernel_objective": "portability",
    "num_threads": 3,
    "model_impl": "transformers",
}
IRRELEVANT_VALUES = {
    "gpu_memory_utilization": 0.5,
    "jump_forward": "off",
    "overlap_schedule": "on",
    "cudagraph_mode": "none",
    "seed": 7,
    "load_format": "dummy",
    "trust_remote_code": True,
    "allow_pickle": True,
    "compile_jobs": 3,
    "compile_mode": "eager-first",
}
# Fields that other tests here change, or that a CPU refuses.
ELSEWHERE = {
    "model": "test_the_model_is_what_its_config_says_not_where_it_lies",
    "quantize_lm_head": "test_a_quantised_head_is_another_key",
    "enable_passes": "undoes --disable-pass; every pass that can run on a CPU is on",
    "kernel_config": "test_a_kernel_file_counts_by_its_contents",
    "tokenizer": "test_a_tokenizer_elsewhere_is_the_same_key",
    "cache_dir": "test_where_things_lie_is_no_part",
    "config_file": "read before there is a config",
    "enforce_eager": "nothing is compiled",
    "dump_graphs": "caches are neither read nor written",
    "device": "GPU only",
    "kv_cache_dtype": "GPU only",
    "scheduler": "GPU only",
    "inductor_pdl": "GPU only",
    "check_graphs": "GPU only",
    "device_loop": "GPU only",
    "max_step_ms": "GPU only",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def same_threads():
    """The option changes the process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(model, cache):
    return preview_key(EngineConfig(model=str(model), cache_dir=cache, **BASE))


def key_with(model: Path, cache: Path, **changes: Any):
    return preview_key(EngineConfig(model=str(model), **{"cache_dir": cache, **BASE, **changes}))


def names(differences: list[str]) -> list[str]:
    return [text.partition(" ")[0] for text in differences]


def test_every_field_is_declared_relevant_or_not():
    declared = {f.name for f in fields(EngineConfig)}
    assert RELEVANT_FIELDS.keys() | IRRELEVANT_FIELDS.keys() == declared, (
        "a field of EngineConfig is in neither table of key_parts, or a table names one that is not"
    )
    assert not RELEVANT_FIELDS.keys() & IRRELEVANT_FIELDS.keys()


def test_every_field_is_changed_by_a_test():
    tested = RELEVANT_VALUES.keys() | IRRELEVANT_VALUES.keys() | ELSEWHERE.keys()
    assert tested == {f.name for f in fields(EngineConfig)}
    assert RELEVANT_VALUES.keys() <= RELEVANT_FIELDS.keys()
    assert IRRELEVANT_VALUES.keys() <= IRRELEVANT_FIELDS.keys()


@pytest.mark.parametrize("name", RELEVANT_VALUES)
def test_a_relevant_field_makes_another_key_and_names_its_part(model, cache, base, name):
    other = key_with(model, cache, **{name: RELEVANT_VALUES[name]})
    assert other.digest != base.digest
    part = RELEVANT_FIELDS[name]
    found = names(other.differences(base))
    assert any(text == part or text.startswith(f"{part}.") for text in found), found
    assert not any(text.startswith(("source.", "engine.")) for text in found)


@pytest.mark.parametrize("name", IRRELEVANT_VALUES)
def test_an_irrelevant_field_makes_no_other_key(model, cache, base, name):
    other = key_with(model, cache, **{name: IRRELEVANT_VALUES[name]})
    assert other.differences(base) == []
    assert other.digest == base.digest


def test_a_default_spelled_out_is_the_same_key(model, cache, base):
    spelled = {"dtype": "float32", "model_impl": "native", "block_size": 16}
    assert key_with(model, cache, **spelled, num_threads=torch.get_num_threads()) == base


def test_the_server_has_no_part():
    """Host, port, keys, log options: the engine process is not even told."""
    assert not {f.name for f in fields(ServerConfig)} & {f.name for f in fields(EngineConfig)}


def test_the_model_is_what_its_config_says_not_where_it_lies(model, cache, base, tmp_path):
    moved = shutil.copytree(model, tmp_path / "moved")
    assert key_with(moved, cache) == base
    for name, value in (("rms_norm_eps", 1e-3), ("num_hidden_layers", 1), ("hidden_size", 96)):
        wide = write_tiny_model(tmp_path / name, **{name: value})
        other = key_with(wide, cache)
        assert any(text.startswith("model.") for text in names(other.differences(base))), name


def test_end_tokens_and_names_of_a_model_are_no_part(model, cache, base, tmp_path):
    moved = shutil.copytree(model, tmp_path / "moved")
    path = moved / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"eos_token_id": 7, "_name_or_path": "other/name"}))
    assert key_with(moved, cache) == base


def test_a_model_of_transformers_counts_by_its_config_file(model, cache, tmp_path):
    first = key_with(model, cache, model_impl="transformers")
    moved = shutil.copytree(model, tmp_path / "moved")
    path = moved / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"_name_or_path": "other/name"}))
    assert key_with(moved, cache, model_impl="transformers") == first
    path.write_text(json.dumps(document | {"rms_norm_eps": 1e-3}))
    other = key_with(moved, cache, model_impl="transformers")
    assert "model.config_json" in names(other.differences(first))
    assert "versions.transformers" in first.parts


def test_a_quantised_head_is_another_key(model, cache):
    plain = key_with(model, cache, quantization="int8")
    quantised = key_with(model, cache, quantization="int8", quantize_lm_head=True)
    assert any(n.startswith("model.quantization") for n in names(quantised.differences(plain)))


def test_a_kernel_file_counts_by_its_contents(model, cache, tmp_path):
    files = [tmp_path / name for name in ("a.toml", "b.toml", "c.toml")]
    table = '[kernels]\nattention = "torch"\n'
    for path, text in zip(
        files, [table, table, f'objective = "portability"\n{table}'], strict=True
    ):
        path.write_text(text)
    first, same, other = (key_with(model, cache, kernel_config=path) for path in files)
    assert first == same == key_with(model, cache, kernels=("attention=torch",))
    assert names(other.differences(first)) == ["flags.kernel_objective"]


def test_a_tokenizer_elsewhere_is_the_same_key(model, cache, base, tmp_path):
    moved = shutil.copytree(model, tmp_path / "tokenizer")
    assert key_with(model, cache, tokenizer=str(moved)) == base


def test_where_things_lie_is_no_part(model, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    for name, value in (
        ("HOSTNAME", "another-host"),
        ("HOME", str(tmp_path)),
        ("USER", "somebody"),
        ("CUDA_VISIBLE_DEVICES", "3"),
        ("COMPILED_ENGINE_LOG_LEVEL", "DEBUG"),
        ("TORCHINDUCTOR_COMPILE_THREADS", "7"),
    ):
        monkeypatch.setenv(name, value)
    assert key_with(model, tmp_path / "elsewhere") == base
    assert not any(str(ROOT) in value or str(model) in value for value in base.parts.values())


def test_options_of_compilers_in_the_environment_are_parts(model, cache, base, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    other = key_with(model, cache)
    assert other.differences(base) == ["environment.TORCHINDUCTOR_MAX_AUTOTUNE (1, there nothing)"]
    assert environment_parts({"TRITON_CACHE_DIR": "/x", "PATH": "/bin"}) == {}


def test_options_set_from_python_are_parts(model, cache, base):
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    assert changed_options() == {}, "whether the modules are loaded says nothing"
    assert key_with(model, cache) == base
    before = inductor.max_autotune
    with inductor.patch(max_autotune=not before), dynamo.patch(assume_static_by_default=False):
        other = key_with(model, cache)
    assert other.differences(base) == [
        "compilers.dynamo.assume_static_by_default (False, there nothing)",
        f"compilers.inductor.max_autotune ({not before}, there nothing)",
    ]
    with inductor.patch({"compile_threads": 3, "trace.enabled": True, "max_autotune": before}):
        assert key_with(model, cache) == base, "harmless ones, and one at its default"
    with inductor.patch({"triton.unique_kernel_names": not inductor.triton.unique_kernel_names}):
        assert list(changed_options()) == ["inductor.triton.unique_kernel_names"]


class _Pass:
    """A pass of a user for Inductor."""

    def uuid(self) -> bytes:
        return b"second"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_Pass(), "_Pass b'second'"),
        (write_tiny_model, "tests.helpers.tiny_model.write_tiny_model"),
    ],
    ids=["with a digest", "function"],
)
def test_a_pass_of_a_user_is_named_alike_in_every_process(value, text):
    import torch._inductor.config as inductor

    with inductor.patch(pre_grad_custom_pass=value):
        assert changed_options() == {"inductor.pre_grad_custom_pass": text}


def test_options_set_from_python_keep_the_compiling_in_this_process(model, cache):
    import torch._inductor.config as inductor

    config = EngineConfig(model=str(model), cache_dir=cache, **BASE)
    assert missing_parts(config) != []
    with inductor.patch(max_autotune=not inductor.max_autotune):
        assert missing_parts(config) == []


def test_no_compiler_is_imported_to_ask_for_its_options():
    code = (
        "import sys\nfrom compiled_engine.compile.torch_compat import changed_options\n"
        "assert changed_options() == {}\n"
        "assert not {'torch._inductor', 'torch._dynamo'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: m.setattr(fingerprint, "__version__", "9.9"), "engine.version"),
        (lambda m: m.setattr(torch, "__version__", "9.9"), "versions.torch"),
        (lambda m: m.setattr(torch.version, "cuda", "99.0"), "versions.cuda"),
        (
            lambda m: m.setattr(fingerprint.importlib.metadata, "version", lambda name: "9.9"),
            "versions.triton",
        ),
        (
            lambda m: m.setattr(
                fingerprint.platform, "python_version_tuple", lambda: ("3", "99", "1")
            ),
            "versions.python",
        ),
        (
            lambda m: m.setattr(fingerprint, "instruction_sets", lambda: "SSE"),
            "device.instructions",
        ),
        (lambda m: m.setattr(fingerprint.platform, "system", lambda: "VMS"), "device.machine"),
        (lambda m: m.setattr(torch, "get_num_threads", lambda: 64), "device.threads"),
        (
            lambda m: m.setattr(torch, "get_float32_matmul_precision", lambda: "high"),
            "torch.float32_matmul_precision",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_versions_and_the_machine_are_parts(change, part, monkeypatch):
    device = torch.device("cpu")
    before = fingerprint.fixed_parts(device)
    change(monkeypatch)
    after = fingerprint.fixed_parts(device)
    assert [name for name in after if after[name] != before[name]] == [part]


def test_a_patch_release_of_python_is_no_part(monkeypatch):
    before = fingerprint.version_parts(())
    major, minor, _ = fingerprint.platform.python_version_tuple()
    monkeypatch.setattr(fingerprint.platform, "python_version_tuple", lambda: (major, minor, "99"))
    assert fingerprint.version_parts(()) == before


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "NVIDIA H200", 9, 0, 132, 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"name": "NVIDIA H100"}, "device.name"),
        ({"minor": 3}, "device.capability"),
        ({"multi_processor_count": 66}, "device.multiprocessors"),
        ({"total_memory": 2}, None),
    ],
    ids=["name", "capability", "part-of-one", "memory"],
)
def test_a_gpu_is_its_model_and_not_its_index(change, part, monkeypatch):
    other = type("Other", (_Properties,), change)
    kinds = {0: _Properties, 1: _Properties, 2: other}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kinds[device.index])
    first, second, third = (
        fingerprint.device_parts(torch.device("cuda", index)) for index in range(3)
    )
    assert first == second
    assert [n for n in first if first[n] != third[n]] == ([part] if part else [])
    assert "device.threads" not in first


def test_instruction_sets_are_what_a_compiler_may_use():
    plain = "model name : A\nflags : fpu sse avx2 fma hypervisor\nbogomips : 1\n"
    assert instruction_sets(plain) == instruction_sets("flags : fma avx2 sse md_clear\n")
    assert instruction_sets(plain) != instruction_sets(plain.replace("avx2", "avx2 avx512f"))
    assert instruction_sets("")


# --- sources ------------------------------------------------------------------------------


def test_no_source_file_of_the_packages_is_forgotten():
    parts = source_parts()
    expected = set()
    for package in SOURCE_PACKAGES:
        folder = ROOT / package if (ROOT / package).is_dir() else ROOT / "compiled_engine" / package
        for path in folder.rglob("*"):
            if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts:
                name = path.relative_to(folder)
                dotted = ".".join((package, *name.with_suffix("").parts))
                is_python = path.suffix == ".py"
                own = dotted.removesuffix(".__init__") if is_python else f"{package}/{name}"
                expected.add(f"source.{own}")
    assert {name for name in parts if name.partition(".")[2] not in SOURCE_MODULES} == expected
    assert any(name.endswith(".cu") for name in parts)


def test_every_file_below_the_packages_is_of_a_known_kind():
    """A kernel in another language would not be hashed."""
    for package in SOURCE_PACKAGES:
        folder = ROOT / package if (ROOT / package).is_dir() else ROOT / "compiled_engine" / package
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.suffix in (*SOURCE_SUFFIXES, ".md"), path


def test_the_modules_beside_the_packages_are_all_that_a_step_is_made_of():
    """The rule of `fingerprint`, worked out from the imports."""
    files = {file.name: file for file in package_files()}
    known = {file.module for file in package_files()}
    seen, pending = set(SOURCE_ROOTS), list(SOURCE_ROOTS)
    while pending:
        for found in imports_of(files[pending.pop()], known):
            name = found.target.removeprefix("compiled_engine.")
            is_own = name.split(".")[0] in SOURCE_PACKAGES or name not in files
            if not is_own and name not in seen and name not in EXEMPT_MODULES:
                seen.add(name)
                pending.append(name)
    assert seen == set(SOURCE_MODULES)


def test_exempt_modules_are_still_imported():
    assert all((ROOT / "compiled_engine" / f"{name}.py").is_file() for name in EXEMPT_MODULES)


CHANGES = (
    ("models/llama.py", "source.models.llama"),
    ("pieces.py", "source.pieces"),
    ("custom_ops/csrc/vector.h", "source.custom_ops/csrc/vector.h"),
    ("server/app.py", None),
    ("cli.py", None),
)
CHANGE_EACH = """
import json, sys
from pathlib import Path
from compiled_engine.compile.fingerprint import source_parts
package, found = Path(sys.argv[1]), []
first = source_parts()
for name in sys.argv[2:]:
    path = package / name
    text = path.read_text()
    path.write_text(text + "\\n")
    found.append([part for part, value in source_parts().items() if value != first[part]])
    path.write_text(text)
print(json.dumps([first, found]))
"""


def test_a_changed_source_is_named_and_a_moved_one_is_the_same(tmp_path):
    """In a copy of the package, as a wheel has it: no links, another path."""
    copy = tmp_path / "site" / "compiled_engine"
    shutil.copytree(
        ROOT / "compiled_engine", copy, ignore=shutil.ignore_patterns("__pycache__"), symlinks=False
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHANGE_EACH, str(copy), *(name for name, _ in CHANGES)],
        env={"PYTHONPATH": str(copy.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    moved, changed = json.loads(done.stdout)
    assert moved == source_parts()
    assert changed == [[part] if part else [] for _, part in CHANGES]


def test_differences_are_in_words(base):
    other = replace(base, parts={**base.parts, "shape.page_size": "32", "source.pieces": "x"})
    assert other.differences(base) == ["shape.page_size (32, there 16)", "source.pieces"]
