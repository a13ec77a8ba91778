"""Every candidate of the kernel registry, and a registry over them."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_engine.custom_ops import attention_choice, gemm, moe_choice, quant_choice
from compiled_engine.custom_ops.registry import Candidate, KernelRegistry
from compiled_engine.errors import ConfigError

CANDIDATES: tuple[Candidate, ...] = (
    *attention_choice.CANDIDATES,
    *gemm.CANDIDATES,
    *moe_choice.CANDIDATES,
    *quant_choice.CANDIDATES,
)


def make_registry(overrides: Iterable[str] = ()) -> KernelRegistry:
    """A registry with `--kernel` overrides, each "family=name" or "family.mode=name".

    Raises:
        ConfigError: an override is not of this form or names what there is not.
    """
    chosen = {}
    for text in overrides:
        place, separator, name = text.partition("=")
        if not (place and separator and name):
            raise ConfigError(
                f"--kernel {text}: the form is FAMILY=NAME, such as attention=torch",
                param="kernels",
            )
        chosen[place] = name
    return KernelRegistry(CANDIDATES, chosen)
