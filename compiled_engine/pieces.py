"""The functions a step is made of, compiled or not, and which version serves which size.

Every piece is a pure function of its arguments but for the tensors it says it mutates, and every
piece has its plain twin: the same function, not compiled. A decoder layer has up to five versions:
for one token, for few (products by the fastest kernel for their sizes), for many in decode steps
and in mixed ones (products by the library), and for the last layer of a step that has more tokens
than rows: what it does behind attention, it does for the rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.torch_compat import (
    expect_equal,
    has_any_size,
    mark_any_size,
    mark_dynamic,
)
from compiled_engine.config import SchedulerKernels
from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.custom_ops.gemm import MOST_TOKENS
from compiled_engine.custom_ops.registry import KernelRegistry
from compiled_engine.custom_ops.sampling import Masks, mask_logits
from compiled_engine.layer_kinds import layer_kinds, sample_of_kinds
from compiled_engine.layout import StepInputs, layout_places
from compiled_engine.models import CausalLM
from compiled_engine.models.layers import DecoderLayer, Rotary
from compiled_engine.outbox import Outbox, RecordQueue, RingOutbox, pack
from compiled_engine.passes.names import PieceTraits
from compiled_engine.sampler import (
    ParamInbox,
    RowParams,
    Sampled,
    Variant,
    apply_params,
    draw,
    penalised,
    sample,
)
from compiled_engine.scheduler.advance import advance
from compiled_engine.scheduler.cuda import schedule_plan
from compiled_engine.scheduler.cuda_advance import schedule_advance, schedule_layout
from compiled_engine.scheduler.inbox import Inbox
from compiled_engine.scheduler.plan import Plan, plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState

# (state, params, logits [S, padded vocab], rows [S], masks by row or None) -> by row
Sampler = Callable[..., Sampled]

# Tokens up to which products are `fused_linear`, which takes the fastest kernel for the product and
# the number of tokens; with more the library is the fastest for all.
MAX_FEW = 128
# Of these, tokens up to which attention may treat chunks of prompts like tokens of many sequences.
MAX_FEW_MIXED = 32


@dataclass(frozen=True)
class LayerVersion:
    """One compiled version of the decoder layer.

    Attributes:
        name: shown in logs.
        low, high: token counts it serves; equal for a static one.
        is_decode: for decode steps; see `passes.decode_attention`.
        is_last: for the last layer; gives `max_rows` rows.
    """

    name: str
    low: int
    high: int
    is_decode: bool
    is_last: bool = False

    @property
    def example_size(self) -> int:
        """A size for the version's compile; a dynamic one equals no other size by chance."""
        if self.low == self.high:
            return self.low
        return min(self.high, max(self.low + 4, 37 if self.high > 37 else 13))

    @property
    def sizes(self) -> str:
        """The token counts in words."""
        layer = "last layer, " * self.is_last
        if self.low == self.high:
            return f"{layer}{self.low} token" + "s" * (self.low > 1)
        return f"{layer}{self.low} to {self.high} tokens"


def few_limit(registry: KernelRegistry) -> int:
    """`MAX_FEW`, or the tokens that the kernel takes which an option asks for."""
    wanted = registry.override("fused_linear", "few")
    return MAX_FEW if wanted is None else min(MAX_FEW, MOST_TOKENS.get(wanted, MAX_FEW))


def layer_versions(
    max_tokens: int, max_rows: int, *, is_gpu: bool, has_last: bool, max_few: int = MAX_FEW
) -> tuple[LayerVersion, ...]:
    """The versions that steps of up to `max_tokens` tokens need, smallest first.

    `max_few` is the highest count of the version for few tokens.
    """
    if not is_gpu:
        few_mixed = 1
        versions = [
            LayerVersion("layer_one", 1, 1, is_decode=False),
            LayerVersion("layer_many", 2, max_tokens, is_decode=False),
        ]
    else:
        few, most = min(max_few, max_tokens), min(max_rows, max_tokens)
        few_mixed = min(few, MAX_FEW_MIXED)
        versions = [
            LayerVersion("layer_one", 1, 1, is_decode=True),
            LayerVersion("layer_few", 2, few, is_decode=True),
            LayerVersion("layer_many_decode", few + 1, most, is_decode=True),
            LayerVersion("layer_many_mixed", few_mixed + 1, max_tokens, is_decode=False),
        ]
    if has_last:
        low = max(few_mixed, max_rows) + 1
        versions.append(LayerVersion("layer_last", low, max_tokens, is_decode=False, is_last=True))
    return tuple(version for version in versions if version.low <= version.high)


