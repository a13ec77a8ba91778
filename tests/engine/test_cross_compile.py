"""`warmup --target-arch`: what it compiles for a GPU that is not here, a start there finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.cache_folders import CUBINS, TRITON
from compiled_engine.cross_builds import CrossBuilds
from compiled_engine.cross_compile import CrossReport
from compiled_engine.custom_ops import cuda_build
from compiled_engine.custom_ops.cuda_build import arch_of, supported_archs
from compiled_engine.described_gpu import CHIPS, GPU, find_chip, tensors_here, tensors_on_gpu
from compiled_engine.errors import ConfigError
from tests.helpers.commands import refusal, run
from tests.helpers.tiny_model import write_tiny_model

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

FLAGS = ("--max-num-seqs", "1", "--chunked-prefill-size", "1")


@dataclass(frozen=True)
class Crossed:
    """A cache folder after `warmup --target-arch`, the artifact, and what the command said."""

    cache: Path
    artifact: Path
    text: str
    document: dict[str, Any]


def cross(folder: Path, arch: str, *flags: str, **model: Any) -> Crossed:
    """In a process of its own, which has been told of a GPU that is not there."""
    model_folder = write_tiny_model(folder / "model", torch_dtype="bfloat16", **model)
    (model_folder / "model.safetensors").unlink()  # a config is enough
    cache, artifact = folder / "cache", folder / "artifact.tar"
    words = ("warmup", model_folder, "--target-arch", arch, "--cache-dir", cache)
    command = [sys.executable, "-m", "compiled_engine.cli", *map(str, words)]
    command += ["--output", str(artifact), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Crossed(cache, artifact, done.stdout, json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Crossed:
    return cross(tmp_path_factory.mktemp("crossed"), "sm_90", *FLAGS)


def test_kernels_are_compiled_and_the_rest_is_named(crossed: Crossed):
    document = crossed.document
    assert document["target_arch"] == "sm_90a"
    compiled = {row["name"]: row for row in document["compiled"]}
    assert {
        "scheduler/plan.cu",
        "scheduler/layout.cu",
        "scheduler/advance.cu",
        "sampling/sample.cu",
        "gemm_skinny_row.row_kernel",
        "norm_triton._rms_norm_kernel",
        "attention_work_plan.plan_kernel",
        "rope_kv_triton._rope_kv_kernel",
        "sampling_finish.greedy_kernel",
    } <= set(compiled)
    assert all(row["num_compiled"] and row["num_bytes"] for row in compiled.values())
    left = {row["name"]: row["reason"] for row in document["not_compiled"]}
    pieces = {"embed", "head_few", "layer_one", "penalties"}
    assert pieces | {"memory", "CUDA graphs"} <= set(left)
    assert "Inductor" in left["layer_one"]
    for name in (*compiled, *left):
        assert name in crossed.text.rpartition("\n{")[0], "the tables name what the JSON does"


def test_what_was_compiled_is_for_the_architecture(crossed: Crossed):
    texts = [path.read_text() for path in (crossed.cache / TRITON).glob("*/*.ptx")]
    assert texts
    assert all(".target sm_90a" in text for text in texts)
    assert len(list((crossed.cache / CUBINS).glob("*.cubin"))) >= 5


def test_a_launch_on_such_a_gpu_finds_what_was_compiled(crossed: Crossed, tmp_path):
    moved = shutil.copytree(crossed.cache, tmp_path / "moved")
    command = [sys.executable, "-m", "tests.helpers.launched_elsewhere", str(moved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    place = found.index(["control", None])
    expected, others = found[:place], found[place + 1 :]
    assert {name for name, _ in expected} == {
        "_rms_norm_kernel",
        "_gated_kernel",
        "scan_kernel",
        "greedy_kernel",
        "scheduler/plan.cu",
        "sampling/sample.cu",
    }
    assert all(is_found for _, is_found in expected), expected
    assert others == [["scheduler/page_ops.cu", False], ["_rms_norm_kernel", False]], (
        "what no start of the model launches is not there"
    )


def test_the_artifact_is_taken_in_on_a_machine_of_another_kind(crossed: Crossed, tmp_path, capsys):
    taken = run(
        capsys, "cache", "import", crossed.artifact, "--trust-artifact", "--cache-dir", tmp_path
    )
    assert taken["num_files"] == crossed.document["files"]
    assert taken["digests"] == []
    here, there = ({path.relative_to(base) for path in base.rglob("*.cubin")}
                   for base in (tmp_path, crossed.cache))  # fmt: skip
    assert here == there
    assert all((tmp_path / p).read_bytes() == (crossed.cache / p).read_bytes() for p in here)


def test_options_that_need_the_gpu_are_refused(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model")
    words = ("warmup", model, "--cache-dir", tmp_path / "cache", "--target-arch")
    assert "known are sm_80, " in refusal(capsys, *words, "sm_91")
    for flags, text in (
        (("--check",), "--target-arch needs a warm-up"),
        (("--device", "cpu"), "--device cpu"),
        (("--scheduler", "torch"), "--scheduler torch"),
        (("--kernel-objective", "autotune"), "measures kernels on the GPU"),
        (("--dump-graphs", str(tmp_path / "graphs")), "--dump-graphs"),
        (("--output", str(tmp_path)), "is there already"),
    ):
        assert text in refusal(capsys, *words, "sm_90a", *flags)
    assert not (tmp_path / "cache" / TRITON).exists()


def test_every_known_chip_is_one_that_nvrtc_compiles_for():
    assert {chip.number for chip in CHIPS} <= set(supported_archs())
    assert find_chip("sm_100").arch == "sm_100a"
    assert find_chip("sm_80").capability == (8, 0)
    with pytest.raises(ConfigError, match="sm_9 is not known"):
        find_chip("sm_9")


def test_what_a_compiler_refuses_is_named_and_the_rest_is_kept(tmp_path, monkeypatch):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "good.cu").write_text('extern "C" __global__ void one(int* x) { *x = ONE; }')
    monkeypatch.setattr(cuda_build, "CSRC", folder)
    for expected in ((1, 0), (0, 1)):
        builds = CrossBuilds(tmp_path, 2)
        with builds.running():
            for flags in (("-DONE=1",), ("-DONE=1",), ("-DONE=nonsense",)):
                assert builds.cubin("good.cu", "sm_80", tmp_path / CUBINS, flags).code == b""
        (row,) = builds.rows()
        assert (row.name, row.num_compiled, row.num_found) == ("good.cu", *expected)
        (failure,) = builds.failures()
        assert failure.is_error
        assert "good.cu for sm_80: NVRTC_ERROR_COMPILATION" in failure.reason
        (name,) = builds.files()
        assert row.num_bytes == (tmp_path / name).stat().st_size
        report = CrossReport(built=(row,), left=(failure,), files=(name,), versions={})
        assert not report.is_complete


def test_tensors_say_that_they_are_on_the_gpu():
    launched, failed = [], []

    def relu(x: torch.Tensor) -> torch.Tensor:
        launched.append((x.device, x.data_ptr() % 16, torch.empty(2, device=x.device).is_cuda))
        return torch.neg(x)

    def neg(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such GPU")

    kernels = {"aten::relu": relu, "aten::neg": neg}
    with tensors_on_gpu(kernels, lambda op, error: failed.append((op, str(error)))):
        x = torch.zeros(4, 6, dtype=torch.bfloat16, device=GPU)
        made = torch.relu(x[1:, 1:])
        assert (made.device, made.is_cuda, made.is_cpu, tuple(made.shape)) == (
            GPU, True, False, (3, 5),
        )  # fmt: skip
        pinned = torch.zeros(3, pin_memory=True)
        assert (pinned.is_cuda, pinned.is_pinned(), pinned.numpy().tolist()) == (
            False, True, [0.0] * 3,
        )  # fmt: skip
        with tensors_here():
            assert x.device == torch.device("cpu")
            assert torch.ones(1).item() == 1.0
    assert launched == [(GPU, (6 + 1) * 2, True)]
    assert failed == [("aten::neg", "no such GPU")], "a launcher's own ops are launched too"
    assert not torch.zeros(1).is_cuda


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_start_on_this_gpu_compiles_no_kernel_of_ours(tmp_path, monkeypatch, family):
    flags = ("--max-num-seqs", "40", "--chunked-prefill-size", "256", "--block-size", "16")
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
        crossed = cross(tmp_path, arch, *flags, family=family, **sizes)
    here = (tmp_path / "model", "--cache-dir", tmp_path / "cache", "--jobs", "1", *flags)
    command = [sys.executable, "-m", "compiled_engine.cli", "warmup", *map(str, here)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    phases = {phase["name"]: phase for phase in document["phases"]}
    made = {name: phases[name]["num_misses"] for name in ("triton", "own sources")}
    assert made == {"triton": 0, "own sources": 0}, new_kernels(crossed)
    assert phases["triton"]["num_hits"] > 20


def new_kernels(crossed: Crossed) -> list[str]:
    """Names of Triton kernels in the cache that the artifact does not have."""
    with tarfile.open(crossed.artifact) as tar:
        known = {Path(name).parent.name for name in tar.getnames()}
    notes = (crossed.cache / TRITON).glob("*/__grp__*.json")
    return [note.name for note in notes if note.parent.name not in known]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arch", "family", "flags"),
    [
        ("sm_80", "qwen3", ()),
        ("sm_90a", "qwen3_moe", ()),
        ("sm_100a", "gpt_oss", ()),
        ("sm_89", "llama", ("--quantization", "fp8")),
        ("sm_120a", "mixtral", ("--device-loop",)),
    ],
)
def test_other_models_and_architectures(tmp_path, arch, family, flags):
    sizes = ("--max-num-seqs", "2", "--chunked-prefill-size", "10")
    found = cross(tmp_path, arch, *sizes, *flags, family=family)
    assert not [row for row in found.document["not_compiled"] if row["is_error"]]
    assert not [row for row in found.document["not_compiled"] if row["kind"] == "op"]
