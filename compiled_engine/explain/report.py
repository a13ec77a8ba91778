"""What `explain` found, as plain records: the table, the JSON and the HTML page are views of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One thing that a piece runs: a call of an op, or a kernel that Inductor writes.

    Attributes:
        name: the op, or "inductor".
        shape: of its first result, with dtype.
        made_by: passes that made it; empty for what stands in the model as it is.
        place: kernel family and mode; empty if it has none.
        kernel: what computes it.
        reason: why that was chosen.
        rejected: (other candidate, why not).
        num_kernels: launched; 0 if that is not known.
        covers: ops in it that Inductor fused, in order.
        inputs: rows of the same piece that it reads from.
        num_bytes, num_flops: that it must move and compute.
        is_8bit: those operations are products of 8-bit numbers.
        floor_us: least time of that on the device; None without its ceilings.
        measured_us: median time on the device; None if it was not measured.
    """

    name: str
    shape: str
    made_by: tuple[str, ...] = ()
    place: str = ""
    kernel: str = ""
    reason: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    num_kernels: int = 1
    covers: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    num_bytes: float = 0.0
    num_flops: float = 0.0
    is_8bit: bool = False
    floor_us: float | None = None
    measured_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """One pass over a piece: how often it matched; why it did not run, if so."""

    name: str
    matches: int
    why_off: str = ""


@dataclass(frozen=True, kw_only=True)
class PieceReport:
    """One piece of the step: a distinct layer, or what stands before and after the layers.

    Attributes:
        name: of the piece.
        version: compiled version that serves the step, in words; empty if there is only one.
        count: how often a step runs it.
        layers: which layers of the model it is.
        passes: in order.
        kernels: in order.
        num_graph_breaks: while it was traced.
    """

    name: str
    version: str = ""
    count: int = 1
    layers: tuple[int, ...] = ()
    passes: tuple[PassRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    num_graph_breaks: int = 0

    @property
    def num_generated(self) -> int:
        """Kernels that Inductor writes."""
        return sum(bool(row.covers) for row in self.kernels)

    @property
    def floor_us(self) -> float | None:
        """Of one run; None if one part has none."""
        return _sum([row.floor_us for row in self.kernels])

    @property
    def measured_us(self) -> float | None:
        """Of one run; None if a part was not measured."""
        return _sum([row.measured_us for row in self.kernels])


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of one step, the scheduler and the sampler apart.

    Attributes:
        num_kernels: launched; what is not known counts as one.
        num_unknown: rows whose number of kernels is not known.
        num_generated: kernels that Inductor writes.
        num_graph_breaks: 0, or the pieces would not compile.
        num_bytes, num_flops: moved and computed.
        floor_us, measured_us: sums over the pieces; None if one part has none.
    """

    num_kernels: int
    num_unknown: int
    num_generated: int
    num_graph_breaks: int
    num_bytes: float
    num_flops: float
    floor_us: float | None
    measured_us: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found.

    Attributes:
        model: as it was given.
        architecture: of its config.
        device: name or description of the device.
        target: device type and capability.
        dtype: of the computation.
        num_tokens: of the step.
        context: tokens of KV of each sequence.
        is_decode: every token is a sequence of its own.
        num_layers: of the model.
        read_tb_s, matmul_tflop_s: ceilings that floors are taken of; None if unknown.
        ceilings_from: where these come from, in words.
        objective: what kernels are chosen for.
        pieces: in the order in which a step runs them.
        seconds: that the report took.
        notes: what a reader should know.
    """

    model: str
    architecture: str
    device: str
    target: str
    dtype: str
    num_tokens: int
    context: int
    is_decode: bool
    num_layers: int
    read_tb_s: float | None
    matmul_tflop_s: float | None
    ceilings_from: str
    objective: str
    pieces: tuple[PieceReport, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def totals(self) -> Totals:
        """Sums over a step."""
        rows = [(row, piece.count) for piece in self.pieces for row in piece.kernels]
        return Totals(
            num_kernels=sum(max(1, row.num_kernels) * count for row, count in rows),
            num_unknown=sum(count for row, count in rows if row.num_kernels == 0),
            num_generated=sum(piece.num_generated * piece.count for piece in self.pieces),
            num_graph_breaks=sum(piece.num_graph_breaks for piece in self.pieces),
            num_bytes=sum(row.num_bytes * count for row, count in rows),
            num_flops=sum(row.num_flops * count for row, count in rows),
            floor_us=_sum([_times(row.floor_us, count) for row, count in rows]),
            measured_us=_sum([_times(row.measured_us, count) for row, count in rows]),
        )


def _times(value: float | None, count: int) -> float | None:
    return None if value is None else value * count


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
