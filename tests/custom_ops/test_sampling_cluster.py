"""The CUDA sampling kernel: emulated on tiny rows, and on a GPU against the reference."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import sampling_cluster
from compiled_engine.custom_ops.cuda_build import compile_source
from compiled_engine.custom_ops.sampling import (
    NO_TOKEN,
    Places,
    RowSettings,
    sample_rows_reference,
    sample_tokens_reference,
)
from compiled_engine.custom_ops.sampling_cluster import ClusterConfig, default_config, variant_of
from tests.helpers.emulated_sampling import SMALL, run_emulated
from tests.helpers.sampling_boundary import boundary_probe, head_and_tail
from tests.helpers.sampling_masks import WIDTHS, check_masked, masked_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# top_k, top_p, min_p
LIMITS = (
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (2, 0.999, 0.0),
    (50, 1.0, 0.0),
    (200, 0.9, 0.0),
    (10**9, 0.3, 0.001),
    (0, 0.95, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.99999, 0.0),
    (0, 1.0, 0.2),
    (60, 0.8, 0.01),
    (7, 0.5, 1.0),
)
KINDS = (
    "normal",
    "equal",
    "ties",
    "zeros",
    "masked",
    "one",
    "large",
    "small",
    "peaked",
    "tail",
    "none",
)


def logits_of(kind: str, rows: int, width: int) -> Tensor:
    """Rows of logits that are hard in some way."""
    spread = torch.randn(rows, width) * 3
    if kind == "masked":
        return torch.where(torch.rand(rows, width) < 0.9, float("-inf"), spread)
    if kind == "one":
        spread.fill_(float("-inf"))
        spread[:, width // 3] = -2.0
        return spread
    if kind == "peaked":
        spread[:, width // 2] = 40.0
        return spread
    if kind == "tail":
        # Unlikely tokens, of which there are so many that one mostly wins.
        spread = spread * 0.01 - 5.0
        spread[:, width // 2] = 0.0
        return spread
    made = {
        "normal": spread,
        "equal": torch.full((rows, width), 1.5),
        "ties": spread.round(),
        # Of both signs, and little else.
        "zeros": (spread * 0.1).round(),
        "large": spread * 1e4,
        "small": spread * 1e-4,
        "none": torch.full((rows, width), float("-inf")),
    }
    return made[kind]


def settings_of(rows: int, *, temperature: float | None = None) -> RowSettings:
    """The limits in turn; every sixth row is greedy, every fourth has a temperature of 1."""
    top_k, top_p, min_p = zip(*(LIMITS[i % len(LIMITS)] for i in range(rows)), strict=True)
    heat = torch.rand(rows) * 1.5 + 0.1
    heat[::4] = 1.0
    heat[5::6] = 0.0
    if temperature is not None:
        heat.fill_(temperature)
    return RowSettings(
        heat,
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 5000, (rows,), dtype=torch.int32),
    )


def check_emulated(logits: Tensor, settings: RowSettings, vocab_size: int, order: int) -> None:
    got, _ = run_emulated(logits, settings, None, vocab_size, order=order)
    expected = sample_tokens_reference(logits, *settings, vocab_size, False)
    wrong = torch.nonzero(got != expected).flatten().tolist()
    assert not wrong, [(i, int(got[i]), int(expected[i]), [t[i] for t in settings]) for i in wrong]


@pytest.mark.parametrize("kind", KINDS)
def test_emulated_tokens_equal_the_reference(kind):
    torch.manual_seed(KINDS.index(kind))
    dtype = DTYPES[KINDS.index(kind) % 3]
    # An odd width, so that rows begin at every place of a vector.
    logits = logits_of(kind, len(LIMITS), 317).to(dtype)
    check_emulated(logits, settings_of(len(LIMITS)), 310, KINDS.index(kind))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab", [1, 2, 9, 129, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_tokens_on_every_width(kind, vocab, dtype):
    torch.manual_seed(vocab)
    logits = logits_of(kind, len(LIMITS), vocab + 3).to(dtype)
    for temperature in (None, 1.0, 1e-9, 1e30):
        check_emulated(logits, settings_of(len(LIMITS), temperature=temperature), vocab, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_emulated_cut_is_exact_to_the_token(dtype):
    torch.manual_seed(0)
    rows, head = 24, 64
    settings = settings_of(rows, temperature=0.8)
    top_p = torch.rand(rows) * 0.8 + 0.1
    top_p[::3] = 1.0
    top_k = torch.randint(1, 60, (rows,), dtype=torch.int32)
    top_k[1::3] = 0
    settings = settings._replace(top_k=top_k, top_p=top_p, min_p=torch.rand(rows) * 0.3)
    logits = head_and_tail(rows, head, 700).to(dtype)
    probe = boundary_probe(logits, settings, head)
    assert probe.expected.shape[0] > rows
    got, _ = run_emulated(probe.logits, probe.settings, None, 700)
    assert torch.equal(got.long(), probe.expected)


def test_emulated_rows_and_stops():
    """Settings and results by row; rows without a place get 0 and False; one row named twice."""
    torch.manual_seed(0)
    num_rows = 15
    by_row = settings_of(num_rows)
    floats = torch.stack((by_row.temperature, by_row.top_p, by_row.min_p), 1)
    by_row = by_row._replace(temperature=floats[:, 0], top_p=floats[:, 1], min_p=floats[:, 2])
    by_row = by_row._replace(position=by_row.position.long())
    rows = torch.tensor([3, 9, 0, 14, 14], dtype=torch.int32)
    logits = torch.randn(5, 70) * 3
    logits[4] = logits[3]
    stop_ids = torch.full((num_rows, 3), -1, dtype=torch.int32)
    plain = sample_rows_reference(logits, *by_row, rows, stop_ids, 66, False)[0]
    stop_ids[3, 2] = plain[3, 0]
    stop_ids[0, 0] = plain[0, 0] + 1
    got = run_emulated(logits, by_row, Places(rows, stop_ids), 66, order=7)
    expected = sample_rows_reference(logits, *by_row, rows, stop_ids, 66, False)
    assert torch.equal(got[0], expected[0][:, 0])
    assert torch.equal(got[1], expected[1][:, 0])
    assert bool(got[1][3])
    assert not bool(got[1][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_emulated_row_with_a_nan_has_no_token_and_spoils_no_other(dtype):
    torch.manual_seed(2)
    num_rows, vocab = 9, 203
    logits, settings = logits_of("normal", num_rows, 211).to(dtype), settings_of(num_rows)
    places = Places(
        torch.arange(num_rows, dtype=torch.int32),
        torch.full((num_rows, 2), -1, dtype=torch.int32),
    )
    plain, _ = run_emulated(logits, settings, places, vocab)
    logits[:, vocab:] = float("nan")
    # The first and the last token, all of them, a greedy row.
    logits[0, 0] = logits[3, vocab - 1] = logits[4, :] = logits[5, 100] = float("nan")
    assert settings.temperature[5] == 0
    expected = sample_rows_reference(logits, *settings, *places, vocab, False)
    for order in (0, 3):
        got, stops = run_emulated(logits, settings, places, vocab, order=order)
        assert got[[0, 3, 4, 5]].tolist() == [NO_TOKEN] * 4
        assert torch.equal(got, expected[0][:, 0])
        assert not stops.any()
        got[[0, 3, 4, 5]] = plain[[0, 3, 4, 5]]
        assert torch.equal(got, plain)
    assert not expected[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("vocab", "padding"), WIDTHS)
def test_emulated_masks_equal_logits_masked_before(vocab, padding, dtype):
    torch.manual_seed(vocab)
    num_places = len(LIMITS)
    settings = settings_of(num_places + 5)
    for order, kind in enumerate(("normal", "ties", "large")):
        logits = logits_of(kind, num_places, vocab + padding).to(dtype)
        case = masked_case(logits, settings, vocab)
        shared = (case.settings, case.places, vocab)
        got = run_emulated(case.logits, *shared, masks=case.masks, order=order)
        check_masked(case, got, run_emulated(case.masked, *shared))
        check_masked(case, got, sample_rows_reference(*case.plain_call(is_greedy=False)))


def test_emulated_result_does_not_depend_on_the_cut_of_the_launch():
    torch.manual_seed(1)
    logits, settings = logits_of("normal", 11, 333), settings_of(11)
    results = [
        run_emulated(logits, settings, None, 333, config=config, order=order)[0]
        for config, order in (
            (SMALL, 0),
            (ClusterConfig(cluster=4, block=128, log_bins=7), 1),
            (ClusterConfig(cluster=1, block=64, log_bins=6), 5),
        )
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("places", [1, 256])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(arch, places, dtype):
    pytest.importorskip("cuda.bindings.nvrtc")
    variant = variant_of(dtype, 151936, default_config(dtype, 151936, places))
    log = compile_source(sampling_cluster.SOURCE, arch, variant.flags).log
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log) == [("0", "0")], (
        log
    )
    (registers,) = re.findall(r"Used (\d+) registers", log)
    config = variant.config
    assert int(registers) * config.block * config.resident <= 65536
    assert (variant.shared_bytes + 1024) * config.resident <= 228 * 1024


def on_the_gpu(settings: RowSettings) -> RowSettings:
    return RowSettings(*(t.cuda() for t in settings))


def needs_clusters() -> None:
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs clusters")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab", [5, 32017, 151669])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_the_reference(kind, vocab, dtype):
    needs_clusters()
    logits = logits_of(kind, 40, vocab + 2).cuda().to(dtype)
    settings = on_the_gpu(settings_of(40))
    expected = sample_tokens_reference(logits, *settings, vocab, False)
    for places in (1, 256):
        config = default_config(dtype, vocab, places)
        got, _ = sampling_cluster.launch(logits, settings, None, vocab, config=config)
        # Two noisy logits may be equal up to rounding.
        assert int((got != expected).sum()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_cut_is_exact_to_the_token(dtype):
    needs_clusters()
    rows, head, vocab = 64, 256, 151669
    settings = settings_of(rows, temperature=0.8)
    settings = settings._replace(
        top_k=torch.randint(-100, 250, (rows,), dtype=torch.int32),
        top_p=torch.rand(rows) * 0.8 + 0.1,
        min_p=torch.zeros(rows),
    )
    logits = head_and_tail(rows, head, vocab, "cuda").to(dtype)
    probe = boundary_probe(logits, on_the_gpu(settings), head)
    got, _ = sampling_cluster.launch(probe.logits, probe.settings, None, vocab)
    assert probe.expected.shape[0] > rows
    assert torch.equal(got.long(), probe.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab", [5, 32017, 151669])
@pytest.mark.parametrize("places", [1, 40])
def test_masks_equal_logits_masked_before(places, vocab, dtype):
    needs_clusters()
    settings = on_the_gpu(settings_of(places + 5))
    for kind in ("normal", "ties", "large"):
        logits = logits_of(kind, places, vocab + 2).cuda().to(dtype)
        case = masked_case(logits, settings, vocab)
        shared = (case.settings, case.places, vocab)
        got = sampling_cluster.launch(case.logits, *shared, masks=case.masks)
        check_masked(case, got, sampling_cluster.launch(case.masked, *shared))


@pytest.mark.gpu
def test_rows_without_a_place_are_cleared():
    needs_clusters()
    num_rows, vocab = 300, 32017
    by_row = on_the_gpu(settings_of(num_rows))
    for num_places in (1, 33):
        rows = torch.randperm(num_rows, device="cuda")[:num_places].int()
        logits = torch.randn(num_places, vocab, device="cuda").bfloat16()
        stop_ids = torch.full((num_rows, 4), -1, dtype=torch.int32, device="cuda")
        for _ in range(2):
            got = sampling_cluster.launch(logits, by_row, Places(rows, stop_ids), vocab)
            expected = sample_rows_reference(logits, *by_row, rows, stop_ids, vocab, False)
            assert torch.equal(got[0], expected[0][:, 0])
            assert torch.equal(got[1], expected[1][:, 0])
            stop_ids[:, 1] = got[0]
