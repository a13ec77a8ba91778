"""Launchers of the sampling kernels: `sample_tokens` and `sample_rows` on CUDA.

Two Triton kernels a call: the first reads every tile of every row once, on all of the device; the
second finishes a place a program. Where the device has clusters, steps that are not all greedy go
to the one kernel of `sampling_cluster` instead, which needs far less time for top-k and top-p.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from compiled_engine.custom_ops import sampling_cluster
from compiled_engine.custom_ops.sampling import (
    Masks,
    Places,
    RowSettings,
    masks_of,
    sample_rows_reference,
    sample_tokens_reference,
)
from compiled_engine.custom_ops.sampling_finish import draw_kernel, greedy_kernel
from compiled_engine.custom_ops.sampling_scan import scan_kernel
from compiled_engine.custom_ops.triton_common import DTYPES, has_pdl

MAX_TILES = 1024
_MASK_DTYPES = (torch.uint8, torch.bool)


class Config(NamedTuple):
    """How a launch is cut.

    Attributes:
        tile: logits a program of the first kernel.
        scan_warps: its warps.
        lanes: width of a pass over a row in the second kernel.
        depth: collected logits a lane.
        limit: logits that are worth collecting: few enough that hardly ever a lane overflows.
        keep: top-k up to which the first kernel leaves the draw to the second.
        finish_warps: warps of the second kernel.
        min_tiles: least tiles the second kernel is made for: fewer versions of it.
    """

    tile: int
    scan_warps: int
    lanes: int = 2048
    depth: int = 16
    limit: int = 8192
    keep: int = 1024
    finish_warps: int = 16
    min_tiles: int = 256


def unsupported_reason(
    logits: Tensor, settings: RowSettings, places: Places | None, masks: Masks | None = None
) -> str | None:
    """Why the kernels cannot serve these arguments; None if they can. Reads shapes and dtypes."""
    wanted = (
        torch.float32, torch.int32, torch.float32, torch.float32, torch.int64,
    )  # fmt: skip
    extra = () if places is None else (places.rows, places.stop_ids)
    bits = () if masks is None else tuple(masks)
    is_typed = all(t.dtype == d for t, d in zip(settings, wanted, strict=False))
    rules = (
        (logits.dtype in DTYPES, f"{logits.dtype}, they take {', '.join(map(str, DTYPES))}"),
        (logits.dim() == 2 and logits.stride(-1) == 1, "logits that are not rows"),
        (logits.shape[-1] <= MAX_TILES * 4096, f"a vocabulary of {logits.shape[-1]}"),
        (is_typed and settings.position.dtype in (torch.int32, torch.int64), "a setting's dtype"),
        (all(t.dtype == torch.int32 for t in extra), "rows or stop ids that are not int32"),
        (all(t.stride(-1) == 1 for t in extra), "rows or stop ids with a strided last dim"),
        (all(t.dtype == d for t, d in zip(bits, _MASK_DTYPES, strict=False)), "a mask's dtype"),
        (all(t.stride(-1) == 1 for t in bits), "masks with a strided last dim"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def default_config(num_places: int, vocab_size: int, is_greedy: bool) -> Config:
    """Tiles that give every multiprocessor work and keep their number small."""
    if is_greedy:
        tile = 1024 if num_places <= 2 else 4096 if num_places < 64 else 8192
    else:
        tile = 1024 if num_places <= 4 else 2048
    while vocab_size > MAX_TILES * tile or (tile < 4096 and vocab_size > 256 * tile):
        tile *= 2
    return Config(tile, max(4, tile // 1024))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    is_greedy: bool,
) -> Tensor:
    """As `sample_tokens_reference`, which also serves what `unsupported_reason` names."""
    settings = RowSettings(temperature, top_k, top_p, min_p, seed, position)
    if unsupported_reason(logits, settings, None) is not None:
        return sample_tokens_reference(logits, *settings, vocab_size, is_greedy)
    return _run(logits, settings, None, vocab_size, is_greedy)[0]


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    rows: Tensor,
    stop_ids: Tensor,
    vocab_size: int,
    is_greedy: bool,
    mask_bits: Tensor | None = None,
    has_grammar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sample_rows_reference`, which also serves what `unsupported_reason` names."""
    settings = RowSettings(temperature, top_k, top_p, min_p, seed, position)
    places, masks = Places(rows, stop_ids), masks_of(mask_bits, has_grammar)
    if unsupported_reason(logits, settings, places, masks) is not None:
        return sample_rows_reference(
            logits, *settings, *places, vocab_size, is_greedy, mask_bits, has_grammar
        )
    tokens, stops = _run(logits, settings, places, vocab_size, is_greedy, masks=masks)
    return tokens[:, None], stops[:, None]


