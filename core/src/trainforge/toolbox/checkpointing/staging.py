"""The snapshot: copies of what this rank writes, in host buffers that are reused from save to save."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainforge.toolbox.checkpointing.layout import Chunk, Held
from trainforge.toolbox.host_memory import HostMemory

SLAB_BYTES = 256 * 2**20
"""Size of a page-locked buffer."""


class Staging:
    """Buffers for one snapshot. On an accelerator they are page-locked, and copied to on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, HostMemory(device)
        self._slabs: list[Tensor] = []
        self._accelerated = device.type != "cpu"
        self._stream = torch.Stream(device) if self._accelerated else None
        self._chunks: list[Chunk] = []
        self._copies: list[Tensor] = []

    def snapshot(self, chunks: list[Chunk], held: Mapping[str, Sequence[Held]]) -> list[Tensor]:
        """Copy the chunks' elements; the copies are complete when it returns.

        Returns:
            1-D CPU tensors in the order of `chunks`, valid until the next snapshot.
        """
        if chunks != self._chunks:
            self._chunks, self._copies = [], []  # given back before the new ones are allocated
            self._copies = self._allocate(chunks)
            self._chunks = chunks
        sources = {tensor: sorted(spans, key=lambda span: span.offset) for tensor, spans in held.items()}
        with self._side_stream():
            for chunk, copy in zip(chunks, self._copies, strict=True):
                _copy_elements(chunk, sources[chunk.tensor], copy)
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies

    def missing(self, chunks: list[Chunk]) -> int:
        """Bytes that a snapshot of these chunks would take beside what is held already."""
        if chunks == self._chunks:
            return 0
        return max(0, sum(chunk.bytes for chunk in chunks) - len(self._slabs) * SLAB_BYTES)

    def reserve(self, size: int) -> None:
        """Have buffers for `size` bytes ready, so that the first snapshot need not wait for them.

        Raises:
            ConfigError: the memory cannot be had or locked.
        """
        while len(self._slabs) * SLAB_BYTES < size:
            self._slabs.append(self._memory.tensor(SLAB_BYTES, torch.uint8, pinned=True))

    def close(self) -> None:
        """Give the buffers back."""
        self._chunks, self._copies, self._slabs = [], [], []
        self._memory.close()

    def _side_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self._stream

    def _allocate(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Place the chunks one after the other in slabs; none crosses from one slab to the next."""
        places: list[tuple[int, int]] = []
        fills = [0]
        for chunk in chunks:
            if fills[-1] + chunk.bytes > SLAB_BYTES:
                fills.append(0)
            places.append((len(fills) - 1, fills[-1]))
            fills[-1] += chunk.bytes
        self.reserve(len(fills) * SLAB_BYTES if self._accelerated else 0)
        slabs = self._slabs or [torch.empty(fill, dtype=torch.uint8) for fill in fills]
        return [
            slabs[slab][start : start + chunk.bytes].view(getattr(torch, chunk.dtype))
            for chunk, (slab, start) in zip(chunks, places, strict=True)
        ]


class OneByOne(Sequence[Tensor]):
    """No snapshot: each chunk is copied when it is asked for, into one buffer that the next one takes over.

    For state that fills host RAM; training must wait until all chunks are written.
    """

    def __init__(self, chunks: Sequence[Chunk], held: Mapping[str, Sequence[Held]]) -> None:
        self._chunks = chunks
        self._spans = {tensor: sorted(spans, key=lambda span: span.offset) for tensor, spans in held.items()}
        self._buffer = torch.empty(max((chunk.bytes for chunk in chunks), default=0), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        """The chunk's elements, 1-D, on the CPU; valid until the next one is asked for."""
        chunk = self._chunks[index]
        copy = self._buffer[: chunk.bytes].view(getattr(torch, chunk.dtype))
        device = _copy_elements(chunk, self._spans[chunk.tensor], copy)
        if device.type not in ("cpu", "meta"):  # meta: it was read from a checkpoint
            # The copy may still be on its way. A background thread's own device is the first of the machine.
            torch.accelerator.synchronize(device)
        return copy


def _copy_elements(chunk: Chunk, spans: Sequence[Held], out: Tensor) -> torch.device:
    """Copy a chunk's live elements; gives the device that they are on.

    The plan gave this rank only chunks that lie within one of its spans.
    """
    candidates = spans[: bisect_right(spans, chunk.offset, key=lambda span: span.offset)]
    span = next(s for s in reversed(candidates) if s.offset + s.length >= chunk.offset + chunk.length)
    span.named.read(chunk.offset - span.offset, out)
    return span.named.tensor.device
