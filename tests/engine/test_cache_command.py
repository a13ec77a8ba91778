"""`cache ls|verify|prune|export|import`, over entries that a store wrote."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_engine import build_cache
from compiled_engine.cli import main
from compiled_engine.compile.fingerprint import portable_parts
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from tests.helpers.cache_folder import CODE, files_of, halve, keep
from tests.helpers.commands import refusal, run


def key_of(**changes: str) -> StartKey:
    """A key that this installation could have."""
    parts = {
        **portable_parts(),
        "model.architecture": "LlamaForCausalLM",
        "model.num_layers": "2",
        "model.hidden_size": "64",
        "model.dtype": "float32",
        "device.kind": "cpu",
        "device.instructions": "AVX512 abc",
        "shape.page_size": "16",
    }
    return StartKey(parts | changes)


@pytest.fixture
def cache(tmp_path) -> Path:
    """Two starts, a built library, another that no start needs, and Triton's own files."""
    base = tmp_path / "cache"
    keep(base, key_of(), layer_one=b"one", layer_few=b"few" * 100)
    keep(base, key_of(**{"shape.page_size": "32"}), layer_one=b"other")
    build_cache.load_or_build(base / "cpp" / "unused.so", lambda: CODE)
    for folder, kernel in (("AAA", "_rms_norm"), ("BBB", "triton_poi_fused_add_0")):
        (base / "triton" / folder).mkdir(parents=True)
        (base / "triton" / folder / f"{kernel}.cubin").write_bytes(CODE)
    (base / "inductor" / "ab").mkdir(parents=True)
    (base / "inductor" / "ab" / "x.py").write_text("x = 1")
    return base


def test_ls_shows_every_key_with_what_it_is_for(cache, capsys):
    assert main(["cache", "ls", "--cache-dir", str(cache)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["keys"]
    assert len(rows) == 2
    row = next(row for row in rows if row["key"] == key_of().digest)
    assert row["entries"] == 2
    assert row["model"] == "LlamaForCausalLM 2 x 64 float32"
    assert row["usable"] == "yes"
    assert row["complete"] is True
    assert row["bytes"] > 300
    assert key_of().digest[:12] in "\n".join(table)


def test_ls_says_what_makes_a_key_useless_here(cache, capsys):
    keep(cache, key_of(**{"versions.torch": "1.0"}), x=b"x")
    rows = run(capsys, "cache", "ls", "--cache-dir", cache)["keys"]
    assert sorted(row["usable"] for row in rows) == ["no: other versions.torch", "yes", "yes"]


@pytest.mark.parametrize("kind", ["ls", "verify"])
def test_an_empty_cache_is_no_mistake(tmp_path, capsys, kind):
    assert (
        run(capsys, "cache", kind, "--cache-dir", tmp_path / "none")["command"] == f"cache {kind}"
    )
    assert not (tmp_path / "none").exists()


def test_verify_finds_nothing_wrong_in_what_was_written(cache, capsys):
    found = run(capsys, "cache", "verify", "--cache-dir", cache)
    assert (found["num_sound"], found["problems"]) == (5, [])


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("programs/*/layer_few.program", halve),
        ("programs/*/layer_few.program", Path.unlink),
        ("programs/*/key.json", halve),
        ("cpp/lib.so", halve),
        ("cpp/lib.so", lambda path: path.chmod(0o666)),
    ],
    ids=["entry", "lost-entry", "key", "library", "open-to-others"],
)
def test_verify_names_what_is_bad_and_exits_with_1(cache, capsys, pattern, damage):
    path = next(cache.glob(pattern))
    damage(path)
    found = run(capsys, "cache", "verify", "--cache-dir", cache, code=1)
    (problem,) = found["problems"]
    assert path.name.removesuffix(".program") in problem["path"]
    assert problem["reason"]


# --- prune --------------------------------------------------------------------------------


def test_prune_needs_something_to_go_by(cache, capsys):
    before = files_of(cache)
    assert "nothing to prune by" in refusal(capsys, "cache", "prune", "--cache-dir", cache)
    assert "--max-bytes is -1" in refusal(
        capsys, "cache", "prune", "--max-bytes", -1, "--cache-dir", cache
    )
    assert files_of(cache) == before


