"""The Triton sampling kernels: interpreted on tiny rows, and on a GPU against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops.sampling import (
    NO_TOKEN,
    RowSettings,
    sample_tokens_reference,
    top_logprobs_reference,
)
from tests.helpers.interpreted import run_interpreted
from tests.helpers.sampling_masks import WIDTHS, check_masked, masked_case

pytest.importorskip("triton")

MODULE = "tests.helpers.interpreted_sampling"


def test_interpreted_kernels_equal_the_references():
    run_interpreted(MODULE, "greedy", "nan", "rows", "reasons", "logprobs", "few", "masks")


@pytest.mark.slow
def test_interpreted_kernels_under_every_limit_on_hard_rows():
    run_interpreted(MODULE, "kinds", "hot")


def random_settings(rows: int, device: str = "cuda") -> RowSettings:
    top_k = torch.randint(-1, 3000, (rows,), dtype=torch.int32, device=device)
    top_p = 1 - 0.9 * torch.rand(rows, device=device)
    min_p = torch.rand(rows, device=device).pow(3)
    temperature = torch.rand(rows, device=device) * 1.5
    top_k[::3], top_p[1::3], min_p[::2], temperature[::7] = 0, 1.0, 0.0, 0.0
    seed = torch.randint(-(2**62), 2**62, (rows,), device=device)
    return RowSettings(temperature, top_k, top_p, min_p, seed, torch.arange(rows, device=device))


def tokens_by_op(logits: Tensor, settings: RowSettings, vocab: int, is_greedy: bool) -> Tensor:
    return torch.ops.ce.sample_tokens.default(logits, *settings, vocab, is_greedy)


def tokens_by_triton(logits: Tensor, settings: RowSettings, vocab: int, is_greedy: bool) -> Tensor:
    from compiled_engine.custom_ops import sampling_triton

    return sampling_triton.launch(logits, settings, None, vocab, is_greedy)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_of", [tokens_by_op, tokens_by_triton])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 64, 256])
@pytest.mark.parametrize("vocab", [50, 32017, 151669])
def test_tokens_equal_the_reference(vocab, rows, dtype, tokens_of):
    logits = (torch.randn(rows, vocab + 267, device="cuda") * 3).to(dtype)
    settings = random_settings(rows)
    for is_greedy in (False, True):
        got = tokens_of(logits, settings, vocab, is_greedy)
        expected = sample_tokens_reference(logits, *settings, vocab, is_greedy)
        # Two noisy logits may be equal up to rounding, or a sum of weights reach top-p by it.
        num_different = int((got != expected).sum())
        assert num_different <= (0 if is_greedy else rows // 64), num_different


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(130, 40000, device="cuda") * 3
    settings = random_settings(130)
    together = torch.ops.ce.sample_tokens.default(logits, *settings, 40000, False)
    for i in range(0, 130, 9):
        one = slice(i, i + 1)
        alone = RowSettings(*(t[one] for t in settings))
        got = torch.ops.ce.sample_tokens.default(logits[one], *alone, 40000, False)
        assert torch.equal(got, together[one])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_of", [tokens_by_op, tokens_by_triton])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_row_with_a_nan_has_no_token_and_spoils_no_other(rows, tokens_of):
    logits = (torch.randn(rows, 32017, device="cuda") * 3).bfloat16()
    settings = random_settings(rows)
    for is_greedy in (False, True):
        plain = tokens_of(logits, settings, 32000, is_greedy)
        spoilt = logits.clone()
        spoilt[:, 32000:] = float("nan")
        spoilt[torch.arange(0, rows, 3), torch.randint(32000, (len(range(0, rows, 3)),))] = float(
            "nan"
        )
        got = tokens_of(spoilt, settings, 32000, is_greedy)
        assert (got[::3] == NO_TOKEN).all()
        got[::3] = plain[::3]
        assert torch.equal(got, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize(("vocab", "padding"), WIDTHS)
def test_masks_of_the_op_equal_logits_masked_before(vocab, padding, rows, dtype):
    torch.manual_seed(vocab + rows)
    settings = random_settings(rows + 5, "cpu")
    logits = (torch.randn(rows, vocab + padding) * 3).to(dtype)
    case = masked_case(logits, settings, vocab)
    for is_greedy in (False, True):
        got = torch.ops.ce.sample_rows.default(*case.call(is_greedy=is_greedy))
        plain = torch.ops.ce.sample_rows.default(*case.plain_call(is_greedy=is_greedy))
        check_masked(case, got, plain)


def test_one_half_of_a_mask_is_refused():
    case = masked_case(torch.randn(1, 9), random_settings(2, "cpu"), 9)
    with pytest.raises(AssertionError, match="mask_bits without has_grammar"):
        torch.ops.ce.sample_rows.default(*case.plain_call(is_greedy=True), case.masks.bits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 40, 256])
@pytest.mark.parametrize("vocab", [5, 32017, 151669])
@pytest.mark.parametrize("is_triton", [False, True], ids=["op", "triton"])
def test_masks_equal_logits_masked_before(is_triton, vocab, rows, dtype):
    from compiled_engine.custom_ops import sampling_triton

    logits = (torch.randn(rows, vocab + 3, device="cuda") * 3).to(dtype)
    case = masked_case(logits, random_settings(rows + 5), vocab)
    for is_greedy in (False, True):
        if is_triton:
            shared = (case.settings, case.places, vocab, is_greedy)
            got = sampling_triton.launch(case.logits, *shared, masks=case.masks)
            plain = sampling_triton.launch(case.masked, *shared)
        else:
            got = torch.ops.ce.sample_rows.default(*case.call(is_greedy=is_greedy))
            plain = torch.ops.ce.sample_rows.default(*case.plain_call(is_greedy=is_greedy))
        check_masked(case, got, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50, 151669])
def test_top_logprobs_equal_the_reference(vocab):
    logits = (torch.randn(9, vocab, device="cuda") * 3).bfloat16()
    chosen = torch.randint(0, vocab, (9,), dtype=torch.int32, device="cuda")
    got = torch.ops.ce.top_logprobs.default(logits, chosen, 20)
    expected = top_logprobs_reference(logits, chosen, 20)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[3], expected[3])
    for a, b in zip(got[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("rows", "width", "k"), [(1, 1, 1), (5, 33, 20), (3, 1003, 5), (2, 9, 0)])
def test_top_logprobs_are_log_softmax_by_a_stable_sort(rows, width, k):
    """Ties go to the lowest id, and two zeros are one; forbidden tokens come last."""
    logits = (torch.randn(rows, width + 3) * 2).round()[:, :width]
    logits[0, : width // 2] = -0.0
    logits[-1, width - 1] = float("-inf") if width > 1 else 0.0
    chosen = torch.arange(rows) % width
    ids, best, picked, rank = top_logprobs_reference(logits, chosen, k)
    logprobs = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids.long(), order)
    torch.testing.assert_close(best.double(), logprobs.gather(1, order), rtol=1e-6, atol=1e-6)
    wanted = logprobs.gather(1, chosen[:, None]).squeeze(1)
    torch.testing.assert_close(picked.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(rank.long(), (logprobs > wanted[:, None]).sum(1) + 1)
