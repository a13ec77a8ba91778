"""Timing of calls: events around them, inside one CUDA graph, or by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def event_ms(
    function: Callable[[], Any], *, num_calls: int, num_repeats: int, rest_s: float = 0.0
) -> list[float]:
    """Milliseconds of one call, for each repeat of `num_calls` calls in a row.

    The device rests for `rest_s` seconds before each repeat: one that works at its power limit
    slows down within a tenth of a second.
    """
    import torch

    function()
    taken = []
    for _ in range(num_repeats):
        if rest_s:
            torch.cuda.synchronize()
            time.sleep(rest_s)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(num_calls):
            function()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / num_calls)
    return taken


def graph_ms(
    calls: Sequence[Callable[[], Any]], *, num_replays: int, num_repeats: int
) -> list[float]:
    """Milliseconds of one of `calls`, captured together in one CUDA graph, for each repeat.

    Give every call inputs of its own, more bytes in all than the device's cache holds.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and allocates what is kept between calls
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = event_ms(graph.replay, num_calls=num_replays, num_repeats=num_repeats)
    return [milliseconds / len(calls) for milliseconds in taken]


def host_ms(
    calls: Sequence[Callable[[], Any]], *, num_repeats: int, min_s: float = 0.02
) -> list[float]:
    """Milliseconds of one of `calls` on the CPU, for each repeat of at least `min_s` seconds."""
    for call in calls:  # builds what is built when first called
        call()
    taken = []
    for _ in range(num_repeats):
        count, start = 0, time.perf_counter()
        now = start
        while now < start + min_s:
            calls[count % len(calls)]()
            count += 1
            now = time.perf_counter()
        taken.append((now - start) / count * 1e3)
    return taken


def calls_ms(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, num_repeats: int
) -> list[float]:
    """Milliseconds of one of `calls` where they run: in a CUDA graph, or by the host's clock."""
    if device.type == "cuda":
        return graph_ms(calls, num_replays=10, num_repeats=num_repeats)
    return host_ms(calls, num_repeats=num_repeats)
