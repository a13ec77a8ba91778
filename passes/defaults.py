"""Which passes run on a device when no option says so.

A pass that does not pay on a device is off there: its op has no kernel for it, or it was measured
to be slower. `--enable-pass NAME` runs it all the same, `--disable-pass NAME` leaves another out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from compiled_engine.errors import ConfigError
from compiled_engine.passes.pipeline import PASS_NAMES

# Device type -> pass -> why it is off there.
OFF_BY_DEFAULT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {
                "decode_attention": "the CPU's kernel takes decode rows and prompts alike",
                "fuse_linear": "its op has kernels for GPUs only",
                "use_library_op": "it calls a GPU's library",
            }
        ),
        "cuda": MappingProxyType({"use_linear_op": "its op has kernels for CPUs only"}),
    }
)


def disabled_passes(
    device_type: str, *, disabled: tuple[str, ...], enabled: tuple[str, ...]
) -> tuple[str, ...]:
    """Passes that do not run: those an option names, and those that do not pay on the device.

    Args:
        device_type: "cpu", "cuda", or "" for a device of which nothing is known.
        disabled: names that an option leaves out.
        enabled: names that an option turns on.

    Raises:
        ConfigError: an unknown name in `enabled`, or one that both options name.
    """
    known = ", ".join(PASS_NAMES)
    for name in enabled:
        if name not in PASS_NAMES:
            raise ConfigError(
                f"--enable-pass {name}: no such pass; there are {known}", param="enable_passes"
            )
        if name in disabled:
            raise ConfigError(
                f"--enable-pass {name} and --disable-pass {name} contradict each other",
                param="enable_passes",
            )
    off = (name for name in OFF_BY_DEFAULT.get(device_type, {}) if name not in enabled)
    return tuple(dict.fromkeys((*disabled, *off)))
