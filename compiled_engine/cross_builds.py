"""Compiles kernels for a GPU that is not here, in threads, and counts what became of each.

Knows where Triton and our own sources keep what is compiled; which kernels there are is with who
launches them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from compiled_engine.build_cache import file_problem
from compiled_engine.custom_ops.cuda_build import Cubin, CudaBuildError, cache_key, cached_cubin

TRITON_KIND, CUDA_KIND = "Triton kernel", "CUDA C++ source"
_LONGEST_REASON = 200


@dataclass(frozen=True, kw_only=True)
class BuildRow:
    """What became of one kernel, in all the versions of it that are needed.

    Attributes:
        kind: what it is, in words.
        name: of the kernel, source or piece.
        num_compiled: versions that were compiled.
        num_found: versions that were in the cache.
        seconds: that compiling took, of all threads.
        num_bytes: of all versions in the cache.
        reason: why it was not compiled; empty if it was.
        is_error: a compiler refused it.
    """

    kind: str
    name: str
    num_compiled: int = 0
    num_found: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    reason: str = ""
    is_error: bool = False


class CrossBuilds:
    """Kernels that are being compiled.

    Args:
        cache_dir: the engine's cache folder.
        jobs: threads.
    """

    def __init__(self, cache_dir: Path, jobs: int) -> None:
        self._base = cache_dir.absolute()
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="cross-compile")
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], BuildRow] = {}
        self._failures: dict[tuple[str, str], BuildRow] = {}
        self._files: set[Path] = set()
        self._cubins: dict[Path, Future[None]] = {}
        self._kernel = ""  # that is being launched

    @contextmanager
    def running(self) -> Iterator[None]:
        """Kernels that are launched in the block are compiled; waits for all of them."""
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITCallable

        parse, order = JITCallable.parse, threading.RLock()

        def parse_alone(function: Any) -> Any:
            with order:  # Python 3.11 and 3.12 fail where two threads do
                return parse(function)

        with (
            self._pool,
            mock.patch.object(knobs.compilation, "listener", self._on_kernel),
            mock.patch.object(JITCallable, "parse", parse_alone),
        ):
            with AsyncCompileMode(_Named(self), ignore_errors=True):
                yield
            for future in self._cubins.values():
                future.result()

    def cubin(self, name: str, arch: str, cache_dir: Path, flags: Iterable[str] = ()) -> Cubin:
        """Stands for `cuda_build.cached_cubin` and returns at once, with no code."""
        flags = tuple(flags)
        path = cache_dir / f"{cache_key(name, arch, flags)}.cubin"
        if path not in self._cubins:
            self._cubins[path] = self._pool.submit(self._build_cubin, path, name, arch, flags)
        return Cubin(b"", "")

    def library_product(self, residual: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
        """Stands for `gemm_library.library_product`, which runs the library's fastest kernel."""
        name = "products of the library"
        why = "the library's kernels are measured on the GPU, by the first start that needs them"
        with self._lock:
            row = BuildRow(kind="measurement", name=name, reason=why)
            self._failures.setdefault((row.kind, name), row)
        return x.new_empty(x.shape[0], weight.shape[0])

    def note_launch(self, kernel: Any) -> None:
        """Triton is about to look for a kernel, or to compile it."""
        self._kernel = _name_of(kernel)

    def note_failed_launch(self, op: str, error: Exception) -> None:
        """A launcher asked for what only the GPU can say."""
        self._fail("op", op.replace("::", "."), error)

    def note_failed_piece(self, name: str, error: Exception) -> None:
        """A piece could not be traced: kernels that it alone launches are not known."""
        self._fail("piece", name, error, is_error=True)

    def rows(self) -> list[BuildRow]:
        """What is in the cache now, by kind and name."""
        return [self._rows[key] for key in sorted(self._rows)]

    def failures(self) -> list[BuildRow]:
        """What is not, by kind and name."""
        return [self._failures[key] for key in sorted(self._failures)]

    def files(self) -> list[str]:
        """Files that hold what was built, relative to the cache folder."""
        return sorted(path.relative_to(self._base).as_posix() for path in self._files)

    def submit(self, build: Any) -> Future[Any]:
        """Has a thread compile the kernel that is being launched."""
        return self._pool.submit(self._build_kernel, self._kernel, build)

    def _build_kernel(self, name: str, build: Any) -> Any:
        try:
            return build()
        except Exception as error:
            self._fail(TRITON_KIND, name, error, is_error=True)
            raise

    def _on_kernel(
        self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        paths = [Path(path).absolute() for path in metadata_group.values()]
        # The note of what belongs together lies beside it.
        paths += [path for path in paths[0].parent.glob("__grp__*")]
        seconds = 0.0 if cache_hit else times.total / 1e6
        self._count(TRITON_KIND, _name_of(src.fn), paths, seconds, is_found=cache_hit)

    def _build_cubin(self, path: Path, name: str, arch: str, flags: tuple[str, ...]) -> None:
        is_found = not file_problem(path)
        start = time.perf_counter()
        try:
            cached_cubin(name, arch, path.parent, flags)
        except CudaBuildError as error:
            self._fail(CUDA_KIND, name, error, is_error=True)
            return
        seconds = 0.0 if is_found else time.perf_counter() - start
        self._count(CUDA_KIND, name, [path.absolute()], seconds, is_found=is_found)

    def _count(
        self, kind: str, name: str, paths: list[Path], seconds: float, *, is_found: bool
    ) -> None:
        kept = [path for path in paths if path.is_file()]
        with self._lock:
            self._files.update(kept)
            row = self._rows.get((kind, name)) or BuildRow(kind=kind, name=name)
            self._rows[kind, name] = replace(
                row,
                num_compiled=row.num_compiled + (not is_found),
                num_found=row.num_found + is_found,
                seconds=round(row.seconds + seconds, 3),
                num_bytes=row.num_bytes + sum(path.stat().st_size for path in kept),
            )

    def _fail(self, kind: str, name: str, error: Exception, *, is_error: bool = False) -> None:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:_LONGEST_REASON]}"
        row = BuildRow(kind=kind, name=name, reason=reason, is_error=is_error)
        with self._lock:
            self._failures.setdefault((kind, name), row)


def _name_of(kernel: Any) -> str:
    """Of a Triton kernel: several modules have one of a name."""
    return f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"


class _Named:
    """What Triton takes for an executor."""

    def __init__(self, builds: CrossBuilds) -> None:
        self._builds = builds

    def submit(self, build: Any) -> Future[Any]:
        """As `Executor.submit`."""
        return self._builds.submit(build)
