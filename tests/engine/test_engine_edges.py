"""The engine at its edges: smallest and largest settings, races on the host, odd vocabularies."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine import LLM, engine_process
from compiled_engine.engine import Engine
from compiled_engine.engine_process import Channel, EngineServer
from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.ipc import EngineFrame, new_endpoint, remove_endpoint
from compiled_engine.request import Request, SamplingParams, TokenEvent, validate_request
from compiled_engine.settings import scheduler_shape
from compiled_engine.step import StepExecutor
from tests.helpers.engines import (
    GREEDY,
    assert_idle,
    reference_greedy,
    run_requests,
    tiny_engine,
)
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=3)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(length)]


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "chunk", "max_len", "page", "pool"),
    [
        (1, 1, 24, 1, None),
        (1, 64, 24, 256, None),
        (3, 1, 24, 16, None),
        (2, 2, 24, 32, None),
        (5, 3, 300, 256, None),
        (5, 700, 512, 1, None),
        (5, 7, 24, 4, 24),
        (5, 7, 24, 4, 4),
        (2, 1, 2, 1, None),
        (2, 8, 2, 256, 256),
    ],
)
def test_smallest_and_largest_sizes(folder, rows, chunk, max_len, page, pool):
    """Prompts up to the last length that fits, answers of one token and up to the limit."""
    made = tiny_engine(
        folder,
        max_num_seqs=rows,
        chunked_prefill_size=chunk,
        max_model_len=max_len,
        block_size=page,
        max_total_tokens=pool,
        overlap_schedule="on",
    )
    longest = min(made.limits.max_model_len, made.limits.max_total_tokens)
    lengths = sorted({1, 2, 15, 16, 17, 255, 256, 257, longest - 2, longest - 1})
    prompts = [prompt_of(n, n) for n in lengths if 1 <= n < longest]
    most = [min(longest - len(p), 9) for p in prompts]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=None if longest - len(p) <= 9 and i % 2 else (1, most[i])[i % 2],
            ignore_eos=True,
        )
        for i, p in enumerate(prompts)
    ]
    result = run_requests(made, prompts, params)
    counts = [(1, n)[i % 2] for i, n in enumerate(most)]
    assert result.tokens == [
        reference_greedy(made, p, n) for p, n in zip(prompts, counts, strict=True)
    ]
    assert set(result.reasons) == {"length"}


# --- races on the host ------------------------------------------------------------------------


class _Traffic:
    """Random submits and aborts; checks each event, each end and some answers."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.longest = min(engine.limits.max_model_len, engine.limits.max_total_tokens)
        self.shared = prompt_of(7, self.longest)
        self.alive: dict[int, tuple[list[int], int]] = {}
        self.given: dict[int, list[int]] = {}

    def submit(self) -> None:
        rng, longest = self.rng, self.longest
        length = min(rng.choice((1, 2, 30, longest - 1, rng.randrange(1, longest))), longest - 1)
        kept = rng.randrange(length + 1) if rng.random() < 0.6 else 0
        prompt = self.shared[:kept] + [rng.randrange(5, 250) for _ in range(length - kept)]
        count = min(rng.choice((1, 2, 10)), longest - length)
        request = Request(
            request_id=len(self.given),
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
            priority=rng.choice((0, 0, 1, -1)),
            cache_salt=rng.choice(("", "a")),
        )
        validate_request(request, self.engine.limits)
        self.engine.loop.submit(request)
        self.alive[request.request_id] = prompt, count
        self.given[request.request_id] = []

    def abort(self) -> None:
        victim = self.rng.choice(sorted(self.alive))
        del self.alive[victim]
        self.engine.loop.abort(victim)

    def take(self, event: TokenEvent) -> None:
        assert event.request_id in self.alive, "an event after the end"
        given = self.given[event.request_id]
        given += event.token_ids
        if event.finish_reason is not None:
            prompt, count = self.alive.pop(event.request_id)
            assert len(given) == count
            if self.rng.random() < 0.1:
                assert given == reference_greedy(self.engine, prompt, count)

    def run(self, num_steps: int) -> None:
        loop, rng, step = self.engine.loop, self.rng, 0
        while step < num_steps or loop.has_work:
            if step < num_steps and rng.random() < 0.25:
                for _ in range(rng.choice((1, 1, 4, 20))):
                    self.submit()
            if rng.random() < 0.08:
                for _ in range(min(len(self.alive), rng.choice((1, 1, 12)))):
                    self.abort()
            for event in loop.step():
                self.take(event)
            step += 1
            assert step < 5000, "requests do not end"
        assert not loop.drain()
        assert not self.alive
        assert_idle(self.engine)
        assert not loop._unstarted
        assert not loop._seat_of


