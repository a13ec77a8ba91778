"""Grammar texts to compiled grammars, and the process that tries every grammar first.

A compile in C++ can neither be stopped nor survive its own crash. So each grammar is first compiled
in a child that is thrown away: with a time limit, a memory limit and half the stack. Only what
passed there is compiled in the engine process. The parent of those children (this module's `main`)
loads the library once and forks one child for each grammar; it has a single thread.

xgrammar is imported here only, inside functions.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from compiled_engine.request import GrammarSpec

# Processor time of one compile, with the first mask; on a busy machine it may wait for that longer.
TIME_LIMIT_S = 5
WALL_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 1 << 30
# What a compiled grammar may occupy.
SIZE_LIMIT_BYTES = 64 << 20
STACK_LIMIT_BYTES = 4 << 20
# Blanks and line breaks between two tokens of JSON; inside strings they are not limited.
MAX_WHITESPACE = 8

_TOO_LARGE = "the grammar is too complex: compiling it needs too much memory or nesting"
_TOO_SLOW = f"the grammar is too complex: compiling takes more than {TIME_LIMIT_S} s"
_DAY_28, _DAY_30 = "(0[1-9]|1[0-9]|2[0-8])", "(0[1-9]|[12][0-9]|30)"
_DAY_31 = "(0[1-9]|[12][0-9]|3[01])"
_DATE = f"[1-9][0-9]{{3}}-((0[13578]|1[02])-{_DAY_31}|(0[469]|11)-{_DAY_30}|02-{_DAY_28})"
_HOUR, _SIXTY = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:{_SIXTY})"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# The library's own forms let through 31 February, leading zeros, and fractions without end.
STRICT_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}$",
}
# Keywords whose values are data, not schemas.
_DATA = ("const", "enum", "default", "examples", "example")
_PLACE = re.compile(r"^\[[0-9:]+\] \S+?:\d+: ")


class TokenTable(msgspec.Struct, frozen=True):
    """The vocabulary as grammars see it.

    Attributes:
        tokens: text of each id as the tokenizer stores it, "" where an id has none.
        special_ids: ids whose text no grammar but a structural tag may produce.
        stop_ids: ids that end an answer; at least one.
        backend: the tokenizer.json text, which says how `tokens` are encoded.
    """

    tokens: list[str]
    special_ids: list[int]
    stop_ids: list[int]
    backend: str


class Trial(msgspec.Struct):
    """A grammar to try."""

    number: int
    spec: GrammarSpec


class Verdict(msgspec.Struct):
    """What became of a trial; no error means that it can be compiled."""

    number: int
    error: str | None = None


class Vocabularies(msgspec.Struct):
    """xgrammar's own serialised vocabularies; a token without text is never allowed.

    Attributes:
        json: without special tokens, and without control characters but line breaks: the library
            lets them into strings of limited length, where JSON forbids them.
        plain: without special tokens.
        special: all tokens, but control characters other than white space.
    """

    json: str
    plain: str
    special: str


class Compiler:
    """Compiles grammars for one vocabulary; usable from several threads.

    Args:
        vocabularies: from `vocabularies_of`.
    """

    def __init__(self, vocabularies: Vocabularies) -> None:
        import xgrammar

        self._library = xgrammar
        read = xgrammar.TokenizerInfo.deserialize_json
        json_info, plain, special = map(
            read, (vocabularies.json, vocabularies.plain, vocabularies.special)
        )
        infos = {kind: plain for kind in ("regex", "choice", "grammar")}
        infos |= {"json_schema": json_info, "json_object": json_info, "structural_tag": special}
        self._infos = infos
        self._vocab_size = plain.vocab_size
        self._token_bytes: list[bytes] | None = None

    @property
    def token_bytes(self) -> list[bytes]:
        """The text of every token id, special tokens included."""
        if self._token_bytes is None:
            # Each of them leaves some tokens out.
            parts = (self._infos[kind].decoded_vocab for kind in ("structural_tag", "regex"))
            self._token_bytes = [a or b for a, b in zip(*parts, strict=True)]
        return self._token_bytes

    def compile(self, spec: GrammarSpec) -> Any:
        """The compiled grammar. Takes any time and any memory.

        Raises:
            RuntimeError: the grammar is wrong.
        """
        info = self._infos[spec.kind]
        compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        if spec.kind in ("json_schema", "json_object"):
            text = '{"type": "object"}'
            if spec.kind == "json_schema":
                text = json.dumps(strict_formats(json.loads(spec.text)))
            return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        if spec.kind == "regex":
            return compiler.compile_regex(spec.text)
        if spec.kind == "structural_tag":
            return compiler.compile_structural_tag(strict_formats(json.loads(spec.text)))
        return compiler.compile_grammar(_choice(spec.text) if spec.kind == "choice" else spec.text)

    def new_matcher(self, compiled: Any) -> Any:
        """The state of one answer."""
        return self._library.GrammarMatcher(compiled)

    def new_mask(self) -> Any:
        """Room for one mask, [1, words] int32 on the CPU."""
        return self._library.allocate_token_bitmask(1, self._vocab_size)


def vocabularies_of(table: TokenTable) -> Vocabularies:
    """What `Compiler` needs. Takes a moment."""
    import xgrammar

    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(table.backend)

    def info(tokens: list[str]) -> Any:
        return xgrammar.TokenizerInfo(
            tokens,
            vocab_type=metadata["vocab_type"],
            vocab_size=len(tokens),
            stop_token_ids=list(table.stop_ids),
            add_prefix_space=metadata["add_prefix_space"],
        )

    whole = info(table.tokens)
    special = set(table.special_ids)
    made = []
    control = set(range(32))
    nothing: set[int] = set()
    for dropped, forbidden in (
        (special, control - set(b"\n\r")),
        (special, nothing),
        (nothing, control - set(b"\t\n\r")),
    ):
        tokens = [
            "" if token_id in dropped or not forbidden.isdisjoint(text) else table.tokens[token_id]
            for token_id, text in enumerate(whole.decoded_vocab)
        ]
        made.append(str(info(tokens).serialize_json()))
    return Vocabularies(*made)


def strict_formats(value: Any) -> Any:
    """A schema, or what holds schemas, with patterns instead of formats that need them."""
    if isinstance(value, list):
        return [strict_formats(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {name: item if name in _DATA else strict_formats(item) for name, item in value.items()}
    kind = made.get("format")
    if made.get("type") == "string" and isinstance(kind, str) and kind in STRICT_FORMATS:
        del made["format"]
        made["pattern"] = STRICT_FORMATS[kind]
    return made


def _choice(text: str) -> str:
    """A grammar for one of several texts, given as a JSON list."""
    choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
    return "root ::= " + " | ".join(choices)


def short_message(error: BaseException) -> str:
    """The library's message without the places in its source text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _PLACE.sub("", lines[0])[:500]


