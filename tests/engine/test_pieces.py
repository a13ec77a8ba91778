"""Which version of the decoder layer serves which step."""

from __future__ import annotations

import pytest

from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.pieces import LayerVersion, StepPieces, few_limit, layer_versions


def names(versions: tuple[LayerVersion, ...], sizes: list[int], *, is_mixed: bool) -> list[str]:
    pieces = StepPieces.__new__(StepPieces)
    pieces.versions = versions
    return [pieces.version(size, is_mixed=is_mixed).name for size in sizes]


def test_few_tokens_of_decode_steps_go_further_than_those_of_mixed_ones():
    versions = layer_versions(8192, 256, is_gpu=True, has_last=True)
    assert [(v.name, v.low, v.high) for v in versions] == [
        ("layer_one", 1, 1),
        ("layer_few", 2, 128),
        ("layer_many_decode", 129, 256),
        ("layer_many_mixed", 33, 8192),
        ("layer_last", 257, 8192),
    ]
    sizes = [1, 2, 32, 33, 128, 129, 256, 257, 8192]
    few, many = ["layer_few"], ["layer_many_mixed"]
    decode = ["layer_one", *few * 4, "layer_many_decode", "layer_many_decode", *many * 2]
    assert names(versions, sizes, is_mixed=False) == decode
    assert names(versions, sizes, is_mixed=True) == ["layer_one", *few * 2, *many * 6]
    rows_first = layer_versions(8192, 16, is_gpu=True, has_last=True)
    assert rows_first[-1] == LayerVersion("layer_last", 33, 8192, is_decode=False, is_last=True)


def test_the_last_layer_plans_attention_as_the_others_do():
    pieces = StepPieces.__new__(StepPieces)
    pieces.versions = layer_versions(8192, 16, is_gpu=True, has_last=True)
    for size, is_mixed, is_cut in ((33, False, False), (128, False, False), (33, True, True)):
        version = pieces.version(size, is_mixed=is_mixed)
        last = pieces.last_version(version, size)
        assert (last is not None) == is_cut
        assert last is None or last.is_decode == version.is_decode


@pytest.mark.parametrize("max_tokens", [1, 2, 31, 33, 64, 128, 129, 300])
@pytest.mark.parametrize("max_rows", [1, 16, 64, 256])
@pytest.mark.parametrize("max_few", [1, 32, 128])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_every_step_has_a_version(max_tokens: int, max_rows: int, max_few: int, is_gpu: bool):
    versions = layer_versions(max_tokens, max_rows, is_gpu=is_gpu, has_last=False, max_few=max_few)
    for is_mixed in (True, False):
        for size in range(1, (max_tokens if is_mixed else min(max_rows, max_tokens)) + 1):
            (name,) = names(versions, [size], is_mixed=is_mixed)
            (version,) = (v for v in versions if v.name == name)
            assert version.low <= size <= version.high


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ([], 128),
        (["fused_linear=row"], 1),
        (["fused_linear=tile"], 32),
        (["fused_linear.few=mma"], 32),
        (["fused_linear=wide"], 128),
        (["fused_linear=library"], 128),
        (["attention=torch"], 128),
    ],
)
def test_a_kernel_that_an_option_asks_for_gets_no_more_tokens_than_it_takes(options, limit):
    assert few_limit(make_registry(options)) == limit
