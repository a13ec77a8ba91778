"""Tokenizer, chat template and incremental detokenising, byte-level and SentencePiece-style."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.server.logprobs import token_offsets
from compiled_engine.tokenizer import Tokenizer, has_tokenizer
from tests.helpers.tiny_model import write_tiny_model, write_tiny_tokenizer

TEXTS = [
    "Hello world, this is  spaced   text.\n\n\tTab",
    "naïve café, Größe, 日本語のテキスト, 👩‍👩‍👧‍👦 🏳️‍🌈 ok",
    " leading space",
    "  two leading spaces",
    "こんにちは世界",
    "a",
    "",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ — \u200b\u0301 e\u0301",
]


def sentence_piece(*, strips_space: bool = True) -> BackendTokenizer:
    """BPE with byte fallback and the decoder of Llama 2 (or of Gemma, which strips no space)."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokens += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,é世",
        "he",
        "hel",
        "hell",
        "hello",
        "▁hello",
        "▁▁",
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    backend = BackendTokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strips_space)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> BackendTokenizer:
    """Unigram with the Metaspace decoder, as T5-style SentencePiece models have."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁hello", -1.0), ("▁world", -1.0)]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz.,é世"]
    backend = BackendTokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def tokenizers(byte_level: Tokenizer, smollm2_tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    return {
        "byte-level": byte_level,
        "smollm2": smollm2_tokenizer,
        "sentencepiece": Tokenizer(sentence_piece()),
        "gemma-like": Tokenizer(sentence_piece(strips_space=False)),
        "metaspace": Tokenizer(metaspace()),
    }


KINDS = ["byte-level", "smollm2", "sentencepiece", "gemma-like", "metaspace"]


def random_splits(ids: Sequence[int], rng: random.Random) -> list[list[int]]:
    pieces, rest = [], list(ids)
    while rest:
        size = rng.choice([0, 1, 1, 1, 2, 3, 7])
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def assert_streams_like_whole(tokenizer: Tokenizer, ids: list[int], rng: random.Random) -> None:
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        for pieces in ([[token_id] for token_id in ids], random_splits(ids, rng), [ids]):
            detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip)
            deltas = [detokenizer.push(piece) for piece in pieces]
            assert "".join(deltas) + detokenizer.finish() == whole, (ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_detokenizer_joined_deltas_equal_decode(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    rng = random.Random(7)
    for text in TEXTS:
        assert_streams_like_whole(tokenizers[kind], tokenizers[kind].encode(text), rng)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_detokenizer_random_ids_equal_decode(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Random ids hold broken UTF-8, byte runs, special tokens anywhere, and unknown ids."""
    tokenizer = tokenizers[kind]
    top = tokenizer.vocab_size + 2
    # Small ids are special tokens and bytes in all five vocabularies.
    token_id = st.one_of(st.integers(0, min(300, top)), st.integers(0, top))
    ids = data.draw(st.lists(token_id, max_size=40))
    assert_streams_like_whole(tokenizer, ids, random.Random(data.draw(st.integers(0, 99))))


def test_detokenizer_holds_back_split_characters_only(byte_level: Tokenizer) -> None:
    detokenizer = byte_level.new_detokenizer()
    deltas = [detokenizer.push([token_id]) for token_id in byte_level.encode("aé👍b")]
    assert deltas == ["a", "", "é", "", "", "", "👍", "b"]
    assert detokenizer.finish() == ""


def test_detokenizer_finish_releases_broken_bytes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("👍")[:3]
    detokenizer = byte_level.new_detokenizer()
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == "\ufffd" == byte_level.decode(ids)


def test_detokenizer_sentencepiece_strips_the_first_space_only() -> None:
    tokenizer = Tokenizer(sentence_piece())
    hello = tokenizer.encode(" hello")
    detokenizer = tokenizer.new_detokenizer()
    assert [detokenizer.push(hello), detokenizer.push(hello)] == ["hello", " hello"]


def test_detokenizer_cost_per_token_does_not_grow(byte_level: Tokenizer) -> None:
    """State is bounded: what is held after many tokens is no more than a piece of a character."""
    detokenizer = byte_level.new_detokenizer()
    text = "".join(detokenizer.push([token_id]) for token_id in byte_level.encode("日本" * 5000))
    assert text == "日本" * 5000
    pieces = Tokenizer(sentence_piece())
    piecewise = pieces.new_detokenizer()
    for token_id in pieces.encode("hello world 日. " * 500):
        piecewise.push([token_id])
        assert len(getattr(piecewise, "_held")) <= 3  # noqa: B009 - a white-box bound


def test_tokenizer_unknown_decoder_is_refused() -> None:
    backend = sentence_piece()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match='decoder "WordPiece"'):
        Tokenizer(backend)


def test_tokenizer_facts_of_the_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_model(tmp_path))
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_token_ids == frozenset({0, 1, 2, 3})
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (0, 2)


