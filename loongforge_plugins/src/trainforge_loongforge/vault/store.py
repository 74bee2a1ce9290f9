"""The store: every chunk once, in packs, found by what it holds.

A step's manifest names chunks by address only, so that packs may be rewritten without touching a manifest. Who writes
or collects holds `vault.lock` (the stage does that): a collection may not take a chunk that a save has just decided to
use again. Readers need no lock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.toolbox.checkpointing.folders import fsync_folder, make_durably
from trainforge_loongforge.vault.collecting import Collected, Collector, remove_leftovers
from trainforge_loongforge.vault.hashing import Piece, Ref, hashed_batches, zstd
from trainforge_loongforge.vault.index import Index
from trainforge_loongforge.vault.packs import SUFFIX, TEMPORARY
from trainforge_loongforge.vault.reading import Reader, Wanted
from trainforge_loongforge.vault.writing import Saving, Written

if TYPE_CHECKING:
    from trainforge_loongforge.vault.storage import Storage

__all__ = ["Collected", "Piece", "Ref", "Store", "Written"]

_SAVE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_MOST_THREADS = 4


class Store:
    """The packs of a folder.

    Args:
        folder: where packs lie; made when the first one is written.
        storage: how bytes reach files and come back.
        compress: compress new chunks where that makes them smaller (zstd). Compressed ones are always readable.
        threads: how many hash or read at the same time; as many as the process has cores, at most 4, when not given.
    """

    def __init__(
        self, folder: Path, storage: Storage, *, compress: bool = False, threads: int | None = None
    ) -> None:
        if compress:
            zstd()  # a missing package is told before the run starts
        self.folder = folder
        self._storage, self._compress = storage, compress
        self._threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._index = Index(folder)
        self._reader = Reader(self._index, storage)
        self._index.refresh()

    @property
    def damaged(self) -> dict[str, str]:
        """Packs that cannot be used, by name, and why."""
        return dict(self._index.damaged)

    def has(self, address: bytes) -> bool:
        """Whether a pack holds the chunk of an address, and it was not found damaged."""
        return self._index.has(address)

    def write(
        self,
        save_id: str,
        rank: int,
        pieces: Sequence[Piece],
    ) -> Written:
        """Store the pieces that the store does not hold yet; afterwards all of them are on the disk.

        A piece that is what is known of it is not hashed again; one that the store holds is not written again. At most
        2 x (`threads` + 2) pieces are open at a time, and as many chunks' bytes are held.

        Args:
            save_id: of this save; letters, digits, `-` and `_`. With `rank`, it names the packs.
            rank: who writes.
            pieces: the chunks, in the order in which they shall lie on the disk.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        make_durably(self.folder)
        self._index.refresh()
        # A writer that was killed may have given a name that is not on the disk yet: what lies behind it is used now.
        fsync_folder(self.folder)
        saving = Saving(self._index, self._storage, f"{_checked(save_id)}-r{rank:05d}")
        batches = hashed_batches(pieces, self.has, compress=self._compress, threads=self._threads)
        try:
            with contextlib.closing(batches):
                for batch in batches:
                    saving.take(batch)
            return saving.finish()
        except BaseException:
            saving.abandon()
            raise

    def undo(self, save_id: str, rank: int) -> None:
        """Remove what a rank has written in a save that has failed."""
        name = f"{_checked(save_id)}-r{rank:05d}-"
        for path in self.folder.glob(f"*{name}*{SUFFIX}"):
            if path.name.removeprefix(TEMPORARY).startswith(name):
                path.unlink(missing_ok=True)
        self._index.refresh()

    def read(self, ref: Ref, out: memoryview) -> None:
        """Fill `out` with a chunk. Its length and checksum have been compared when this returns.

        Raises:
            CheckpointError: no pack holds it undamaged; names packs and reasons.
        """
        self._reader.read(ref, out)

    def read_many(self, wanted: Iterable[Wanted], threads: int | None = None) -> None:
        """Read chunks in the order in which they lie on the disk, on several threads.

        Args:
            wanted: each chunk with where it goes: memory of its length, or a callable that is called once with its
                bytes, on any thread, and may use them only while it runs.
            threads: as of the store, when not given.

        Raises:
            CheckpointError: as `read`; not all chunks have been read then.
        """
        self._reader.read_many(wanted, threads or self._threads)

    def verify(self, refs: Iterable[Ref]) -> dict[Ref, str]:
        """Read chunks from the disk and compare checksums; says what is wrong with each that is not whole.

        The indexes are read anew, too. A chunk of which another copy is whole is whole.
        """
        return self._reader.verify(refs, self._threads)

    def collect(self, live: Collection[bytes]) -> Collected:
        """Delete packs without a live chunk, and write those anew of which at most half is live, by stored bytes.

        Afterwards more than half of every pack that can be read is live. It may be killed at any moment, and others
        may read meanwhile. A pack that may hold the only copy of a live chunk is never deleted, damaged or not.
        Leftovers of writers that were killed are removed first.

        Args:
            live: addresses of every chunk that a checkpoint names. A manifest that cannot be read may name any: do not
                collect then.

        Raises:
            OSError: what is live cannot be written anew; the packs it lies in are still there.
        """
        self.clean()
        self._index.refresh()
        if not self.folder.is_dir():
            return Collected(missing=frozenset(live))
        fsync_folder(self.folder)  # see `write`
        return Collector(self._storage, self._index, self._reader, live).run()

    def clean(self) -> int:
        """Remove what writers that were killed have left; gives how many files.

        Nobody may be writing meanwhile.
        """
        return remove_leftovers(self.folder)

    def close(self) -> None:
        """Close the files that are open for reading; they are opened again when needed."""
        self._reader.close()


def _checked(save_id: str) -> str:
    if not _SAVE_ID.fullmatch(save_id):
        raise ValueError(f"{save_id!r} cannot be the name of a save")
    return save_id
