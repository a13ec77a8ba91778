"""The report as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from compiled_engine.explain.report import KernelRow, PieceReport, Report

# Of a table that is not on a terminal.
PLAIN_WIDTH = 200


def print_report(report: Report, console: Console) -> None:
    """Prints what the step is, a table a piece, and the totals."""
    kind = "decode" if report.is_decode else "prompt"
    console.print(
        f"{report.model} ({report.architecture}, {report.num_layers} layers, {report.dtype}) on "
        f"{report.device} [{report.target}]: a {kind} step of {report.num_tokens} tokens"
        + f", {report.context} tokens of KV a row"
        * report.is_decode,
        markup=False,
    )
    if report.read_tb_s is not None and report.matmul_tflop_s is not None:
        console.print(
            f"ceilings, {report.ceilings_from}: reads {report.read_tb_s * 1e3:.4g} GB/s, "
            f"multiplies {report.matmul_tflop_s:.4g} TFLOP/s; kernels are chosen for "
            f"{report.objective}",
            markup=False,
        )
    else:
        console.print(f"ceilings {report.ceilings_from}", markup=False)
    for piece in report.pieces:
        console.print()
        _print_piece(piece, console)
    console.print()
    for line in total_lines(report):
        console.print(line, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"{report.seconds:.1f} s", markup=False)


def total_lines(report: Report) -> list[str]:
    """The sums over a step, in words."""
    totals = report.totals
    lines = [
        f"a step: {totals.num_kernels} kernels ({totals.num_generated} written by Inductor), "
        f"{totals.num_graph_breaks} graph breaks, {amount(totals.num_bytes)}B moved, "
        f"{amount(totals.num_flops)}FLOP"
    ]
    if totals.floor_us is not None:
        lines.append(f"floor {totals.floor_us:.1f} us")
    if totals.measured_us is not None:
        times = f"kernels one by one {totals.measured_us:.1f} us"
        if totals.floor_us:
            times += f", {totals.measured_us / totals.floor_us:.2f} times the floor"
        lines.append(times)
    return lines


def piece_title(piece: PieceReport) -> str:
    """Name, version, how often it runs and what it took."""
    parts = [piece.name]
    if piece.version:
        parts.append(f"version for {piece.version}")
    if piece.layers:
        often = f"{piece.count} times: layers" if piece.count > 1 else "once: layer"
        parts.append(f"{often} {ranges(piece.layers)}")
    if piece.floor_us is not None:
        parts.append(f"floor {piece.floor_us:.2f} us")
    if piece.measured_us is not None:
        parts.append(f"measured {piece.measured_us:.2f} us")
    return ", ".join(parts)


def pass_line(piece: PieceReport) -> str:
    """Matches of each pass; those that are off are said to be."""
    return ", ".join(f"{p.name} {p.why_off or p.matches}" for p in piece.passes)


def ranges(numbers: tuple[int, ...]) -> str:
    """Numbers with runs joined: "0-3, 7"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def amount(value: float) -> str:
    """A number with a prefix: "1.5 M"."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError(value)


def microseconds(value: float | None) -> str:
    """With three digits that count, or nothing."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def why_lines(row: KernelRow) -> list[str]:
    """Why the kernel, and why not the others; what Inductor fused."""
    if row.covers:
        return ["fuses " + ", ".join(row.covers)]
    return [row.reason, *(f"not {name}: {reason}" for name, reason in row.rejected)]


def _print_piece(piece: PieceReport, console: Console) -> None:
    table = Table(title=piece_title(piece), title_justify="left", box=None, pad_edge=False)
    table.add_column("", justify="right")
    for name in ("op", "result", "made by", "kernel"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "FLOP", "floor us", "us"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for index, row in enumerate(piece.kernels):
        table.add_row(
            str(index),
            row.name,
            row.shape,
            ", ".join(row.made_by) or "model",
            row.kernel or "-",
            amount(row.num_bytes),
            amount(row.num_flops) if row.num_flops else "",
            microseconds(row.floor_us),
            microseconds(row.measured_us),
            "; ".join(line for line in why_lines(row) if line),
        )
    console.print(table, markup=False)
    console.print(f"passes: {pass_line(piece)}", markup=False)
