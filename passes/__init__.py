"""FX passes: one fusion a file, and the pipeline that runs them and expands the rest."""

from compiled_engine.passes.pipeline import PASS_NAMES, PassPipeline

__all__ = ["PASS_NAMES", "PassPipeline"]
