"""Logits of every family on a GPU in bf16, within what Hugging Face's own model loses by bf16.

Both are compared with Hugging Face's model in fp32, on the tokens that the engine chose. Where two
experts of a token are all but equally good, the rounding of either side may send it to another one,
which says nothing about either: such positions are left out. A position counts where, in each layer
with experts, the last expert that was chosen leads the first that was not by more than four times
what bf16 does to a router's logits there (the median of Hugging Face's own differences).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.engine import Engine
from compiled_engine.request import SamplingParams
from tests.helpers.engines import run_requests, tiny_engine
from tests.helpers.gpu_engine import OPTIONS, SHAPE
from tests.helpers.hf_models import write_hf_model
from tests.helpers.hf_reference import Logits, Reference
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

NUM_NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
# One step after the other, so that it is known which step made which logits.
PLAIN: dict[str, Any] = {
    "cudagraph_mode": "none",
    "overlap_schedule": "off",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "chunked_prefill_size": 64,
    "block_size": 16,
    "max_total_tokens": 4096,
}
# Two chunks each; with its full pages cached a prompt needs one.
LENGTHS = (100, 70, 90)
# Weights nearer to a trained model's than other tests': attention that looks at one token alone
# makes much of little.
STD = 0.1
TWO_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0], "moe_intermediate_size": 128},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
FALLBACK_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NUM_ROUTERS = {"qwen3_moe": 1, "mixtral": 2, "gpt_oss": 2}
HERE = ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss")
FALLBACK = ("phi3", "olmo2")


def write_model(folder: Path, family: str) -> None:
    if family in FALLBACK:
        write_hf_model(folder, family, **FALLBACK_SHAPE)
        return
    shape = {**SHAPE, "num_hidden_layers": 2, **TWO_KINDS.get(family, {})}
    write_tiny_model(folder, family=family, std=STD, **shape)
    # Sinks that take a share of the attention that shows, another one in each head.
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("sinks"):
            tensors[name] = tensors[name] * 4 + 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Recorder:
    """The first row's logits of every step, as the head makes them."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[Tensor] = []
        pieces = engine.loop.executor.pieces
        head = pieces.head

        def keep(residual: Tensor) -> Tensor:
            logits = head(residual)
            self.seen.append(logits[:1].float().clone())
            return logits

        pieces.head = keep  # type: ignore[method-assign]


def is_settled(truth: Logits, rounded: Logits, top_k: int) -> Tensor:
    """[T] bool: bf16 sends the token to no other experts, see above."""
    settled = torch.ones(truth.logits.shape[0], dtype=torch.bool, device=truth.logits.device)
    for exact, other in zip(truth.routers, rounded.routers, strict=True):
        ranked = exact.sort(descending=True).values
        margin = ranked[:, top_k - 1] - ranked[:, top_k]
        settled &= margin > 4 * (exact - other).abs().amax(1).median()
    return settled


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("family", HERE + FALLBACK)
def test_gpu_logits_equal_hugging_face(tmp_path, family, device):
    """Chunked prefill, decode and prefix hits of one request at a time."""
    write_model(tmp_path / family, family)
    options = OPTIONS if device == "cuda" else {"dtype": "bfloat16", "device": device}
    engine = tiny_engine(tmp_path / family, **{**options, **PLAIN})
    recorder, reference = Recorder(engine), Reference(tmp_path / family, device)
    generator = torch.Generator().manual_seed(5)
    errors, own_errors, settled = [], [], []
    for length in LENGTHS:
        prompt = torch.randint(3, 250, (length,), generator=generator).tolist()
        for first in (1, 0):
            recorder.seen.clear()
            run = run_requests(engine, [prompt], GREEDY)
            assert bool(run.cached[0]) == (first == 0)
            got = torch.cat(recorder.seen[first : first + NUM_NEW])
            truth, rounded = reference.run(prompt + run.tokens[0])
            places = slice(length - 1, length - 1 + NUM_NEW)
            expected, own = truth.logits[places], rounded.logits[places]
            assert len(truth.routers) == NUM_ROUTERS.get(family, 0)
            errors.append((got[:, : expected.shape[1]] - expected).norm(dim=1))
            own_errors.append((own - expected).norm(dim=1))
            settled.append(is_settled(truth, rounded, reference.top_k)[places])
    is_kept = torch.cat(settled)
    assert int(is_kept.sum()) >= is_kept.numel() / 2, "most positions must be compared"
    error, own_error = torch.cat(errors)[is_kept], torch.cat(own_errors)[is_kept]
    print(
        f"{family}: {int(is_kept.sum())} of {is_kept.numel()} positions, error / Hugging Face's: "
        f"{float(error.norm() / own_error.norm()):.2f} in all, "
        f"{float(error.max() / own_error.max()):.2f} at worst"
    )
    assert error.norm() <= 1.5 * own_error.norm()
    assert error.max() <= 4 * own_error.max()
