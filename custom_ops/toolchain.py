"""Versions of the tools that kernels depend on beyond their public interface."""

from __future__ import annotations

import functools
import importlib.metadata
from importlib.util import find_spec

import torch

# Gluon has no stable interface yet: kernels written in it run on the versions they were checked on.
GLUON_VERSIONS = ("3.6",)


@functools.cache
def has_nvrtc() -> bool:
    """Whether CUDA C++ can be compiled here: torch is for CUDA and `cuda.bindings` is installed."""
    return torch.version.hip is None and find_spec("cuda") is not None


@functools.cache
def gluon_reason() -> str | None:
    """Why kernels written in Gluon cannot be used here, None if they can."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "needs Triton, which is not installed"
    if ".".join(version.split(".")[:2]) in GLUON_VERSIONS:
        return None
    return f"was checked on Triton {', '.join(GLUON_VERSIONS)}, this is {version}"
