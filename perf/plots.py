"""The plots of the report, each out of the rows of one machine; empty where rows are lacking."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from perf import svg
from perf.qwen3_8b import HIDDEN, LAYER_PRODUCTS, NUM_LAYERS, VOCAB_SIZE, prefill_flops, step_bytes
from perf.rows import Row
from perf.svg import Axis, Series

# Scenario and row key -> the newest row.
Newest = Mapping[tuple[str, str], Row]
DECODE_CONTEXT = 1152  # tokens: the middle of a measured decode batch, 1024 to 1280
MAX_HISTORIES = 12
_DIVIDED = re.compile(r"^(.*): ([^:]*)$")


def latency(newest: Newest) -> str:
    """Throughput against latency: of servers, of conversations, and of bare steps."""
    serving = _by_batch(newest, "serving", "serving_tok_s")
    drawn = []
    for case in ("p50", "p99"):
        times = _by_batch(newest, "serving", "tpot_ms", case)
        drawn.append(_curve(f"server, TPOT {case}", serving, times))
    agents = _by_batch(newest, "agentic", "agentic_output_tok_s")
    drawn.append(_curve("agents, TPOT", agents, _by_batch(newest, "agentic", "agentic_tpot_ms")))
    models = dict.fromkeys((r.scenario, r.model, r.dtype) for r in _of(newest, "decode_step_ms"))
    for scenario, model, dtype in models:
        rows = [
            r
            for r in _of(newest, "decode_step_ms")
            if (r.scenario, r.model, r.dtype) == (scenario, model, dtype) and r.batch
        ]
        if len(rows) < 2:
            continue
        rows.sort(key=lambda r: r.batch or 0)
        name = f"steps alone, {model} {dtype}".strip() if model else "steps alone"
        points = [((r.batch or 0) / r.value * 1e3, r.value) for r in rows]
        labels = [str(r.batch) for r in rows]
        drawn.append(Series(name=name, points=points, labels=labels))
    series = [entry for entry in drawn if len(entry.points) > 1]
    if not series:
        return ""
    x = Axis(label="output tokens a second, all together", is_log=True)
    y = Axis(label="ms a token, each", is_log=True)
    return svg.chart(x, y, series, title="Latency against throughput")


def _curve(name: str, rates: Mapping[int, Row], times: Mapping[int, Row]) -> Series:
    batches = sorted(rates.keys() & times.keys())
    return Series(
        name=name,
        points=[(rates[b].value, times[b].value) for b in batches],
        labels=[str(b) for b in batches],
    )


def _of(newest: Newest, metric: str) -> list[Row]:
    return [row for row in newest.values() if row.metric == metric]


def _by_batch(newest: Newest, scenario: str, metric: str, case: str = "") -> dict[int, Row]:
    return {
        row.batch: row
        for row in _of(newest, metric)
        if row.scenario == scenario and row.batch is not None and row.case == case
    }


def roofline(newest: Newest) -> str:
    """What is reached, over operations for each byte, below what the device can do."""
    gpu = _gpu_points(newest)
    cpu = _cpu_points(newest)
    if gpu is not None:
        read, matmul, points = gpu
    elif cpu is not None:
        read, matmul, points = cpu
    else:
        return ""
    lowest = min(x for _, (x, _) in points)
    highest = max(matmul / read * 4, max(x for _, (x, _) in points) * 2)
    roof = [(lowest / 2, lowest / 2 * read), (matmul / read, matmul), (highest, matmul)]
    series = [
        Series(name="ceiling of this device", points=roof, has_points=False),
        Series(
            name="measured",
            points=[point for _, point in points],
            labels=[name for name, _ in points],
            has_line=False,
        ),
    ]
    x = Axis(label="operations for each byte", is_log=True)
    y = Axis(label="operations a second", is_log=True)
    return svg.chart(x, y, series, title="Roofline")


Roof = tuple[float, float, list[tuple[str, svg.Point]]]


def _gpu_points(newest: Newest) -> Roof | None:
    """The 8B shape's steps and prompts."""
    read, matmul = (newest.get(("gpu_step", name)) for name in ("read_tb_s", "matmul_tflops"))
    if read is None or matmul is None:
        return None
    layers = NUM_LAYERS * sum(rows * columns for rows, columns in LAYER_PRODUCTS)
    points = []
    for batch, row in sorted(_by_batch(newest, "gpu_step", "decode_step_ms").items()):
        flops = 2.0 * (layers + VOCAB_SIZE * HIDDEN) * batch
        num_bytes = step_bytes(DECODE_CONTEXT * batch, batch)
        points.append((f"decode {batch}", (flops / num_bytes, flops / (row.value * 1e-3))))
    for row in _of(newest, "prefill_tok_s"):
        if row.scenario == "gpu_step" and row.batch:
            lens = [int(row.case)] * row.batch
            flops, seconds = prefill_flops(lens), sum(lens) / row.value
            intensity = flops / step_bytes(0, sum(lens))
            points.append((f"prompts {row.batch}x{row.case}", (intensity, flops / seconds)))
    return (read.value * 1e12, matmul.value * 1e12, points) if points else None


def _cpu_points(newest: Newest) -> Roof | None:
    """The fastest candidate of each op."""
    read, matmul = (newest.get(("cpu_ops", name)) for name in ("read_gb_s", "matmul_gflop_s"))
    if read is None or matmul is None:
        return None
    best: dict[str, tuple[float, float]] = {}
    for row in _of(newest, "op_gflop_s"):
        rate = newest.get(("cpu_ops", row.key.replace("op_gflop_s", "op_gb_s")))
        found = _DIVIDED.match(row.case)
        if rate is None or found is None or not row.value or not rate.value:
            continue
        if row.value > best.get(found[1], (0.0, 0.0))[1]:
            best[found[1]] = (row.value / rate.value, row.value)
    points = [(name, (x, y * 1e9)) for name, (x, y) in best.items()]
    return (read.value * 1e9, matmul.value * 1e9, points) if points else None


def start(newest: Newest) -> str:
    """What starts say they do, one behind the other, up to the first token."""
    rows = []
    for total in _of(newest, "start_to_first_output_s"):
        phases = [
            (row.case.partition(": ")[2], row.value)
            for row in _of(newest, "start_phase_s")
            if row.model == total.model and row.case.startswith(f"{total.case}: ")
        ]
        rest = total.value - sum(seconds for _, seconds in phases)
        parts = [*phases, ("processes, imports, first token", max(rest, 0.0))]
        rows.append((f"{total.model}, {total.case}", parts))
    return svg.waterfall(rows, title="Start, from the process to the first token") if rows else ""


def histories(rows: Sequence[Row], keys: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Title and plot of each metric that several runs have measured, over these runs.

    Args:
        rows: of one machine, oldest first.
        keys: scenario and row key of what matters, at most `MAX_HISTORIES` of which are drawn.
    """
    found = []
    for scenario, key in keys:
        own = [r for r in rows if (r.scenario, r.key) == (scenario, key) and not r.void]
        own.sort(key=lambda r: r.run_id)
        if len(own) < 2:
            continue
        series = Series(
            name=key,
            points=[(float(n + 1), r.value) for n, r in enumerate(own)],
            spreads=[r.spread for r in own],
        )
        plot = svg.chart(
            Axis(label="run", is_whole=True),
            Axis(label=own[-1].unit),
            [series],
            title=f"{key} over runs",
            sizes=svg.SMALL_CHART_SIZES,
        )
        found.append((f"{scenario}: {key}", plot))
    return found[:MAX_HISTORIES]
