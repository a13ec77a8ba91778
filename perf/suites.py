"""Suites: lists of scenarios that belong together, run one after the other, each in a process.

`ci` is what `check --suite ci` measures anew; the others are run by hand. Each command of `h200`
ends within 9 minutes on that device: see `COMMANDS`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Part:
    """One scenario of a suite.

    Attributes:
        name: what `--only` calls it.
        scenario: that is run.
        flags: further words of its `perf run`.
        about: what it measures, for the documents.
    """

    name: str
    scenario: str
    flags: tuple[str, ...] = ()
    about: str


def _part(name: str, scenario: str, *flags: str, about: str) -> Part:
    return Part(name=name, scenario=scenario, flags=flags, about=about)


SUITES: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "ci": (_part("ci", "ci", about="counts and ratios that hold on any machine"),),
        "cpu": (
            _part("ops", "cpu_ops", about="op families over the CPU's own ceilings"),
            _part("passes", "passes", about="kernels and bytes of a step, with and without a pass"),
            _part("step", "cpu_step", about="steps by size, prompts, offline throughput, ratios"),
            _part("start", "start", about="`serve` from nothing to its first token, cold and warm"),
            _part("serving", "serving", about="the server under load: latency and throughput"),
            _part("agentic", "agentic", about="conversations of agents: many turns, shared prefix"),
            _part("overload", "overload", about="three times the requests it can answer"),
            _part("overhead", "server_overhead", about="the server before an instant engine"),
            _part(
                "peers", "cpu_vs_peers", "--no-start", about="against transformers, in turns"
            ),
        ),
        "h200": (
            _part("step", "gpu_step", about="the 8B shape: every row of its table"),
            _part("start", "start", "--model", "qwen3-8b", about="cold and warm start, 8B shape"),
            _part(
                "moe", "gpu_models", "--model", "qwen3-30b-a3b", about="a mixture of experts"
            ),
            _part(
                "packed", "gpu_models", "--model", "gpt-oss-20b", "--only", "decode_1",
                about="packed experts, a row alone",
            ),
            _part(
                "quantised", "gpu_models", "--model", "qwen3-8b,qwen3-8b-fp8,qwen3-8b-nvfp4",
                "--only", "decode_1,prefill", about="the 8B shape in fp8 and nvfp4 over bf16",
            ),
            _part(
                "start_moe", "start", "--model", "qwen3-30b-a3b", about="its cold and warm start"
            ),
            _part("passes", "gpu_models", "--model", "qwen3-8b", "--only", "passes",
                  about="each pass on and off"),
            _part("ops", "op_bench", about="op families: candidates side by side, over ceilings"),
            _part("agentic", "agentic", "--model", "qwen3-8b", about="agents, full sizes"),
        ),
    }
)  # fmt: skip
# Parts that together stay within 9 minutes: two commands rerun the targets of steps, of models and
# of passes, the third those of starts.
COMMANDS = ("step,passes", "moe,packed,quantised", "start,start_moe", "ops,agentic")


def chosen(suite: str, only: str | None) -> list[Part]:
    """The parts of a suite to run.

    Raises:
        SystemExit: an unknown name.
    """
    parts = {part.name: part for part in SUITES[suite]}
    names = list(parts) if only is None else only.split(",")
    unknown = [name for name in names if name not in parts]
    if unknown:
        known = ", ".join(parts)
        raise SystemExit(f"--only {only}: no part {', '.join(unknown)} in {suite}; it has {known}")
    return [part for part in parts.values() if part.name in names]


def run_suite(parts: Sequence[Part], words: Sequence[str], more: Sequence[str]) -> int:
    """Runs the parts; exit code 1 if one fails. SIGTERM ends the running one, which keeps its rows.

    Args:
        parts: in their order.
        words: of the command before `run`.
        more: flags for every part.
    """
    is_stopped, failed = False, []
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: Any) -> None:
        nonlocal is_stopped
        is_stopped = True
        if child is not None:
            child.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for part in parts:
            if is_stopped:
                failed.append(part.name)
                continue
            command = [sys.executable, "-m", "perf", *words, "run", part.scenario]
            print(f"== {part.name}: {part.about}", file=sys.stderr, flush=True)
            child = subprocess.Popen([*command, *part.flags, *more])
            if child.wait():
                failed.append(part.name)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed:
        print(f"failed or left out: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))