NARROW = {
    "max_submits": 1, "max_pieces": 1, "max_aborts": 1, "max_releases": 1, "num_candidates": 1,
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "limits"), [("on", NARROW), ("off", {})])
@pytest.mark.parametrize("reads_plans", [True, False], ids=["exact", "buckets"])
@pytest.mark.parametrize(
    ("rows", "chunk", "max_len", "page", "pool"),
    [(5, 50, 512, 16, 800), (8, 1, 64, 4, 64), (20, 7, 40, 1, 60)],
)
def test_random_traffic_leaves_nothing_behind(
    folder, monkeypatch, rows, chunk, max_len, page, pool, reads_plans, schedule, limits
):
    """Long uploads, more entries than a step takes, aborts at any time, both ways to size a step.

    "buckets" is what runs on a GPU: the host picks the size from numbers that are a step old.
    """
    monkeypatch.setattr(StepExecutor, "reads_plans", reads_plans)

    def narrowed(*args: Any) -> Any:
        return dataclasses.replace(scheduler_shape(*args), **limits)

    monkeypatch.setattr("compiled_engine.engine.scheduler_shape", narrowed)
    made = tiny_engine(
        folder,
        max_num_seqs=rows,
        chunked_prefill_size=chunk,
        max_model_len=max_len,
        block_size=page,
        max_total_tokens=pool,
        overlap_schedule=schedule,
    )
    _Traffic(made, seed=rows).run(40)


def test_rows_that_wait_for_pages_count_as_waiting(folder):
    made = tiny_engine(folder, max_num_seqs=4, max_model_len=64, max_total_tokens=64)
    loop = made.loop
    for index in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        prompt = prompt_of(index, 40)
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))
    loop.step()
    loop.step()
    assert (loop.num_running, loop.num_waiting) == (1, 5)
    while loop.has_work:
        loop.step()
    assert (loop.num_running, loop.num_waiting) == (0, 0)


def test_given_pool_may_exceed_the_default_share(folder, monkeypatch):
    """On a CPU the fixed share bounds the default only; what is asked for is bounded by memory."""
    monkeypatch.setattr("compiled_engine.kv_cache.CPU_CACHE_BYTES", 1)
    made = tiny_engine(folder, max_total_tokens=64)
    assert made.limits.max_total_tokens == 65
    with pytest.raises(ConfigError, match="no room for a KV page"):
        tiny_engine(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 256)  # pages of 256 bytes, 256 of them
        message = r"--max-total-tokens 6400 needs \d+ bytes.*65536 are available: lower it to 124"
        with pytest.raises(ConfigError, match=message):
            tiny_engine(folder, max_total_tokens=6400)


# --- vocabulary and end tokens ----------------------------------------------------------------


def test_end_id_beyond_the_tokenizer_harms_nobody(tmp_path):
    """The model's config names id 300; its tokenizer ends at 259."""
    made = tiny_engine(write_tiny_model(tmp_path, seed=3, eos_token_id=300))
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2)
    assert len(run_requests(made, [[5, 6, 7]], params).tokens[0]) == 4
    assert made.settings.eos_token_ids == (2,)


