"""A save's view of the state while training goes on.

What lies on a device is copied to page-locked buffers before `save` returns. What lies in host RAM and is changed by
updates only is not copied: a chunk is read where it lies when its turn comes. Should the update come first
(`Checkpoint.before_write`), it copies what is not written yet, as far as there is RAM for copies, and waits for the
rest. (Copy-on-write snapshots of memory for checkpoints are an old idea: Li, Naughton and Plank 1990.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.finite import is_finite
from trainforge.toolbox.checkpointing.layout import Chunk, Held, split_name
from trainforge.toolbox.host_memory import HostMemory
from trainforge_loongforge.vault.copying import Helpers, copy_bytes
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.packs import CHUNK_BYTES

_WAITING, _COPYING, _COPIED, _OPEN, _DONE = "waiting", "copying", "copied", "open", "done"
_STUCK_S = 600.0
_SLAB_CHUNKS = 16  # so many buffers are made at a time
_ALONE_BYTES = 2 * CHUNK_BYTES  # up to here one thread copies
SMALL_BYTES = 2**16  # up to here memory is asked for when it is needed


class Buffers:
    """Buffers of a chunk's size that are used again, also by the next save: fresh memory costs more than the copy.

    Attributes:
        made: how many there are, in use or not.
        helpers: threads that help to fill them.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(torch.device("cpu"))
        self._free: list[Tensor] = []
        self._lock = threading.Lock()
        self._closed = False
        self.made, self.helpers = 0, Helpers()

    def take(self, size: int = CHUNK_BYTES) -> Tensor:
        """A buffer of at least `size` bytes."""
        if size <= SMALL_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            if not self._free:
                self._make(max(1, min(self.made, _SLAB_CHUNKS)))
            return self._free.pop()

    def reserve(self, count: int) -> None:
        """Have that many ready, so that the first update that overtakes a save need not wait for memory.

        Raises:
            ConfigError: it cannot be had.
        """
        while True:
            with self._lock:
                missing = count - self.made
                if missing <= 0 or self._closed:
                    return
                self._make(min(missing, _SLAB_CHUNKS))

    def give_back(self, buffer: Tensor) -> None:
        """Let somebody else use it."""
        if buffer.nbytes == CHUNK_BYTES:
            with self._lock:
                self._free.append(buffer)

    def close(self) -> None:
        """Give the memory back; none is made any more."""
        self._closed = True
        self.helpers.close()
        with self._lock:
            self._free.clear()

    def _make(self, count: int) -> None:
        """Several at once, in huge pages that are there: making pages one by one costs more than the copy, too."""
        slab = self._memory.tensor(count * CHUNK_BYTES, torch.uint8, pinned=False)
        self._free += slab.split(CHUNK_BYTES)
        self.made += count


@dataclass(eq=False)
class LivePiece:
    """A chunk that is read where it lies.

    Attributes:
        chunk: which.
        held: the live tensor that has it.
        known: what lay there in the last step.
        snapshot: whose lock guards `state` and `copy`.
        finite: False once it was seen that a master is not.
    """

    chunk: Chunk
    held: Held
    known: Ref | None
    snapshot: Snapshot
    state: str = _WAITING
    copy: Tensor | None = None
    finite: bool = True

    @property
    def nbytes(self) -> int:
        """Of the chunk."""
        return self.chunk.bytes

    @contextmanager
    def opened(self) -> Iterator[memoryview]:
        """Its bytes; an update that would change them waits until this ends."""
        copy = self.snapshot.open(self)
        scratch = None
        try:
            values = copy if copy is not None else self._as_it_lies()
            if values is None:
                scratch = self.snapshot.buffers.take(self.nbytes)
                values = scratch[: self.nbytes]
                self.read_into(values)
            self.finite = is_finite(values, self.chunk)
            yield _bytes_of(values)
        finally:
            if scratch is not None:
                self.snapshot.buffers.give_back(scratch)
            self.snapshot.close_piece(self)

    def read_into(self, out: Tensor) -> None:
        """Copy its bytes; complete when this returns."""
        values = self._as_it_lies()
        if values is not None:
            copy_bytes(out, values)
            return
        start = self.chunk.offset - self.held.offset
        self.held.named.read(start, out.view(getattr(torch, self.chunk.dtype)))
        if self.held.named.tensor.device.type not in ("cpu", "meta"):  # meta: it was read from a checkpoint
            torch.accelerator.synchronize(self.held.named.tensor.device)

    def _as_it_lies(self) -> Tensor | None:
        """Its bytes without a copy, where memory holds them just so."""
        tensor = self.held.named.tensor.detach()
        if self.held.named.low is not None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        start = self.chunk.offset - self.held.offset
        return tensor.view(-1)[start : start + self.chunk.length].view(torch.uint8)


@dataclass(eq=False)
class CopiedPiece:
    """A chunk that was copied before `save` returned."""

    chunk: Chunk
    copy: Tensor
    known: Ref | None
    finite: bool = True

    @property
    def nbytes(self) -> int:
        """Of the chunk."""
        return self.chunk.bytes

    @contextmanager
    def opened(self) -> Iterator[memoryview]:
        """Its bytes."""
        values = self.copy.view(torch.uint8)
        self.finite = is_finite(values, self.chunk)
        yield _bytes_of(values)


