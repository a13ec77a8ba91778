"""Triton's cache of kernels after its folder was moved."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from compiled_engine.build_cache import BuildTotals, triton_totals
from compiled_engine.cache_folders import place_caches
from compiled_engine.triton_cache import MovableCache


def _counted(before: BuildTotals) -> tuple[int, int, int]:
    """Hits, misses and bytes since."""
    now = triton_totals()
    return (
        now.num_hits - before.num_hits,
        now.num_misses - before.num_misses,
        now.num_bytes - before.num_bytes,
    )


SCRIPT = """
from pathlib import Path
import sys
from compiled_engine.build_cache import BuildTotals, triton_totals
from compiled_engine.cache_folders import place_caches
place_caches(Path(sys.argv[1]))
from triton.runtime.cache import get_cache_manager
print(type(get_cache_manager("0a" * 32)).__name__)
"""


def test_triton_is_told_of_the_cache_before_it_is_imported(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["MovableCache"]


def test_a_moved_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("COMPILED_ENGINE_BUILD_CACHE", "")
    place_caches(tmp_path / "here")
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "here")
        knobs.cache.manager_class = MovableCache
        before = replace(triton_totals())
        made = get_cache_manager("0a" * 32)
        assert made.get_group("k.json") is None
        files = {name: made.put(b"x" + name.encode(), name) for name in ("k.cubin", "k.json")}
        made.put_group("k.json", files)
        assert made.get_group("k.json") == files
        assert _counted(before) == (1, 1, 2 * sum(len(b"x" + n.encode()) for n in files))
        assert made.get_group("triton_poi_fused_add_0.json") is None
        made.put_group("triton_poi_fused_add_0.json", files)
        assert _counted(before)[:2] == (1, 1), "Inductor's own are not counted"
        (tmp_path / "here").rename(tmp_path / "there")
        knobs.cache.dir = str(tmp_path / "there")
        found = get_cache_manager("0a" * 32).get_group("k.json")
        assert found is not None
        assert {n: Path(path).read_bytes() for n, path in found.items()} == {
            "k.cubin": b"xk.cubin",
            "k.json": b"xk.json",
        }
        (Path(found["k.cubin"])).unlink()
        assert set(get_cache_manager("0a" * 32).get_group("k.json") or {}) == {"k.json"}
        assert get_cache_manager("0b" * 32).get_group("k.json") is None
        plain = FileCacheManager(get_cache_manager("0a" * 32).key)
        assert plain.get_group("k.json") == {}, "why the class is there"
