"""Moves byte ranges of files into tensors: several threads read, a side stream copies.

Owns the cutting of ranges into chunks, the pinned buffers and the overlap of reading and copying.
Does not own which bytes belong to which tensor (`weights.py`). Works on a CPU too, without pinned
memory and streams; `weights.py` does not use it there, where a mapped file needs no second buffer.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Large enough that a copy's own cost is small, small enough that pinning the buffers is, too.
CHUNK_BYTES = 16 * 1024**2
NUM_READERS = 12
# While one buffer of a reader is being copied, it fills another.
BUFFERS_PER_READER = 2


@dataclass(frozen=True)
class FileRange:
    """A tensor in a file.

    Attributes:
        name: of the tensor.
        path: of the file.
        offset: first byte.
        dtype: of the bytes in the file.
        target: contiguous tensor that takes the values; has as many elements as the range.
    """

    name: str
    path: Path
    offset: int
    dtype: torch.dtype
    target: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """What one chunk holds of one tensor.

    Attributes:
        name: of the tensor.
        at: first byte inside the chunk, a multiple of the element size.
        num_bytes: in the chunk.
        dtype: of the bytes.
        target: 1-D piece of the tensor's target.
    """

    name: str
    at: int
    num_bytes: int
    dtype: torch.dtype
    target: Tensor


@dataclass(frozen=True)
class Chunk:
    """One read of a file, and where its bytes go."""

    path: Path
    offset: int
    num_bytes: int
    parts: tuple[Part, ...]


def safetensors_offsets(path: Path) -> dict[str, int]:
    """Tensor name -> its first byte in the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: 8 + size + int(entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def split_ranges(ranges: Sequence[FileRange], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cuts tensors into reads of at most `chunk_bytes`, in the order of the files.

    Neighbours share a chunk; a tensor is cut between elements. `chunk_bytes` is a multiple of 8.
    """
    assert chunk_bytes > 0, chunk_bytes
    assert chunk_bytes % 8 == 0, chunk_bytes
    chunks: list[Chunk] = []
    parts: list[Part] = []
    path, start, end = Path(), 0, 0

    def close() -> None:
        if parts:
            chunks.append(Chunk(path, start, end - start, tuple(parts)))
            parts.clear()

    for item in sorted(ranges, key=lambda r: (r.path, r.offset)):
        assert item.target.is_contiguous(), f"{item.name} goes into a tensor with gaps"
        flat, size, done = item.target.view(-1), item.dtype.itemsize, 0
        while done < item.num_bytes:
            offset = item.offset + done
            room = (chunk_bytes - (end - start)) // size * size
            is_next = parts and path == item.path and offset == end and (end - start) % size == 0
            if not (is_next and room):
                close()
                path, start, end, room = item.path, offset, offset, chunk_bytes
            length = min(room, item.num_bytes - done)
            piece = flat[done // size : (done + length) // size]
            parts.append(Part(item.name, end - start, length, item.dtype, piece))
            done, end = done + length, end + length
    close()
    return chunks


def read_exactly(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` from the file's byte `offset` on; other threads run meanwhile.

    Raises:
        OSError: a read failed, or the file ends before.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(f"the file ends {len(buffer) - done} bytes too early")
        done += count


class _Buffer:
    """Staging memory of one chunk. Its memory is taken on first use, by the thread that reads."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
        self._num_bytes = num_bytes
        self._stream = stream
        self._memory: Tensor | None = None
        self._is_copied = None if stream is None else torch.cuda.Event(blocking=True)

    def fill(self, descriptor: int, chunk: Chunk) -> None:
        """Waits until the last chunk has left, then reads."""
        if self._memory is None:
            is_pinned = self._stream is not None
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        if self._is_copied is not None:
            self._is_copied.synchronize()
        data = self._memory.numpy().data[: chunk.num_bytes]
        read_exactly(descriptor, data, chunk.offset)

    @torch.no_grad()
    def send(self, chunk: Chunk) -> None:
        """Starts the copies into the targets; on a CPU does them."""
        assert self._memory is not None, "fill() comes first"
        with torch.cuda.stream(self._stream):  # None: no stream
            for part in chunk.parts:
                data = self._memory[part.at : part.at + part.num_bytes]
                if part.dtype == part.target.dtype:
                    part.target.view(torch.uint8).copy_(data, non_blocking=True)
                else:
                    # Converted on the device: there it costs nothing.
                    moved = data.to(part.target.device, non_blocking=True)
                    part.target.copy_(moved.view(part.dtype))
            if self._is_copied is not None:
                self._is_copied.record()


def stream_chunks(
    chunks: Sequence[Chunk],
    device: torch.device,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    num_readers: int = NUM_READERS,
) -> Iterator[Chunk]:
    """Fills the targets, all on `device`; yields each chunk, in order, once it has been read.

    Everything is in place when the iterator ends; until then the targets must not be used.

    Raises:
        OSError: a file cannot be read; its `filename` is the path.
    """
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
    free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
    for _ in range(BUFFERS_PER_READER * num_readers):
        free.put(_Buffer(chunk_bytes, stream))
    descriptors: dict[Path, int] = {}

    def move(chunk: Chunk) -> Chunk:
        # The queue hands out the buffer that was sent longest ago.
        buffer = free.get()
        try:
            buffer.fill(descriptors[chunk.path], chunk)
            buffer.send(chunk)
        except OSError as error:
            raise OSError(error.errno or 0, error.strerror or str(error), chunk.path) from error
        finally:
            free.put(buffer)
        return chunk

    try:
        for chunk in chunks:
            if chunk.path not in descriptors:
                descriptors[chunk.path] = os.open(chunk.path, os.O_RDONLY)
        with ThreadPoolExecutor(num_readers, thread_name_prefix="read-weights") as pool:
            yield from pool.map(move, chunks)
    finally:
        if stream is not None:
            stream.synchronize()
        for descriptor in descriptors.values():
            os.close(descriptor)