def test_prune_by_age_takes_what_was_not_used(cache, capsys):
    old = time.time() - 10 * 86400
    for path in (cache / "cpp" / "unused.so", cache / "programs" / key_of().digest / "key.json"):
        os.utime(path, (old, old))
    found = run(capsys, "cache", "prune", "--older-than", 7, "--cache-dir", cache)
    removed = {item["path"] for item in found["removed"]}
    assert removed == {"cpp/unused.so", f"programs/{key_of().digest}"}
    assert EntryStore(cache, key_of()).load("layer_one") is None
    assert EntryStore(cache, key_of(**{"shape.page_size": "32"})).load("layer_one") == b"other"


def test_a_start_that_loads_its_pieces_keeps_them_young(cache, capsys):
    old = time.time() - 10 * 86400
    for path in (*cache.glob("programs/*/key.json"), *cache.glob("cpp/*")):
        os.utime(path, (old, old))
    EntryStore(cache, key_of()).load("layer_one")
    build_cache.load_or_build(cache / "cpp" / "lib.so", lambda: CODE)
    run(capsys, "cache", "prune", "--older-than", 7, "--cache-dir", cache)
    assert [path.name for path in cache.glob("programs/*")] == [key_of().digest]
    assert [path.name for path in cache.glob("cpp/*")] == ["lib.so"]


def test_prune_to_a_size_takes_the_longest_unused_first(cache, capsys):
    now = time.time()
    ages = {"cpp/lib.so": 1, "cpp/unused.so": 5, f"programs/{key_of().digest}/key.json": 2}
    for path in cache.glob("programs/*/key.json"):
        os.utime(path, (now - 4, now - 4))
    for name, age in ages.items():
        os.utime(cache / name, (now - age, now - age))
    newest = (cache / "cpp" / "lib.so").stat().st_size
    kept = newest + sum(p.stat().st_size for p in (cache / "programs" / key_of().digest).iterdir())
    run(capsys, "cache", "prune", "--max-bytes", kept, "--cache-dir", cache)
    assert [path.name for path in cache.glob("programs/*")] == [key_of().digest]
    assert [path.name for path in cache.glob("cpp/*")] == ["lib.so"]
    run(capsys, "cache", "prune", "--max-bytes", 0, "--cache-dir", cache)
    assert not list(cache.glob("programs/*"))
    assert (cache / "inductor").is_dir(), "not asked for"


def test_prune_stale_takes_keys_of_other_installations(cache, capsys):
    stale = key_of(**{"source.models.llama": "another"})
    keep(cache, stale, x=b"x")
    found = run(capsys, "cache", "prune", "--stale", "--cache-dir", cache)
    assert [item["path"] for item in found["removed"]] == [f"programs/{stale.digest}"]


def test_prune_compilers_takes_what_only_a_compile_needs(cache, capsys):
    run(capsys, "cache", "prune", "--compilers", "--cache-dir", cache)
    assert {name.split("/")[0] for name in files_of(cache)} == {"programs", "cpp"}


def test_prune_ends_what_a_killed_prune_began(cache, capsys):
    left = cache / "programs" / ".removed-0123"
    shutil.copytree(cache / "programs" / key_of().digest, left)
    run(capsys, "cache", "prune", "--older-than", 7, "--cache-dir", cache)
    assert not left.exists()


# --- export and import --------------------------------------------------------------------


@pytest.fixture(params=["folder", "art.tar"])
def artifact(request, cache, tmp_path, capsys) -> Path:
    """Of the first start alone."""
    target = tmp_path / request.param
    run(capsys, "cache", "export", target, "--key", key_of().digest[:10], "--cache-dir", cache)
    return target


def take(artifact: Path, cache: Path) -> list[object]:
    return ["cache", "import", artifact, "--trust-artifact", "--cache-dir", cache]


