"""One step on the device: plan, model, sample, advance, outbox record.

Owns the state and the caches, and knows nothing of requests. On a GPU a step is one CUDA graph of
its size; `--cudagraph-mode none` launches the same functions one by one, which is the plain twin.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_engine.compile.device_loop import DeviceLoop, LoopControl
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.graphs import StepGraphs
from compiled_engine.compile.torch_compat import mark_any_size
from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.custom_ops.sampling import Masks
from compiled_engine.layer_kinds import Layers
from compiled_engine.layout import StepInputs
from compiled_engine.logprobs import (
    MIN_CHUNK,
    LogprobOutbox,
    prompt_records,
    row_records,
    scored_places,
)
from compiled_engine.models import CausalLM
from compiled_engine.outbox import (
    MIN_FREE_RECORDS,
    RING_RECORDS,
    Outbox,
    RecordQueue,
    RingOutbox,
)
from compiled_engine.passes.names import DECODE_ATTENTION
from compiled_engine.pieces import LayerVersion, StepPieces
from compiled_engine.sampler import (
    ParamInbox,
    RowMask,
    Sampled,
    Variant,
    new_mask_bits,
    new_row_params,
)
from compiled_engine.scheduler.inbox import Inbox
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import new_state
from compiled_engine.step_key import StepKey, masked_keys
from compiled_engine.step_times import shortest_times
from compiled_engine.upload import DeviceInbox, MaskUpload

logger = logging.getLogger(__name__)


class StepExecutor:
    """Launches steps.

    Args:
        model: weights in place.
        caches: KV pages by layer.
        pieces: the functions of a step, made for `pieces.shape`.
        buckets: token counts a step may have, ascending; the last is `shape.max_tokens`.
        driver: has compiled the pieces.

    Attributes:
        survives_out_of_memory: a step that runs out of memory computes nothing instead of raising;
            set by whoever asks `take_out_of_memory` after each step. A replayed step needs no
            memory that it does not have; one that cannot be captured stays uncaptured.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: tuple[LayerCache, ...],
        pieces: StepPieces,
        buckets: tuple[int, ...],
        driver: CompileDriver,
    ) -> None:
        self.model = model
        self.caches = caches
        self.pieces = pieces
        self.shape = shape = pieces.shape
        self.buckets = buckets
        self.driver = driver
        self.device = caches[0].k_cache.device
        self.state = new_state(shape, self.device)
        self.params = new_row_params(shape.max_rows + 1, self.device)
        num_columns = model.config.vocab_size
        bits = new_mask_bits(shape.max_rows + 1, num_columns, self.device)
        self.masks = Masks(bits, self.state.grammar)
        self._mask_upload = MaskUpload(bits, shape.max_masks)
        queue = RingOutbox if pieces.scheduler == "cuda" else Outbox
        self.outbox: RecordQueue = queue(shape.max_rows + 1, self.device)
        self.logprobs = LogprobOutbox(shape.max_rows + 1, self.device)
        self._layers = list(zip(model.layers, caches, strict=True))
        self._places = torch.arange(shape.max_tokens, device=self.device)
        self._budgets: dict[int, Tensor] = {}
        self._keys: dict[tuple[int, Variant, bool], StepKey] = {}
        rows = shape.max_rows + 1
        self._nothing_sampled = Sampled(
            torch.zeros(rows, 1, dtype=torch.int32, device=self.device),
            torch.zeros(rows, 1, dtype=torch.bool, device=self.device),
        )
        self._no_work = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._graphs: StepGraphs | None = None
        self._uncaptured: set[StepKey] = set()  # memory did not suffice
        self.loop_control: LoopControl | None = None
        self._loops: dict[StepKey, DeviceLoop] = {}
        self._upload: DeviceInbox | None = None
        self.survives_out_of_memory = False
        self.before_launch: Callable[[], None] = lambda: None
        self._out_of_memory: list[int] | None = None

    @cached_property
    def reads_plans(self) -> bool:
        """On a CPU the plan is there once `begin` returns: reading it costs nothing."""
        return self.device.type == "cpu"

    def launch(
        self,
        inbox: Inbox,
        param_inbox: ParamInbox,
        key: StepKey,
        *,
        has_entries: bool,
        masks: Sequence[RowMask] = (),
    ) -> None:
        """Runs one step of at most `key.num_tokens` tokens and writes its record.

        On a GPU it waits for nothing and has that many places; on a CPU it has as many as the plan
        needs, and a step without tokens does not run the model. Without entries in the inbox
        nothing is copied. `masks` are those whose arrival the inbox announces.
        """
        self.before_launch()
        if masks:
            self._mask_upload.send(masks)
        if self.reads_plans:
            with torch.no_grad():
                self._run_here(inbox, param_inbox, key)
            self._note_launch(key)
            return
        assert self._upload is not None, "launched before warm_up"
        is_sent = self._upload.send(inbox, param_inbox, has_entries=has_entries)
        if is_sent and self.pieces.apply_params is not None:
            with torch.no_grad():
                self.pieces.apply_params(self.params, self._upload.param_inbox)
        self._run(key)
        self._note_launch(key)

    def _note_launch(self, key: StepKey) -> None:
        self.outbox.note_launch()
        if key.has_logprobs:
            self.logprobs.note_launch(key.num_top, key.num_score_top)

    def _run(self, key: StepKey) -> None:
        graphs = None if key.num_scored else self._graphs
        if graphs is not None and key in graphs:
            graphs.replay(key)
            return
        with torch.no_grad():
            self._enqueue(key, survives=self.survives_out_of_memory)
            is_whole = self._out_of_memory is None and key not in self._uncaptured
            if graphs is not None and is_whole:
                self._capture_late(key, graphs)

    def _capture_late(self, key: StepKey, graphs: StepGraphs) -> None:
        """Captures a step that nobody asked for before; its kernels have just run."""
        for _ in range(2):
            try:
                return graphs.capture(key, lambda: self._enqueue(key))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # which a capture cannot do
        self._uncaptured.add(key)
        logger.warning("no memory for the CUDA graph of %s: it is launched without one", key)

    def key_of(self, num_tokens: int, variant: Variant, *, is_mixed: bool) -> StepKey:
        """The key of the smallest step that has `num_tokens` places."""
        wanted = (num_tokens, variant, is_mixed)
        key = self._keys.get(wanted)
        if key is None:
            size = self.bucket_of(max(1, num_tokens))
            version = self.pieces.version(size, is_mixed=is_mixed)
            key = self._keys[wanted] = StepKey(size, not version.is_decode, variant)
        return key

    def _run_here(self, inbox: Inbox, param_inbox: ParamInbox, key: StepKey) -> None:
        budget = self._budget(key.num_tokens)
        step_plan = self.pieces.begin(self.state, self.params, inbox, param_inbox, budget)
        num_tokens = self.bucket_of(int(step_plan.num_tokens))
        sampled = self._nothing_sampled
        if num_tokens:
            sampled = self._compute(
                step_plan,
                key._replace(num_tokens=num_tokens),
                survives=self.survives_out_of_memory,
            )
        self.pieces.end(self.state, step_plan, sampled, self.outbox)

    def _compute(
        self, step_plan: Plan, key: StepKey, *, survives: bool, layers: Layers = None
    ) -> Sampled:
        """Model and sampler. Where memory runs out and it `survives`, rows stay where they are."""
        try:
            version = self.pieces.version(key.num_tokens, is_mixed=key.is_mixed)
            # Every token of a prompt whose tokens are scored needs its logits.
            last = None if key.num_scored else self.pieces.last_version(version, key.num_tokens)
            sizes = (key.num_tokens, version, last)
            residual, inputs = self._run_layers(step_plan, *sizes, layers=layers)
            if key.num_scored:
                self._score_prompts(key, residual, inputs)
            return self._sample(key, *self._logits(residual, inputs, is_kept=last is not None))
        except torch.OutOfMemoryError:
            if not survives:
                raise
        self._out_of_memory = step_plan.give[:-1].tolist()
        for part in (step_plan.give, step_plan.emit, step_plan.num_tokens):
            part.zero_()
        return self._nothing_sampled

    def take_out_of_memory(self) -> list[int] | None:
        """Tokens by row of a step that ran out of memory since the last call; None if none did."""
        taken, self._out_of_memory = self._out_of_memory, None
        return taken

    def bucket_of(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`, the largest if none does; 0 for none."""
        if num_tokens == 0:
            return 0
        return self.buckets[min(bisect_left(self.buckets, num_tokens), len(self.buckets) - 1)]

    # --- loops on the device --------------------------------------------------------------

    def launch_loop(self, key: StepKey, *, max_steps: int, has_waiting: bool) -> bool:
        """Repeats the step of `key` on the device; see `compile.device_loop`.

        Everything launched before has been read; the inbox is empty. False: there is no memory for
        such a loop, and nothing was launched.
        """
        assert self._graphs is not None
        assert isinstance(self.outbox, RingOutbox)
        assert self._upload is not None
        if self.loop_control is None:
            self.loop_control = LoopControl()
        if key not in self._loops:
            try:
                self._loops[key] = DeviceLoop(
                    self._graphs.whole_graph(key),
                    self.loop_control,
                    self.state.state,
                    self.outbox.ring.step_counter,
                    RING_RECORDS - MIN_FREE_RECORDS,
                )
            except torch.OutOfMemoryError:
                logger.warning("no memory for a loop on the device: the host launches every step")
                return False
        self._upload.clear()
        self.outbox.note_loop(self.loop_control)
        self._loops[key].launch(max_steps=max_steps, has_waiting=has_waiting)
        return True

    # --- the model ------------------------------------------------------------------------

    def _enqueue(self, key: StepKey, *, survives: bool = False, layers: Layers = None) -> None:
        """Launches the kernels of a step; what is captured."""
        assert self._upload is not None
        budget = self._budget(key.num_tokens)
        inbox, param_inbox = self._upload.inbox, self._upload.param_inbox
        step_plan = self.pieces.begin(self.state, self.params, inbox, param_inbox, budget)
        sampled = self._compute(step_plan, key, survives=survives, layers=layers)
        self.pieces.end(self.state, step_plan, sampled, self.outbox)

    def _sample(self, key: StepKey, logits: Tensor, seq_rows: Tensor) -> Sampled:
        masks = self.masks if key.is_masked else None
        sampled = self.pieces.sample[key.variant](self.state, self.params, logits, seq_rows, masks)
        if key.num_top:
            # Of what the model gave, whatever the row's sampler made of it.
            vocab_size = self.pieces.vocab_size
            made = row_records(logits, sampled.tokens, seq_rows, vocab_size, key.num_top)
            self.logprobs.stage_rows(made)
        return sampled

    def _score_prompts(self, key: StepKey, residual: Tensor, inputs: StepInputs) -> None:
        scored = scored_places(
            self.shape, self.state, inputs.token_rows, inputs.positions, key.num_scored
        )
        if scored.places.shape[0]:
            made = prompt_records(
                scored,
                residual,
                self.pieces.head,
                self.pieces.vocab_size,
                key.num_score_top,
                max(MIN_CHUNK, self.shape.max_rows),
            )
            self.logprobs.stage_prompt(made)

    def _run_layers(
        self,
        step_plan: Plan,
        num_tokens: int,
        version: LayerVersion,
        last: LayerVersion | None,
        *,
        warmed: LayerVersion | None = None,
        layers: Layers = None,
    ) -> tuple[Tensor, StepInputs]:
        """Residual [T, hidden] behind the last layer, and where its tokens stand.

        With `last`, the version of the last layer, it has the sampled rows only: [S, hidden].
        `warmed` is the one of the two that has not been compiled yet.
        """
        places = self._places[:num_tokens]
        if warmed is not None:
            places = self._any_size(places)
        inputs, residual, rotary = self.pieces.embed(self.state, step_plan, places)
        ctx = PagedContext(
            slot_mapping=inputs.slot_mapping,
            block_table=self.state.groups[0].block_table,
            seq_rows=inputs.seq_rows,
            seq_lens=inputs.seq_lens,
            query_start_loc=inputs.query_start_loc,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            work=self._no_work,
        )
        if not self.reads_plans:
            ctx = ctx._replace(work=self._attention_work(ctx, version))
        shared: tuple[Any, ...] = (rotary, ctx)
        for key in range(len(self._layers)) if layers is None else layers:
            static = self._layers[key]
            if last is not None and key == len(self._layers) - 1:
                keep = inputs.logits_indices[: min(num_tokens, self.shape.max_rows)]
                version, shared = last, (rotary, ctx, keep)
            if version is warmed:
                varying = (residual, *rotary, ctx.slot_mapping, ctx.token_rows, ctx.positions)
                self.pieces.mark_sizes(version, varying, ctx.work, self.caches)
            layer = self.pieces.layer(version, key)
            (residual,) = layer(key, static, shared, residual)
        return residual, inputs

    def _logits(
        self, residual: Tensor, inputs: StepInputs, *, is_kept: bool, is_warm_up: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [S, vocab] and rows [S] of residual [S, hidden]; [T, hidden] if not `is_kept`."""
        num_seqs = min(residual.shape[0], self.shape.max_rows)
        residual = residual if is_kept else residual[inputs.logits_indices[:num_seqs]]
        residual = self._any_size(residual) if is_warm_up else residual
        return self.pieces.head(residual), inputs.seq_rows[:num_seqs]

    def _attention_work(self, ctx: PagedContext, version: LayerVersion) -> Tensor:
        is_decode = version.is_decode and self.driver.runs_pass(DECODE_ATTENTION)
        config, page_size = self.model.config, self.caches[0].k_cache.shape[1]
        heads = config.num_heads, config.num_kv_heads
        rows = ctx.seq_rows, ctx.seq_lens, ctx.query_start_loc
        where = ctx.block_table, ctx.token_rows, ctx.positions
        return torch.ops.ce.attention_work.default(*where, *rows, page_size, *heads, is_decode)

    def _budget(self, num_tokens: int) -> Tensor:
        if num_tokens not in self._budgets:
            budget = torch.tensor(num_tokens, dtype=torch.int32, device=self.device)
            self._budgets[num_tokens] = budget
        return self._budgets[num_tokens]

    @torch.no_grad()
    def run_empty(self, num_tokens: int, *, is_short: bool = False) -> None:
        """An empty mixed step in the variant that needs most; a short one has few layers."""
        layers = self.pieces.sample_layers if is_short else None
        self._enqueue(self.key_of(num_tokens, Variant.FULL, is_mixed=True), layers=layers)

    def mixed_seconds(self) -> dict[int, float]:
        """Seconds of a mixed step without rows by its size: what its tokens cost by themselves."""
        keys = {size: self.key_of(size, Variant.GREEDY, is_mixed=True) for size in self.buckets}
        seconds = shortest_times(keys, self._run)
        self.outbox.discard()
        return seconds

    def addresses(self) -> dict[str, int]:
        """Addresses that captured steps read and write, by name."""
        named: dict[str, Tensor] = {}
        named |= {f"weight {name}": p for name, p in self.model.named_parameters()}
        for index, cache in enumerate(self.caches):
            named[f"k_cache {index}"], named[f"v_cache {index}"] = cache
        for index, tensor in enumerate(tree_leaves((self.state, self.params))):
            named[f"state {index}"] = tensor
        assert self._upload is not None
        found = {name: tensor.data_ptr() for name, tensor in named.items()}
        found |= {"inbox": self._upload.address, "masks": self.masks.bits.data_ptr()}
        return found | {"logprobs": self.logprobs.staged.data_ptr()}

    def take_pieces(
        self, pieces: StepPieces, driver: CompileDriver, graphs: StepGraphs | None
    ) -> None:
        """Runs these from the next launch on; on a GPU nothing may be in flight."""
        self.pieces, self.driver, self._graphs = pieces, driver, graphs
        self._keys.clear()

    # --- before the first request ---------------------------------------------------------

    def prepare(self, inbox: Inbox, param_inbox: ParamInbox) -> DeviceInbox:
        """Makes room on a GPU for what the host sends, given as empty; part of `warm_up`."""
        self._upload = DeviceInbox(inbox, param_inbox, self.device)
        return self._upload

    @torch.no_grad()
    def warm_up(
        self,
        inbox: Inbox,
        param_inbox: ParamInbox,
        on_piece: Callable[[str, int, int], None],
        *,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Compiles every piece at every size it will be called with, by steps without rows.

        Args:
            inbox: an empty one.
            param_inbox: an empty one.
            on_piece: called with (label, done, total).
            graphs: captures every step that can occur; None launches kernel by kernel.
        """
        if not self.reads_plans:
            upload = self.prepare(inbox, param_inbox)
            inbox, param_inbox = upload.inbox, upload.param_inbox
        keys = self.keys() if graphs is not None else []
        total = 2 + len(self.pieces.versions) + len(Variant) + len(keys)
        on_piece("plan", 0, total)
        if self.pieces.apply_params is not None:
            self.pieces.apply_params(self.params, param_inbox)
        step_plan = self.pieces.begin(self.state, self.params, inbox, param_inbox, self._budget(1))
        for done, version in enumerate(self.pieces.versions, start=1):
            on_piece(f"model, {version.sizes}", done, total)
            size = version.example_size
            others = self.pieces.version(size, is_mixed=not version.is_decode)
            last = version if version.is_last else None
            warmed = None if self.driver.is_eager else version
            residual, inputs = self._run_layers(
                step_plan, size, others, last, warmed=warmed, layers=self.pieces.sample_layers
            )
            is_kept = last is not None
            logits, seq_rows = self._logits(residual, inputs, is_kept=is_kept, is_warm_up=True)
        done = 1 + len(self.pieces.versions)
        for variant in Variant:
            on_piece(f"sampler, {variant.name.lower()}", done + variant, total)
            sampled = self._warm_sampler(variant, logits, seq_rows)
        done += len(Variant)
        on_piece("advance", done, total)
        self.pieces.end(self.state, step_plan, sampled, self.outbox)
        self.driver.finish_warm_up()
        self._graphs = graphs
        if graphs is not None:
            with self.driver.times.measure("capture"):
                # Every kernel once without capturing: it is loaded, nothing is left to set up.
                for key in (*keys, *masked_keys(keys, self.shape.max_rows)):
                    self._enqueue(key, layers=self.pieces.sample_layers)
                torch.cuda.empty_cache()
                for count, key in enumerate(keys, start=done + 1):
                    on_piece(f"graph of {key.num_tokens} tokens", count, total)
                    graphs.capture(key, partial(self._enqueue, key))
        self.outbox.discard()
        on_piece("done", total, total)

    def keys(self) -> list[StepKey]:
        """The steps that are captured before the first request, largest first.

        Those that need penalties, a bias, masks or log probabilities are captured when a request
        first asks for them.
        """
        most_few = max((v.high for v in self.pieces.versions if v.is_decode), default=0)
        wanted = []
        for size in reversed(self.buckets):
            for is_mixed in (True, False):
                version = self.pieces.version(size, is_mixed=is_mixed)
                is_own = version.is_decode != is_mixed and (is_mixed or size <= most_few)
                if is_own:
                    wanted.append((size, is_mixed))
        return [
            StepKey(size, is_mixed, variant)
            for size, is_mixed in wanted
            for variant in (Variant.GREEDY, Variant.SAMPLED)
        ]

    def _warm_sampler(self, variant: Variant, logits: Tensor, seq_rows: Tensor) -> Sampled:
        logits, seq_rows = self._any_size(logits), self._any_size(seq_rows)
        return self.pieces.sample[variant](self.state, self.params, logits, seq_rows)

    def _any_size(self, tensor: Tensor) -> Tensor:
        """A copy whose first dim the next compile must take as any size; itself when eager."""
        if not self.driver.is_eager:
            tensor = tensor.clone()
            mark_any_size(tensor, 0)
        return tensor