def layer_traits(
    version: LayerVersion, *, is_gpu: bool, max_few: int, is_foreign: bool
) -> PieceTraits:
    """What the passes are told of a version."""
    traits = PieceTraits(is_foreign=is_foreign)
    if not is_gpu:
        return traits
    is_few = version.is_decode and version.high <= max_few
    return replace(traits, is_decode=version.is_decode, is_few=is_few)


def layer_function(version: LayerVersion) -> tuple[Callable[..., tuple[Tensor]], int]:
    """What is compiled for a version, and how many of its arguments a step's layers share."""

    def layer(
        module: DecoderLayer,
        cache: LayerCache,
        rotary: Rotary,
        ctx: PagedContext,
        residual: Tensor,
    ) -> tuple[Tensor]:
        return (module(residual, rotary, cache, ctx),)

    def last_layer(
        module: DecoderLayer,
        cache: LayerCache,
        rotary: Rotary,
        ctx: PagedContext,
        keep: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor]:
        return (module(residual, rotary, cache, ctx, keep),)

    return (last_layer, 3) if version.is_last else (layer, 2)


def version_for(
    versions: Sequence[LayerVersion], num_tokens: int, *, is_mixed: bool
) -> LayerVersion:
    """The version for a step of `num_tokens` tokens."""
    fitting = [v for v in versions if v.low <= num_tokens <= v.high and not v.is_last]
    wanted = [v for v in fitting if v.is_decode != is_mixed]
    return (wanted or fitting)[0]


def last_version_for(
    versions: Sequence[LayerVersion], version: LayerVersion, num_tokens: int
) -> LayerVersion | None:
    """The version that gives only what is sampled; None where every token may be.

    `version` is that of the step's other layers: it plans attention for all of them.
    """
    if version.is_decode:
        return None
    return next((v for v in versions if v.low <= num_tokens <= v.high and v.is_last), None)


