"""Quantised models through the whole engine: answers, refusals, and what a start says."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Target
from compiled_engine.errors import ConfigError
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.quant_report import quantization_report
from compiled_engine.settings import model_config_of, preview_settings, weight_bytes
from tests.helpers.engines import GREEDY, reference_greedy, run_requests, tiny_engine
from tests.helpers.quant_case import ONLINE, quantized_model
from tests.helpers.quant_checkpoints import LAYOUTS, rewrite_quantized
from tests.helpers.tiny_model import write_tiny_model

H200, B200 = Target("cuda", 90), Target("cuda", 100)
PROMPTS = [random.Random(i).choices(range(5, 250), k=k) for i, k in enumerate((1, 5, 17, 70))]


@pytest.mark.parametrize("name", ONLINE)
def test_greedy_answers_equal_the_model_itself(tmp_path: Path, name: str):
    engine = tiny_engine(write_tiny_model(tmp_path), quantization=name, quantize_lm_head=True)
    layers = [m for m in engine.loop.executor.model.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == 2 * 4 + 1
    answers = run_requests(engine, PROMPTS).tokens
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == reference_greedy(engine, prompt, GREEDY.max_tokens or 0)


@pytest.mark.parametrize("layout", ["deepseek_fp8", "modelopt_nvfp4", "awq", "gptq_order"])
def test_a_published_checkpoint_is_served(tmp_path: Path, layout: str):
    config, spell, _ = LAYOUTS[layout]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    engine = tiny_engine(folder)
    answers = run_requests(engine, PROMPTS[:2]).tokens
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert answer == reference_greedy(engine, prompt, GREEDY.max_tokens or 0)


def test_layers_that_differ_are_compiled_apart(tmp_path: Path):
    """A layer on the ignore list is of another kind: nothing is shared with the others."""
    config, spell, _ = LAYOUTS["compressed_int8"]
    folder = write_tiny_model(tmp_path, family="qwen3")
    ignored = ["lm_head", "re:.*layers.0.mlp.down_proj"]
    rewrite_quantized(
        folder, {**config, "ignore": ignored}, spell, skipped=("model.layers.0.mlp.down_proj",)
    )
    engine = tiny_engine(folder)
    assert engine.loop.executor.pieces.kinds == (0, 1)
    answers = run_requests(engine, PROMPTS[:2]).tokens
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert answer == reference_greedy(engine, prompt, GREEDY.max_tokens or 0)


def test_a_start_names_the_kernel_of_each_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config, spell, _ = LAYOUTS["modelopt_nvfp4"]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    with caplog.at_level(logging.INFO, "compiled_engine.engine"):
        tiny_engine(folder)
    lines = [r.message for r in caplog.records if r.message.startswith("quantised: ")]
    assert len(lines) == 4 + 1
    assert lines[0].startswith("quantised: 2 x qkv_proj [128 x 64], weights nvfp4, activations as")
    assert "dequantised for every product" in lines[0]
    assert "where the checkpoint asks for 4 bits: products of such need compute" in lines[-1]


@pytest.mark.parametrize(
    ("name", "arch", "kernels"),
    [
        ("fp8", 90, ("ring", "ring", "scaled_mm")),
        ("nvfp4", 90, ("ring", "ring", "dequantized")),
        ("nvfp4_w4a4", 90, ("dequantized",) * 3),
        ("nvfp4_w4a4", 100, ("fp4",) * 3),
    ],
)
def test_kernels_on_a_gpu(
    tmp_path: Path, name: str, arch: int, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """What the registry would choose there, by sizes; the fakes need no GPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = quantized_model(write_tiny_model(tmp_path, **sizes), name, torch.bfloat16)
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, _: Target("cuda", arch)))
    monkeypatch.setattr("compiled_engine.custom_ops.quant_choice.has_nvrtc", lambda: True)
    lines = quantization_report(
        model,
        make_registry(),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_tokens=8192,
        max_few=128,
    )
    assert len(lines) == 4
    for line in lines:
        assert tuple(re.findall(r"_linear by (\w+) ", line)) == kernels, line


@pytest.mark.parametrize(
    ("name", "arch", "kernels"),
    [
        ("nvfp4", 90, ("packed_token", "stream", "tiles")),
        ("mxfp4", 90, ("packed_token", "stream", "tiles")),
        ("nvfp4", 86, ("torch",) * 3),
        ("fp8", 90, ("rows", "stream", "tiles")),
    ],
)
def test_kernels_of_experts_on_a_gpu(
    tmp_path: Path, name: str, arch: int, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **sizes)
    model = quantized_model(folder, name, torch.bfloat16)
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, _: Target("cuda", arch)))
    monkeypatch.setattr("compiled_engine.custom_ops.quant_choice.has_nvrtc", lambda: True)
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "max_few": 128}
    lines = quantization_report(model, make_registry(), max_tokens=8192, **options)
    (line,) = (line for line in lines if "5 experts" in line)
    assert line.startswith("2 x 5 experts [256 x 256, 256 x 128], weights ")
    assert tuple(re.findall(r"(?:experts|sparse_mlp) by (\w+) ", line)) == kernels, line


def test_refusals(tmp_path: Path):
    plain = write_tiny_model(tmp_path / "plain")
    with pytest.raises(ConfigError, match="--quantize-lm-head needs --quantization"):
        model_config_of(EngineConfig(model="x", quantize_lm_head=True), plain, H200)
    with pytest.raises(ConfigError, match="--quantization is 'int3'; allowed are auto, fp8"):
        EngineConfig(model="x", quantization="int3")  # type: ignore[arg-type]
    config, spell, _ = LAYOUTS["awq"]
    packed = write_tiny_model(tmp_path / "packed", family="qwen3")
    rewrite_quantized(packed, config, spell)
    with pytest.raises(ConfigError, match=r"quantised already \(awq\): leave it out"):
        model_config_of(EngineConfig(model="x", quantization="fp8"), packed, H200)


def test_the_head_of_a_published_checkpoint_takes_its_format(tmp_path: Path):
    config, spell, _ = LAYOUTS["awq"]
    folder = write_tiny_model(tmp_path, family="qwen3")
    rewrite_quantized(folder, config, spell)
    engine = tiny_engine(folder, quantize_lm_head=True)
    head = engine.loop.executor.model.lm_head
    assert isinstance(head, QuantLinear)
    assert (head.format, head.scheme.layout) == ("int4_group", "plain")
    answers = run_requests(engine, PROMPTS[:1]).tokens
    assert answers[0] == reference_greedy(engine, PROMPTS[0], GREEDY.max_tokens or 0)


def test_a_preview_knows_the_bytes(tmp_path: Path):
    folder = write_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    options = {"model": str(folder), "device": "cpu"}
    preview_settings(EngineConfig(**options, quantization="int8"))
    plain, small = (weight_bytes(quantized_model(folder, name)) for name in (None, "int8"))
    assert small < 0.5 * plain