# --- the process ------------------------------------------------------------------------------


@dataclass
class _Child:
    number: int
    pid: int
    deadline: float
    output: bytes = b""


class _Forks:
    """Children that each try one grammar, by the pipe on which they answer."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._children: dict[int, _Child] = {}

    @property
    def pipes(self) -> list[int]:
        return list(self._children)

    def timeout_s(self) -> float | None:
        """Until the next deadline."""
        if not self._children:
            return None
        return max(0.0, min(c.deadline for c in self._children.values()) - time.monotonic())

    def start(self, trial: Trial) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _try_in_child(self._compiler, trial, write_end)
        os.close(write_end)
        self._children[read_end] = _Child(trial.number, pid, time.monotonic() + WALL_LIMIT_S)

    def read(self, pipe: int) -> Verdict | None:
        """Takes what a child wrote; its verdict once it has ended."""
        child = self._children[pipe]
        part = os.read(pipe, 1 << 16)
        child.output += part
        if part:
            return None
        status = self._forget(pipe)
        if not child.output:
            is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
            return Verdict(child.number, _TOO_SLOW if is_slow else _TOO_LARGE)
        return Verdict(child.number, child.output.decode() if child.output != b"ok" else None)

    def kill_late(self) -> list[Verdict]:
        """Ends children that are past their deadline."""
        now = time.monotonic()
        late = [pipe for pipe, child in self._children.items() if child.deadline <= now]
        verdicts = []
        for pipe in late:
            child = self._children[pipe]
            os.kill(child.pid, signal.SIGKILL)
            self._forget(pipe)
            verdicts.append(Verdict(child.number, _TOO_SLOW))
        return verdicts

    def _forget(self, pipe: int) -> int:
        """The child's wait status."""
        child = self._children.pop(pipe)
        os.close(pipe)
        return os.waitpid(child.pid, 0)[1]


def _try_in_child(compiler: Compiler, trial: Trial, write_end: int) -> None:
    """Compiles, makes the first mask, writes "ok" or an error and ends the process."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT_S, TIME_LIMIT_S + 1))
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_LIMIT_BYTES, STACK_LIMIT_BYTES))
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        compiled = compiler.compile(trial.spec)
        mask = compiler.new_mask()
        compiler.new_matcher(compiled).fill_next_token_bitmask(mask, 0)
        size = int(compiled.memory_size_bytes)
        result = "ok"
        if not mask.any():
            result = "the grammar allows no answer at all"
        if size > SIZE_LIMIT_BYTES:
            result = (
                f"the grammar is too large: {size >> 20} MiB compiled; at most "
                f"{SIZE_LIMIT_BYTES >> 20} MiB are allowed"
            )
    except (MemoryError, RecursionError):
        result = ""
    except BaseException as error:
        result = "" if "bad_alloc" in str(error) else short_message(error)
    os.write(write_end, result.encode())
    os._exit(0)


def main() -> None:
    """Reads vocabularies, then trials, as JSON lines from stdin; writes verdicts to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    # What the library prints about a client's grammar is nobody's business.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    lines = _Lines(sys.stdin.fileno())
    first = lines.read()
    while not first:
        first = lines.read()
    forks = _Forks(Compiler(msgspec.json.decode(first[0], type=Vocabularies)))
    waiting = first[1:]
    while True:
        for line in waiting:
            forks.start(msgspec.json.decode(line, type=Trial))
        waiting = []
        ready, _, _ = select.select([lines.descriptor, *forks.pipes], [], [], forks.timeout_s())
        verdicts = [forks.read(pipe) for pipe in ready if pipe != lines.descriptor]
        for verdict in (*verdicts, *forks.kill_late()):
            if verdict is not None:
                os.write(1, msgspec.json.encode(verdict) + b"\n")
        if lines.descriptor in ready:
            waiting = lines.read()


class _Lines:
    """Whole lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes]:
        """The lines that one read completes; ends the process where there is no more."""
        part = os.read(self.descriptor, 1 << 20)
        if not part:
            os._exit(0)
        *lines, self._rest = (self._rest + part).split(b"\n")
        return lines


if __name__ == "__main__":
    main()
