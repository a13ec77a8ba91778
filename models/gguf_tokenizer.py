"""Writes the tokenizer files of a model folder from GGUF metadata.

Owns the translation of the two tokenizer kinds that llama and qwen3 files use: "gpt2" (byte-level
BPE with merges) and "llama" (SentencePiece BPE with scores). Reading the folder back is the job of
`compiled_engine.tokenizer`. How text is cut before merging is not in a GGUF file, only its name
(`tokenizer.ggml.pre`): an unknown name is refused, since a wrong cut gives wrong tokens silently.

Source: the pre-tokenizer definitions published with each model family's tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from compiled_engine.errors import ConfigError

# Token types of the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CUT_FORMAT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Raises:
        ConfigError: the file has no tokenizer, or one of an unknown kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("tokenizer.ggml.tokens is missing in the GGUF file", param="model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise ConfigError(
            f'tokenizer.ggml.model is "{kind}"; supported are gpt2 and llama', param="model"
        )
    _add_marked_tokens(tokenizer, metadata)
    _add_frame(tokenizer, metadata, adds_bos_by_default=kind == "llama")
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[metadata[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    # The class is for transformers, which can read the folder too.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a whole word from the vocabulary before it tries merges.
    model = BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return words
    if name in ("smollm", "starcoder"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words])
    digits_by_name = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    if name in digits_by_name:
        cut = Regex(_CUT_FORMAT.format(digits=digits_by_name[name]))
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(cut, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ConfigError(
        f'tokenizer.ggml.pre is "{name}"; supported are gpt-2, llama-bpe, qwen2, smollm, starcoder',
        param="model",
    )


def _sentence_piece(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ConfigError("tokenizer.ggml.scores is missing in the GGUF file", param="model")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or []
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    model = BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * has_prefix)])
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the best-scored result first.

    SentencePiece merges the pair whose result scores best; a merge list spells that order out.
    """
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                rank = (-scores[index], vocabulary[left], vocabulary[right])
                ranked.append((*rank, (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _add_marked_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Control tokens become special; user-defined ones are kept whole but stay visible text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_frame(
    tokenizer: Tokenizer, metadata: dict[str, Any], *, adds_bos_by_default: bool
) -> None:
    """Sets what `add_special_tokens` puts around a text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    frame: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", adds_bos_by_default), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token_id is not None:
            frame[name] = (tokens[token_id], int(token_id))
    if not frame:
        return
    begin = [frame["bos"][0]] if "bos" in frame else []
    end = [frame["eos"][0]] if "eos" in frame else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=sorted(set(frame.values())),
    )
