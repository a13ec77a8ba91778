"""The arithmetic of `perf`'s GPU scenarios, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from compiled_engine import LLM
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops import reference
from compiled_engine.errors import InvalidRequestError
from compiled_engine.models import ARCHITECTURES
from compiled_engine.models.config import load_model_config
from compiled_engine.models.weight_targets import checkpoint_targets
from compiled_engine.request import Request, TokenEvent
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.state import SchedulerShape
from compiled_engine.tokenizer import Tokenizer
from perf import (
    decode,
    gpu_step,
    job_profile,
    kernel_profile,
    loading,
    offline,
    op_bench,
    qwen3_8b,
    scheduler,
)
from perf.ceilings import Ceilings
from perf.kernel_profile import Kernel, idle_us, kernel_table
from perf.op_families import OpCase, Sequences, num_copies, paged_calls
from tests.helpers.tiny_model import write_tiny_model

CEILINGS = Ceilings(
    read_tb_s=[4.0],
    copy_tb_s=[4.0],
    matmul_tflops=[800.0],
    sustained_tflops=[700.0],
    environment={},
)


@dataclass
class FakeLoop:
    """Admits `per_step` requests a step; each then gets a token a step."""

    per_step: int
    queue: list[Request] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)  # id -> tokens left
    seconds: float = 0.0
    choice: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(step_times=None))

    def submit(self, request: Request) -> None:
        self.queue.append(request)

    def abort(self, request_id: int) -> None:
        self.running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.running)

    def step(self) -> list[TokenEvent]:
        self.seconds += 0.004
        for request in self.queue[: self.per_step]:
            self.running[request.request_id] = request.params.max_tokens or 0
        del self.queue[: self.per_step]
        events = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            reason = None if self.running[request_id] else "length"
            if reason:
                del self.running[request_id]
            events.append(TokenEvent(request_id, [0], reason))
        return events

    def drain(self) -> list[TokenEvent]:
        return []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    loop = FakeLoop(per_step=2)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: loop.seconds))
    return decode.Driver(SimpleNamespace(loop=loop), qwen3_8b.Prompts())


def test_steady_steps_are_those_in_which_all_rows_decode(fake: decode.Driver):
    # Rows start in steps 1, 1, 2, 2: rows of the second pair are one token behind.
    steady = decode.measure_steady(fake, 4)
    assert steady.step_s == pytest.approx(0.004)
    # From 5 and 4 tokens known to 255 and 254, of which the last was not yet followed by a step.
    known = (5 + 254) / 2 * 2 + (4 + 253) / 2 * 2
    assert steady.context_tokens == pytest.approx(4 * (1024 - 1) + known)
    assert not fake.loop.has_work


def test_decode_rows_stand_over_the_bytes_of_a_step(fake: decode.Driver):
    rows = list(decode.measure_decode(fake, CEILINGS, 3))
    by_key = {(row.metric, row.batch): row for row in rows}
    assert {batch for _, batch in by_key} == set(decode.BATCH_SIZES)
    step = by_key["decode_step_ms", 1]
    assert list(step.values) == pytest.approx([4.0] * 3)
    over = by_key["decode_step_over_floor", 1]
    floor_ms = (qwen3_8b.step_weight_bytes() + 1152 * qwen3_8b.KV_BYTES_PER_TOKEN) / 4.0e9
    assert list(over.values) == pytest.approx([4.0 / floor_ms] * 3, rel=1e-3)


def test_intervals_are_those_between_submit_and_the_prompts_first_token(fake: decode.Driver):
    fake.loop.per_step = 1
    fake.loop.choice.step_times = None
    with pytest.raises(AssertionError, match="without max_step_ms"):
        list(decode.measure_itl(fake, 15.0, 3))
    fake.loop.choice.step_times = "limits"
    rows = {row.metric: row for row in decode.measure_itl(fake, 2.0, 3)}
    assert list(rows["itl_p99_over_limit"].values) == pytest.approx([2.0] * 3)
    with decode.limited_steps(fake.loop, is_limited=False):
        assert fake.loop.choice.step_times is None
    assert fake.loop.choice.step_times == "limits"


def test_prefill_ends_with_the_last_prompts_token(
    fake: decode.Driver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(offline, "time", SimpleNamespace(perf_counter=lambda: fake.loop.seconds))
    rows = {row.metric: row for row in offline.measure_prefill(fake, CEILINGS, 3)}
    # Two prompts a step, four steps.
    assert list(rows["prefill_tok_s"].values) == pytest.approx([65536 / 0.016] * 3)
    share = 1068.7e12 / 0.016 / 800e12
    assert list(rows["prefill_share_of_matmul"].values) == pytest.approx([share] * 3, rel=1e-3)


def test_shape_costs_what_the_model_has(tmp_path: Path):
    qwen3_8b.write_folder(tmp_path)
    config = load_model_config(tmp_path)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config)
    numels = {name: p.numel() for name, p in model.named_parameters()}
    read = sum(n for name, n in numels.items() if name != "model.embed_tokens.weight")
    assert qwen3_8b.step_weight_bytes() == 2 * read
    assert qwen3_8b.KV_BYTES_PER_TOKEN == 147_456
    assert qwen3_8b.prefill_flops([8192] * 8) == pytest.approx((910 + 158) * 1e12, rel=2e-3)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == qwen3_8b.VOCAB_SIZE
    assert tokenizer.eos_token_ids == ()
    ids = qwen3_8b.Prompts(3).one(50)
    detokenizer = tokenizer.new_detokenizer()
    pieces = [detokenizer.push([token]) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_prompts_are_seeded_and_different():
    first, again = qwen3_8b.Prompts(1).many(3, 8), qwen3_8b.Prompts(1).many(3, 8)
    assert first == again
    assert len({tuple(prompt) for prompt in first}) == 3


def test_parts_are_chosen_by_name():
    assert gpu_step.chosen_parts(None) == list(gpu_step.PARTS)
    assert gpu_step.chosen_parts("itl,decode") == ["decode", "itl"]
    assert gpu_step.chosen_parts("ceilings") == []
    with pytest.raises(SystemExit, match="no part speed; there are ceilings, load"):
        gpu_step.chosen_parts("speed")


def test_checkpoint_for_loading_fits_the_model(tmp_path: Path):
    qwen3_8b.write_folder(tmp_path, num_hidden_layers=2)
    config = load_model_config(tmp_path)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config)
    wanted = {name: target.shape for name, target in checkpoint_targets(model, ()).items()}
    shapes = loading.checkpoint_shapes(2)
    assert shapes == wanted
    shards = loading.split_shards(shapes, 3)
    assert list(itertools.chain.from_iterable(shards)) == list(shapes)
    assert all(shards)


def test_checkpoint_files_are_safetensors_of_numbers(tmp_path: Path):
    shapes = {f"t{index}": (1 << index, 48) for index in range(5)}
    num_bytes = loading.write_checkpoint(tmp_path, shapes, {}, 2)
    files = sorted(tmp_path.glob("*.safetensors"))
    tensors = {name: t for path in files for name, t in load_file(path).items()}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
    assert sum(t.nbytes for t in tensors.values()) == num_bytes
    for tensor in tensors.values():
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
    assert tensors["t4"].unique().numel() > 100
    assert loading._read_s(tmp_path) > 0


def test_rates_of_an_op_stand_over_its_ceiling():
    by_bytes = OpCase(name="x", num_bytes=2e9, candidates={})
    rows = {r.metric: r for r in op_bench.rates(by_bytes, "ours", [1e-3], CEILINGS)}
    assert rows["op_us"].values == pytest.approx([1000.0])
    assert rows["op_tb_s"].values == pytest.approx([2.0])
    assert rows["op_share_of_ceiling"].values == pytest.approx([0.5])
    assert rows["op_us"].case == "x: ours"
    by_flops = OpCase(name="x", num_flops=4e11, candidates={})
    rows = {r.metric: r for r in op_bench.rates(by_flops, "ours", [1e-3], CEILINGS)}
    assert rows["op_tflops"].values == pytest.approx([400.0])
    assert rows["op_share_of_ceiling"].values == pytest.approx([0.5])
    assert (num_copies(1e6), num_copies(1e8), num_copies(1e12)) == (36, 10, 2)


def test_paged_calls_compute_causal_attention():
    sequences = Sequences([35, 7, 40], [35, 1, 2], num_shared=0)
    (call,) = paged_calls(sequences, 1, is_decode=False, device="cpu")
    q, k_cache, v_cache, table, *_ = call.args
    out = reference.paged_attention(*call.args)
    # The first row is a whole prompt: plain causal attention of its own keys and values.
    pages = table[0, : -(-35 // 16)].long()
    k, v = (cache[pages].flatten(0, 1)[:35] for cache in (k_cache, v_cache))
    plain = reference.causal_attention(q[:35], k, v, qwen3_8b.HEAD_DIM**-0.5)
    torch.testing.assert_close(out[:35], plain, rtol=2e-2, atol=2e-2)
    assert out.shape[0] == 38


def test_shared_pages_are_the_first_of_every_row_and_count_once():
    sequences = Sequences([48, 40, 33], [1, 1, 1], num_shared=32)
    table = sequences.indices("cpu")["block_table"]
    assert (table[:3, :2] == table[0, :2]).all()
    own = table[:3, 2].tolist()
    assert len({*own, *table[0, :2].tolist()}) == 5
    assert sequences.num_pages == 6
    assert sequences.kv_tokens == 48 + 8 + 1


def test_scheduler_bench_decodes_in_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("NUM_ROWS", 6), ("NUM_PAGES", 60), ("CONTEXT", 40)):
        monkeypatch.setattr(scheduler, name, value)
    shape = SchedulerShape(
        max_rows=6, num_pages=9, page_size=16, max_model_len=256, max_tokens=64, max_submits=2
    )
    driver = CompileDriver(EngineConfig(model="none", enforce_eager=True, cache_dir=tmp_path))
    bench = scheduler._Bench(shape, driver, "torch", "cpu")
    bench.fill(60)
    assert (bench.shape.num_pages, bench.num_decoding) == (60, 6)
    before = bench.state.num_tokens[:-1].clone()
    bench.step(InboxBuilder(bench.shape).take()[0])
    assert (bench.state.num_tokens[:-1] - before).tolist() == [1] * 6


def test_idle_time_is_what_no_kernel_covers():
    kernels = [Kernel("a", 0, 10), Kernel("b", 8, 12), Kernel("a", 15, 25), Kernel("c", 16, 20)]
    assert idle_us(kernels) == pytest.approx(3.0)
    table = kernel_table(kernels, 2).splitlines()
    assert table[2] == "| `a` | 1 | 10.00 | 10.0 | 80.0% |"
    assert len(table) == 5


def test_parts_of_a_step_add_up_and_know_their_floors():
    """Two whole steps between parts of others; kernels overlap by 1 us."""
    names = [kernel_profile._FIRST, "gather"]
    for _ in range(qwen3_8b.NUM_LAYERS):
        names += ["nvjet_a", "rope", "decode_attention", "row_kernel", "hopper_kernel", "sum"]
        names += ["tile_kernel"]
    names += ["nvjet_head", "greedy"]
    runs = [*names[5:], *names, *names, *names[:7]]
    kernels = [Kernel(name, 4.0 * i, 4.0 * i + 5.0) for i, name in enumerate(runs)]
    slots, num_steps = kernel_profile.step_parts(kernels)
    assert num_steps == 2
    layers = 2 * qwen3_8b.NUM_LAYERS
    counts = {name: len(taken) for name, taken in slots.items()}
    assert counts == {
        "before the first and after the head": 6,
        "qkv": layers, "between products": 2 * layers, "attention": layers, "o": layers,
        "gate_up": layers, "down": layers, "head": 2,
    }  # fmt: skip
    assert sum(map(sum, slots.values())) == pytest.approx(2 * 4.0 * len(names))
    read = 2e12
    floors = kernel_profile.part_floors(3, read)
    assert floors["o"] == pytest.approx(4096 * 4096 * 2 / read * 1e6)
    whole = qwen3_8b.NUM_LAYERS * sum(v for k, v in floors.items() if k != "head") + floors["head"]
    assert whole == pytest.approx(qwen3_8b.step_bytes(3 * 1024, 3) / read * 1e6, rel=1e-3)
    table = kernel_profile.part_table(kernels, 3, read)
    assert f"| o | {4.0 * qwen3_8b.NUM_LAYERS:.1f} | 4.00 | {floors['o']:.2f} |" in table


def test_a_layer_is_shown_in_order_and_adds_up():
    """Layers of three kernels that overlap by 1 us; the last one of a step is longer."""
    step = [kernel_profile._FIRST, *["decode_attention", "row_kernel", "norm"] * 4, "head"]
    kernels = [Kernel(name, 4.0 * i, 4.0 * i + 5.0) for i, name in enumerate([*step, *step])]
    table = kernel_profile.layer_table(kernels).splitlines()
    assert table[2:5] == [
        f"| `{name}` | 5.00 | 4.00 |" for name in ("decode_attention", "row_kernel", "norm")
    ]
    assert table[5:] == ["| 6 layers of 3 kernels | | 12.00 |"]
    assert kernel_profile.layer_table(kernels[:2]) == "no layers were seen\n"


def test_a_job_is_told_by_kinds_of_steps():
    """Two steps with prompts, three of decoding; kernels overlap by 1 us, steps are 3 us apart."""
    first = kernel_profile._FIRST
    prompt = [first, "nvjet_a", "tiles_kernel", "decode_attention", "rope"]
    decode = [first, "row_kernel", "decode_attention"]
    kernels, at = [Kernel("copy", 0.0, 5.0)], 10.0
    for names in (prompt, prompt, decode, decode, decode):
        for name in names:
            kernels.append(Kernel(name, at, at + 5.0))
            at += 4.0
        at += 4.0
    times, counts = job_profile.step_times(job_profile.split_steps(kernels))
    assert counts == {"prompts": 2, "decode": 3}
    assert times["prompts"] == {"other": 2 * 9.0, "products": 2 * 4.0, "attention": 2 * 8.0}
    assert times["decode"] == {"other": 3 * 5.0, "products": 3 * 4.0, "attention": 3 * 4.0}
    job = job_profile.Job(title="", work=list, flops=6e6, attention=2e6, step_bytes=5e6)
    ceilings = SimpleNamespace(matmul=1e12, read=1e12)
    table = job_profile.job_table(kernels, job, ceilings)  # type: ignore[arg-type]
    assert "| 2 with prompts | products | 0.0 | 0.0 | 50% |" in table
    assert "| 2 with prompts | attention | 0.0 | 0.0 | 12% |" in table
    assert "| 3 with decode | all | 0.0 | 0.0 | 38% |" in table
    assert "| decode | `row_kernel` | 3 | 5.00 | 0.0 |" in table


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    base = tmp_path_factory.mktemp("perf-llm")
    options = {"device": "cpu", "enforce_eager": True, "max_num_seqs": 4, "cache_dir": base}
    with LLM(str(write_tiny_model(base / "model")), chunked_prefill_size=64, **options) as made:
        yield made


def test_jobs_run_through_the_python_api(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    for name, value in (
        ("E2E_BATCH", 3), ("E2E_INPUT", 20), ("E2E_OUTPUT", 4), ("AGENTIC_BATCH", 3),
        ("AGENTIC_SHARED", 33), ("AGENTIC_OWN", 5), ("AGENTIC_OUTPUT", 3),
    ):  # fmt: skip
        monkeypatch.setattr(offline, name, value)
    prompts = qwen3_8b.Prompts(vocab_size=260)
    cached: list[int] = []
    generate = llm.generate

    def spy(*args):
        outputs = generate(*args)
        cached.append(outputs[0].num_cached_tokens)
        return outputs

    monkeypatch.setattr(llm, "generate", spy)
    (e2e,) = offline.measure_e2e(llm, prompts, 1)
    assert (e2e.case, e2e.batch, len(e2e.values)) == ("3x20+4", 3, 1)
    assert cached == [0, 0]
    cached.clear()
    rows = list(offline.measure_agentic(llm, prompts, 2))
    assert [row.case for row in rows] == ["cold_prefix", "warm_prefix"]
    assert cached == [0, 32] * 3


def test_reset_prefix_cache_forgets_and_nothing_else_changes(llm: LLM):
    prompt = qwen3_8b.Prompts(9, vocab_size=260).one(70)
    params = offline.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    stats = llm.engine.loop.stats
    free = stats.num_pages_free + stats.num_pages_cached
    assert llm.generate(prompt, params)[0].num_cached_tokens == 64
    for _ in range(2):
        llm.reset_prefix_cache()
        again = llm.generate(prompt, params)[0]
        assert again.num_cached_tokens == 0
        assert again.token_ids == first.token_ids
    again = llm.generate(prompt, params)[0]
    assert (again.num_cached_tokens, again.token_ids) == (64, first.token_ids)
    assert stats.num_pages_free + stats.num_pages_cached == free
    assert stats.num_scheduler_errors == 0


def test_reset_prefix_cache_is_refused_while_requests_run(llm: LLM):
    params = offline.SamplingParams(max_tokens=4)
    request = Request(request_id=1 << 41, prompt_token_ids=[1, 2, 3], params=params)
    llm.engine.loop.submit(request)
    with pytest.raises(InvalidRequestError, match="requests are running"):
        llm.reset_prefix_cache()
    llm.engine.loop.abort(request.request_id)
    llm.reset_prefix_cache()


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_steady_steps_of_a_real_engine(
    llm: LLM, is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decode, "INPUT_LEN", 70)
    monkeypatch.setattr(decode, "OUTPUT_LEN", 48)
    loop = llm.engine.loop
    monkeypatch.setattr(loop, "is_overlapped", is_overlapped)
    driver = decode.Driver(llm.engine, qwen3_8b.Prompts(vocab_size=260))
    steady = decode.measure_steady(driver, 3)
    assert 0 < steady.step_s < 10
    assert 3 * 70 < steady.context_tokens < 3 * (70 + 48)
    assert not loop.has_work