def test_padding_of_the_vocabulary_is_never_chosen_and_never_taken(tmp_path):
    """The model has 320 rows, its tokenizer 260 ids: the others win every step, if they may."""
    made = tiny_engine(write_tiny_model(tmp_path, seed=3, tie_word_embeddings=False))
    vocab_size = made.settings.vocab_size
    assert vocab_size == 260
    with torch.no_grad():
        made.loop.executor.model.lm_head.weight[vocab_size:] *= 1000.0
    hot = [
        SamplingParams(temperature=5.0, max_tokens=100, ignore_eos=True, seed=seed)
        for seed in range(19)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    result = run_requests(made, [[5, 6, 7]] * 20, [*hot, greedy])
    chosen = {token_id for ids in result.tokens for token_id in ids}
    assert max(chosen) < vocab_size
    assert len(chosen) > vocab_size // 2
    for ids in ([vocab_size], [319], [320], [5, 300]):
        request = Request(request_id=0, prompt_token_ids=ids, params=greedy)
        with pytest.raises(InvalidRequestError, match=str(ids[-1])):
            validate_request(request, made.limits)


def test_end_token_of_the_tokenizer_ends_answers(tmp_path):
    """The model's config names another end id than its tokenizer; both end an answer."""
    made = tiny_engine(write_tiny_model(tmp_path, seed=3, eos_token_id=0))
    for token_id in (0, 2):
        chosen = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={token_id: 100.0})
        result = run_requests(made, [[5, 6, 7]], chosen)
        assert result.tokens == [[token_id]]
        assert result.reasons == ["stop"]


def test_too_many_end_ids_are_refused(tmp_path):
    write_tiny_model(tmp_path)
    generation = {"bos_token_id": 1, "eos_token_id": list(range(10, 27))}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ConfigError, match="18 end-of-sequence ids; at most 16"):
        tiny_engine(tmp_path)


# --- engine process ---------------------------------------------------------------------------


def test_channel_never_blocks_while_nobody_reads():
    """An API process that is stopped, then killed, must not leave the engine inside a send."""
    endpoint = new_endpoint()
    channel = Channel(endpoint, os.getppid())

    def send_many() -> None:
        for _ in range(1500):
            channel.send(EngineFrame())

    sender = threading.Thread(target=send_many, daemon=True)
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    channel.close()
    remove_endpoint(endpoint)


def test_a_hang_in_the_last_read_is_a_busy_engine():
    """The last records are read without a launch: the step's age must run there too."""
    channel = SimpleNamespace(
        busy_since=None, receive=lambda wait_ms: [], is_status_due=lambda: False, status=None
    )
    seen = []

    def drain() -> list[TokenEvent]:
        seen.append(channel.busy_since)
        return []

    outbox = SimpleNamespace(num_unread=1)
    executor = SimpleNamespace(outbox=outbox)
    loop = SimpleNamespace(has_work=False, executor=executor, drain=drain, take_refusals=list)
    EngineServer(SimpleNamespace(loop=loop), channel)._turn()
    assert len(seen) == 1
    assert seen[0] is not None
    assert channel.busy_since is None


def test_engine_that_cannot_be_built_says_why(monkeypatch, folder):
    """Each kind of failure has its exit code, and the last frame the reason."""
    sent: list[EngineFrame] = []

    def no_channel(*_: Any) -> Any:
        status = SimpleNamespace()
        return SimpleNamespace(send=sent.append, close=lambda: None, status=status)

    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(engine_process, "Channel", no_channel)
    config = tiny_config(folder, max_model_len=100_000)
    assert engine_process.serve("", config, 0) == engine_process.EXIT_CONFIG
    assert "made for 512 positions" in str(sent[-1].fatal)
    monkeypatch.setattr(engine_process, "build_engine", fail)
    assert engine_process.serve("", config, 0) == engine_process.EXIT_FAILED
    assert sent[-1].fatal == "MemoryError: no room"


@pytest.mark.parametrize("name", ["load_format", "dtype", "device", "overlap_schedule"])
def test_unknown_choice_is_refused(folder, name):
    """From Python too, where no command line has looked at it."""
    with pytest.raises(ConfigError, match="is 'yes'; allowed are auto, ") as caught:
        tiny_engine(folder, **{name: "yes"})
    assert caught.value.param == name


def test_load_format_is_honoured(folder, tmp_path):
    """Weights of another format than the one asked for are refused, not loaded all the same."""
    tiny_engine(folder, load_format="safetensors")
    with pytest.raises(ConfigError, match=r"--load-format is gguf, but .* is no \.gguf file"):
        tiny_engine(folder, load_format="gguf")
    with pytest.raises(ConfigError, match=r"--load-format is safetensors, but .* is a GGUF model"):
        tiny_engine(tmp_path / "model.gguf", load_format="safetensors")
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        tiny_engine(tmp_path, load_format="safetensors", allow_pickle=True)
    assert caught.value.param == "allow_pickle", "the pickle was read"


