"""Contracts of the sampling family: the cut-off of top-k, top-p and min-p, tokens, logprobs.

The references are here too, as they call one another. Sampling adds Gumbel noise to the kept logits
and takes the maximum; the noise of a token is a hash of (seed, position, token id), so a row's
result never depends on its neighbours, on the batch or on a generator's state.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.hashing import mix
from compiled_engine.custom_ops.library import LIBRARY, define_op

# The token of a row whose logits hold a NaN: none of its ids is right.
NO_TOKEN = -1


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for rows, vocab in ((1, 50), (6, 1003), (0, 8)):
        logits = torch.randn(rows, vocab, generator=generator, device=device) * 4
        top_k = torch.randint(0, vocab + 2, (rows,), generator=generator, device=device).int()
        top_p = 1 - 0.9 * torch.rand(rows, generator=generator, device=device)
        min_p = torch.rand(rows, generator=generator, device=device).square() * 0.3
        if rows > 1:
            top_p[0], min_p[1], top_k[2] = 1.0, 0.0, 1
        made.append((logits, top_k, top_p, min_p))
    return made


SAMPLING_THRESHOLD = define_op(
    "sampling_threshold(Tensor logits, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    reference=reference.sampling_threshold,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0]),
    example_inputs=_examples,
    is_expandable=False,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("sampling_cpu.cpp").ce_sampling_threshold
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2
    return function


def sampling_threshold_cpu(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The C++ kernel; arguments and result as `reference.sampling_threshold`."""
    for tensor in (logits, top_p, min_p):
        assert tensor.dtype == torch.float32, f"{tensor.dtype} where fp32 is meant"
    assert top_k.dtype == torch.int32, f"top_k is {top_k.dtype}, not int32"
    logits, top_k = logits.contiguous(), top_k.contiguous()
    top_p, min_p = top_p.contiguous(), min_p.contiguous()
    out = logits.new_empty(logits.shape[0])
    _cpu_kernel()(
        logits.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        out.data_ptr(),
        logits.shape[0],
        logits.shape[1],
    )
    return out


LIBRARY.impl("sampling_threshold", sampling_threshold_cpu, "CPU")


def sampling_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Smallest logit each row keeps; see `reference.sampling_threshold`."""
    return torch.ops.ce.sampling_threshold.default(logits, top_k, top_p, min_p)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [S, vocab] fp32, a function of (seed, position, token id) only."""
    row_key = mix(mix(seed) + position.long())
    token = torch.arange(vocab_size, dtype=torch.int64, device=seed.device)
    # 23 random bits: with half added they are exact in fp32, so 0 < uniform < 1.
    bits = mix(row_key[:, None] + token) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * (1.0 / (1 << 23))
    return -torch.log(-torch.log(uniform))


class RowSettings(NamedTuple):
    """What decides a draw, each a tensor [S]."""

    temperature: Tensor  # fp32, 0 = greedy
    top_k: Tensor  # i32, 0 or less keeps all
    top_p: Tensor  # fp32 in (0, 1]
    min_p: Tensor  # fp32 in [0, 1]
    seed: Tensor  # i64
    position: Tensor  # i32 or i64, tokens before the drawn one


class Places(NamedTuple):
    """Where settings are read and results written: row of each place [S], stop ids [R, n]."""

    rows: Tensor
    stop_ids: Tensor


class Masks(NamedTuple):
    """Which tokens the rows' grammars allow."""

    bits: Tensor  # [R, bytes] u8, bit i % 8 of byte i // 8 is token i; a bit a real token at least
    has_grammar: Tensor  # [R] bool; the others may take any token


def masks_of(mask_bits: Tensor | None, has_grammar: Tensor | None) -> Masks | None:
    """The two arguments of an op as one; None without."""
    if mask_bits is None and has_grammar is None:
        return None
    assert mask_bits is not None, "has_grammar without mask_bits"
    assert has_grammar is not None, "mask_bits without has_grammar"
    return Masks(mask_bits, has_grammar)


def mask_logits(logits: Tensor, masks: Masks, rows: Tensor) -> Tensor:
    """Minus infinity for tokens that the row's grammar forbids: [S, columns], as the logits.

    NaN stays, whatever the mask says, so that the row has no token.

    Args:
        logits: [S, columns], of which the masks know each.
        masks: by row.
        rows: [S] i32, row of each place.
    """
    rows = rows.long()
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (masks.bits[rows].unsqueeze(-1) >> places) & 1
    is_forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    is_forbidden = is_forbidden & masks.has_grammar[rows][:, None] & ~logits.isnan()
    return logits.masked_fill(is_forbidden, float("-inf"))


