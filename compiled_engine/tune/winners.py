"""The kernels that measurements chose, in words: a line for each op and bucket of shapes."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.custom_ops.registry import Measured
from compiled_engine.custom_ops.tuning import KernelTuner


def winner_lines(tuner: KernelTuner) -> list[str]:
    """What `--kernel-objective autotune` runs, and where that is kept.

    An engine whose code was in the cache asks for no kernel: then all of the file is listed.
    """
    entries = tuner.entries
    known = sorted(tuner.asked & set(entries)) or sorted(entries)
    if not known:
        return []
    of = "" if tuner.asked else ", of every model measured with this cache"
    return [
        f"Kernels that autotune chose{of}. They are kept in the cache folder, in "
        f"kernels/{tuner.path.name}, and travel with `warmup --output`; `--kernel` cannot name one "
        "for a single bucket of shapes.",
        *(_line(key, entries[key]) for key in known),
    ]


def _line(key: str, measured: Measured) -> str:
    what, _, rest = key.partition("; ")
    traits = rest.rpartition("; ")[0]
    return f"{what.strip()}; {traits}: {_ranked(measured)}"


def _ranked(measured: Measured) -> str:
    others: Sequence[tuple[str, float]] = sorted(
        ((n, s) for n, s in measured.seconds.items() if n != measured.winner), key=lambda e: e[1]
    )
    listed = [(measured.winner, measured.seconds[measured.winner]), *others]
    return ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in listed)
