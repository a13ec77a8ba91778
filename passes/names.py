"""The passes by name, in their order, and which are for which piece.

For whoever chooses passes and runs none: imports neither Inductor nor Dynamo, which take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.errors import ConfigError

# Attention of such pieces is planned by tokens; `step` asks whether it runs.
DECODE_ATTENTION = "decode_attention"

# Code that does not call our ops is brought to them first.
LIFT_NAMES: tuple[str, ...] = (
    "remove_no_ops",
    "flatten_batch",
    "merge_linears",
    "lift_rms_norm",
    "lift_gated_activation",
    "lift_rope",
    "lift_route",
)
# `pipeline` runs modules in this order; a test compares their names with these.
PASS_NAMES: tuple[str, ...] = (
    *LIFT_NAMES,
    DECODE_ATTENTION,
    "lower_quantized_linear",
    "lower_scaled_linear",
    "fuse_sparse_mlp",
    "fuse_linear",
    "use_library_op",
    "fuse_add_rms_norm",
    "fuse_norm_quant",
    "fuse_activation_quant",
    "fuse_attention_quant",
    "fuse_qk_norm_rope_kv",
    "use_linear_op",
)


@dataclass(frozen=True, kw_only=True)
class PieceTraits:
    """What a piece is compiled for; some passes are for such pieces only.

    Attributes:
        is_decode: every token may be taken as a sequence of its own (`decode_attention`).
        is_few: never more tokens than the kernels for few rows take (`fuse_linear`,
            `fuse_sparse_mlp`, `lower_quantized_linear`); the others give plain products to the
            library (`use_library_op`).
        is_foreign: made from code that does not call our ops (`LIFT_NAMES`).
    """

    is_decode: bool = False
    is_few: bool = False
    is_foreign: bool = False

    def skipped(self) -> tuple[str, ...]:
        """Names of the passes that are not for such a piece."""
        kept = {
            DECODE_ATTENTION: self.is_decode,
            "fuse_linear": self.is_few,
            "fuse_sparse_mlp": self.is_few,
            "lower_quantized_linear": self.is_few,
            "use_library_op": not self.is_few,
        }
        kept |= dict.fromkeys(LIFT_NAMES, self.is_foreign)
        return tuple(name for name, is_kept in kept.items() if not is_kept)


def check_names(names: tuple[str, ...], verb: str) -> None:
    """Raises ConfigError for a name in `--<verb>-pass` that is no pass; lists those there are."""
    for name in names:
        if name not in PASS_NAMES:
            raise ConfigError(
                f"--{verb}-pass {name}: no such pass; there are {', '.join(PASS_NAMES)}",
                param=f"{verb}_passes",
            )