def test_an_artifact_moves_a_start_to_another_folder(artifact, cache, tmp_path, capsys):
    shutil.rmtree(cache)
    other = tmp_path / "other" / "cache"
    found = run(capsys, *take(artifact, other))
    assert found["digests"] == [key_of().digest]
    store = EntryStore(other, key_of())
    assert store.load("layer_one") == b"one"
    assert store.load("layer_few") == b"few" * 100
    assert files_of(other) == {
        *(
            f"programs/{key_of().digest}/{name}"
            for name in ("key.json", "start.json", "layer_one.program", "layer_few.program")
        ),
        "cpp/lib.so",
        "triton/AAA/_rms_norm.cubin",
    }
    built = build_cache.load_or_build(other / "cpp" / "lib.so", lambda: pytest.fail("built again"))
    assert built == CODE
    assert run(capsys, "cache", "verify", "--cache-dir", other)["problems"] == []


def test_an_artifact_is_the_same_bytes_whenever_it_is_made(cache, tmp_path, capsys):
    for name in ("a.tar", "b.tar"):
        run(capsys, "cache", "export", tmp_path / name, "--cache-dir", cache)
        os.utime(cache / "cpp" / "lib.so", (1, 1))
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_all_keys_go_when_none_is_named(cache, tmp_path, capsys):
    found = run(capsys, "cache", "export", tmp_path / "all.tar", "--cache-dir", cache)
    assert len(found["keys"]) == 2


def test_import_needs_to_be_told_that_the_artifact_is_trusted(artifact, tmp_path, capsys):
    said = refusal(capsys, "cache", "import", artifact, "--cache-dir", tmp_path / "new")
    assert "--trust-artifact" in said
    assert "code" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["export", "{there}"], "is there already"),
        (["export", "{new}", "--key", "zzz"], "--key zzz fits 0 keys"),
        (["import", "{missing}", "--trust-artifact"], "neither a folder nor a tar file"),
        (["import", "{there}", "--trust-artifact"], "no manifest.json"),
    ],
    ids=["target-there", "unknown-key", "no-source", "no-artifact"],
)
def test_what_cannot_work_is_refused(cache, tmp_path, capsys, argv, message):
    there = tmp_path / "there"
    there.mkdir()
    places = {"there": there, "new": tmp_path / "new", "missing": tmp_path / "missing"}
    words = [word.format(**places) for word in argv]
    assert message in refusal(capsys, "cache", *words, "--cache-dir", cache)


def test_export_refuses_a_damaged_entry(cache, tmp_path, capsys):
    halve(cache / "programs" / key_of().digest / "layer_one.program")
    said = refusal(capsys, "cache", "export", tmp_path / "x.tar", "--cache-dir", cache)
    assert "layer_one" in said
    assert not (tmp_path / "x.tar").exists()


def test_export_of_an_empty_cache_is_refused(tmp_path, capsys):
    said = refusal(capsys, "cache", "export", tmp_path / "x", "--cache-dir", tmp_path / "none")
    assert "holds no compiled start" in said