def _run(
    logits: Tensor,
    settings: RowSettings,
    places: Places | None,
    vocab_size: int,
    is_greedy: bool,
    *,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    if not is_greedy and sampling_cluster.is_served(logits, vocab_size):
        return sampling_cluster.launch(logits, settings, places, vocab_size, masks=masks)
    return launch(logits, settings, places, vocab_size, is_greedy, masks=masks)


def launch(
    logits: Tensor,
    settings: RowSettings,
    places: Places | None,
    vocab_size: int,
    is_greedy: bool,
    *,
    masks: Masks | None = None,
    config: Config | None = None,
    is_pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """Runs the kernels on arguments they support.

    Returns:
        Tokens by place [S] i32, or by row [R] with `places`; and then stop flags [R] bool.
    """
    num_places = logits.shape[0]
    num_results = num_places if places is None else places.stop_ids.shape[0]
    tokens = torch.empty(num_results, dtype=torch.int32, device=logits.device)
    stops = torch.empty(num_results, dtype=torch.bool, device=logits.device)
    if not num_places:
        return tokens.zero_(), stops.zero_()
    config = config or default_config(num_places, vocab_size, is_greedy)
    settings = _with_one_stride(settings)
    num_tiles = triton.cdiv(vocab_size, config.tile)
    floats = torch.empty(num_places, 5, num_tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_places, 2, num_tiles, dtype=torch.int32, device=logits.device)
    rows, stop_ids = (tokens, tokens[:, None]) if places is None else places
    flags = stops.view(torch.uint8)
    is_pdl = is_pdl and has_pdl(logits.device)
    common: dict[str, Any] = {"HAS_ROWS": places is not None, "PDL": is_pdl, "launch_pdl": is_pdl}
    masked = (flags, 0, flags) if masks is None else _mask_arguments(masks)
    scan_kernel[(num_places * num_tiles,)](
        logits, logits.stride(0), settings.temperature, settings.top_k, settings.seed,
        settings.position, settings.temperature.stride(0), *masked, rows, floats, ids, tokens,
        flags, num_results, vocab_size, num_tiles, TILE=config.tile, KEEP=config.keep,
        IS_GREEDY=is_greedy, HAS_MASK=masks is not None, num_warps=config.scan_warps, **common,
    )  # fmt: skip
    common |= {
        "TILES": max(config.min_tiles, triton.next_power_of_2(num_tiles)),
        "NUM_STOPS": stop_ids.shape[1],
        "STOP_BLOCK": triton.next_power_of_2(max(stop_ids.shape[1], 1)),
    }
    ends = (rows, stop_ids, stop_ids.stride(0), tokens, flags)
    if is_greedy:
        greedy_kernel[(num_places,)](floats, ids, *ends, num_tiles, num_warps=2, **common)
        return tokens, stops
    depth = min(config.depth, triton.cdiv(vocab_size, config.lanes))
    kept = (num_places, depth, config.lanes)
    draw_kernel[(num_places,)](
        logits, logits.stride(0), *settings, settings.temperature.stride(0), *masked, floats, ids,
        torch.empty(kept, dtype=logits.dtype, device=logits.device),
        torch.empty(kept, dtype=torch.int32, device=logits.device),
        *ends, vocab_size, num_tiles, TILE=config.tile, KEEP=config.keep, LANES=config.lanes,
        DEPTH=depth, LIMIT=config.limit, HAS_MASK=masks is not None,
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0, num_warps=config.finish_warps, **common,
    )  # fmt: skip
    return tokens, stops


def _mask_arguments(masks: Masks) -> tuple[Tensor, int, Tensor]:
    """The masks as the kernels take them."""
    return masks.bits, masks.bits.stride(0), masks.has_grammar.view(torch.uint8)


def _with_one_stride(settings: RowSettings) -> RowSettings:
    """The same values such that the fp32 settings share a stride and the others are packed."""
    temperature, top_k, top_p, min_p, seed, position = settings
    if len({t.stride(0) for t in (temperature, top_p, min_p)}) > 1:
        temperature, top_p, min_p = torch.stack((temperature, top_p, min_p))
    others = (top_k.contiguous(), seed.contiguous(), position.contiguous())
    return RowSettings(temperature, others[0], top_p, min_p, *others[1:])
