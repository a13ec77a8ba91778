"""Measure a few settings on this machine, and write those that are better to a file for --config.

Owns the flags, the engines and the output: a table, and as the last line one JSON document.
"""

from __future__ import annotations

import argparse
import datetime
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    changed_fields,
    config_from_args,
)
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from compiled_engine.engine import Engine
    from compiled_engine.models import CausalLM
    from compiled_engine.tune.choose import Decision
    from compiled_engine.tune.measure import Deadline, EngineBench
    from compiled_engine.tune.recipe import Recipe
    from compiled_engine.tune.stages import Plan

DEFAULT_MINUTES = 8.0
# As `tune.workloads` has them, which would import torch for `--help`.
_WORKLOADS = ("agentic", "throughput", "latency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, what to measure and how long, and engine settings."""
    add_model_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write, .toml or .json (default: the model's name with .toml, here)",
    )
    parser.add_argument(
        "--workload",
        choices=_WORKLOADS,
        default=_WORKLOADS[0],
        help="what counts: conversations with tools and a shared prefix, tokens per second of many "
        f"requests, or the time of few requests (default: {_WORKLOADS[0]})",
    )
    parser.add_argument(
        "--max-minutes",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="X",
        help="then the settings not measured yet keep their defaults "
        f"(default: {DEFAULT_MINUTES:g})",
    )
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the file, prints the table and the document."""
    config = config_from_args(EngineConfig, args)
    if not 0 < args.max_minutes <= 24 * 60:
        raise ConfigError(f"--max-minutes is {args.max_minutes:g}; allowed is more than 0 to 1440")
    if config.compile_mode != "first":
        raise ConfigError(
            "--compile-mode eager-first serves before everything is compiled, and tune measures "
            "compiled code: leave it out",
            param="compile_mode",
        )
    from compiled_engine.tune.measure import Deadline
    from compiled_engine.tune.recipe import check_output, write_recipe

    output: Path = args.output or Path(f"{Path(config.model).name}.toml")
    check_output(output)
    start = time.perf_counter()
    recipe, notes = _measured(config, args.workload, Deadline(args.max_minutes * 60))
    write_recipe(recipe, output)
    _print_outcome(recipe, output, config, time.perf_counter() - start, notes)
    return 0


def _measured(config: EngineConfig, name: str, deadline: Deadline) -> tuple[Recipe, list[str]]:
    """What was found, and what the user should be told of it."""
    from compiled_engine.settings import preview_settings
    from compiled_engine.tune.candidates import bench_config, candidates
    from compiled_engine.tune.measure import TimeUp
    from compiled_engine.tune.stages import Plan
    from compiled_engine.tune.workloads import workload

    settings = preview_settings(config)
    longest = min(settings.max_model_len, (settings.num_pages - 1) * config.block_size)
    wanted = workload(name, settings.device.type).within(longest - 1)
    plan = Plan(
        config=config,
        settings=settings,
        workload=wanted,
        candidates=candidates(config, settings, wanted),
    )
    if not plan.num_runs:
        raise ConfigError("every setting that tune measures is given: leave one of them out")
    bench = bench_config(config, settings, plan.candidates, wanted)
    with ExitStack() as stack:
        try:
            first = _open(bench, deadline)
        except TimeUp:
            raise EngineError(
                "the engine had not started when the time was up, and nothing is written: raise "
                "--max-minutes, or fill the cache by `compiled-engine warmup` first"
            ) from None
        stack.callback(first.close)
        second = _Second(bench, first, deadline, stack)
        decisions = _decide(plan, first, second, deadline)
    if not any(decision.is_measured for decision in decisions):
        raise EngineError(
            "the time was up before anything was measured, and nothing is written: raise "
            "--max-minutes"
        )
    return _recipe(plan, first, decisions, second)


def _decide(plan: Plan, first: Engine, second: _Second, deadline: Deadline) -> list[Decision]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from compiled_engine.commands.progress import stderr_console
    from compiled_engine.tune.measure import EngineBench
    from compiled_engine.tune.stages import Stages

    console = stderr_console()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("measuring", total=plan.num_runs)

        def open_second() -> tuple[EngineBench | None, str]:
            bar.stop()  # a start has a bar of its own
            try:
                return second.open()
            finally:
                bar.start()

        stages = Stages(
            plan,
            EngineBench(first, deadline),
            open_second,
            deadline,
            on_done=lambda: bar.advance(task),
        )
        return stages.run()


class _Second:
    """The engine whose kernels are measured, over the weights of the first.

    Args:
        config: of the first.
        first: that engine.
        deadline: of everything.
        stack: closes it.

    Attributes:
        engine: once it is open.
    """

    def __init__(
        self, config: EngineConfig, first: Engine, deadline: Deadline, stack: ExitStack
    ) -> None:
        self._config = replace(config, kernel_objective="autotune")
        self._first, self._deadline, self._stack = first, deadline, stack
        self.engine: Engine | None = None

    def open(self) -> tuple[EngineBench | None, str]:
        """The bench over it; or none, and why. Raises `TimeUp`."""
        import torch

        from compiled_engine.tune.measure import EngineBench

        model = self._first.loop.executor.model
        try:
            self.engine = _open(self._config, self._deadline, loaded=model)
        except (EngineError, torch.OutOfMemoryError) as error:
            return None, f"an engine with measured kernels cannot be started here: {error}"
        self._stack.callback(self.engine.close)
        return EngineBench(self.engine, self._deadline), ""


def _open(config: EngineConfig, deadline: Deadline, loaded: CausalLM | None = None) -> Engine:
    """An engine; raises `TimeUp` between two pieces when the time is up."""
    from compiled_engine.commands.local import open_engine

    def check(*_: Any) -> None:
        # Processes that compile report from threads of their own.
        if threading.current_thread() is threading.main_thread():
            deadline.check()

    return open_engine(config, is_quiet=loaded is not None, on_report=check, loaded=loaded)


def _recipe(
    plan: Plan, first: Engine, decisions: list[Decision], second: _Second
) -> tuple[Recipe, list[str]]:
    from compiled_engine.commands.info import versions
    from compiled_engine.custom_ops.tuning import KernelTuner
    from compiled_engine.tune.candidates import KERNELS
    from compiled_engine.tune.recipe import NOT_KEPT, Recipe
    from compiled_engine.tune.winners import winner_lines
    from compiled_engine.tuned_for import tuned_here

    given = {
        name: getattr(plan.config, name) for name in sorted(changed_fields(plan.config) - NOT_KEPT)
    }
    tuned = tuned_here(plan.config, first.loop.executor.model.config, first.settings.device)
    lines: list[str] = []
    takes_measured = any(d.name == KERNELS and d.value is not None for d in decisions)
    if takes_measured and second.engine is not None:
        tuner = second.engine.driver.registry.tuner
        assert isinstance(tuner, KernelTuner)
        lines = winner_lines(tuner)
    recipe = Recipe(
        given=given,
        decisions=decisions,
        tuned=replace(
            tuned,
            workload=str(plan.workload),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            versions=versions(),
        ),
        notes=lines,
    )
    return recipe, [f"{d.name}: {d.reason}" for d in decisions if not d.is_measured]


def _print_outcome(
    recipe: Recipe, output: Path, config: EngineConfig, seconds: float, notes: list[str]
) -> None:
    from compiled_engine.bench.report import print_document, print_table
    from compiled_engine.tune.recipe import plain_value

    print_table(
        f"settings of {recipe.tuned.model} on {recipe.tuned.device}",
        ("setting", "value", "tok/s", "token ms p50", "p99", "request ms", ""),
        [row for decision in recipe.decisions for row in _rows(decision)],
    )
    for note in notes:
        print(note)
    print(f"{output} is written: serve with --config {output}")
    if any(d.value is not None and d.name != "max_step_ms" for d in recipe.decisions):
        print(f"compile for it ahead: compiled-engine warmup {config.model} --config {output}")
    print_document(
        {
            "command": "tune",
            "seconds": round(seconds, 3),
            "output": str(output),
            "values": {name: plain_value(value) for name, value in recipe.values.items()},
            "reasons": recipe.reasons,
            "not_measured": [d.name for d in recipe.decisions if not d.is_measured],
        }
    )


def _rows(decision: Decision) -> list[tuple[str, ...]]:
    from statistics import median

    from compiled_engine.bench.stats import percentile
    from compiled_engine.tune.choose import REQUEST_MS, TOKENS_PER_S, score

    def of_steps(results: list[Any], percent: float) -> str:
        return f"{median(percentile(result.itls_ms, percent) for result in results):.2f}"

    return [
        (
            decision.name,
            "none" if trial.value is None else f"{trial.value}",
            f"{score(trial, TOKENS_PER_S).median:.0f}",
            of_steps(trial.results, 50),
            of_steps(trial.results, 99),
            f"{score(trial, REQUEST_MS).median:.0f}",
            "*" if trial.value == decision.chosen else "",
        )
        for trial in decision.trials
    ]
