"""compiled-engine: version and the names of the Python API, loaded on first use.

Importing this package must stay cheap: torch is imported only when `LLM` is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiled_engine.llm import LLM
    from compiled_engine.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from compiled_engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from compiled_engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
