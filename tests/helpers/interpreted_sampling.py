"""The sampling kernels in Triton's CPU interpreter against their references, on tiny vocabularies.

Run as a program of its own with TRITON_INTERPRET=1, see `interpreted.py`; arguments name checks.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from compiled_engine.custom_ops import logprobs_triton, sampling_triton
from compiled_engine.custom_ops.sampling import (
    NO_TOKEN,
    Masks,
    Places,
    RowSettings,
    sample_rows_reference,
    sample_tokens_reference,
    top_logprobs_reference,
)
from compiled_engine.custom_ops.sampling_triton import Config
from tests.helpers.interpreted import readable_loop_bounds
from tests.helpers.sampling_masks import WIDTHS, check_masked, masked_case

# Small enough that a vocabulary of some hundred has many tiles, passes and full lanes.
SMALL = Config(
    tile=32, scan_warps=1, lanes=16, depth=4, limit=24, keep=8, finish_warps=1, min_tiles=2
)

# top_k, top_p, min_p
LIMITS = (
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 1.0, 0.0),
    (200, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.2),
    (0, 1.0, 1.0),
    (60, 0.8, 0.01),
    (7, 0.5, 0.0),
    (10**9, 0.3, 0.001),
)


def settings_of(limits: tuple[tuple[int, float, float], ...], *, is_hot: bool) -> RowSettings:
    """A row for each of the limits; every eighth is greedy."""
    rows = len(limits)
    top_k, top_p, min_p = zip(*limits, strict=True)
    temperature = torch.rand(rows) * (3.0 if is_hot else 0.7) + 0.2
    temperature[7::8] = 0.0
    return RowSettings(
        temperature,
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 5000, (rows,), dtype=torch.int32),
    )


def compare(logits: Tensor, settings: RowSettings, vocab_size: int, config: Config = SMALL) -> None:
    """Tokens equal the reference's."""
    got, _ = sampling_triton.launch(logits, settings, None, vocab_size, False, config=config)
    expected = sample_tokens_reference(logits, *settings, vocab_size, False)
    wrong = torch.nonzero(got != expected).flatten().tolist()
    assert not wrong, [(i, int(got[i]), int(expected[i]), [t[i] for t in settings]) for i in wrong]