def test_engine_process_serves_a_converted_gguf_file(monkeypatch, folder):
    """Once it is found it is a folder; asking for GGUF must not be held against that."""
    monkeypatch.setattr("compiled_engine.settings.resolve_model", lambda *_, **__: folder)
    config = dataclasses.replace(tiny_config(folder), model="some.gguf", load_format="gguf")
    status = SimpleNamespace()
    found = engine_process._find_folders(config, status, lambda *_: None)
    assert (found.model, found.load_format) == (str(folder), "auto")


def tiny_config(folder: Path, **options: Any) -> Any:
    from compiled_engine.config import EngineConfig

    return EngineConfig(model=str(folder), device="cpu", enforce_eager=True, **options)


# --- LLM --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(
        str(folder), dtype="float32", enforce_eager=True, device="cpu", max_model_len=128,
        cache_dir=Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent,
    )  # fmt: skip


def test_llm_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    """What Ctrl-C left running must neither reach the next call nor keep its rows."""
    launch, count = llm.engine.loop.executor.launch, iter(range(100))

    def interrupted(*args: Any, **options: Any) -> None:
        if next(count) == 3:
            raise KeyboardInterrupt
        launch(*args, **options)

    expected = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.loop.executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[8, 9], [10, 11, 12]], GREEDY)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
    assert_idle(llm.engine)


def forced(llm: LLM, text: str, **options: Any) -> Any:
    """An answer to a prompt, with the model's tokens replaced by the bytes of `text`."""
    wanted = iter(llm.tokenizer.encode(text, add_special_tokens=False))
    sample = llm.engine.loop.executor.pieces.sample

    def replace(variant: Any) -> Any:
        def sample_text(*args: Any) -> Any:
            sampled = sample[variant](*args)
            token = torch.full_like(sampled.tokens, next(wanted))
            return sampled._replace(tokens=token, is_stop=torch.zeros_like(sampled.is_stop))

        return sample_text

    llm.engine.loop.executor.pieces.sample = {variant: replace(variant) for variant in sample}
    try:
        params = SamplingParams(temperature=0.0, max_tokens=len(text), ignore_eos=True, **options)
        return llm.generate([[5, 6, 7]], params)[0]
    finally:
        llm.engine.loop.executor.pieces.sample = sample


def test_llm_stop_string_that_completes_first_wins(llm):
    """However the text is cut into tokens: "b" is complete before "abc" is."""
    result = forced(llm, "xabcx", stop=("abc", "b"))
    assert (result.text, result.finish_reason) == ("xa", "stop")
    assert forced(llm, "xabcx", stop=("c", "bc")).text == "xa"


def test_llm_stop_string_before_min_tokens_does_not_count(llm):
    """As the server does it: the search begins behind the first `min_tokens` tokens."""
    result = forced(llm, "ab.cd.ef", stop=(".",), min_tokens=4)
    assert (result.text, result.finish_reason) == ("ab.cd", "stop")


def test_llm_resolves_the_tokenizers_name(folder, monkeypatch):
    """`tokenizer` is a folder or an id, as everywhere: not a path alone."""
    asked = []

    def resolve(name: str, *_: Any, **__: Any) -> Path:
        asked.append(name)
        return folder

    monkeypatch.setattr("compiled_engine.settings.resolve_model", resolve)
    made = tiny_engine(folder, tokenizer="owner/name")
    assert asked == [str(folder), "owner/name"]
    assert made.settings.tokenizer_folder == folder
    assert made.settings.vocab_size == 260


def test_llm_closes_twice(folder):
    with LLM(str(folder), enforce_eager=True, device="cpu", max_model_len=16) as made:
        made.close()


def test_stop_given_as_one_string_is_refused():
    with pytest.raises(InvalidRequestError, match="stop is the string 'END'"):
        SamplingParams(stop="END")  # type: ignore[arg-type]
