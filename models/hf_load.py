"""Weights of a model that transformers' code computes, read by transformers' own loader.

The checkpoints of such models are named and cut as transformers knows and we do not, so it reads
them: straight to the device, onto a model made without storage (accelerate's meta-device loading).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from compiled_engine.errors import ConfigError
from compiled_engine.models.checkpoint import checkpoint_files, list_names
from compiled_engine.models.hf_attention import INTERFACE, register_interfaces
from compiled_engine.models.hf_config import HfModelConfig
from compiled_engine.models.hf_model import HfCausalLM, new_config, new_model, prepared_model
from compiled_engine.models.hf_plan import plan_model
from compiled_engine.models.weights import init_dummy_weights

__all__ = ["build_hf_model"]


def build_hf_model(
    config: HfModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    allow_pickle: bool = False,
) -> HfCausalLM:
    """The model with its weights, or with seeded random ones, ready for inference.

    Args:
        config: of a folder with a checkpoint; without one if `dummy_seed` is given.
        dtype: of the parameters.
        device: of the parameters.
        dummy_seed: makes random weights instead of reading any.
        allow_pickle: read `.bin` files where there are no safetensors.

    Raises:
        ConfigError: transformers' code of the model cannot be served, or the checkpoint does not
            fit; says why.
    """
    # Before anything is read: what cannot be served is refused at once.
    plan = _plan(config, dtype)
    if dummy_seed is None:
        theirs = _read(config, dtype, device, allow_pickle=allow_pickle)
    else:
        theirs = _empty(config, dtype, device)
    model = HfCausalLM(config, theirs, plan).eval()
    if dummy_seed is not None:
        init_dummy_weights(model, dummy_seed)
    model.check_rows()
    return model.requires_grad_(False)


def shape_hf_model(
    config: HfModelConfig, *, dtype: torch.dtype, device: torch.device, mode: Any
) -> HfCausalLM:
    """The model with tensors of `mode`, which have shapes and no values.

    Raises:
        ConfigError: transformers' code of the model cannot be served; says why.
    """
    plan = _plan(config, dtype)
    # What its code computes keeps its values until the model has looked at them.
    model = HfCausalLM(config, _empty(config, dtype, device, mode), plan).eval()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            with mode:
                setattr(module, name, mode.from_tensor(buffer).to(device))
    return model.requires_grad_(False)


def _plan(config: HfModelConfig, dtype: torch.dtype) -> Any:
    """How the model's code is cut into pieces."""
    with torch.device("meta"):
        twin = new_model(config, dtype=dtype)
    return plan_model(twin, config.num_layers, config.architecture)


def _empty(
    config: HfModelConfig, dtype: torch.dtype, device: torch.device, mode: Any = None
) -> Any:
    """transformers' model with uninitialised parameters; what its code computes is in place.

    With a `mode`, parameters are of that and have no values, and buffers stay where they are.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        theirs = new_model(config, dtype=dtype)
    theirs.tie_weights()  # what is made without storage is made apart
    made: dict[int, torch.nn.Parameter] = {}
    for module in theirs.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:  # tied ones stay tied
                with mode or nullcontext():
                    storage = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[id(parameter)] = torch.nn.Parameter(storage, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if mode is None:
                setattr(module, name, buffer.to(device))
    return theirs


def _read(
    config: HfModelConfig, dtype: torch.dtype, device: torch.device, *, allow_pickle: bool
) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    checkpoint_files(config.folder, allow_pickle=allow_pickle)
    register_interfaces()
    logging.disable_progress_bar()
    try:
        theirs, info = AutoModelForCausalLM.from_pretrained(
            config.folder,
            config=new_config(config),
            attn_implementation=INTERFACE,
            dtype=dtype,
            device_map={"": device},
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers' loader raises what its parts do
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the weights in {config.folder} cannot be loaded: {text}", param="model"
        ) from error
    _check(config, info)
    return prepared_model(theirs)


def _check(config: HfModelConfig, info: dict[str, Any]) -> None:
    lines = []
    for what, key in (
        ("missing", "missing_keys"),
        ("unexpected", "unexpected_keys"),
        ("of a wrong shape", "mismatched_keys"),
    ):
        listed = info.get(key, ())
        names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in listed)
        if names:
            is_are = "tensor is" if len(names) == 1 else "tensors are"
            lines.append(f"{len(names)} {is_are} {what}: {list_names(names)}")
    if lines:
        raise ConfigError(
            f"the weights in {config.folder} do not fit its config.json:\n  " + "\n  ".join(lines),
            param="model",
        )