class StepPieces:
    """The functions of a step.

    Args:
        model: on its device, evaluated only.
        shape: static sizes of the scheduler.
        vocab_size: real token ids.
        driver: compiles, or hands the functions back.
        is_gpu: make the versions for a GPU.
        scheduler: "torch" or "cuda", as in `EngineConfig`.
    """

    def __init__(
        self,
        model: CausalLM,
        shape: SchedulerShape,
        vocab_size: int,
        driver: CompileDriver,
        *,
        is_gpu: bool,
        scheduler: SchedulerKernels,
    ) -> None:
        self.shape = shape
        self.vocab_size = vocab_size
        self.scheduler = scheduler
        self.max_few = few_limit(driver.registry)
        # On a CPU the compile of one more version costs a start more than it spares a prompt.
        self.versions = layer_versions(
            shape.max_tokens,
            shape.max_rows,
            is_gpu=is_gpu,
            has_last=model.has_short_last_layer and (is_gpu or driver.is_eager),
            max_few=self.max_few,
        )
        self._driver = driver
        self._model = model
        self._is_gpu = is_gpu
        self._layers: dict[tuple[LayerVersion, int], Any] = {}
        # Parameters of submitted rows are written by `begin`, unless this writes them before it.
        self.apply_params: Callable[[RowParams, ParamInbox], None] | None = None
        if scheduler == "cuda":
            self._use_cuda_scheduler(model)
        else:
            self._compile_torch_scheduler(model)

        def head(model: CausalLM, residual: Tensor) -> Tensor:
            return model.head(residual)

        traits = PieceTraits(is_foreign=model.is_foreign)
        few = replace(traits, is_few=True)
        self._head_few = driver.compile(head, "head_few", few) if is_gpu else None
        self._head = driver.compile(head, "head", traits)
        make = self._gpu_sampler if is_gpu else self._cpu_sampler
        self.sample: dict[Variant, Sampler] = {variant: make(variant) for variant in Variant}

    def _compile_torch_scheduler(self, model: CausalLM) -> None:
        shape = self.shape

        def begin(
            state: SchedulerState,
            params: RowParams,
            inbox: Inbox,
            param_inbox: ParamInbox,
            budget: Tensor,
        ) -> Plan:
            apply_params(params, param_inbox)
            return plan(shape, state, inbox, budget)

        def embed_places(
            model: CausalLM, state: SchedulerState, step_plan: Plan, token: Tensor
        ) -> tuple[StepInputs, Tensor, Rotary]:
            inputs = layout_places(shape, state, step_plan, token)
            return inputs, *model.embed(inputs.token_ids, inputs.positions)

        compiled_embed = self._driver.compile(embed_places, "embed")

        def embed(
            state: SchedulerState, step_plan: Plan, token: Tensor
        ) -> tuple[StepInputs, Tensor, Rotary]:
            inputs, residual, rotary = compiled_embed(model, state, step_plan, token)
            return inputs, residual, rotary

        def packed(state: SchedulerState, step_plan: Plan, sampled: Sampled) -> Any:
            count = step_plan.emit.int()
            record = advance(shape, state, step_plan, sampled.tokens, count, sampled.is_stop)
            return pack(record)

        compiled = self._driver.compile(packed, "end")

        def end(
            state: SchedulerState, step_plan: Plan, sampled: Sampled, outbox: RecordQueue
        ) -> None:
            assert isinstance(outbox, Outbox)
            outbox.stage(*compiled(state, step_plan, sampled))

        self.begin = self._driver.compile(begin, "begin")
        self.embed = embed
        self.end = end

    def _use_cuda_scheduler(self, model: CausalLM) -> None:
        shape = self.shape

        def embed_tokens(
            model: CausalLM, token_ids: Tensor, positions: Tensor
        ) -> tuple[Tensor, Rotary]:
            expect_equal(token_ids.shape[0], positions.shape[0])
            return model.embed(token_ids, positions)

        compiled = self._driver.compile(embed_tokens, "embed")

        def begin(
            state: SchedulerState,
            params: RowParams,
            inbox: Inbox,
            param_inbox: ParamInbox,
            budget: Tensor,
        ) -> Plan:
            return schedule_plan(shape, state, inbox, budget)

        def embed(
            state: SchedulerState, step_plan: Plan, token: Tensor
        ) -> tuple[StepInputs, Tensor, Rotary]:
            inputs = schedule_layout(shape, state, step_plan, token.shape[0])
            if has_any_size(token, 0):
                mark_any_size(inputs.token_ids, 0)
                mark_any_size(inputs.positions, 0)
            return inputs, *compiled(model, inputs.token_ids, inputs.positions)

        def end(
            state: SchedulerState, step_plan: Plan, sampled: Sampled, outbox: RecordQueue
        ) -> None:
            assert isinstance(outbox, RingOutbox)
            ring = outbox.ring
            schedule_advance(shape, state, step_plan, sampled.tokens, sampled.is_stop, ring)

        self.begin = begin
        self.embed = embed
        self.end = end
        self.apply_params = self._driver.compile(apply_params, "apply_params")

    def _compile_layer(self, version: LayerVersion, kind: int) -> Any:
        function, num_shared = layer_function(version)
        traits = layer_traits(
            version,
            is_gpu=self._is_gpu,
            max_few=self.max_few,
            is_foreign=self._model.is_foreign,
        )
        name = f"{version.name}_kind_{kind}" if kind else version.name
        return self._driver.compile_direct(
            function, name, num_static=2, num_shared=num_shared, traits=traits
        )

    def _cpu_sampler(self, variant: Variant) -> Sampler:
        """Compiled whole, for logits whose masks are applied already.

        A version that applies them would be one more compile a variant, for a start that may never
        see a grammar.
        """
        shape, vocab_size = self.shape, self.vocab_size

        def sample_rows(
            state: SchedulerState, params: RowParams, logits: Tensor, seq_rows: Tensor
        ) -> Sampled:
            # One version serves any number of rows: the compiler must know the two sizes are one.
            expect_equal(logits.shape[0], seq_rows.shape[0])
            return sample(shape, state, params, logits, seq_rows, vocab_size, variant)

        compiled = self._driver.compile(sample_rows, f"sample_{variant.name}")

        def masked(
            state: SchedulerState,
            params: RowParams,
            logits: Tensor,
            seq_rows: Tensor,
            masks: Masks | None = None,
        ) -> Sampled:
            if masks is not None:
                logits = mask_logits(logits, masks, seq_rows)
            sampled: Sampled = compiled(state, params, logits, seq_rows)
            return sampled

        return masked

    def _gpu_sampler(self, variant: Variant) -> Sampler:
        """The op, called as it is: it is kernels of its own. Penalties before it are compiled."""
        shape, vocab_size = self.shape, self.vocab_size

        def penalise(
            state: SchedulerState, params: RowParams, logits: Tensor, seq_rows: Tensor
        ) -> Tensor:
            expect_equal(logits.shape[0], seq_rows.shape[0])
            return penalised(shape, state, params, logits, seq_rows, vocab_size)

        is_full = variant == Variant.FULL
        compiled = self._driver.compile(penalise, "penalties") if is_full else None

        def sample_rows(
            state: SchedulerState,
            params: RowParams,
            logits: Tensor,
            seq_rows: Tensor,
            masks: Masks | None = None,
        ) -> Sampled:
            if compiled is not None:
                logits = compiled(state, params, logits, seq_rows)
            return draw(state, params, logits, seq_rows, vocab_size, variant, masks=masks)

        return sample_rows

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer of the model; see `layer_kinds`."""
        return layer_kinds(self._model.layers)

    @cached_property
    def sample_layers(self) -> tuple[int, ...]:
        """Layers that launch every kernel the whole model does; see `sample_of_kinds`."""
        return sample_of_kinds(self.kinds)

    def version(self, num_tokens: int, *, is_mixed: bool) -> LayerVersion:
        """The layer's version for a step of `num_tokens` tokens."""
        return version_for(self.versions, num_tokens, is_mixed=is_mixed)

    def last_version(self, version: LayerVersion, num_tokens: int) -> LayerVersion | None:
        """The version that gives only what is sampled; see `last_version_for`."""
        return last_version_for(self.versions, version, num_tokens)

    def layer(self, version: LayerVersion, index: int) -> Any:
        """The compiled layer; called as `DirectPiece`, an `is_last` one with `keep` behind ctx.

        `index` is the layer's in the model.
        """
        key = (version, self.kinds[index])
        if key not in self._layers:
            self._layers[key] = self._compile_layer(*key)
        return self._layers[key]

    def preload(self) -> list[str]:
        """Takes every piece from the store without calling it; names those that are not there."""
        last = len(self.kinds) - 1
        first = {kind: index for index, kind in reversed(list(enumerate(self.kinds)))}
        for version in self.versions:
            for index in [last] if version.is_last else first.values():
                self.layer(version, index)
        # On a GPU few rows take another version of the head, and prompts alone take this one.
        is_rare = self._is_gpu and self.shape.max_rows <= self.max_few
        pieces = [p for p in self._driver.pieces if not (is_rare and p.name == "head")]
        return [piece.name for piece in pieces if not piece.preload()]

    def leave_plain(self, names: Collection[str]) -> None:
        """The pieces of these names are not compiled: the functions themselves are called."""
        for piece in self._driver.pieces:
            if piece.name in names:
                piece.stay_plain()

    def mark_sizes(
        self,
        version: LayerVersion,
        tensors: tuple[Tensor, ...],
        work: Tensor,
        caches: tuple[LayerCache, ...],
    ) -> None:
        """Tells the next compile of the version which first dims vary.

        Those of `tensors` vary with the token count. On a GPU a start has as many KV pages as
        there is memory, and code must serve any number of them.
        """
        if version.low < version.high:
            for tensor in tensors:
                mark_dynamic(tensor, 0, low=version.low, high=version.high)
            if work.shape[0] > 0:
                mark_dynamic(work, 0, low=2, high=2**31 - 1)
        if self._is_gpu:
            for cache in caches:
                for tensor in cache:
                    mark_dynamic(tensor, 0, low=2, high=2**31 - 1)

    def head(self, residual: Tensor) -> Tensor:
        """Logits [S, vocab] of residual [S, hidden]."""
        if self._head_few is not None and residual.shape[0] <= self.max_few:
            return self._head_few(self._model, residual)
        return self._head(self._model, residual)
