"""The packs of one save of one rank: written one after the other, each durable before the next begins."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge_loongforge.vault.packs import SUFFIX, PackWriter

if TYPE_CHECKING:
    from trainforge_loongforge.vault.hashing import Batch, Hashed, Ref
    from trainforge_loongforge.vault.index import Index
    from trainforge_loongforge.vault.storage import Storage


@dataclass
class Written:
    """What a save wrote.

    Attributes:
        refs: one per piece, in order.
        new_bytes: stored bytes of the chunks that were new.
        new_chunks: how many there were.
        unchanged: pieces found by their checksum alone, because they are what they were in the last step.
        shared: other pieces whose bytes the store, or this save, already held.
        packs: the files that were written.
    """

    refs: list[Ref] = field(default_factory=list)
    new_bytes: int = 0
    new_chunks: int = 0
    unchanged: int = 0
    shared: int = 0
    packs: list[Path] = field(default_factory=list)


class Saving:
    """Writes what is new of the batches that it is given.

    Args:
        index: of the folder; gets the packs when all are finished.
        storage: writes files.
        name: what the names of the packs begin with.
    """

    def __init__(self, index: Index, storage: Storage, name: str) -> None:
        self._index, self._storage, self._name = index, storage, name
        self._writer: PackWriter | None = None
        self._finished: list[PackWriter] = []
        self._new: set[bytes] = set()
        self._written = Written()

    def take(self, batch: Batch) -> None:
        """Write what is new of a batch, and count the rest."""
        written = self._written
        for piece in batch.pieces:
            written.refs.append(piece.ref)
            if piece.unchanged:
                written.unchanged += 1
            elif piece.data is None or piece.ref.address in self._new:
                written.shared += 1
            else:
                self._add(piece)

    def finish(self) -> Written:
        """Finish the last pack; what was written can be found from now on."""
        self._finish_pack()
        for writer in self._finished:
            self._index.add(writer.path.name, writer.entries)
        return self._written

    def abandon(self) -> None:
        """Remove everything that was written; never raises."""
        if self._writer is not None:
            self._writer.abandon()
        for path in self._written.packs:
            with contextlib.suppress(OSError):
                path.unlink()

    def _add(self, piece: Hashed) -> None:
        assert piece.data is not None, "what is new has its bytes"
        size = piece.data.nbytes
        if self._writer is not None and not self._writer.has_room(size):
            self._finish_pack()
        if self._writer is None:
            path = self._index.folder / f"{self._name}-{len(self._finished):03d}{SUFFIX}"
            self._writer = PackWriter(path, self._storage)
        self._writer.add(piece.ref.address, piece.ref.xxh3_128, piece.data, piece.codec, piece.ref.length)
        self._new.add(piece.ref.address)
        self._written.new_chunks += 1
        self._written.new_bytes += size

    def _finish_pack(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._finished.append(self._writer)
            self._written.packs.append(self._writer.path)
            self._writer = None