def logits_of(kind: str, rows: int, width: int) -> Tensor:
    """Rows of logits that are hard in some way."""
    spread = torch.randn(rows, width) * 3
    if kind == "normal":
        return spread
    if kind == "equal":
        return torch.full((rows, width), 1.5)
    if kind == "ties":
        return spread.round()
    if kind == "masked":
        return torch.where(torch.rand(rows, width) < 0.9, float("-inf"), spread)
    if kind == "all masked but one":
        spread.fill_(float("-inf"))
        spread[:, width // 3] = -2.0
        return spread
    if kind == "clustered":
        spread[:, 32:64] += 12.0
        return spread
    if kind == "large":
        return spread * 1e4
    assert kind == "peaked", kind
    spread[:, width // 2] = 40.0
    return spread


KINDS = ("normal", "equal", "ties", "masked", "all masked but one", "clustered", "large", "peaked")


def check_kinds() -> None:
    """Every kind of row under every limit."""
    for i, kind in enumerate(KINDS):
        settings = settings_of(LIMITS, is_hot=i % 2 == 0)
        dtype = (torch.float32, torch.bfloat16)[i // 2 % 2]
        compare(logits_of(kind, len(LIMITS), 210).to(dtype), settings, 203)


def check_few() -> None:
    """A quick selection of the above."""
    compare(logits_of("normal", 3, 70), settings_of(LIMITS[4:10:2], is_hot=False), 67)
    compare(logits_of("masked", 2, 70).bfloat16(), settings_of(LIMITS[9:11], is_hot=True), 67)


def check_hot() -> None:
    """Hot rows draw often from what a limit cuts away, so tiles are drawn again."""
    settings = settings_of(((0, 0.3, 0.0), (0, 0.6, 0.0)) * 3, is_hot=True)
    compare(torch.randn(6, 128), settings._replace(temperature=torch.full((6,), 4.0)), 128)


def check_greedy() -> None:
    """Lowest id of equal maxima, -inf rows, padding, tiles of one value."""
    config = SMALL
    for width in (1, 31, 33, 97):
        logits = torch.randn(4, width + 5).round()
        logits[:, width:] = 99.0
        logits[1, :width] = float("-inf")
        settings = settings_of(((0, 1.0, 0.0),) * 4, is_hot=False)
        got, _ = sampling_triton.launch(logits, settings, None, width, True, config=config)
        assert torch.equal(got, sample_tokens_reference(logits, *settings, width, True))


def check_nan() -> None:
    """A row with a NaN anywhere has no token and stops nothing; padding may hold one."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(6, 77) * 3).to(dtype)
        logits[0, 0] = logits[2, 69] = logits[4, :70] = float("nan")
        logits[4, 33] = float("inf")
        logits[:, 70:] = float("nan")
        settings = settings_of(LIMITS[4:10], is_hot=False)
        settings.temperature[2] = 0.0
        rows = torch.arange(6, dtype=torch.int32)
        places = Places(rows, torch.full((6, 2), -1, dtype=torch.int32))
        for is_greedy in (False, True):
            got = sampling_triton.launch(logits, settings, places, 70, is_greedy, config=SMALL)
            expected = sample_rows_reference(logits, *settings, *places, 70, is_greedy)
            is_nan = torch.tensor([True, False, True, False, True, False])
            assert torch.equal(got[0] == NO_TOKEN, is_nan)
            assert torch.equal(got[0], expected[0][:, 0])
            assert not got[1].any()
            assert not expected[1].any()


def check_rows() -> None:
    """Settings and results by row; rows without a place get 0 and False."""
    by_row = settings_of(LIMITS, is_hot=False)
    num_rows = len(LIMITS)
    floats = torch.stack((by_row.temperature, by_row.top_p, by_row.min_p), 1)
    by_row = by_row._replace(temperature=floats[:, 0], top_p=floats[:, 1], min_p=floats[:, 2])
    rows = torch.tensor([3, 9, 0, 12, 12], dtype=torch.int32)
    logits = torch.randn(5, 70) * 3
    logits[4] = logits[3]
    plain = sample_rows_reference(
        logits, *by_row, rows, torch.full((num_rows, 3), -1, dtype=torch.int32), 66, False
    )[0]
    stop_ids = torch.full((num_rows, 3), -1, dtype=torch.int32)
    stop_ids[3, 2] = plain[3, 0]
    stop_ids[0, 0] = plain[0, 0] + 1
    for is_greedy in (False, True):
        places = Places(rows, stop_ids)
        got = sampling_triton.launch(logits, by_row, places, 66, is_greedy, config=SMALL)
        expected = sample_rows_reference(logits, *by_row, *places, 66, is_greedy)
        assert torch.equal(got[0], expected[0][:, 0])
        assert torch.equal(got[1], expected[1][:, 0])
        assert is_greedy or bool(got[1][3])


def check_masks() -> None:
    """Under masks tokens are those of logits that were masked before, in every variant."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for i, (vocab_size, padding) in enumerate(WIDTHS[:4]):
        by_row = settings_of(LIMITS[3:11], is_hot=i % 2 == 0)
        # The draws of all tiles, of some again, and of what a search has collected.
        by_row.temperature[0] = 4.0
        logits = (torch.randn(6, vocab_size + padding) * 3).to(dtypes[i % 3])
        case = masked_case(logits, by_row, vocab_size)
        for is_greedy in (False, True):
            shared = (case.settings, case.places, vocab_size, is_greedy)
            got = sampling_triton.launch(case.logits, *shared, masks=case.masks, config=SMALL)
            plain = sampling_triton.launch(case.masked, *shared, config=SMALL)
            check_masked(case, got, plain)
            check_masked(case, got, sample_rows_reference(*case.plain_call(is_greedy=is_greedy)))


def check_logprobs() -> None:
    """Ids, log probabilities and ties; tiles shorter than k; forbidden tokens; a strided row."""
    for width, k in ((70, 5), (33, 20), (3, 3)):
        logits = torch.randn(3, width + 2)[:, :width] * 3
        logits[1] = logits[1].round()
        logits[2, 1] = float("-inf")
        chosen = torch.randint(0, width, (3,), dtype=torch.int32)
        assert logprobs_triton.unsupported_reason(logits, chosen, k) is None
        got = logprobs_triton.launch(logits, chosen, k, tile=32)
        expected = top_logprobs_reference(logits, chosen, k)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[3], expected[3])
        for a, b in zip(got[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert logprobs_triton.unsupported_reason(logits, chosen, 0) is not None
    assert logprobs_triton.unsupported_reason(logits, chosen, 21) is not None


def check_reasons() -> None:
    """What the kernels do not take is said."""
    settings = settings_of(LIMITS, is_hot=False)
    logits = torch.zeros(len(LIMITS), 8)
    assert sampling_triton.unsupported_reason(logits, settings, None) is None
    for wrong in (logits.double(), logits.t(), logits[0]):
        assert sampling_triton.unsupported_reason(wrong, settings, None) is not None
    rows = torch.zeros(1, dtype=torch.int32)
    bits = torch.zeros(1, 2, dtype=torch.uint8)
    flags = torch.ones(1, dtype=torch.bool)
    for masks, is_taken in (
        (Masks(bits, flags), True),
        (Masks(bits.int(), flags), False),
        (Masks(bits, flags.int()), False),
        (Masks(bits[:, ::2], flags), False),
    ):
        reason = sampling_triton.unsupported_reason(
            logits, settings, Places(rows, rows[:, None]), masks
        )
        assert (reason is None) == is_taken
    wrong_settings = settings._replace(top_k=settings.top_k.long())
    assert sampling_triton.unsupported_reason(logits, wrong_settings, None) is not None


CHECKS = {
    "greedy": check_greedy,
    "nan": check_nan,
    "rows": check_rows,
    "reasons": check_reasons,
    "logprobs": check_logprobs,
    "few": check_few,
    "masks": check_masks,
    "hot": check_hot,
    "kinds": check_kinds,
}


if __name__ == "__main__":
    # Hashes wrap, and the interpreter computes with NumPy, which says so.
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.manual_seed(0)
    with readable_loop_bounds():
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name]()
