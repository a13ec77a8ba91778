"""What launchers remember between the layers of a step is what they would find again."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.cache_folders import PRODUCTS, place_caches
from compiled_engine.custom_ops import attention_choice, gemm, gemm_library
from compiled_engine.custom_ops.attention_work import Heads, known_work_shape, work_shape
from compiled_engine.custom_ops.gemm_choice import pick_config
from compiled_engine.custom_ops.registry import Target
from compiled_engine.custom_ops.triton_common import rows_of

H200 = Target("cuda", 90)
A100 = Target("cuda", 80)


def fused_linear_traits(rng: random.Random) -> dict[str, int]:
    """Traits of a call: products of a model, and others that few kernels take."""
    flags = ("has_norm", "has_bias", "has_residual", "is_gated")
    lucky = ("is_residual_aligned", "has_one_dtype", "is_weight_contiguous", "is_aligned")
    return {
        "num_tokens": rng.choice([1, 2, 7, 8, 9, 31, 32, 33, 64, 128, 129, 2048, 8192]),
        "rows": rng.choice([4096, 6144, 24576, 151936, 33 * 8]),
        "size": rng.choice([4096, 12288, 2048, 72]),
        **{name: rng.randrange(2) for name in flags},
        **{name: int(rng.random() < 0.8) for name in lucky},
        "is_last_dim_contiguous": int(rng.random() < 0.8),
        "is_hopper": 1,
        "has_nvrtc": 1,
        "has_cublaslt": rng.randrange(2),
    }


@pytest.mark.parametrize("impl", ["", "library", "tile", "library:8,cublaslt"])
def test_a_remembered_kernel_of_a_product_is_the_one_that_is_found(impl):
    rng = random.Random(impl)
    gemm._selected.cache_clear()
    for _ in range(300):
        traits = fused_linear_traits(rng)
        key = (impl, H200, torch.bfloat16)
        try:
            kernel = gemm.select_kernel(*key, traits)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:30]):
                gemm._selected(*key, tuple(traits.items()))
            continue
        is_sized = kernel in ("row", "tile", "mma", "wide", "hopper")
        config = pick_config(kernel, traits) if is_sized else None
        for _ in range(2):
            assert gemm._selected(*key, tuple(traits.items())) == (kernel, config)


def test_a_kernel_is_chosen_once_for_all_layers_and_anew_for_what_differs(monkeypatch):
    calls: list[Any] = []
    plain = gemm.select_kernel

    def counted(*arguments: Any) -> str:
        calls.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(gemm, "select_kernel", counted)
    gemm._selected.cache_clear()
    traits = fused_linear_traits(random.Random(1)) | {"has_one_dtype": 1}
    given = ["library", H200, torch.bfloat16]
    for _ in range(36):
        gemm._selected(*given, tuple(traits.items()))
    assert len(calls) == 1
    for place, other in enumerate(("", A100, torch.float16)):
        gemm._selected(*given[:place], other, *given[place + 1 :], tuple(traits.items()))
        assert len(calls) == place + 2
    for count, name in enumerate(("num_tokens", "rows", "is_gated"), start=5):
        gemm._selected(*given, tuple((traits | {name: traits[name] ^ 1}).items()))
        assert len(calls) == count
    gemm._selected.cache_clear()


def test_attention_is_chosen_by_all_that_its_candidates_look_at():
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)
    for _ in range(2):
        assert attention_choice.select_attention("", q, cache, 3) == "cpp"
        assert attention_choice.select_attention("torch", q, cache, 3) == "torch"
        assert attention_choice.select_attention("", q.float(), cache, 3) == "torch"
        with pytest.raises(ValueError, match="cuda runs on cuda"):
            attention_choice.select_attention("cuda", q, cache, 3)


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_remembered_work_list_has_the_sizes_and_regions_of_a_new_one(is_decode):
    for counts in ((1, 1), (7, 5), (512, 64), (7, 5)):
        known = known_work_shape(16, Heads(32, 8), *counts, is_decode=is_decode)
        made = work_shape(16, Heads(32, 8), *counts, is_decode=is_decode)
        assert known == made
        assert (known.sizes, known.starts) == (made.sizes, made.starts)
        work = torch.arange(made.total_size)
        known.check(work)
        for name, region in made.split(work).items():
            assert torch.equal(known.region(work, name), region)
            start = made.starts[name]
            assert region.tolist() == [*range(start, start + made.sizes[name])]
        with pytest.raises(AssertionError, match="work has"):
            known.check(work[1:])


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
@pytest.mark.parametrize("step", [1, 3])
def test_rows_of_a_matrix_are_those_of_the_same_matrix_with_another_dim(num_rows, step):
    whole = torch.zeros(step * num_rows, 24)[::step]
    for x in (whole, whole[:, :7], whole[:, 3:4]):
        rows = rows_of(x)
        assert rows is not None
        assert rows == rows_of(x.unsqueeze(1))
        assert rows.num_rows == num_rows
    assert rows_of(torch.zeros(4, 6).T) is None


class FakeLibrary:
    """Stands for cuBLAS where there is none."""

    def __init__(self, version: int) -> None:
        self.cublasLtGetVersion = lambda: version


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Callable[..., tuple[list[int], int]]:
    """Asks for the kernel of a product; returns its first two words, and how often it measured."""
    place_caches(tmp_path)
    count = 0

    def measure() -> gemm_library._Algorithm:
        nonlocal count
        count += 1
        algorithm = gemm_library._Algorithm()
        algorithm.data[0], algorithm.data[1] = 7, 2**64 - count
        return algorithm

    def ask(*, version: int = 12, name: str = "H200", **changes: Any) -> tuple[list[int], int]:
        properties = SimpleNamespace(name=name, multi_processor_count=132)
        monkeypatch.setattr(gemm_library, "_library", lambda: FakeLibrary(version))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        shape = gemm_library._Shape(2048, 4096, 4096, 4096, 0, torch.bfloat16, 0)
        found = gemm_library._known_fastest(shape._replace(**changes), measure)
        return found.data[:2], count

    return ask


def test_a_kernel_of_the_library_is_measured_once_for_all_processes(measured):
    assert measured() == measured() == ([7, 2**64 - 1], 1)
    assert measured(device=3) == ([7, 2**64 - 1], 1)  # another GPU of the kind


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 4096},
        {"rows": 6144},
        {"size": 512},
        {"x_stride": 8192},
        {"residual_stride": 4096},
        {"dtype": torch.float16},
        {"version": 13},
        {"name": "H100"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_kernel_of_the_library_is_measured_anew_for_what_differs(measured, change):
    measured()
    assert measured(**change) == ([7, 2**64 - 2], 2)


def test_a_damaged_kernel_of_the_library_is_measured_again(measured, tmp_path):
    measured()
    (path,) = (tmp_path / PRODUCTS).iterdir()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.warns(UserWarning, match="damaged"):
        assert measured() == ([7, 2**64 - 2], 2)
    assert measured() == ([7, 2**64 - 2], 2)
