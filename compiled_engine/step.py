"""One step on the device: plan, model, sample, advance, outbox record.

Owns the state, the caches and the compiled pieces; knows nothing of requests. Every piece is a pure
function of its arguments but for the tensors it says it mutates, and every piece has its plain
twin: the same function, not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.torch_compat import mark_any_size, mark_dynamic
from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.layout import StepInputs, layout_places
from compiled_engine.models import CausalLM
from compiled_engine.models.layers import DecoderLayer, Rotary
from compiled_engine.outbox import Outbox, pack
from compiled_engine.sampler import (
    ParamInbox,
    RowParams,
    Sampled,
    Variant,
    apply_params,
    new_row_params,
    sample,
)
from compiled_engine.scheduler.advance import advance
from compiled_engine.scheduler.inbox import Inbox
from compiled_engine.scheduler.plan import Plan, plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState, new_state


class StepPieces:
    """The functions of a step, compiled or not.

    Args:
        model: on its device, evaluated only.
        shape: static sizes of the scheduler.
        vocab_size: real token ids.
        driver: compiles, or hands the functions back.
    """

    def __init__(
        self, model: CausalLM, shape: SchedulerShape, vocab_size: int, driver: CompileDriver
    ) -> None:
        self.shape = shape

        def begin(
            state: SchedulerState,
            params: RowParams,
            inbox: Inbox,
            param_inbox: ParamInbox,
            budget: Tensor,
        ) -> Plan:
            apply_params(params, param_inbox)
            return plan(shape, state, inbox, budget)

        def embed(
            state: SchedulerState, step_plan: Plan, token: Tensor
        ) -> tuple[StepInputs, Tensor, Tensor, Rotary]:
            inputs = layout_places(shape, state, step_plan, token)
            return inputs, *model.embed(inputs.token_ids, inputs.positions)

        def layer(
            module: DecoderLayer,
            cache: LayerCache,
            rotary: Rotary,
            ctx: PagedContext,
            hidden: Tensor,
            residual: Tensor,
        ) -> tuple[Tensor, Tensor]:
            return module(hidden, residual, rotary, cache, ctx)

        def head(hidden: Tensor, residual: Tensor) -> Tensor:
            torch._check(hidden.shape[0] == residual.shape[0])
            return model.head(hidden, residual)

        def end(state: SchedulerState, step_plan: Plan, sampled: Sampled) -> tuple[Tensor, Tensor]:
            count = step_plan.emit.int()
            record = advance(shape, state, step_plan, sampled.tokens, count, sampled.is_stop)
            return pack(record)

        self.begin = driver.compile(begin, "begin")
        self.embed = driver.compile(embed, "embed")
        self.head = driver.compile(head, "head")
        self.end = driver.compile(end, "end")
        self._layer_one = driver.compile_direct(layer, "layer_one", num_static=2, num_shared=2)
        self._layer_many = driver.compile_direct(layer, "layer_many", num_static=2, num_shared=2)
        self.sample = {
            variant: driver.compile(self._sampler(variant, vocab_size), f"sample_{variant.name}")
            for variant in Variant
        }

    def _sampler(self, variant: Variant, vocab_size: int) -> Callable[..., Sampled]:
        shape = self.shape

        def sample_rows(
            state: SchedulerState, params: RowParams, logits: Tensor, seq_rows: Tensor
        ) -> Sampled:
            # One version serves any number of rows: the compiler must know the two sizes are one.
            torch._check(logits.shape[0] == seq_rows.shape[0])
            return sample(shape, state, params, logits, seq_rows, vocab_size, variant)

        return sample_rows

    def layer(self, num_tokens: int) -> Callable[..., Any]:
        """The decoder layer for `num_tokens` tokens: for a single one, or the dynamic version."""
        return self._layer_one if num_tokens == 1 else self._layer_many


class StepExecutor:
    """Launches steps.

    Args:
        model: weights in place.
        caches: KV pages by layer.
        shape: static sizes of the scheduler; its `num_pages` is the caches'.
        vocab_size: real token ids.
        buckets: token counts a step may have, ascending; the last is `shape.max_tokens`.
        driver: compiles the pieces.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: tuple[LayerCache, ...],
        shape: SchedulerShape,
        vocab_size: int,
        buckets: tuple[int, ...],
        driver: CompileDriver,
    ) -> None:
        self.model = model
        self.caches = caches
        self.shape = shape
        self.buckets = buckets
        self.driver = driver
        self.device = caches[0].k_cache.device
        self.pieces = StepPieces(model, shape, vocab_size, driver)
        self.state = new_state(shape, self.device)
        self.params = new_row_params(shape.max_rows + 1, self.device)
        self.outbox = Outbox(shape.max_rows + 1, self.device)
        self._layers = list(zip(model.layers, caches, strict=True))
        self._places = torch.arange(shape.max_tokens, device=self.device)
        self._budgets: dict[int, Tensor] = {}
        rows = shape.max_rows + 1
        self._nothing_sampled = Sampled(
            torch.zeros(rows, 1, dtype=torch.int32, device=self.device),
            torch.zeros(rows, 1, dtype=torch.bool, device=self.device),
        )

    @property
    def reads_plans(self) -> bool:
        """On a CPU the plan is there once `begin` returns: reading it costs nothing."""
        return self.device.type == "cpu"

    @torch.no_grad()
    def launch(self, inbox: Inbox, param_inbox: ParamInbox, budget: int, variant: Variant) -> None:
        """Runs one step of at most `budget` tokens and writes its record.

        On a GPU it waits for nothing and has `budget` places; on a CPU it has as many as the plan
        needs, and a step without tokens does not run the model.
        """
        inbox, param_inbox = self._to_device(inbox), self._to_device(param_inbox)
        step_plan = self.pieces.begin(
            self.state, self.params, inbox, param_inbox, self._budget(budget)
        )
        num_tokens = budget
        if self.reads_plans:
            num_tokens = self.bucket_of(int(step_plan.num_tokens))
        if num_tokens:
            logits, seq_rows = self._run_model(step_plan, num_tokens, is_warm_up=False)
            sampled = self.pieces.sample[variant](self.state, self.params, logits, seq_rows)
        else:
            sampled = self._nothing_sampled
        self.outbox.write(*self.pieces.end(self.state, step_plan, sampled))

    def bucket_of(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`, the largest if none does; 0 for none."""
        if num_tokens == 0:
            return 0
        return next((b for b in self.buckets if b >= num_tokens), self.buckets[-1])

    @torch.no_grad()
    def warm_up(
        self, inbox: Inbox, param_inbox: ParamInbox, on_piece: Callable[[str, int, int], None]
    ) -> None:
        """Compiles every piece at every size it will be called with, by steps without rows.

        Args:
            inbox: an empty one.
            param_inbox: an empty one.
            on_piece: called with (label, done, total).
        """
        sizes = [1] if self.shape.max_tokens == 1 else [1, self._example_size()]
        total = 2 + 2 * len(sizes) + len(Variant)
        inbox, param_inbox = self._to_device(inbox), self._to_device(param_inbox)
        on_piece("plan", 0, total)
        step_plan = self.pieces.begin(self.state, self.params, inbox, param_inbox, self._budget(1))
        for done, size in enumerate(sizes):
            label = "model, one token" if size == 1 else "model, any number of tokens"
            on_piece(label, 1 + 2 * done, total)
            logits, seq_rows = self._run_model(step_plan, size, is_warm_up=True)
        done = 1 + 2 * len(sizes)
        for variant in Variant:
            on_piece(f"sampler, {variant.name.lower()}", done + variant, total)
            sampled = self._warm_sampler(variant, logits, seq_rows)
        on_piece("advance", total - 1, total)
        self.pieces.end(self.state, step_plan, sampled)
        self.driver.finish_warm_up()
        on_piece("done", total, total)

    def _warm_sampler(self, variant: Variant, logits: Tensor, seq_rows: Tensor) -> Sampled:
        logits, seq_rows = self._any_size(logits), self._any_size(seq_rows)
        return self.pieces.sample[variant](self.state, self.params, logits, seq_rows)

    def _any_size(self, tensor: Tensor) -> Tensor:
        """A copy whose first dim the next compile must take as any size; itself when eager."""
        if self.driver.is_eager:
            return tensor
        tensor = tensor.clone()
        mark_any_size(tensor, 0)
        return tensor

    def _example_size(self) -> int:
        """A size for the dynamic compile that equals no other size by chance."""
        return min(self.shape.max_tokens, 37)

    def _run_model(
        self, step_plan: Plan, num_tokens: int, *, is_warm_up: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits [S, vocab] and rows [S] of the S = min(T, R) sequence places."""
        is_marked = is_warm_up and not self.driver.is_eager
        places = self._places[:num_tokens]
        if is_marked:
            places = self._any_size(places)
        inputs, hidden, residual, rotary = self.pieces.embed(self.state, step_plan, places)
        ctx = PagedContext(
            inputs.slot_mapping,
            self.state.groups[0].block_table,
            inputs.seq_rows,
            inputs.seq_lens,
            inputs.query_start_loc,
        )
        layer = self.pieces.layer(num_tokens)
        shared = (rotary, ctx)
        for key, static in enumerate(self._layers):
            if is_marked and num_tokens > 1:
                for tensor in (hidden, residual, *rotary, ctx.slot_mapping):
                    mark_dynamic(tensor, 0, low=2, high=self.shape.max_tokens)
            hidden, residual = layer(key, static, shared, hidden, residual)
        num_seqs = min(num_tokens, self.shape.max_rows)
        last = inputs.logits_indices[:num_seqs]
        hidden, residual = hidden[last], residual[last]
        if is_marked:
            hidden, residual = self._any_size(hidden), self._any_size(residual)
        return self.pieces.head(hidden, residual), inputs.seq_rows[:num_seqs]

    def _budget(self, num_tokens: int) -> Tensor:
        if num_tokens not in self._budgets:
            budget = torch.tensor(num_tokens, dtype=torch.int32, device=self.device)
            self._budgets[num_tokens] = budget
        return self._budgets[num_tokens]

    def _to_device(self, entries: Any) -> Any:
        if self.device.type == "cpu":
            return entries
        if isinstance(entries, Tensor):
            return entries.pin_memory().to(self.device, non_blocking=True)
        return type(entries)(*(self._to_device(entry) for entry in entries))