@dataclass(eq=False)
class Snapshot:
    """The chunks of a rank in one save.

    Attributes:
        buffers: for scratch and for copies.
        most_copies: how many chunks may be copied when updates overtake the writing.
        pieces: every chunk, in the order in which they are written.
        delayed_s: seconds that updates have spent copying and waiting.
    """

    buffers: Buffers
    most_copies: int
    pieces: list[LivePiece | CopiedPiece] = field(default_factory=list)
    delayed_s: float = 0.0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _copies: int = 0
    _overtaking: int = 0  # updates that are copying
    _written: int = 0
    _by_name: dict[str, list[LivePiece]] = field(default_factory=dict)

    def add_live(self, chunk: Chunk, held: Held, known: Ref | None) -> None:
        """A chunk to be read where it lies."""
        piece = LivePiece(chunk, held, known, self)
        self.pieces.append(piece)
        self._by_name.setdefault(split_name(chunk.tensor)[2], []).append(piece)

    def add_copied(self, chunk: Chunk, copy: Tensor, known: Ref | None) -> None:
        """A chunk that lies in a buffer."""
        self.pieces.append(CopiedPiece(chunk, copy, known))

    @property
    def finite(self) -> bool:
        """Whether all masters are, once all is written."""
        return all(piece.finite for piece in self.pieces)

    def open(self, piece: LivePiece) -> Tensor | None:
        """Claim a chunk for writing; gives its copy when there is one."""
        with self._changed:
            # While it is copied, for else the update would change what is read; and see `_writer_at_rest`.
            self._changed.wait_for(lambda: piece.state is not _COPYING and not self._overtaking)
            copy = piece.copy
            piece.state = _OPEN
            return None if copy is None else copy[: piece.nbytes]

    def close_piece(self, piece: LivePiece) -> None:
        """The chunk is written, or found to lie there already."""
        with self._changed:
            if piece.copy is not None:
                self.buffers.give_back(piece.copy)
                piece.copy = None
                self._copies -= 1
            piece.state = _DONE
            self._written += 1
            self._changed.notify_all()

    def end(self) -> None:
        """The save has ended, well or not: nobody need wait for it."""
        with self._changed:
            for piece in (piece for pieces in self._by_name.values() for piece in pieces):
                if piece.copy is not None and piece.state is _COPIED:  # nobody has it open
                    self.buffers.give_back(piece.copy)
                    piece.copy = None
                    self._copies -= 1
                piece.state = _DONE
            self._changed.notify_all()

    def before_write(self, names: Collection[str]) -> None:
        """Tensors of these parameters are about to change: copy their chunks, or wait for them.

        Raises:
            CheckpointError: the writing has not moved for minutes.
        """
        pieces = [
            piece for name in names for piece in self._by_name.get(name, ()) if piece.state is not _DONE
        ]
        if not pieces:
            return
        began = time.perf_counter()
        with self._writer_at_rest():
            if sum(piece.nbytes for piece in pieces) > _ALONE_BYTES:
                self.buffers.helpers.run(self._copy_if_it_may, pieces)
            else:
                for piece in pieces:
                    self._copy_if_it_may(piece)
        self._wait_for(pieces)
        self.delayed_s += time.perf_counter() - began

    @contextmanager
    def _writer_at_rest(self) -> Iterator[None]:
        """Meanwhile the writer opens no chunk: an update waits for the copies, and hashing would take their cores."""
        with self._changed:
            self._overtaking += 1
        try:
            yield
        finally:
            with self._changed:
                self._overtaking -= 1
                self._changed.notify_all()

    def _wait_for(self, pieces: Sequence[LivePiece]) -> None:
        """Wait until each is copied or written, for as long as some chunk is written now and then."""

        def settled() -> bool:
            return all(piece.copy is not None or piece.state is _DONE for piece in pieces)

        with self._changed:
            before = -1
            while before < self._written and not settled():
                before = self._written
                self._changed.wait_for(lambda: settled() or self._written > before, _STUCK_S)  # noqa: B023
            if not settled():
                raise CheckpointError(
                    f"the update waits for a checkpoint of which nothing was written for {_STUCK_S:.0f} s: the disk "
                    "hangs, or is far too slow; save less often (train.save_every)"
                )

    def _copy_if_it_may(self, piece: LivePiece) -> None:
        if self._may_copy(piece):
            self._copy(piece)

    def _may_copy(self, piece: LivePiece) -> bool:
        """Claim a chunk for copying, unless it is being written or there is no room for one more copy."""
        with self._changed:
            if piece.state is not _WAITING or self._copies >= self.most_copies:
                return False
            piece.state = _COPYING
            self._copies += 1
            return True

    def _copy(self, piece: LivePiece) -> None:
        """Copy a chunk that was claimed for it. Where that fails, it is as if nobody had tried."""
        buffer, whole = None, False
        try:
            buffer = self.buffers.take(piece.nbytes)
            piece.read_into(buffer[: piece.nbytes])
            whole = True
        finally:
            with self._changed:
                kept = whole and piece.state is _COPYING  # else the save has ended meanwhile
                if kept:
                    piece.copy, piece.state = buffer, _COPIED
                elif piece.state is _COPYING:
                    piece.state = _WAITING
                self._copies -= not kept  # `_writer_at_rest` wakes whoever waits for it
            if buffer is not None and not kept:
                self.buffers.give_back(buffer)


def _bytes_of(values: Tensor) -> memoryview:
    return values.numpy().data if values.numel() else memoryview(b"")


def overtakable(names: Collection[str], held: Mapping[str, Sequence[Held]], chunk: Chunk) -> Held | None:
    """The live tensor of a chunk that only updates change and that lies in host RAM; None for all others."""
    part, _, name = split_name(chunk.tensor)
    if part != "memory" or name not in names:
        return None
    found = holder(held, chunk)
    return found if found.named.tensor.device.type == "cpu" else None


def holder(held: Mapping[str, Sequence[Held]], chunk: Chunk) -> Held:
    """The live tensor that has a chunk of this rank."""
    spans = held[chunk.tensor]
    end = chunk.offset + chunk.length
    return next(span for span in spans if span.offset <= chunk.offset and end <= span.offset + span.length)