def test_smollm2_round_trip_and_facts(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.eos_token_ids == (2,)
    for text in TEXTS:
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_encode_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        byte_level.encode("ab\ud83d")


def test_encode_ignores_truncation_and_padding_of_the_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = BackendTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abcdefghijkl")) == 12
    assert len(Tokenizer(backend).encode("ab")) == 2


def test_from_folder_needs_no_transformers_and_no_torch(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['torch'] = None\n"
        "from compiled_engine.tokenizer import Tokenizer\n"
        "t = Tokenizer.from_folder(sys.argv[1])\n"
        "print(t.decode(t.encode('ok')), t.has_chat_template)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["ok", "True"]


def test_from_folder_without_tokenizer_names_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        Tokenizer.from_folder(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


USER = {"role": "user", "content": "Hi"}


def with_template(source: str | dict[str, str]) -> Tokenizer:
    templates = {"default": source} if isinstance(source, str) else source
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(sentence_piece(), special_tokens=tokens, chat_templates=templates)


def test_apply_chat_template_smollm2(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.has_chat_template
    text = smollm2_tokenizer.apply_chat_template([{"role": "system", "content": "S"}, USER])
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(2)) == (1, 2)
    closed = smollm2_tokenizer.apply_chat_template([USER], add_generation_prompt=False)
    assert closed.endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize(
    "content", ["To be", " trailing  ", [{"type": "text", "text": "To be"}]], ids=str
)
def test_apply_chat_template_continues_the_final_message(content: object) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content if m.content is string else m.content[0].text }}{{ eos_token }}{% endfor %}"
    )
    text = with_template(source).apply_chat_template(
        [USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    expected = content if isinstance(content, str) else "To be"
    assert text == f"[user]Hi</s>[assistant]{expected}"


def test_apply_chat_template_continue_conflicts_are_refused() -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="together with add_generation_prompt"):
        tokenizer.apply_chat_template([USER], continue_final_message=True)
    for messages in ([], [{"role": "assistant", "content": None}]):
        with pytest.raises(InvalidRequestError, match="ends in text"):
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=False, continue_final_message=True
            )
    with pytest.raises(InvalidRequestError, match="leaves out the last message"):
        tokenizer.apply_chat_template(
            [USER, USER], add_generation_prompt=False, continue_final_message=True
        )


def test_apply_chat_template_passes_the_templates_own_message() -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match=r"^roles must alternate$"):
        tokenizer.apply_chat_template([USER])


def test_apply_chat_template_renders_like_hugging_face() -> None:
    source = (
        "{% generation %}\n"
        "  {%- for m in messages %}\n"
        "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "<{{ m.content }}>\n"
        "  {%- endfor %}\n"
        "{% endgeneration %}\n"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ flag }}"
    )
    messages = [{"role": "skip", "content": "no"}, USER]
    text = with_template(source).apply_chat_template(messages, tools=[{"é": "<b>"}], flag=True)
    assert text == '<Hi>[{"é": "<b>"}]4True'


def test_apply_chat_template_is_sandboxed() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(InvalidRequestError):
            with_template(source).apply_chat_template([USER])


def test_apply_chat_template_type_errors_are_the_clients() -> None:
    tokenizer = with_template("{{ 'x' + messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="cannot render these messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_apply_chat_template_chooses_tool_use_for_tools() -> None:
    tokenizer = with_template({"default": "plain", "tool_use": "with tools"})
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=[{}]) == "with tools"


def test_chat_template_sources_of_the_folder(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert not Tokenizer.from_folder(tmp_path).has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([USER])
    listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([USER]) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([USER]) == "new"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="no valid Jinja"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% for %}"),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_unreadable_template_or_settings_are_a_config_error(tmp_path, name, content):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError):
        Tokenizer.from_folder(tmp_path)


def test_has_tokenizer_knows_every_form(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).touch()
        assert has_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_spell_the_text(tokenizers, kind: str, text: str) -> None:
    """One after the other; some tokenizers put a space before a text, or drop its first one."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    whole = tokenizer.decode(ids)
    assert spelled == whole or spelled == " " + whole
    for token_id in tokenizer.special_token_ids:
        name = tokenizer.backend.id_to_token(token_id)
        assert tokenizer.token_bytes(token_id).decode() == name
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS, "hello hello  é世"])
def test_offsets_cut_the_text_at_its_tokens(tokenizers, kind: str, text: str) -> None:
    """Of a text as it was given, and of ids as they are decoded: both are where tokens begin."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    decoded = token_offsets(tokenizer, ids, skip_special_tokens=True)
    given = tokenizer.text_offsets(text, add_special_tokens=False)
    pairs = [(decoded, whole)]
    if kind != "metaspace":  # it does not know some of the characters
        pairs.append((given, text))
    for offsets, shown in pairs:
        assert len(offsets) == len(ids)
        assert offsets == sorted(offsets)
        ends = [*offsets, len(shown)][1:]
        for token_id, begin, end in zip(ids, offsets, ends, strict=True):
            own = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            cut = shown[begin:end]
            assert "\ufffd" in own or cut in (own, own.removeprefix(" ")), (own, cut)


def test_offsets_of_special_tokens_take_no_room_where_they_are_skipped(byte_level) -> None:
    ids = [1, *byte_level.encode("é"), 2, *byte_level.encode("x")]
    assert token_offsets(byte_level, ids, skip_special_tokens=True) == [0, 0, 0, 1, 1]
    assert token_offsets(byte_level, ids, skip_special_tokens=False) == [0, 12, 12, 13, 23]
    text = "<|im_start|>é<|im_end|>x"
    assert byte_level.text_offsets(text) == [0, 12, 12, 13, 23]


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize("absent", [None, *HARMONY])
def test_answers_and_calls_of_the_harmony_form_end_where_it_says(absent: str | None):
    """Whatever generation_config.json holds; a message's end is none of the answer's."""
    markers = [marker for marker in HARMONY if marker != absent]
    backend = BackendTokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>", *markers])
    tokenizer = Tokenizer(backend, eos_token_ids=[1])
    ids = [backend.token_to_id(marker) for marker in ("<|return|>", "<|call|>")]
    assert tokenizer.is_harmony == (absent is None)
    assert tokenizer.eos_token_ids == ((1, *ids) if absent is None else (1,))
