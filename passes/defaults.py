"""Which passes run on a device when no option says so.

A pass does not run on a device that its op has no kernel for. One that was measured to be slower
on a device is off there by default: `--enable-pass NAME` runs it all the same, and
`--disable-pass NAME` leaves another out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from compiled_engine.errors import ConfigError
from compiled_engine.passes.names import check_names

# Device type -> pass -> why it cannot run there.
NOT_FOR: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {
                "fuse_attention_quant": "the CPU's kernel writes the dtype of the queries",
                "decode_attention": "the CPU's kernel takes decode rows and prompts alike",
                "fuse_linear": "its op has kernels for GPUs only",
                "fuse_sparse_mlp": "its op has kernels for GPUs only",
                "use_library_op": "it calls a GPU's library",
            }
        ),
        "cuda": MappingProxyType({"use_linear_op": "its op has kernels for CPUs only"}),
    }
)
# Device type -> passes that were measured to be slower there.
OFF_BY_DEFAULT: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": (), "cuda": ()})


def disabled_passes(
    device_type: str, *, disabled: tuple[str, ...], enabled: tuple[str, ...]
) -> tuple[str, ...]:
    """Passes that do not run: those an option names, and those that do not pay on the device.

    Args:
        device_type: "cpu", "cuda", or "" for a device of which nothing is known.
        disabled: names that an option leaves out.
        enabled: names that an option turns on.

    Raises:
        ConfigError: a name is unknown, cannot run on the device, or is in both.
    """
    check_names(disabled, "disable")
    check_names(enabled, "enable")
    impossible = NOT_FOR.get(device_type, {})
    for name in enabled:
        if name in impossible:
            raise ConfigError(
                f"--enable-pass {name}: it cannot run on {device_type}, {impossible[name]}",
                param="enable_passes",
            )
        if name in disabled:
            raise ConfigError(
                f"--enable-pass {name} and --disable-pass {name} contradict each other",
                param="enable_passes",
            )
    slow = (name for name in OFF_BY_DEFAULT.get(device_type, ()) if name not in enabled)
    return tuple(dict.fromkeys((*disabled, *impossible, *slow)))
