"""`weight_stream`: how tensors are cut into reads, that every byte arrives, and what errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.errors import ConfigError
from compiled_engine.models import ARCHITECTURES, CausalLM
from compiled_engine.models import weights as weights_module
from compiled_engine.models.config import load_model_config
from compiled_engine.models.weight_stream import (
    FileRange,
    safetensors_offsets,
    split_ranges,
    stream_chunks,
)
from compiled_engine.models.weights import build_model, load_weights
from tests.helpers.quant_checkpoints import LAYOUTS, rewrite_quantized
from tests.helpers.tiny_model import write_tiny_model

CPU = torch.device("cpu")
SHAPES = {"a": (5, 3), "b": (1,), "c": (64, 7), "d": (0, 4), "e": (2, 2, 9)}


def write_file(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: torch.randn(*shape).to(dtype) for name, shape in SHAPES.items() if name != "c"}
    tensors["c"] = torch.randn(*SHAPES["c"])  # fp32 among the others
    save_file(tensors, path)
    return tensors


def ranges_of(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> list[FileRange]:
    offsets = safetensors_offsets(path)
    return [
        FileRange(name, path, offsets[name], t.dtype, torch.full(t.shape, -1.0, dtype=dtype))
        for name, t in tensors.items()
    ]


@pytest.mark.parametrize("chunk_bytes", [8, 24, 64, 4096])
def test_chunks_cover_every_element_once_and_stay_small(tmp_path: Path, chunk_bytes: int):
    tensors = write_file(tmp_path / "x.safetensors", torch.bfloat16)
    ranges = ranges_of(tmp_path / "x.safetensors", tensors, torch.bfloat16)
    chunks = split_ranges(ranges, chunk_bytes)
    covered = dict.fromkeys(tensors, 0)
    for chunk in chunks:
        assert 0 < chunk.num_bytes <= chunk_bytes
        at = 0
        for part in chunk.parts:
            assert part.at == at
            assert part.at % part.dtype.itemsize == 0
            assert part.target.numel() * part.dtype.itemsize == part.num_bytes
            at += part.num_bytes
            covered[part.name] += part.target.numel()
        assert at == chunk.num_bytes
    assert covered == {name: t.numel() for name, t in tensors.items()}
    assert [(c.path, c.offset) for c in chunks] == sorted((c.path, c.offset) for c in chunks)
    if chunk_bytes == 4096:
        assert len(chunks) == 1, "neighbours share a read"


def test_what_nobody_wants_is_not_read(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(16) for name in "abc"}, path)
    offsets = safetensors_offsets(path)
    wanted = [FileRange(n, path, offsets[n], torch.float32, torch.zeros(16)) for n in ("a", "c")]
    assert [(c.offset, c.num_bytes) for c in split_ranges(wanted)] == [
        (offsets["a"], 64),
        (offsets["c"], 64),
    ]


def test_a_target_with_gaps_is_refused(tmp_path: Path):
    item = FileRange("x", tmp_path / "x", 0, torch.float32, torch.zeros(4, 4)[:, :2])
    with pytest.raises(AssertionError, match="gaps"):
        split_ranges([item])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_bytes", [40, 4096])
def test_streamed_tensors_equal_the_files(tmp_path: Path, dtype: torch.dtype, chunk_bytes: int):
    ranges, expected = [], {}
    for name in ("one", "two"):
        tensors = write_file(tmp_path / name, torch.bfloat16)
        for item in ranges_of(tmp_path / name, tensors, dtype):
            ranges.append(item)
            expected[name, item.name] = (item.target, tensors[item.name].to(dtype))
    chunks = split_ranges(ranges, chunk_bytes)
    seen = list(stream_chunks(chunks, CPU, chunk_bytes=chunk_bytes, num_readers=3))
    assert seen == chunks
    for got, wanted in expected.values():
        assert torch.equal(got, wanted)


def test_a_file_that_ends_early_is_named(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    tensors = write_file(path, torch.float32)
    ranges = ranges_of(path, tensors, torch.float32)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match="8 bytes too early") as caught:
        list(stream_chunks(split_ranges(ranges), CPU))
    assert caught.value.filename == path


def build(folder: Path, dtype: torch.dtype, device: torch.device) -> CausalLM:
    config = load_model_config(folder)
    return build_model(ARCHITECTURES[config.architecture], config, dtype=dtype, device=device)


def stream_model(
    model: CausalLM, folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Loads by the streaming path, on any device; returns the tensors in order of completion."""
    monkeypatch.setattr(
        weights_module,
        "_copy_files",
        lambda files, targets, on_tensor: weights_module._stream_files(
            files, infos, device, targets, on_tensor
        ),
    )
    files = [folder / "model.safetensors"]
    infos = weights_module.open_checkpoint(files[0]).infos()
    names: list[str] = []
    load_weights(
        model,
        folder,
        dtype=next(model.parameters()).dtype,
        device=device,
        progress=lambda _done, _total, name: names.append(name),
    )
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_model_equals_a_copied_one(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path, family="qwen3", attention_bias=True)
    copied, streamed = build(folder, dtype, CPU), build(folder, dtype, CPU)
    load_weights(copied, folder, dtype=dtype, device=CPU)
    names = stream_model(streamed, folder, CPU, monkeypatch)
    assert sorted(names) == sorted(load_file(folder / "model.safetensors"))
    expected = dict(copied.named_parameters())
    for name, parameter in streamed.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("layout", ["fp8_static", "compressed_int4_zero", "modelopt_nvfp4"])
def test_a_streamed_quantised_model_equals_a_copied_one(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
):
    config, spell, _ = LAYOUTS[layout]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    copied, streamed = build(folder, torch.bfloat16, CPU), build(folder, torch.bfloat16, CPU)
    load_weights(copied, folder, dtype=torch.bfloat16, device=CPU)
    stream_model(streamed, folder, CPU, monkeypatch)
    expected = dict(copied.named_parameters())
    for name, parameter in streamed.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_a_read_error_while_streaming_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("compiled_engine.models.weight_stream.read_exactly", fail)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: Input/output"):
        stream_model(build(folder, torch.float32, CPU), folder, CPU, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_gpu_equal_those_on_the_cpu(tmp_path: Path, dtype: torch.dtype):
    folder = write_tiny_model(
        tmp_path, family="qwen3", vocab_size=40_000, tie_word_embeddings=False
    )
    device = torch.device("cuda", 0)
    there, here = build(folder, dtype, device), build(folder, dtype, CPU)
    load_weights(there, folder, dtype=dtype, device=device)
    load_weights(here, folder, dtype=dtype, device=CPU)
    expected = dict(here.named_parameters())
    for name, parameter in there.named_parameters():
        assert parameter.is_cuda
        assert torch.equal(parameter.cpu(), expected[name]), name
