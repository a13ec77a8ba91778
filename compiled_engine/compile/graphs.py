"""CUDA graphs of whole steps: captured once a key, replayed with one call.

A graph is captured whole, or in segments split at calls of named ops, which then run eagerly
between the segments (for ops that may not be captured). All graphs share one memory pool: steps run
one after another, so what one leaves behind the next may overwrite. Everything a step reads from or
leaves to another step lives outside the pool, at fixed addresses; `check_addresses` tests that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.compile.torch_compat import fake_result, raw_stream

Replay = Callable[[], None]


class StepGraphs:
    """Captures and replays.

    Args:
        device: the GPU.
        split_ops: qualified op names ("ce::paged_attention") at which graphs are split; empty
            captures whole steps.
        addresses: names and addresses a replay relies on, compared before every replay; None
            compares nothing.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        split_ops: tuple[str, ...] = (),
        addresses: Callable[[], dict[str, int]] | None = None,
    ) -> None:
        self.split_ops = split_ops
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._replays: dict[Hashable, list[Replay]] = {}
        self._graphs: dict[Hashable, list[torch.cuda.CUDAGraph]] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._addresses = addresses
        self._seen: dict[str, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Records what `function` launches under `key`. It has run at least once before.

        A capture cannot free what the allocator keeps for later: `torch.cuda.empty_cache` before
        the first of several gives that to it.

        Raises:
            torch.OutOfMemoryError: the graph does not fit; nothing is recorded under `key`.
        """
        assert key not in self._replays, f"{key} was captured already"
        if self._addresses is not None and not self._seen:
            self._seen = self._addresses()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        segments = _Segments(self.split_ops, self._pool, self._buffers)
        try:
            with torch.cuda.stream(self._stream):
                segments.record(function)
        finally:
            current.wait_stream(self._stream)
        self._replays[key] = segments.replays
        self._graphs[key] = segments.graphs

    def replay(self, key: Hashable) -> None:
        """Launches the step of `key` on the current stream."""
        if self._addresses is not None:
            self.check_addresses()
        for replay in self._replays[key]:
            replay()

    def whole_graph(self, key: Hashable) -> torch.cuda.CUDAGraph:
        """The only graph of a key that was captured whole."""
        (graph,) = self._graphs[key]
        return graph

    def check_addresses(self) -> None:
        """Raises AssertionError if a tensor the graphs rely on moved since the first capture."""
        assert self._addresses is not None
        now = self._addresses()
        moved = [name for name, address in now.items() if self._seen.get(name) != address]
        assert not moved, f"captured graphs read {moved} at addresses that are no longer theirs"


class _Segments(TorchDispatchMode):
    """One capture, cut at the split ops."""

    def __init__(
        self, split_ops: tuple[str, ...], pool: Any, buffers: dict[Hashable, Tensor]
    ) -> None:
        super().__init__()
        self.replays: list[Replay] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._split_ops = frozenset(split_ops)
        self._pool = pool
        self._buffers = buffers
        self._open: torch.cuda.CUDAGraph | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode, which sees the ops it calls."""
        return True

    def record(self, function: Callable[[], None]) -> None:
        with self._capturing():
            if self._split_ops:
                with self:
                    function()
            else:
                function()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except BaseException:
            self._drop()
            raise
        self._end()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Relaxed: other threads (a heartbeat, a loader) may call CUDA while this one captures.
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        self._open = graph

    def _end(self) -> None:
        assert self._open is not None
        graph, self._open = self._open, None
        graph.capture_end()
        self.graphs.append(graph)
        self.replays.append(_launcher(graph))

    def _drop(self) -> None:
        """Ends a capture that failed; what it recorded is of no use."""
        graph, self._open = self._open, None
        if graph is not None:
            with suppress(RuntimeError):  # the error that ended the capture is the one to tell
                graph.capture_end()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() not in self._split_ops:
            return func(*args, **kwargs)
        self._end()
        # The tensors live in the pool at addresses every replay fills again; holding them would
        # keep their memory from the segments behind, so only their addresses are held.
        fixed = [_unowned(a) if isinstance(a, Tensor) else a for a in args]
        # Not run now: what its arguments hold, captured kernels have not computed.
        out = self._buffer(func.name(), fake_result(func, args, kwargs))

        def run() -> None:
            out.copy_(func(*fixed, **kwargs))

        self.replays.append(run)
        self._begin()
        return out

    def _buffer(self, name: str, made: Tensor) -> Tensor:
        """Where a split op's result stands: one buffer for all layers and all steps.

        It is read before it is reused. Largest steps are captured first, so hardly one is outgrown.
        """
        buffer = self._buffers.get((name, made.dtype))
        if buffer is None or buffer.numel() < made.numel():
            buffer = torch.empty(made.numel(), dtype=made.dtype, device=made.device)
            self._buffers[name, made.dtype] = buffer
        return buffer[: made.numel()].view(made.shape)


def check_call(result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises:
        torch.OutOfMemoryError: it needs memory that is not there.
        RuntimeError: it failed otherwise.
    """
    status, *values = result
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise torch.OutOfMemoryError("a CUDA driver call ran out of memory")
    if int(status) != 0:
        raise RuntimeError(f"a CUDA driver call failed: {status.name}")
    return values[0] if values else None


def _launcher(graph: torch.cuda.CUDAGraph) -> Replay:
    """Launches a captured graph on the current stream.

    By the driver's own call: torch's replay would also launch kernels that move the state of its
    random generator, which no step uses.
    """
    from cuda.bindings import driver

    executable = check_call(driver.cuGraphInstantiate(driver.CUgraph(graph.raw_cuda_graph()), 0))
    device_index = torch.cuda.current_device()

    def launch() -> None:
        check_call(driver.cuGraphLaunch(executable, raw_stream(device_index)))

    return launch


class _CudaArray:
    """Memory at an address, in the form `torch.as_tensor` takes without owning it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it allocated."""
    if tensor.numel() == 0:
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _CudaArray(tensor.data_ptr(), extent * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
