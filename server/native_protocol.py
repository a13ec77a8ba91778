"""The JSON of `/generate` and of the control routes; names and meaning are SGLang's.

Owns the shapes only, as `protocol` does for OpenAI's routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compiled_engine.server.protocol import SamplingFields

PauseMode = Literal["in_place", "abort"]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_IDS_SCHEMA = {
    "description": "Token ids of one prompt, or of several.",
    "oneOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}],
}


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of `/generate`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class NativeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /generate`: either `text` or `input_ids`, one or a list of them.

    Attributes:
        rid: name of the call, for `/abort_request`; otherwise its `X-Request-ID`.
        extra_key: as `cache_salt` of the other routes: prefixes are shared only within one.
        return_logprob: list log probabilities, of the answer's tokens and of the prompt's behind
            `logprob_start_len`, which is -1 for none of them.
        top_logprobs_num: likeliest tokens to list beside each.
        return_text_in_logprobs: put each token's text beside its id.
    """

    text: str | list[str] | None = None
    input_ids: Annotated[Any, Meta(extra_json_schema=_IDS_SCHEMA)] = None
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    rid: str | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None


class NativeFinish(msgspec.Struct):
    """Why an answer ended.

    Attributes:
        type: "stop" or "length".
        matched: the stop string or stop token.
        length: generated tokens, where that was the limit.
    """

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET


# Log probability, id, text; the first token listed of a prompt has no log probability.
NativeLogprob = tuple[float | None, int, str | None]


class NativeMeta(msgspec.Struct, kw_only=True):
    """What an answer cost. `e2e_latency` is in seconds; `finish_reason` is null while it runs.

    The lists of log probabilities are there where they were asked for: one entry for each token of
    `output_ids`, and one for each of the prompt's from `logprob_start_len` on, which come with the
    first event of a stream.
    """

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob] | None] | UnsetType = UNSET


class NativeAnswer(msgspec.Struct):
    """One answer. In a stream each event has all of the text and ids so far.

    Attributes:
        index: of the answer, where there are several.
    """

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | UnsetType = UNSET


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_request`: a call's `rid` or `X-Request-ID`, or all calls."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /pause_generation`.

    Attributes:
        mode: "in_place" keeps requests where they are; "abort" ends them first.
    """

    mode: PauseMode | None = None


class ProfileRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /start_profile`.

    Attributes:
        num_steps: end by itself after so many steps.
        output_dir: refused: the operator chooses the folder by a flag.
    """

    num_steps: int | None = None
    output_dir: Any = None


class EmptyRequest(msgspec.Struct):
    """Body of a call that needs none."""


class ControlAnswer(msgspec.Struct):
    """Answer of the control routes.

    Attributes:
        message: what was done.
        num_aborted: calls' sequences that were ended.
        path: file of the profile, on the server.
    """

    message: str
    success: bool = True
    num_aborted: int | UnsetType = UNSET
    path: str | UnsetType = UNSET


class WeightVersion(msgspec.Struct):
    """Answer of `/get_weight_version`."""

    weight_version: str


class ModelInfo(msgspec.Struct, kw_only=True):
    """Answer of `/model_info`; lengths are null until the model is loaded."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    weight_version: str
    is_generation: bool
    has_chat_template: bool
    max_model_len: int | None
    max_total_tokens: int | None
    vocab_size: int | None
    preferred_sampling_params: dict[str, Any]


class ServerInfo(msgspec.Struct, kw_only=True):
    """Answer of `/server_info`; secrets are left out."""

    version: str
    served_model_name: str
    weight_version: str
    engine: dict[str, Any]
    server: dict[str, Any]
    status: dict[str, Any]


class Load(msgspec.Struct, kw_only=True):
    """Load of one engine. `token_usage` and `cache_hit_rate` are shares, 1 is all."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    queued_prompt_tokens: int
    is_paused: bool


class Loads(msgspec.Struct, kw_only=True):
    """Answer of `/v1/loads`; there is one engine. `timestamp` is Unix time, seconds."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]


class Progress(msgspec.Struct, kw_only=True):
    """Answer of `/progress`.

    Attributes:
        status: "ok", or why not.
        step_age_s: age of the last finished step while there is work, else 0.
        num_steps: steps since the engine's start.
        num_generated_tokens: likewise.
    """

    status: str
    phase: str
    is_paused: bool
    step_age_s: float
    num_steps: int
    num_generated_tokens: int
    num_running: int
    num_waiting: int
