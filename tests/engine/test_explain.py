"""`compiled-engine explain`: what it says of tiny models, for a CPU and for a GPU that is not here.

Nothing is compiled here: graphs are traced and lowered, no code is generated.
"""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from compiled_engine import cli
from compiled_engine.config import EngineConfig
from compiled_engine.explain.build import Request, explain_model
from compiled_engine.explain.page import render_page
from compiled_engine.explain.report import PieceReport, Report
from compiled_engine.explain.text import amount, microseconds, ranges
from compiled_engine.kernels.ceilings import Ceilings
from compiled_engine.pieces import MAX_FEW
from tests.helpers.browser import Page, running_browser
from tests.helpers.hf_models import write_hf_config
from tests.helpers.tiny_model import write_tiny_model, write_tiny_tokenizer

H200 = {"device": "cuda", "dtype": "bfloat16"}
CEILINGS = Ceilings(4e12, 8e14)
DECODE_OPS = ["ce.fused_linear", "ce.rope_kv_write", "ce.paged_attention", *["ce.fused_linear"] * 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model without its weights."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    made = write_tiny_model(tmp_path_factory.mktemp("model"), **heads)
    (made / "model.safetensors").unlink()
    return made


def explained(folder: Path, num_tokens: int, arch: int | None = 90, **options: object) -> Report:
    given = {**(H200 if arch else {"device": "cpu"}), **options}
    config = EngineConfig(model=str(folder), **given)
    return explain_model(
        Request(config=config, num_tokens=num_tokens, arch=arch, ceilings=CEILINGS)
    )


def piece(report: Report, name: str) -> PieceReport:
    return next(p for p in report.pieces if p.name == name)


# --- what is said -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decode(folder) -> Report:
    return explained(folder, 8)


def test_a_decode_step_for_a_gpu_that_is_not_here(decode):
    layer = piece(decode, "layer")
    assert [row.name for row in layer.kernels] == DECODE_OPS
    assert layer.layers == (0, 1)
    assert layer.version == f"2 to {MAX_FEW} tokens"
    made = {row.name: row.made_by for row in layer.kernels}
    assert made == {
        "ce.fused_linear": ("fuse_linear",),
        "ce.rope_kv_write": ("fuse_qk_norm_rope_kv",),
        "ce.paged_attention": (),
    }
    matches = {p.name: p.matches for p in layer.passes if not p.why_off}
    assert matches["fuse_linear"] == 4
    assert matches["decode_attention"] == matches["fuse_qk_norm_rope_kv"] == 1
    assert [p.name for p in decode.pieces] == ["embedding", "layer", "head"]
    assert decode.totals.num_kernels == 2 + 2 * 6 + 1
    assert decode.totals.num_graph_breaks == 0


def test_kernels_come_with_their_reason_and_the_others_with_theirs(decode):
    first, _, attention, *_ = piece(decode, "layer").kernels
    assert attention.kernel == "cuda"
    reasons = dict(attention.rejected)
    assert reasons["triton"] == "ranks below cuda"
    assert reasons["cpp"] == "runs on cpu, not on cuda"
    assert first.kernel in ("mma", "tile", "hopper", "library")
    assert {"row", "torch"} <= {name for name, _ in first.rejected}
    assert first.reason


def test_bytes_operations_and_floors(decode):
    first, write, attention, *_ = piece(decode, "layer").kernels
    # x, weight, norm and result in bf16; two operations a weight and token.
    assert first.num_bytes == 2 * (8 * 64 + 256 * 64 + 64 + 8 * 256)
    assert first.num_flops == 2 * 8 * 256 * 64
    assert first.floor_us == pytest.approx(first.num_bytes / 4e12 * 1e6)
    # 8 rows of 512 tokens, keys and values of a head of 64.
    kv_bytes = 8 * 512 * 2 * 64 * 2
    assert attention.num_bytes == kv_bytes + 2 * 2 * 8 * 2 * 64
    assert write.num_bytes < 12_000, "the rows that are written, not the cache"
    embedding = piece(decode, "embedding").kernels[0]
    assert embedding.num_bytes < 2 * 320 * 64, "the rows that are looked up, not the table"
    assert decode.totals.floor_us == pytest.approx(sum(p.floor_us * p.count for p in decode.pieces))


def test_rows_say_what_they_read(decode):
    inputs = [row.inputs for row in piece(decode, "layer").kernels]
    assert inputs == [(), (0,), (1,), (2,), (3,), (3, 4)]


def test_a_prompt_has_a_last_layer_of_its_own(folder):
    report = explained(folder, 300, max_num_seqs=20)
    assert [(p.name, p.layers) for p in report.pieces[1:-1]] == [
        ("layer", (0,)),
        ("layer, last", (1,)),
    ]
    assert not report.is_decode
    names = [row.name for row in piece(report, "layer").kernels]
    assert names.count("ce.rms_norm") == 2
    assert names.count("ce.silu_and_mul") == 1
    assert {
        row.made_by for row in piece(report, "layer").kernels if row.name == "ce.fused_linear"
    } == {("use_library_op",)}
    last = piece(report, "layer, last").kernels[-1]
    assert last.shape.startswith("bfloat16 20 x")
    states = {p.name: p.why_off for p in piece(report, "layer").passes}
    assert states["fuse_linear"] == "not for it"


def test_a_disabled_pass_leaves_its_work_to_inductor(folder):
    report = explained(
        folder, 8, disable_passes=("fuse_linear", "use_library_op", "fuse_qk_norm_rope_kv")
    )
    layer = piece(report, "layer")
    states = {p.name: p.why_off for p in layer.passes}
    assert states["fuse_linear"] == "disabled"
    names = [row.name for row in layer.kernels]
    assert "ce.fused_linear" not in names
    assert "ce.rope_kv_write" not in names
    assert names.count("aten.mm") + names.count("aten.addmm") == 4
    fused = [row.covers for row in layer.kernels if row.covers]
    assert fused, "the rotation is Inductor's then"
    assert names.count("ce.kv_write") == 1, "what indexes the caches is not"
    assert not any("aten.index_put" in op for covers in fused for op in covers)
    assert report.totals.num_generated == sum(p.num_generated * p.count for p in report.pieces)
    assert all("ce." not in op for covers in fused for op in covers)


def test_a_cpu_fuses_what_has_no_kernel(folder):
    report = explained(folder, 2, arch=None)
    layer = piece(report, "layer")
    names = [row.name for row in layer.kernels]
    assert names.count("ce.linear") == 4
    assert names.count("ce.paged_attention") == 1
    assert set(names) == {"inductor", "ce.linear", "ce.paged_attention"}
    products = [row for row in layer.kernels if row.name == "ce.linear"]
    assert {(row.kernel, row.made_by) for row in products} == {("cpp", ("use_linear_op",))}
    assert {p.name: p.matches for p in layer.passes}["expand"] >= 3


def test_each_kind_of_layer_is_a_piece(tmp_path):
    model = write_tiny_model(tmp_path, family="gpt_oss")
    report = explained(model, 1)
    layers = [p for p in report.pieces if p.layers]
    assert sorted(i for p in layers for i in p.layers) == list(range(report.num_layers))
    assert len(layers) == 2, "windows alternate"
    for layer in layers:
        mixtures = [row for row in layer.kernels if row.name == "ce.sparse_mlp"]
        assert len(mixtures) == 1
        assert mixtures[0].num_bytes > 0


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_mixture_without_a_file_says_what_was_lifted(tmp_path):
    write_hf_config(tmp_path, "olmoe")
    write_tiny_tokenizer(tmp_path)
    apart = piece(explained(tmp_path, 8, kernels=("experts=stream",)), "layer")
    made = {row.name: row.made_by for row in apart.kernels}
    assert made["ce.route"] == ("lift_route",)
    assert "ce.experts" in made
    whole = piece(explained(tmp_path, 8), "layer")
    (mixture,) = [row for row in whole.kernels if row.name == "ce.sparse_mlp"]
    assert (mixture.kernel, mixture.made_by) == ("stream", ("fuse_sparse_mlp",))
    for layer in (apart, whole):
        matches = {p.name: p.matches for p in layer.passes}
        assert (matches["lift_route"], matches["lift_gated_activation"]) == (1, 0)


def test_an_option_reaches_the_choice(folder):
    report = explained(folder, 8, kernels=("fused_linear=torch",), kernel_objective="determinism")
    first = piece(report, "layer").kernels[0]
    assert (first.kernel, first.reason) == ("torch", "an option asks for it")
    assert first.num_kernels == 0
    assert report.totals.num_unknown > 0
    assert any("is counted as one" in note for note in report.notes)


@pytest.mark.parametrize(("arch", "kernel"), [(90, "packed"), (100, "fp4")])
def test_a_checkpoint_with_4_bit_activations_has_them_where_they_are_multiplied(
    folder, tmp_path, arch, kernel
):
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    report = explained(tmp_path, 8, arch)
    rows = [r for r in piece(report, "layer").kernels if r.name == "ce.quantized_linear"]
    assert len(rows) == 4
    assert {row.kernel for row in rows} == {kernel}
    reasons = {dict(row.rejected).get("fp4") for row in rows}
    assert reasons == {"needs sm_100, this is sm_90" if arch == 90 else None}


# --- the command ------------------------------------------------------------------------------


def test_command_prints_a_table_json_and_a_page(folder, tmp_path, capsys):
    page = tmp_path / "report.html"
    base = ["explain", str(folder), "--device", "cuda", "--arch", "90", "--dtype", "bfloat16"]
    assert cli.main([*base, "--tokens", "2", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "a decode step of 2 tokens, 512 tokens of KV a row" in out
    assert re.search(r"0 +ce\.fused_linear +bfloat16 2 x 256 +fuse_linear", out)
    assert "0 graph breaks" in out
    assert page.read_text().startswith("<!doctype html>")
    assert cli.main([*base, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_tokens"] == 1
    assert document["totals"]["num_graph_breaks"] == 0
    assert [p["name"] for p in document["pieces"]] == ["embedding", "layer", "head"]
    assert document["pieces"][1]["kernels"][0]["rejected"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "90"], "--arch describes a GPU: it needs --device cuda"),
        (["--device", "cuda", "--arch", "9"], "--arch is 9; allowed is 50 to 130"),
        (["--tokens", "0"], "--tokens is 0; allowed is at least 1"),
        (["--tokens", "9000", "--device", "cpu"], "--tokens is 9000; a step computes at most 512"),
        (["--context", "600"], "--context is 600; the model was made for 512 positions"),
        (["--html", "/nowhere/x.html"], "--html /nowhere/x.html: no such folder"),
        (["--disable-pass", "fuse"], "--disable-pass fuse: no such pass; there are "),
        (["--kernel", "norm=x"], "--kernel norm=x: no such kernel; norm has torch, triton"),
        (["--read-tb-s", "1"], "--read-tb-s needs --matmul-tflops beside it"),
        (
            ["--device", "cuda", "--arch", "90", "--kernel-objective", "autotune"],
            "--kernel-objective autotune measures on the device",
        ),
        (["--seed", "3"], "unknown flag --seed"),
    ],
)
def test_wrong_options_are_refused(folder, capsys, arguments, message):
    try:
        code = cli.main(["explain", str(folder), *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


# --- the page ---------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Notes open elements, texts, and whatever is loaded from elsewhere."""

    VOID = frozenset({"meta", "rect", "path", "i", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loaded: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_one_file_with_a_box_and_a_bar_for_each_row(decode):
    page = render_page(decode)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loaded == []
    assert "url(" not in page
    assert "<script" not in page
    num_rows = sum(len(p.kernels) for p in decode.pieces)
    assert checker.counts["rect"] == 2 * num_rows, "a box and the bar of the floor"
    assert checker.counts["path"] == sum(len(r.inputs) for p in decode.pieces for r in p.kernels)
    assert page.count('class="why"') == num_rows
    assert "runs on cpu, not on cuda" in page


def test_page_escapes_what_a_model_is_called(decode):
    import dataclasses

    page = render_page(dataclasses.replace(decode, model="<script>alert(1)</script>"))
    assert "<script" not in page


def test_page_in_a_browser_is_not_wider_than_the_window(decode, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_page(decode))
    with running_browser() as browser:
        asyncio.run(_look(browser, path))


async def _look(browser, path: Path) -> None:
    backgrounds = []
    async with aiohttp.ClientSession() as session, browser.page(session, Page) as page:
        await page.open(path.as_uri())
        for width in (1200, 400):
            for scheme in ("light", "dark"):
                await page.resize(width, 900)
                await page.prefer(scheme)
                wide = "document.documentElement.scrollWidth - window.innerWidth"
                assert await page.value(wide) <= 0
                color = "getComputedStyle(document.body).backgroundColor"
                backgrounds.append(await page.value(color))
        await page.value("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert await page.value(wide) <= 0, "with the reasons open"
        boxes = "[...document.querySelectorAll('svg text')].filter(t => !t.getBBox().width).length"
        assert await page.value(boxes) == 0, "texts that are not drawn"
        right = (
            "[...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')]"
            ".map(t => t.getBBox().x + t.getBBox().width - s.viewBox.baseVal.width))"
        )
        assert max(await page.value(right)) <= 0, "texts beyond the drawing"
        assert page.errors == []
    assert backgrounds[0] != backgrounds[1]


# --- words ------------------------------------------------------------------------------------


def test_numbers_in_words():
    assert [amount(v) for v in (0, 999, 1000, 1.5e6, 2e9, 3e12, 4e15)] == [
        "0 ", "999 ", "1 k", "1.5 M", "2 G", "3 T", "4e+03 T",
    ]  # fmt: skip
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert [microseconds(v) for v in (None, 1.234, 123.456)] == ["", "1.23", "123.5"]
