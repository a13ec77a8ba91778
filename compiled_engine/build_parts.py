"""The parts of what a start compiles, each of which a process can make by itself.

A part is a compiled piece, or a piece at some of the sizes that steps come in: running it there
builds the kernels that those sizes take. Everything a part does not compile itself it takes from
the plain twins, so no part waits for another. Owns the list of parts and how each is made; knows
nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_engine.config import SchedulerKernels
from compiled_engine.pieces import LayerVersion, StepPieces
from compiled_engine.sampler import Variant, build_param_inbox
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.step import StepExecutor

# Layers of few tokens take another kernel at nearly every size.
SLICES = {"layer_few": 4}


@dataclass(frozen=True)
class Part:
    """One thing to make.

    Attributes:
        name: as shown.
        piece: "layer", "sampler", or what `PartMaker` has a method for.
        version: of a layer.
        variant: of a sampler.
        share: which of the sizes: every `share[1]`-th, from `share[0]` on.
    """

    name: str
    piece: str
    version: LayerVersion | None = None
    variant: Variant | None = None
    share: tuple[int, int] = (0, 1)


def list_parts(
    versions: Sequence[LayerVersion], *, is_gpu: bool, scheduler: SchedulerKernels
) -> list[Part]:
    """All parts, those that take longest first; `scheduler` as in `Settings`."""
    parts = []
    for version in versions:
        count = SLICES.get(version.name, 1) if is_gpu else 1
        parts += [
            Part(f"layer, {version.sizes}", "layer", version, share=(index, count))
            for index in range(count)
        ]
    planning = ["apply_params"] if scheduler == "cuda" else ["end", "begin"]
    others = [Part(name, name) for name in (*planning, "embed", "head")]
    samplers = [
        Part(f"sampler, {variant.name.lower()}", "sampler", variant=variant)
        for variant in reversed(Variant)
    ]
    return [*parts, *samplers, *others] if is_gpu else [*others, *samplers, *parts]


class PartMaker(StepExecutor):
    """A step that is never run whole.

    Args:
        plain: uncompiled twins of the pieces.
        executor arguments: as `StepExecutor`.
    """

    plain: StepPieces

    @torch.no_grad()
    def open(self, plain: StepPieces) -> None:
        """Makes a plan without rows, by the plain pieces."""
        self.plain = plain
        self.compiled_embed = self.pieces.embed
        self.pieces.embed = plain.embed
        inbox, _ = InboxBuilder(self.shape).take()
        params = build_param_inbox(self.shape, [])
        if not self.reads_plans:
            upload = self.prepare(inbox, params)
            inbox, params = upload.inbox, upload.param_inbox
        self._empty = inbox, params
        self._plan = plain.begin(self.state, self.params, inbox, params, self._budget(1))

    @torch.no_grad()
    def make(self, part: Part) -> None:
        """Compiles, or loads, and runs what the part says."""
        makers: dict[str, Callable[[Part], None]] = {
            "layer": self._layer,
            "sampler": self._a_sampler,
            "head": self._head,
            "embed": self._embed,
            "begin": self._begin,
            "end": self._end,
            "apply_params": self._apply_params,
        }
        makers[part.piece](part)

    def _layer(self, part: Part) -> None:
        version = part.version
        assert version is not None
        compiled_layer: Any = self.pieces.layer
        self.pieces.__dict__["layer"] = partial(self._layer_of, version, compiled_layer)
        try:
            self._run_sizes(part, version)
        finally:
            del self.pieces.__dict__["layer"]

    def _run_sizes(self, part: Part, version: LayerVersion) -> None:
        last, size = version if version.is_last else None, version.example_size
        others = self.pieces.version(size, is_mixed=not version.is_decode)
        self._run_layers(self._plan, size, others, last, warmed=version)
        start, step = part.share
        sizes = [b for b in self.buckets if version.low <= b <= version.high]
        for size in sizes[start::step]:
            others = version
            if version.is_last:
                others = self.pieces.version(size, is_mixed=True)
            self._run_layers(self._plan, size, others, last)

    def _layer_of(
        self,
        version: LayerVersion,
        compiled: Callable[[LayerVersion, int], Any],
        wanted: LayerVersion,
        index: int,
    ) -> Any:
        """The compiled layer of the part's own version, the plain one of another.

        In front of a last layer stand others, whose sizes nobody has marked.
        """
        return compiled(wanted, index) if wanted == version else self.plain.layer(wanted, index)

    def _residual(self, num_rows: int) -> Tensor:
        _, residual, _ = self.plain.embed(self.state, self._plan, self._places[:1])
        return residual.expand(num_rows, -1).contiguous()

    def _row_counts(self) -> list[int]:
        return sorted({min(size, self.shape.max_rows) for size in self.buckets})

    def _head(self, part: Part) -> None:
        counts = self._row_counts()
        few = [count for count in counts if count <= self.pieces.max_few]
        for group in (few, counts[len(few) :]):
            for place, count in enumerate(reversed(group)):
                residual = self._residual(count)
                self.pieces.head(residual if place else self._any_size(residual))

    def _a_sampler(self, part: Part) -> None:
        assert part.variant is not None
        counts = self._row_counts()
        logits = self.plain.head(self._residual(counts[-1]))
        rows = torch.zeros(counts[-1], dtype=torch.int32, device=self.device)
        self._warm_sampler(part.variant, logits, rows)
        for count in counts:
            sample = self.pieces.sample[part.variant]
            for masks in (None, self.masks):
                sample(self.state, self.params, logits[:count], rows[:count], masks)

    def _embed(self, part: Part) -> None:
        self.compiled_embed(self.state, self._plan, self._any_size(self._places[:13]))

    def _begin(self, part: Part) -> None:
        self.pieces.begin(self.state, self.params, *self._empty, self._budget(1))

    def _end(self, part: Part) -> None:
        self.pieces.end(self.state, self._plan, self._nothing_sampled, self.outbox)
        self.outbox.discard()

    def _apply_params(self, part: Part) -> None:
        assert self.pieces.apply_params is not None
        self.pieces.apply_params(self.params, self._empty[1])