def rewritten(artifact: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The artifact as a tar whose files were changed."""
    contents: dict[str, bytes] = {}
    if artifact.is_dir():
        contents = {name: (artifact / name).read_bytes() for name in files_of(artifact)}
    else:
        with tarfile.open(artifact) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                contents[member.name] = file.read()
    change(contents)
    path = artifact.with_name("rewritten.tar")
    with tarfile.open(path, "w") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _manifest(contents: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads(contents["manifest.json"])
    change(manifest)
    contents["manifest.json"] = json.dumps(manifest).encode()


def _listed_as(name: str) -> Callable[[dict[str, bytes]], None]:
    """A file of the artifact goes by another path, and the manifest says so."""

    def change(contents: dict[str, bytes]) -> None:
        contents[name] = contents.pop("cpp/lib.so")
        _manifest(contents, lambda m: m["files"].update({name: m["files"].pop("cpp/lib.so")}))

    return change


def _flip(contents: dict[str, bytes]) -> None:
    name = next(name for name in contents if name.endswith("layer_one.program"))
    contents[name] = contents[name][:-1] + b"\0"


def _other(part: str) -> Callable[[dict[str, bytes]], None]:
    def change(contents: dict[str, bytes]) -> None:
        def replace(manifest: dict[str, Any]) -> None:
            (parts,) = manifest["keys"].values()
            parts[part] = "another"
            manifest["keys"] = {StartKey(parts).digest: parts}

        _manifest(contents, replace)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_listed_as("../../etc/evil"), "no path of a cache folder"),
        (_listed_as("/etc/evil"), "no path of a cache folder"),
        (_listed_as("cpp/../../evil"), "no path of a cache folder"),
        (_listed_as("cpp/.hidden"), "no path of a cache folder"),
        (_listed_as("models/evil"), "no path of a cache folder"),
        (_listed_as("cpp/a/b"), "no path of a cache folder"),
        (_flip, "is damaged"),
        (lambda c: c.pop("cpp/lib.so"), "not in both"),
        (lambda c: c.update({"cpp/more.so": b"x"}), "not in both"),
        (lambda c: c.update({"manifest.json": b"{"}), "cannot be read"),
        (lambda c: c.update({"manifest.json": b"[]"}), "cannot be read"),
        (lambda c: c.pop("manifest.json"), "no manifest.json"),
        (lambda c: _manifest(c, lambda m: m.update(format=99)), "its format is 99"),
        (
            lambda c: _manifest(c, lambda m: m.update(keys={"0" * 24: {"a": "1"}})),
            "not what its parts say",
        ),
        (_other("versions.torch"), "versions.torch"),
        (_other("engine.version"), "engine.version"),
        (_other("source.models.llama"), "source.models.llama"),
    ],
)
def test_an_artifact_that_is_not_as_it_was_made_is_refused(
    artifact, tmp_path, capsys, change, message
):
    new = tmp_path / "new"
    said = refusal(capsys, *take(rewritten(artifact, change), new))
    assert message in said
    assert not new.exists()


def test_an_artifact_of_another_device_is_taken(artifact, tmp_path, capsys):
    """Images are baked where the device is not."""
    changed = rewritten(artifact, _other("device.name"))
    assert run(capsys, *take(changed, tmp_path / "new"))["num_files"] > 0


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_tar_with_links_is_refused(tmp_path, capsys, kind):
    path = tmp_path / "links.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("cpp/x.so")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    assert "no plain file" in refusal(capsys, *take(path, tmp_path / "new"))


def test_a_folder_with_links_is_refused(cache, tmp_path, capsys):
    target = tmp_path / "artifact"
    run(capsys, "cache", "export", target, "--cache-dir", cache)
    (target / "cpp" / "lib.so").unlink()
    (target / "cpp" / "lib.so").symlink_to("/etc/passwd")
    assert "no plain file" in refusal(capsys, *take(target, tmp_path / "new"))


def test_a_cut_tar_is_refused(cache, tmp_path, capsys):
    target = tmp_path / "a.tar"
    run(capsys, "cache", "export", target, "--cache-dir", cache)
    target.write_bytes(target.read_bytes()[:6000])
    assert str(target) in refusal(capsys, *take(target, tmp_path / "new"))


def test_tritons_own_folder_is_closed_when_something_is_put_into_it(artifact, tmp_path, capsys):
    """Triton makes it as the umask says."""
    folder = tmp_path / "new" / "triton" / "AAA"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o775)
    run(capsys, *take(artifact, tmp_path / "new"))
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o755, 0o755]
    assert (folder / "_rms_norm.cubin").is_file()


def test_measurements_of_this_machine_stay(cache, tmp_path, capsys):
    kernels = cache / "kernels"
    kernels.mkdir()
    (kernels / "m.json").write_text('{"theirs": 1}')
    store = EntryStore(cache, key_of())
    store.load("layer_one")
    store.finish(["kernels/m.json"])
    run(capsys, "cache", "export", tmp_path / "a.tar", "--cache-dir", cache)
    new = tmp_path / "new"
    (new / "kernels").mkdir(parents=True)
    (new / "kernels" / "m.json").write_text('{"ours": 1}')
    assert run(capsys, *take(tmp_path / "a.tar", new))["kept"] == ["kernels/m.json"]
    assert json.loads((new / "kernels" / "m.json").read_text()) == {"ours": 1}