def choose(scores: Tensor, settings: RowSettings, is_greedy: bool) -> Tensor:
    """Reference of the choice: scores [S, vocab] fp32 to token ids [S] i64, or `NO_TOKEN`."""
    best = scores.argmax(-1)
    # A NaN counts as a maximum.
    is_nan = scores.gather(1, best[:, None]).squeeze(1).isnan()
    chosen = best
    if not is_greedy:
        chosen = torch.where(settings.temperature == 0.0, best, _draw(scores, settings))
    return torch.where(is_nan, NO_TOKEN, chosen)


def _draw(scores: Tensor, settings: RowSettings) -> Tensor:
    """Gumbel maximum over the logits that top-k, top-p and min-p keep: [S] i64."""
    # Below a millionth the division could overflow; the best token has won long before.
    temperature = settings.temperature
    temperature = torch.where(temperature == 0.0, 1.0, temperature.clamp_min(1e-6))
    scaled = scores / temperature[:, None]
    # Lowest to highest finite: a bias of minus infinity must not become a NaN in exp.
    scaled = scaled.clamp_min(-1e30)
    cut = sampling_threshold(scaled, settings.top_k, settings.top_p, settings.min_p)
    noise = gumbel_noise(settings.seed, settings.position, scores.shape[1])
    kept = torch.where(scaled >= cut[:, None], scaled + noise, float("-inf"))
    return kept.argmax(-1)


def sample_tokens_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    is_greedy: bool,
) -> Tensor:
    """Chooses a token for each row.

    Args:
        logits: [S, padded vocab]; columns from `vocab_size` on are padding and never chosen.
        temperature: see `RowSettings` for this and the next five.
        top_k: see there.
        top_p: see there.
        min_p: see there.
        seed: see there.
        position: see there.
        vocab_size: real token ids.
        is_greedy: every temperature is 0; the other settings are not read.

    Returns:
        [S] i32. Equal maxima: the lowest id. `NO_TOKEN` where a logit below `vocab_size` is NaN.
    """
    scores = logits[:, :vocab_size].float()
    settings = RowSettings(temperature, top_k, top_p, min_p, seed, position)
    return choose(scores, settings, is_greedy).int()


