"""Text to token ids and back, and chat messages to prompt text, for one model folder.

Owns reading the tokenizer files of a model folder. Incremental decoding lives in `detokenizer.py`,
template rendering in `chat_template.py`. Uses `tokenizers` directly where the folder has a
tokenizer.json; imports transformers (seconds) only to convert older formats. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from compiled_engine.chat_template import ChatTemplates
from compiled_engine.detokenizer import Detokenizer, DetokenizerFactory
from compiled_engine.errors import ConfigError, InvalidRequestError

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)

# Markers of the Harmony form, which gpt-oss writes, and those of them that end the model's turn.
_HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HARMONY_ENDS = ("<|return|>", "<|call|>")

# What transformers can convert where there is no tokenizer.json.
_OLDER_FORMS = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer of one model; immutable and safe to use from several threads.

    Attributes:
        vocab_size: largest token id plus 1, added tokens included; embedding padding is not.
        special_token_ids: ids that `skip_special_tokens` leaves out of text.
        eos_token_ids: ids that end an answer: the tokenizer's own end token, and those of
            generation_config.json, or of config.json where that names none; of a tokenizer of the
            Harmony form the ends of an answer and of a call.
        is_harmony: its vocabulary has the markers of the Harmony form.
        bos_token: text of the begin token, or None.
        eos_token: text of the end token, or None.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        tokens = dict(special_tokens or {})
        self.bos_token: str | None = tokens.get("bos_token")
        self.eos_token: str | None = tokens.get("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        own_eos = backend.token_to_id(self.eos_token) if self.eos_token else None
        markers = {token.content: token_id for token_id, token in added.items() if token.special}
        self.is_harmony = markers.keys() >= {*_HARMONY_MARKERS, *_HARMONY_ENDS}
        ends = [*eos_token_ids, *([] if own_eos is None else [own_eos])]
        ends += [markers[token] for token in _HARMONY_ENDS if self.is_harmony]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._chat_templates = ChatTemplates(chat_templates or {}, tokens)
        self._detokenizers = DetokenizerFactory(backend, self.special_token_ids)

    @classmethod
    def from_folder(cls, folder: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Reads the tokenizer files of a model folder.

        Args:
            folder: holds tokenizer.json, or an older format that transformers can convert.
            trust_remote_code: allow tokenizer code shipped inside the folder.

        Raises:
            ConfigError: no tokenizer there, or one that cannot be read or run token by token.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder", param="tokenizer")
        settings = _read_object(folder / "tokenizer_config.json")
        return cls(
            _load_backend(folder, trust_remote_code=trust_remote_code),
            special_tokens=_special_tokens(folder, settings),
            chat_templates=_chat_template_sources(folder, settings),
            eos_token_ids=_eos_token_ids(folder),
        )

    @property
    def backend(self) -> BackendTokenizer:
        """The `tokenizers` object itself, for grammar compilers; do not change it."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work at all."""
        return bool(self._chat_templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any Unicode text; names of special tokens inside become those tokens.
            add_special_tokens: add what the tokenizer puts around a text, such as a begin token.
                Prompts rendered by a chat template already hold it.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # The library's message for text that has no UTF-8 form does not say so.
            _refuse_lone_surrogate(text)
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all `ids` at once; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token spells by itself; special tokens spell their names."""
        return self._detokenizers.token_bytes(token_id)

    def text_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where in `text` each token of `encode` begins, in characters (code points).

        Tokens that the tokenizer adds take no room; those of one character begin together.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        starts, end = [], 0
        for begin, token_end in encoding.offsets:
            # White space that the tokenizer leaves out of its ranges belongs to the token behind.
            starts.append(min(begin, end) if token_end > begin else end)
            end = max(end, token_end)
        return starts

    @property
    def chat_template_text(self) -> str:
        """The source of all chat templates, to recognise a model family by."""
        return self._chat_templates.text

    @property
    def chat_template_variables(self) -> frozenset[str]:
        """Names that the chat templates read, such as `messages`, `tools`, `enable_thinking`."""
        return self._chat_templates.variables

    def new_detokenizer(
        self, *, skip_special_tokens: bool = True, kept_tokens: Collection[str] = ()
    ) -> Detokenizer:
        """An incremental decoder for one answer; its joined pieces equal `decode` of all ids.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            kept_tokens: special tokens that stay in it even so.
        """
        kept_ids = {self._backend.token_to_id(token) for token in kept_tokens}
        return self._detokenizers.new(skip_special_tokens=skip_special_tokens, kept_ids=kept_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat. Encode it with `add_special_tokens=False`.

        Args:
            messages: `{"role": ..., "content": ...}` objects as templates expect them.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end inside the last message, so that the model continues it.
            **template_kwargs: further template variables, such as `tools` or `enable_thinking`.

        Raises:
            InvalidRequestError: no template, or the template refuses the messages; carries the
                template's own message.
        """
        return self._chat_templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )


def _refuse_lone_surrogate(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"text holds a lone surrogate at character {error.start}, which is no valid Unicode",
            param="prompt",
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer in any form that `Tokenizer.from_folder` reads."""
    return any((folder / name).exists() for name in ("tokenizer.json", *_OLDER_FORMS))


def _load_backend(folder: Path, *, trust_remote_code: bool) -> BackendTokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return BackendTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} cannot be read: {error}", param="tokenizer") from error
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} holds no tokenizer: expected tokenizer.json or tokenizer.model; "
            "--tokenizer names another folder",
            param="tokenizer",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{folder}: tokenizer cannot be converted: {error}", param="tokenizer"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, BackendTokenizer):
        raise ConfigError(
            f"{folder}: {type(tokenizer).__name__} has no tokenizer.json form", param="tokenizer"
        )
    return backend


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", param="tokenizer") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, from tokenizer_config.json or the older special_tokens_map.json."""
    older = _read_object(folder / "special_tokens_map.json")
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = settings.get(name) or older.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _chat_template_sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Template name -> text: chat_template.jinja, else the entry of tokenizer_config.json."""
    sources: dict[str, str] = {}
    listed = settings.get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        try:
            sources.update({str(entry["name"]): entry["template"] for entry in listed})
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: chat_template is a list of something other "
                "than objects with name and template",
                param="tokenizer",
            ) from error
    paths = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        paths["default"] = folder / "chat_template.jinja"
    for name, path in paths.items():
        try:
            sources[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", param="tokenizer") from error
    return sources


def _eos_token_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if ids:
            return ids
    return []
