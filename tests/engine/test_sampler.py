"""The sampler: greedy, kept sets, frequencies, penalties, and rows that ignore their neighbours."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops.sampling import Masks, gumbel_noise, mask_logits
from compiled_engine.pieces import StepPieces
from compiled_engine.request import SamplingParams
from compiled_engine.sampler import (
    RowMask,
    RowParams,
    Sampled,
    Variant,
    apply_params,
    build_param_inbox,
    new_mask_bits,
    new_row_params,
    sample,
    variant_of,
)
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState, new_state
from compiled_engine.upload import MaskUpload

VOCAB, PADDED_VOCAB = 100, 112
MAX_LEN = 40


class Rows:
    """Rows with known tokens and parameters, ready to be sampled."""

    def __init__(self, num_rows: int, vocab_size: int = VOCAB, padded: int = PADDED_VOCAB) -> None:
        self.shape = SchedulerShape(
            max_rows=num_rows,
            num_pages=4,
            page_size=4,
            max_model_len=MAX_LEN,
            max_tokens=num_rows,
            token_page_size=16,
            max_submits=num_rows,
        )
        self.vocab_size, self.padded = vocab_size, padded
        self.state: SchedulerState = new_state(self.shape)
        self.params: RowParams = new_row_params(num_rows + 1, "cpu")
        width = self.shape.token_table_width
        pages = torch.arange(num_rows * width).view(num_rows, width) + 1
        self.state.token_table[:num_rows] = pages.int()

    def set(
        self,
        row: int,
        prompt: list[int],
        generated: list[int],
        *,
        stop_ids: tuple[int, ...] = (),
        **params: Any,
    ) -> None:
        tokens = prompt + generated
        flat = self.state.token_pages[self.state.token_table[row].long()].flatten()
        flat[:] = 7  # stale tokens behind the known ones
        flat[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.state.token_pages[self.state.token_table[row].long()] = flat.view(-1, 16)
        self.state.num_prompt[row], self.state.num_tokens[row] = len(prompt), len(tokens)
        checked = SamplingParams(**params)
        entry = (row, checked, checked.seed or 0, stop_ids)
        apply_params(self.params, build_param_inbox(self.shape, [entry]))

    def logits(self, seed: int = 0) -> Tensor:
        """Random logits for every row; the padding columns are the largest."""
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(self.shape.max_rows, self.padded, generator=generator) * 3
        made[:, self.vocab_size :] = 1e4
        return made

    def sample(self, logits: Tensor, variant: Variant, rows: list[int] | None = None) -> Sampled:
        places = list(range(self.shape.max_rows)) if rows is None else rows
        seq_rows = torch.tensor(places, dtype=torch.int32)
        return sample(
            self.shape, self.state, self.params, logits, seq_rows, self.vocab_size, variant
        )

    def tokens(self, logits: Tensor, variant: Variant) -> list[int]:
        found = self.sample(logits, variant)
        assert found.tokens.dtype == torch.int32
        assert found.tokens.shape == found.is_stop.shape == (self.shape.max_rows + 1, 1)
        return found.tokens[:-1, 0].tolist()


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"temperature": 2.0, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.7, "logit_bias": {3: 5.0, 9: -100.0}},
    {"temperature": 0.0, "min_tokens": 10},
]
ONLY_FULL = ("frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")


def mixed_rows(variant: Variant) -> Rows:
    """One row for each of MIXED that the variant can honour, at different lengths."""
    usable = [
        p for p in MIXED if variant == Variant.FULL or not any(name in p for name in ONLY_FULL)
    ]
    if variant == Variant.GREEDY:
        usable = [{"temperature": 0.0}] * 6
    rows = Rows(len(usable))
    for i, params in enumerate(usable):
        rows.set(i, [i, i + 1, 50], list(range(10, 10 + i)), stop_ids=(2, 60 + i), **params)
    return rows


# --- greedy, padding, variants ------------------------------------------------------------------


@pytest.mark.parametrize("variant", list(Variant))
def test_greedy_is_argmax(variant):
    rows = Rows(8)
    for i in range(8):
        rows.set(i, [1, 2], [3], temperature=0.0)
    logits = rows.logits()
    assert rows.tokens(logits, variant) == logits[:, :VOCAB].argmax(-1).tolist()


def test_greedy_tie_goes_to_the_lowest_id():
    rows = Rows(1)
    rows.set(0, [1], [], temperature=0.0)
    logits = torch.zeros(1, PADDED_VOCAB)
    assert rows.tokens(logits, Variant.GREEDY) == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_logits_are_taken_as_they_are(dtype):
    rows = mixed_rows(Variant.FULL)
    logits = rows.logits().to(dtype)
    assert rows.tokens(logits, Variant.FULL) == rows.tokens(logits.float(), Variant.FULL)


def test_padding_of_the_vocabulary_is_never_chosen():
    rows = Rows(256)
    for i in range(256):
        rows.set(i, [1], [], temperature=5.0, seed=i)
    for variant in (Variant.SAMPLED, Variant.FULL):
        assert max(rows.tokens(rows.logits(), variant)) < VOCAB


def test_variant_is_the_smallest_that_serves():
    assert variant_of(SamplingParams(temperature=0.0)) == Variant.GREEDY
    assert variant_of(SamplingParams(temperature=0.0, top_k=5)) == Variant.GREEDY
    assert variant_of(SamplingParams()) == Variant.SAMPLED
    for full in (
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
    ):
        assert variant_of(SamplingParams(temperature=0.0, **full)) == Variant.FULL  # type: ignore[arg-type]


def test_a_larger_variant_gives_the_same_tokens():
    rows = mixed_rows(Variant.SAMPLED)
    logits = rows.logits()
    assert rows.tokens(logits, Variant.SAMPLED) == rows.tokens(logits, Variant.FULL)
    rows = mixed_rows(Variant.GREEDY)
    assert rows.tokens(logits[:6], Variant.GREEDY) == rows.tokens(logits[:6], Variant.FULL)


# --- neighbours, determinism --------------------------------------------------------------------


@pytest.mark.parametrize("variant", list(Variant))
def test_a_row_alone_equals_the_row_in_a_full_batch(variant):
    for seed in range(20):
        rows = mixed_rows(variant)
        logits = rows.logits(seed)
        together = rows.sample(logits, variant)
        for i in range(rows.shape.max_rows):
            alone = rows.sample(logits[i : i + 1], variant, [i])
            assert alone.tokens[i] == together.tokens[i]
            assert alone.is_stop[i] == together.is_stop[i]


def test_order_and_unused_places_do_not_matter():
    rows = mixed_rows(Variant.FULL)
    logits = rows.logits()
    expected = rows.sample(logits, Variant.FULL)
    order = [4, 2, 0, 8, 7]
    dump = rows.shape.max_rows
    shuffled = torch.cat((logits[order], torch.full((2, PADDED_VOCAB), float("nan"))))
    found = rows.sample(shuffled, Variant.FULL, [*order, dump, dump])
    assert torch.equal(found.tokens[order], expected.tokens[order])
    assert torch.equal(found.is_stop[order], expected.is_stop[order])


def test_draw_is_a_function_of_seed_and_position():
    rows = Rows(4)
    same = torch.randn(1, PADDED_VOCAB).expand(4, -1).contiguous()
    for i, (seed, generated) in enumerate([(1, 3), (1, 3), (2, 3), (1, 4)]):
        rows.set(i, [i, i], [i] * generated, temperature=3.0, seed=seed)
    noise = gumbel_noise(rows.params.seed[:4], rows.state.num_tokens[:4], VOCAB)
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[3])
    tokens = rows.tokens(same, Variant.SAMPLED)
    assert tokens[0] == tokens[1]
    assert rows.tokens(same, Variant.SAMPLED) == tokens


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_extreme_seeds(seed):
    rows = Rows(1)
    rows.set(0, [1], [], temperature=1.0, seed=seed)
    noise = gumbel_noise(rows.params.seed[:1], rows.state.num_tokens[:1], VOCAB)
    assert noise.isfinite().all()
    assert noise.unique().numel() > VOCAB // 2


def test_noise_is_finite_for_every_value_of_the_hash():
    """The largest hash must not become a uniform of exactly 1, whose noise is infinite."""
    noise = gumbel_noise(torch.arange(400), torch.zeros(400), 100_000)
    assert noise.isfinite().all()
    assert noise.max() < 20


# --- distribution ---------------------------------------------------------------------------------

# Chi-square values that 1 in a million fair samples exceeds, by degrees of freedom.
CHI_SQUARE_LIMIT = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3, 7: 40.5}


def chi_square(counts: Counter[int], probabilities: dict[int, float], total: int) -> float:
    assert set(counts) <= set(probabilities), f"tokens that were cut away: {counts}"
    return sum((counts[token] - total * p) ** 2 / (total * p) for token, p in probabilities.items())


def softmax(logits: list[float], temperature: float, kept: list[int]) -> dict[int, float]:
    weights = {i: math.exp(logits[i] / temperature) for i in kept}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


LOGITS = [2.0, 1.0, 0.0, -1.0, 1.5, 0.5]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.0, "top_k": 3}, [0, 4, 1]),
        ({"temperature": 1.0, "top_p": 0.75}, [0, 4, 1]),
        ({"temperature": 1.0, "min_p": 0.3}, [0, 4, 1]),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.6}, [0, 4]),
    ],
    ids=["plain", "cool", "top-k", "top-p", "min-p", "both"],
)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_frequencies(params, kept, varied):
    total = 4000
    rows = Rows(1, vocab_size=6, padded=8)
    rows.set(0, [1], [], **params)
    places = torch.arange(total)
    wide = RowParams(*(tensor[:1].expand(total, *tensor.shape[1:]) for tensor in rows.params))
    if varied == "seed":
        wide = wide._replace(seed=places)
    length = torch.full((total,), 9) if varied == "seed" else places
    state = rows.state._replace(num_tokens=length.int())
    shape = SchedulerShape(
        max_rows=total - 1, num_pages=4, page_size=4, max_model_len=8, max_tokens=4
    )
    logits = torch.tensor([[*LOGITS, 99.0, 99.0]]).expand(total, -1)
    found = sample(shape, state, wide, logits, places.int(), 6, Variant.SAMPLED)
    counts = Counter(found.tokens[:, 0].tolist())
    expected = softmax(LOGITS, params["temperature"], kept)
    assert chi_square(counts, expected, total) < CHI_SQUARE_LIMIT[len(kept) - 1]


def test_almost_zero_temperature_is_greedy():
    rows = Rows(3)
    logits = rows.logits() - 20
    for i, temperature in enumerate((1e-45, 1e-20, 1e-7)):
        rows.set(i, [1], [], temperature=temperature, seed=i)
    assert rows.tokens(logits, Variant.SAMPLED) == logits[:, :VOCAB].argmax(-1).tolist()


def test_very_hot_rows_stay_finite_and_spread():
    rows = Rows(64)
    for i in range(64):
        rows.set(i, [1], [], temperature=100.0, seed=i)
    assert len(set(rows.tokens(rows.logits(), Variant.SAMPLED))) > 20


# --- penalties, bias, min_tokens, stop flags -----------------------------------------------------


def penalised(
    logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams
) -> list[float]:
    """OpenAI's frequency and presence penalties, CTRL's repetition penalty, then the bias."""
    scores = list(logits)
    for token in set(prompt) | set(generated):
        value = scores[token]
        penalty = params.repetition_penalty
        scores[token] = value / penalty if value > 0 else value * penalty
    for token, count in Counter(generated).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -1.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"repetition_penalty": 0.4},
        {"logit_bias": {0: 6.0, 42: 3.0, 99: -100.0}},
        {
            "frequency_penalty": 0.7,
            "presence_penalty": -0.4,
            "repetition_penalty": 1.4,
            "logit_bias": {5: 2.5, 7: 1.0},
        },
    ],
    ids=["frequency", "negative", "presence", "repetition", "encourage", "bias", "all"],
)
def test_penalties_equal_a_plain_computation(params):
    rows = Rows(12)
    checked = SamplingParams(temperature=0.0, **params)
    generator = torch.Generator().manual_seed(5)
    logits = rows.logits()
    expected = []
    for i in range(12):
        # The best tokens of the row are among those used before, often more than once.
        best = logits[i, :VOCAB].topk(12).indices
        picks = best[torch.randint(0, 12, (20,), generator=generator)].tolist()
        prompt, generated = picks[: i + 1], picks[i + 1 :]
        rows.set(i, prompt, generated, temperature=0.0, **params)
        scores = penalised(logits[i, :VOCAB].tolist(), prompt, generated, checked)
        expected.append(max(range(VOCAB), key=lambda t: scores[t]))
    assert rows.tokens(logits, Variant.FULL) == expected


def test_bias_can_force_and_forbid():
    rows = Rows(2)
    logits = rows.logits()
    best = int(logits[1, :VOCAB].argmax())
    rows.set(0, [1], [], temperature=1.0, seed=0, logit_bias={17: 100.0})
    rows.set(1, [1], [], temperature=0.0, logit_bias={best: -100.0})
    forced, other = rows.tokens(logits, Variant.FULL)
    assert forced == 17
    assert other != best


def test_no_end_before_min_tokens():
    for generated, is_allowed in ((0, False), (2, False), (3, True), (5, True)):
        rows = Rows(2)
        logits = rows.logits()
        logits[:, 11] = 500.0
        logits[:, 12] = 400.0
        rows.set(0, [1], [4] * generated, stop_ids=(2, 11), temperature=0.0, min_tokens=3)
        rows.set(1, [1], [4] * generated, stop_ids=(2, 11), temperature=1.0, min_tokens=3)
        assert rows.tokens(logits, Variant.FULL) == ([11, 11] if is_allowed else [12, 12])


def test_min_tokens_does_not_touch_id_0_through_unused_stop_places():
    rows = Rows(1)
    logits = torch.zeros(1, PADDED_VOCAB)
    logits[0, 0] = 5.0
    rows.set(0, [1], [], stop_ids=(3,), temperature=0.0, min_tokens=3)
    assert rows.tokens(logits, Variant.FULL) == [0]


@pytest.mark.parametrize("variant", list(Variant))
def test_stop_flag_is_set_for_stop_ids_only(variant):
    rows = Rows(4)
    logits = torch.zeros(4, PADDED_VOCAB)
    for i, (token, stops) in enumerate([(5, (5,)), (5, (6,)), (0, ()), (6, (2, 6))]):
        rows.set(i, [1], [], stop_ids=stops, temperature=0.0)
        logits[i, token] = 50.0
    found = rows.sample(logits, variant)
    assert found.is_stop[:4, 0].tolist() == [True, False, False, True]


def test_parameters_of_one_row_leave_the_others():
    rows = Rows(3)
    rows.set(0, [1], [], temperature=0.5, top_k=3, seed=9, stop_ids=(1, 2), logit_bias={1: 2.0})
    before = [tensor[0].clone() for tensor in rows.params]
    rows.set(2, [1], [], temperature=1.5, top_p=0.2)
    assert all(torch.equal(a, b[0]) for a, b in zip(before, rows.params, strict=True))
    assert rows.params.stop_ids[2].max() == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_columns"), [(31, 31), (33, 40), (250, 256), (7, 96)])
def test_masks_forbid_what_a_grammar_does_not_allow(vocab_size, num_columns, dtype):
    num_rows = 6
    generator = torch.Generator().manual_seed(vocab_size)
    allowed = torch.rand(num_rows, vocab_size, generator=generator) < 0.3
    allowed[:, 3] = True
    bits = new_mask_bits(num_rows, num_columns, "cpu")
    upload = MaskUpload(bits, 8)
    for row in range(num_rows):
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        for token in allowed[row].nonzero().flatten().tolist():
            words[token // 32] |= np.uint32(1 << (token % 32))
        upload.send([RowMask(row, words.view(np.int32))])
    upload.send([])
    has_grammar = torch.tensor([True, False, True, True, False, True])
    seq_rows = torch.tensor([5, 1, 0, 4, 2], dtype=torch.int32)
    logits = torch.randn(5, num_columns, generator=generator).to(dtype)
    masked = mask_logits(logits, Masks(bits, has_grammar), seq_rows)
    assert masked.dtype == dtype
    for place, row in enumerate(seq_rows.tolist()):
        expected = logits[place].clone()
        if has_grammar[row]:
            expected[:vocab_size][~allowed[row]] = float("-inf")
        assert torch.equal(masked[place, :vocab_size], expected[:vocab_size])


@pytest.mark.parametrize("variant", list(Variant))
def test_masks_behind_penalties_equal_logits_masked_before_them(variant):
    """So do the samplers of both kinds of machine."""
    rows = mixed_rows(variant)
    num_rows = rows.shape.max_rows
    bits = new_mask_bits(num_rows + 1, PADDED_VOCAB, "cpu")
    bits.copy_(torch.randint(256, bits.shape, generator=torch.Generator().manual_seed(1)))
    bits[0] = 0
    bits[0, 4] = 1 << 3
    masks = Masks(bits, torch.arange(num_rows + 1) % 3 != 1)
    seq_rows = torch.arange(num_rows, dtype=torch.int32).flip(0)
    pieces = StepPieces.__new__(StepPieces)
    pieces.shape, pieces.vocab_size = rows.shape, VOCAB
    pieces._driver = CompileDriver(EngineConfig(model="", enforce_eager=True))
    samplers = (pieces._gpu_sampler(variant), pieces._cpu_sampler(variant))
    shared = (rows.shape, rows.state, rows.params)
    for seed in range(4):
        logits = rows.logits(seed)
        logits[2, 7] = float("nan")
        masked = mask_logits(logits, masks, seq_rows)
        expected = sample(*shared, masked, seq_rows, VOCAB, variant)
        found = [sample(*shared, logits, seq_rows, VOCAB, variant, masks=masks)]
        found += [s(rows.state, rows.params, logits, seq_rows, masks) for s in samplers]
        for each in found:
            assert torch.equal(each.tokens, expected.tokens)
            assert torch.equal(each.is_stop, expected.is_stop)
        assert int(expected.tokens[0]) == 35, "the only token that its grammar allows"
        unmasked = sample(*shared, logits, seq_rows, VOCAB, variant)
        assert not torch.equal(unmasked.tokens, expected.tokens)
        for each in samplers:
            assert torch.equal(
                each(rows.state, rows.params, logits, seq_rows).tokens, unmasked.tokens
            )