def sample_rows_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    rows: Tensor,
    stop_ids: Tensor,
    vocab_size: int,
    is_greedy: bool,
    mask_bits: Tensor | None = None,
    has_grammar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` for places of a step, with settings and results by row.

    Args:
        logits: [S, padded vocab].
        temperature: [R], as every setting; see `RowSettings`.
        top_k: see there.
        top_p: see there.
        min_p: see there.
        seed: see there.
        position: see there.
        rows: [S] i32, row of each place; several places may name one row that nobody reads.
        stop_ids: [R, n] i32, ids that stop the row, -1 = unused.
        vocab_size: real token ids.
        is_greedy: every temperature is 0.
        mask_bits: see `Masks`; None if no row has a grammar.
        has_grammar: see there; given with `mask_bits`.

    Returns:
        Tokens [R, 1] i32, as `sample_tokens`, and whether they stop their row [R, 1] bool; 0 and
        False in rows that no place names. `NO_TOKEN` stops nothing.
    """
    scores = logits[:, :vocab_size].float()
    masks = masks_of(mask_bits, has_grammar)
    if masks is not None:
        scores = mask_logits(scores, masks, rows)
    rows = rows.long()
    by_row = RowSettings(temperature, top_k, top_p, min_p, seed, position)
    settings = by_row if is_greedy else RowSettings(*(setting[rows] for setting in by_row))
    chosen = choose(scores, settings, is_greedy)
    is_stop = (stop_ids[rows] == chosen[:, None]).any(1) & (chosen >= 0)
    num_rows = stop_ids.shape[0]
    tokens = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    stops = torch.zeros(num_rows, dtype=torch.bool, device=logits.device)
    tokens = tokens.index_put((rows,), chosen.int())
    stops = stops.index_put((rows,), is_stop)
    return tokens[:, None], stops[:, None]


def top_logprobs_reference(
    logits: Tensor, chosen: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of the `k` likeliest tokens, and of the chosen ones.

    Args:
        logits: [S, vocab], real columns only; any row stride.
        chosen: [S] integer token ids.
        k: 0 to 20, and at most vocab.

    Returns:
        Ids [S, k] i32 from the likeliest on, equal ones by id; their log probabilities [S, k] fp32;
        the log probability of `chosen` [S] fp32; its rank [S] i32, 1 + the number of tokens that
        are likelier.
    """
    scores = logits.float()
    vocab_size = scores.shape[1]
    top = scores.amax(-1, keepdim=True)
    normalizer = (scores - top).exp().sum(-1, keepdim=True).log()
    # Of the logits: rounding can make equal log probabilities of different ones. The lowest id wins
    # among equals, so it is part of what is compared; adding 0 makes one zero of two.
    bits = (scores + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    column = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    ids = vocab_size - 1 - ((order | column).topk(k).values & 0xFFFFFFFF)
    picked = scores.gather(1, chosen.long()[:, None])
    rank = (scores > picked).sum(1, dtype=torch.int32) + 1
    best = scores.gather(1, ids) - top - normalizer
    return ids.int(), best, (picked - top - normalizer).squeeze(1), rank


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of the likeliest and of the chosen tokens; see the reference."""
    return torch.ops.ce.top_logprobs.default(logits, chosen, k)


def _settings_examples(
    dtype: torch.dtype, device: torch.device, seed: int
) -> list[tuple[Tensor, RowSettings]]:
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for logits, top_k, top_p, min_p in _examples(dtype, device, seed):
        rows = logits.shape[0]
        temperature = torch.rand(rows, generator=generator, device=device) + 0.3
        temperature[::4] = 0.0
        seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator, device=device)
        position = torch.arange(rows, device=device, dtype=torch.int32) * 7
        settings = RowSettings(temperature, top_k, top_p, min_p, seeds, position)
        made.append((logits.to(dtype), settings))
    return made


def _token_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    return [
        (logits, *settings, logits.shape[1] - 3, is_greedy)
        for logits, settings in _settings_examples(dtype, device, seed)
        for is_greedy in (False, True)
    ]


def _row_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    made = []
    for logits, settings in _settings_examples(dtype, device, seed):
        num_places, num_rows = logits.shape[0], logits.shape[0] + 2
        by_row = [torch.cat((t[:1], t, t[:1])) if num_places else t.new_ones(2) for t in settings]
        rows = torch.arange(num_places, device=device).flip(0).int() + 1
        stop_ids = torch.arange(num_rows * 5, device=device).view(num_rows, 5).int() - 1
        call = (logits, *by_row, rows, stop_ids, logits.shape[1] - 3)
        made.append((*call, False, None, None))
        # Of some tokens, of one, of rows without a grammar; with bytes that no token has.
        num_bytes = -(-logits.shape[1] // 32) * 4
        bits = torch.arange(num_rows * num_bytes, device=device).view(num_rows, -1) * 73 % 251
        bits[1:2] = 0
        bits[1:2, 2:3] = 8
        has_grammar = torch.arange(num_rows, device=device) % 4 != 2
        made += [
            (*call, is_greedy, bits.to(torch.uint8), has_grammar) for is_greedy in (False, True)
        ]
    return made


def _logprob_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    made = []
    for logits, _ in _settings_examples(dtype, device, seed):
        chosen = torch.arange(logits.shape[0], device=device).int()
        made += [(logits, chosen, k) for k in (0, 5)]
    return made


def _fake_rows(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num_rows = rest[7].shape[0]
    tokens = logits.new_empty((num_rows, 1), dtype=torch.int32)
    return tokens, logits.new_empty((num_rows, 1), dtype=torch.bool)


def _fake_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, ...]:
    places = logits.shape[0]
    return (
        logits.new_empty((places, k), dtype=torch.int32),
        logits.new_empty((places, k), dtype=torch.float32),
        logits.new_empty(places, dtype=torch.float32),
        logits.new_empty(places, dtype=torch.int32),
    )


_SETTINGS = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position"
)
SAMPLE_TOKENS = define_op(
    f"sample_tokens(Tensor logits, {_SETTINGS}, int vocab_size, bool is_greedy) -> Tensor",
    reference=sample_tokens_reference,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int32),
    example_inputs=_token_examples,
    is_expandable=False,
)
SAMPLE_ROWS = define_op(
    f"sample_rows(Tensor logits, {_SETTINGS}, Tensor rows, Tensor stop_ids, int vocab_size, "
    "bool is_greedy, Tensor? mask_bits=None, Tensor? has_grammar=None) -> (Tensor, Tensor)",
    reference=sample_rows_reference,
    fake=_fake_rows,
    example_inputs=_row_examples,
    is_expandable=False,
)
TOP_LOGPROBS = define_op(
    "top_logprobs(Tensor logits, Tensor chosen, int k) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=top_logprobs_reference,
    fake=_fake_logprobs,
    example_inputs=_logprob_examples,
    is_expandable=False,
)


def _sample_tokens_cuda(*args: Any) -> Tensor:
    from compiled_engine.custom_ops.sampling_triton import sample_tokens

    return sample_tokens(*args)


def _sample_rows_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from compiled_engine.custom_ops.sampling_triton import sample_rows

    return sample_rows(*args)


def _top_logprobs_cuda(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, ...]:
    from compiled_engine.custom_ops.logprobs_triton import top_logprobs

    return top_logprobs(logits, chosen, k)


LIBRARY.impl("sample_tokens", _sample_tokens_cuda, "CUDA")
LIBRARY.impl("sample_rows", _sample_rows_cuda, "CUDA")
LIBRARY.impl("top_logprobs", _top_logprobs_cuda, "CUDA")
