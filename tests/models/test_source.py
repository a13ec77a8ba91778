"""`resolve_model` for hub ids, the hub replaced: files chosen, errors, offline use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from compiled_engine.errors import ConfigError
from compiled_engine.models.source import resolve_model

FILES = {
    "config.json": 10,
    "generation_config.json": 5,
    "tokenizer.json": 20,
    "chat_template.jinja": 3,
    "additional_chat_templates/tool_use.jinja": 3,
    "model-00001-of-00002.safetensors": 100,
    "model-00002-of-00002.safetensors": 100,
    "model.safetensors.index.json": 7,
    "consolidated.safetensors": 200,
    "pytorch_model.bin": 200,
    "original/params.json": 1,
    "README.md": 1,
    "figure.png": 50,
}


class FakeHub:
    """A hub with one model; `error` is raised by every network call."""

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        self.folder = folder
        self.files = files
        self.error: Exception | None = None
        self.fetched: list[str] = []
        self.revisions: list[str | None] = []

    def model_info(self, _repo_id: str, *, revision: str | None, **_options: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.revisions.append(revision)
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="abc123")

    def hf_hub_download(self, _repo_id: str, file: str, **options: Any) -> str:
        path = self.folder / "snapshots" / "abc123" / file
        if options.get("local_files_only"):
            if not path.exists():
                raise FileNotFoundError(file)
            return str(path)
        self.fetched.append(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * self.files[file])
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path, dict(FILES))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    return fake


def refusal(error_class: type[Exception]) -> Exception:
    """A hub error without the HTTP response its constructor asks for."""
    return error_class.__new__(error_class)


def test_resolve_model_downloads_what_a_model_needs_and_no_more(
    hub: FakeHub, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    folder = resolve_model(
        "owner/name@v1", tmp_path, progress=lambda done, total, _label: seen.append((done, total))
    )
    unwanted = ("consolidated.safetensors", "pytorch_model.bin", "README.md", "figure.png")
    expected = [name for name in FILES if name not in (*unwanted, "original/params.json")]
    assert sorted(hub.fetched) == sorted(expected)
    assert hub.revisions == ["v1"]
    assert folder == tmp_path / "snapshots" / "abc123"
    assert seen[0][0] == 0
    assert seen[-1] == (248, 248)


def test_resolve_model_for_dummy_weights_downloads_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    resolve_model("owner/name", tmp_path, with_weights=False)
    assert not [name for name in hub.fetched if name.endswith(("safetensors", "bin"))]


def test_resolve_model_pickles_only_with_the_flag(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {name: size for name, size in FILES.items() if not name.endswith(".safetensors")}
    with pytest.raises(ConfigError, match="--allow-pickle"):
        resolve_model("owner/name", tmp_path)
    assert hub.fetched == []
    resolve_model("owner/name", tmp_path, allow_pickle=True)
    assert "pytorch_model.bin" in hub.fetched


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refusal(GatedRepoError), "HF_TOKEN"),
        (refusal(RepositoryNotFoundError), "no model on the hub"),
        (ConnectionError("no route"), "cannot be reached .*no route.*HF_ENDPOINT"),
    ],
    ids=["gated", "not-found", "offline"],
)
def test_resolve_model_errors_say_what_to_set(
    hub: FakeHub, tmp_path: Path, error: Exception, said: str
) -> None:
    hub.error = error
    with pytest.raises(ConfigError, match=said):
        resolve_model("owner/name", tmp_path)


def test_resolve_model_offline_takes_an_earlier_download_and_says_so(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model("owner/name", tmp_path)
    hub.error = ConnectionError("no route")
    assert resolve_model("owner/name", tmp_path) == folder
    assert "cannot be reached" in caplog.text


def test_resolve_model_offline_refuses_a_download_without_weights(
    hub: FakeHub, tmp_path: Path
) -> None:
    folder = resolve_model("owner/name", tmp_path, with_weights=False)
    hub.error = ConnectionError("no route")
    assert resolve_model("owner/name", tmp_path, with_weights=False) == folder
    with pytest.raises(ConfigError, match="cannot be reached"):
        resolve_model("owner/name", tmp_path)


def test_resolve_model_hub_model_without_config_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["config.json"]
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model("owner/name", tmp_path)
