"""A captured step that repeats on the device: a CUDA graph with a conditional WHILE node.

One launch runs steps until one of them finds a reason to leave: a row ended and requests wait, the
host has something for the device, the outbox is nearly full, no row runs, or enough steps were
made. The host talks to it through pinned memory and reads records as they appear.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from compiled_engine.compile.graphs import check_call
from compiled_engine.custom_ops.cuda_build import arch_of, cubin_dir, load_library

CONTROL_FIELDS = ("num_read", "is_interrupted", "has_waiting", "max_steps", "ended_at")
RUNNING = -1  # value of `ended_at`
BLOCK = 256


class _LoopArgs(ctypes.Structure):
    """`LoopArgs` in device_loop.cu."""

    _fields_ = [
        ("handle", ctypes.c_uint64),
        ("control", ctypes.c_void_p),
        ("steps_left", ctypes.c_void_p),
        ("row_state", ctypes.c_void_p),
        ("step_counter", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("max_unread", ctypes.c_int32),
    ]


class LoopControl:
    """The pinned words host and loop share; see `LoopControl` in device_loop.cu."""

    def __init__(self) -> None:
        self.words = torch.zeros(len(CONTROL_FIELDS), dtype=torch.int64, pin_memory=True)
        self._view = self.words.numpy()

    def set(self, name: str, value: int) -> None:
        """Writes one word; the device sees it at its next look."""
        self._view[CONTROL_FIELDS.index(name)] = value

    @property
    def ended_at(self) -> int | None:
        """Steps since the start when the last loop was left, None while one runs."""
        value = int(self._view[CONTROL_FIELDS.index("ended_at")])
        return None if value == RUNNING else value

    def note_read(self, num_read: int) -> None:
        """The host has read that many records since the start."""
        self.set("num_read", num_read)

    def interrupt(self) -> None:
        """Ends a running loop behind the step that runs now."""
        self.set("is_interrupted", 1)


class DeviceLoop:
    """One captured step as the body of a loop.

    Args:
        step: captured whole, with `keep_graph`; must stay alive, and so must what it touches.
        control: shared by all loops of an engine.
        row_state: [R + 1] i8, the scheduler's.
        step_counter: i64 scalar on the device that the step increments.
        max_unread: records the outbox may hold unread.
    """

    def __init__(
        self,
        step: torch.cuda.CUDAGraph,
        control: LoopControl,
        row_state: Tensor,
        step_counter: Tensor,
        max_unread: int,
    ) -> None:
        self._step = step
        self._control = control
        self._steps_left = torch.zeros((), dtype=torch.int64, device=row_state.device)
        self._args = _LoopArgs(
            control=control.words.data_ptr(),
            steps_left=self._steps_left.data_ptr(),
            row_state=row_state.data_ptr(),
            step_counter=step_counter.data_ptr(),
            num_rows=row_state.shape[0] - 1,
            max_unread=max_unread,
        )
        self._executable = self._build(arch_of(row_state.device))

    def launch(self, *, max_steps: int, has_waiting: bool) -> None:
        """Starts the loop on the current stream; must not be called while one runs."""
        assert self._control.ended_at is not None, "a loop is running"
        self._control.set("is_interrupted", 0)
        self._control.set("has_waiting", int(has_waiting))
        self._control.set("max_steps", max_steps)
        self._control.set("ended_at", RUNNING)
        driver = _driver()
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        check_call(driver.cuGraphLaunch(self._executable, stream))

    def _build(self, arch: str) -> Any:
        driver = _driver()
        library = load_library("loop/device_loop.cu", arch, cubin_dir())
        context = check_call(driver.cuCtxGetCurrent())
        graph = check_call(driver.cuGraphCreate(0))
        handle = check_call(driver.cuGraphConditionalHandleCreate(graph, context, 1, 1))
        self._args.handle = int(handle)
        begin = self._add_kernel(graph, [], library, b"ce_loop_begin", 1)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        check_call(driver.cuGraphAddNode(graph, [begin], None, 1, node))
        body = node.conditional.phGraph_out[0]
        child = driver.CUgraph(self._step.raw_cuda_graph())
        step = check_call(driver.cuGraphAddChildGraphNode(body, None, 0, child))
        self._add_kernel(body, [step], library, b"ce_loop_next", BLOCK)
        executable = check_call(driver.cuGraphInstantiate(graph, 0))
        self._graph = graph
        return executable

    def _add_kernel(
        self, graph: Any, after: list[Any], library: Any, name: bytes, block: int
    ) -> Any:
        driver = _driver()
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel = check_call(driver.cuLibraryGetKernel(library, name))
        node.func = driver.CUfunction(int(check_call(driver.cuKernelGetFunction(kernel))))
        node.gridDimX = node.gridDimY = node.gridDimZ = 1
        node.blockDimX, node.blockDimY, node.blockDimZ = block, 1, 1
        places = (ctypes.c_void_p * 1)(ctypes.addressof(self._args))
        node.kernelParams = ctypes.addressof(places)
        return check_call(driver.cuGraphAddKernelNode(graph, after or None, len(after), node))


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
