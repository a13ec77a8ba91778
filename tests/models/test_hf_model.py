"""Models without a file here: logits as Hugging Face's, layers by kind, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_engine.errors import ConfigError
from compiled_engine.layer_kinds import layer_kinds
from compiled_engine.models import HfModelConfig
from compiled_engine.models.config import load_model_config
from compiled_engine.models.hf_attention import MaskRequest, window_of
from compiled_engine.models.hf_linears import LinearPart, merge_linears
from compiled_engine.models.hf_load import build_hf_model
from compiled_engine.models.hf_model import HfCausalLM
from compiled_engine.models.hf_plan import find_layers
from tests.helpers.hf_models import write_hf_config, write_hf_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

CPU = torch.device("cpu")
TOLERANCE = 1e-4
SERVED = (
    "phi3", "olmo2", "granite", "stablelm", "olmoe", "gemma2", "gemma3", "qwen2", "gpt2", "cohere",
    "qwen2_moe", "granitemoe", "minimax_m2", "glm4_moe", "glm4", "ernie4_5",
)  # fmt: skip
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def config_of(folder: Path, **options: Any) -> HfModelConfig:
    config = load_model_config(folder, **options)
    assert isinstance(config, HfModelConfig)
    return config


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> HfCausalLM:
    return build_hf_model(config_of(folder), dtype=dtype, device=CPU, **options)


def difference(mine: HfCausalLM, theirs: nn.Module, token_ids: Tensor) -> float:
    """Largest difference of logits over the largest logit."""
    with torch.no_grad():
        expected = theirs(token_ids[None], use_cache=False).logits[0]
        got = mine(token_ids, torch.arange(len(token_ids)))
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", SERVED)
def test_logits_equal_hugging_face(tmp_path: Path, family: str):
    theirs = write_hf_model(tmp_path, family)
    # Longer than the windows of the families that have some.
    assert difference(load(tmp_path), theirs, torch.arange(23) * 7 % 320) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_with_a_file_runs_from_transformers_code_if_asked(tmp_path: Path, family: str):
    from transformers import AutoModelForCausalLM

    from tests.helpers.tiny_model import write_tiny_model

    write_tiny_model(tmp_path, family=family)
    assert not isinstance(load_model_config(tmp_path), HfModelConfig)
    config = config_of(tmp_path, impl="transformers")
    mine = build_hf_model(config, dtype=torch.float32, device=CPU)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert difference(mine, theirs.eval(), torch.arange(23) * 7 % 320) < TOLERANCE


def test_config_is_what_attention_was_seen_to_do(tmp_path: Path):
    write_hf_model(tmp_path, "gpt2")
    config = config_of(tmp_path)
    assert (config.vocab_size, config.max_position_embeddings) == (320, 256)
    assert config.eos_token_ids == (2,)
    model = load(tmp_path)
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim) == (4, 4, 16)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "windows", "kinds"),
    [("phi3", [0, 0], (0, 0)), ("gemma2", [8, 0], (0, 1)), ("gemma3", [8, 0, 8], (0, 1, 0))],
)
def test_layers_that_do_the_same_are_of_one_kind(tmp_path: Path, family, windows, kinds):
    write_hf_config(tmp_path, family)
    model = HfCausalLM(config_of(tmp_path))
    assert [call.window for call in model.plan.layers] == windows
    assert tuple(call.kind for call in model.plan.layers) == kinds
    assert layer_kinds(model.layers) == kinds
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        ("phi3", ()),
        ("olmo2", (QKV, GATE_UP)),
        ("olmoe", (QKV,)),
        ("gpt2", ()),
        # One norm in front of both: they stay two groups, of attention and of the MLP.
        ("cohere", (QKV, GATE_UP)),
    ],
)
def test_linears_that_read_one_tensor_share_a_matrix(tmp_path: Path, family: str, shared):
    write_hf_model(tmp_path, family)
    model = load(tmp_path)
    assert model.plan.shared == (shared,)
    for layer in model.blocks:
        for names in shared:
            parts = [layer.block.get_submodule(name) for name in names]
            assert all(isinstance(part, LinearPart) for part in parts)
            assert len({id(part.shared.weight) for part in parts}) == 1
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


def test_merged_linears_compute_what_they_did():
    owner = nn.ModuleDict({name: nn.Linear(8, size) for name, size in (("a", 6), ("b", 3))})
    x = torch.randn(5, 8)
    expected = [owner[name](x) for name in ("a", "b")]
    merge_linears(owner, ("a", "b"))
    for name, value in zip(("a", "b"), expected, strict=True):
        torch.testing.assert_close(owner[name](x), value)
    assert owner["a"].shared is owner["b"].shared
    assert owner["b"].weight.data_ptr() == owner["a"].shared.weight[6:].data_ptr()
    assert len(list(owner.parameters())) == 2


def test_rotary_tables_are_carried_as_one_half(tmp_path: Path):
    write_hf_model(tmp_path, "phi3")
    model = load(tmp_path, torch.bfloat16)
    positions = torch.arange(5)
    _, carried = model.embed(positions, positions)
    tables = [tensor for tensor in carried if tensor.is_floating_point()]
    assert [(tensor.shape, tensor.dtype) for tensor in tables] == [((5, 8), torch.float32)] * 2


# --- weights --------------------------------------------------------------------------------------


def test_dummy_weights_follow_the_seed_and_keep_ties(tmp_path: Path):
    write_hf_config(tmp_path, "gemma3")
    one, same, other = (load(tmp_path, dummy_seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    matrices = [
        (a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True) if a.dim() > 1
    ]
    assert all(not torch.equal(a, b) for a, b in matrices)
    assert one.shell.lm_head.weight is one.shell.model.embed_tokens.weight
    assert one(torch.arange(9), torch.arange(9)).isfinite().all()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    write_hf_model(tmp_path, "olmo2")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.extra.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert "1 tensor is missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 tensor is unexpected: model.extra.weight" in str(caught.value)


def test_pickles_and_empty_folders_are_refused(tmp_path: Path):
    write_hf_config(tmp_path, "olmo2")
    with pytest.raises(ConfigError, match="holds no weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="--allow-pickle"):
        load(tmp_path)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("t5", {}, "encoders are not served"),
        ("mamba", {}, r"layer_types holds \['linear_attention'\]"),
        ("jamba", {}, r"layer_types holds \['linear_attention'\]"),
        ("qwen3_next", {}, r"layer_types holds \['linear_attention'\]"),
        ("llama4", {}, r"layer_types holds \['chunked_attention'\]"),
        ("gemma3_vision", {}, "only models of text alone"),
        ("phi3", {"quantization_config": {"quant_method": "awq"}}, "served unquantised"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            'rope_type is "dynamic"',
        ),
    ],
)
def test_kinds_of_models_are_refused_from_the_config(tmp_path: Path, family, overrides, said):
    write_hf_config(tmp_path, family, **overrides)
    with pytest.raises(ConfigError, match=said) as caught:
        load_model_config(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("falcon", {}, "FalconForCausalLM .*cannot be made with attention of ours"),
        ("bloom", {}, "BloomForCausalLM .*cannot be served"),
        ("bart", {}, "BartForCausalLM .*has no list of 2 layers"),
        ("gemma3", {"use_bidirectional_attention": True}, "neither causal nor a causal window"),
    ],
)
def test_models_are_refused_from_their_code(tmp_path: Path, family, overrides, said):
    write_hf_config(tmp_path, family, **overrides)
    if family == "bart":
        edit(tmp_path, is_encoder_decoder=False)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, dummy_seed=0)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def test_unknown_models_are_refused_by_name(tmp_path: Path):
    write_hf_config(tmp_path, "phi3")
    edit(tmp_path, model_type="wonder", architectures=["WonderForCausalLM"])
    with pytest.raises(ConfigError, match=r"no model file here for \['WonderForCausalLM'\]"):
        load_model_config(tmp_path)
    edit(tmp_path, auto_map={"AutoConfig": "wonder.Config"})
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load_model_config(tmp_path)
    edit(tmp_path, model_type="phi3", architectures=["Phi3ForTokenClassification"], auto_map=...)
    with pytest.raises(ConfigError, match="Phi3ForTokenClassification") as caught:
        load_model_config(tmp_path)
    assert "LlamaForCausalLM" in str(caught.value)


def test_native_takes_model_files_only(tmp_path: Path):
    write_hf_config(tmp_path, "phi3")
    with pytest.raises(ConfigError, match="architectures"):
        load_model_config(tmp_path, "native")


def test_code_in_the_folder_runs_only_if_trusted(tmp_path: Path):
    theirs = write_hf_model(tmp_path, "phi3")
    code = "from transformers.models.phi3 import modeling_phi3, configuration_phi3\n"
    code += "class Config(configuration_phi3.Phi3Config):\n    model_type = 'wonder'\n"
    code += "class Model(modeling_phi3.Phi3ForCausalLM):\n    config_class = Config\n"
    (tmp_path / "wonder.py").write_text(code)
    auto_map = {"AutoConfig": "wonder.Config", "AutoModelForCausalLM": "wonder.Model"}
    edit(tmp_path, model_type="wonder", architectures=["Model"], auto_map=auto_map)
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load_model_config(tmp_path)
    config = config_of(tmp_path, trust_remote_code=True)
    mine = build_hf_model(config, dtype=torch.float32, device=CPU)
    assert difference(mine, theirs, torch.arange(9)) < TOLERANCE


def test_a_layer_that_mixes_tokens_is_refused(tmp_path: Path):
    write_hf_model(tmp_path, "phi3")
    model = load(tmp_path)

    class Shift(nn.Module):
        """A convolution over tokens, as far as rows are concerned."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + x.roll(1, dims=-2)

    model.check_rows()
    model.blocks[0].block.mlp = Shift(model.blocks[0].block.mlp)
    with pytest.raises(ConfigError, match="a Phi3DecoderLayer mixes tokens outside of attention"):
        model.check_rows()


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 7])
def test_windows_are_read_from_the_mask(window: int):
    from transformers.masking_utils import sliding_window_causal_mask_function as sliding

    assert window_of(MaskRequest(sliding(window), window)) == window
    with pytest.raises(ConfigError, match="neither causal"):
        window_of(MaskRequest(sliding(window), window + 1))


def test_other_masks_are_refused():
    from transformers import masking_utils

    assert window_of(MaskRequest(masking_utils.causal_mask_function, None)) == 0
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    both = masking_utils.bidirectional_mask_function
    for request in (MaskRequest(chunked, 4), MaskRequest(both, None)):
        with pytest.raises(ConfigError, match="neither causal"):
            window_of(request)
    with pytest.raises(ConfigError, match="no mask"):
        window_of(None)
    with pytest.raises(ConfigError, match="type Tensor"):
        window_of(torch.zeros(1))


def test_layers_are_found_by_their_number():
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1)] * 2), "b": nn.ModuleList()})
    owner, name = find_layers(model, 2)
    assert (owner, name) == (model, "a")
    with pytest.raises(ConfigError, match="no list of 3 layers"):
        find_layers(model, 3)
