"""The pack: a file of chunks that knows by itself what it holds; written once, by one rank, and never changed.

header   magic, version
chunks   each begins at a multiple of 4,096 when it is at least as long, else of 64; zeros between them
index    of each chunk: address, checksum, where it lies, bytes stored, bytes it stands for, codec
footer   where the index lies, its checksum, magic

All integers are little endian. A pack has its name only when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.folders import fsync_folder

if TYPE_CHECKING:
    from trainforge_loongforge.vault.storage import Storage

SUFFIX, TEMPORARY = ".pack", ".tmp-"
CHUNK_BYTES = 4 * 2**20  # the longest chunk, as stored and as it stands for
PACK_BYTES = 2**30  # a writer begins another pack before this is exceeded
PACK_CHUNKS = 2**20  # likewise; bounds what reading an index takes
RAW, ZSTD = 0, 1

_PAGE, _LINE = 4096, 64
_MAGIC, _VERSION = b"TFPACK\r\n", 1
_HEADER = struct.Struct("<8sII")
_ENTRY = struct.Struct("<32s16sQQQB")
_FOOTER = struct.Struct("<QQ16s8s")


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk of a pack.

    Attributes:
        address: blake3 of its bytes (32 bytes).
        xxh3_128: checksum of its bytes (16 bytes).
        at: where it begins in the file.
        stored: bytes that it takes there.
        length: bytes that it stands for; the same when it is raw.
        codec: RAW or ZSTD.
    """

    address: bytes
    xxh3_128: bytes
    at: int
    stored: int
    length: int
    codec: int


class PackWriter:
    """Writes a pack aside; `finish` brings it to the disk under its name.

    Attributes:
        path: the name it will have.
        entries: the chunks so far.
        bytes: how long it is so far.
    """

    def __init__(self, path: Path, storage: Storage) -> None:
        if path.exists():
            raise CheckpointError(f"{path} exists already, and packs are never written over")
        self.path = path
        self.entries: list[Entry] = []
        self.bytes = _HEADER.size
        self._aside = path.with_name(TEMPORARY + path.name)
        self._sink = storage.create(self._aside)
        try:
            self._sink.append(memoryview(_HEADER.pack(_MAGIC, _VERSION, 0)))
        except BaseException:
            self.abandon()
            raise

    def has_room(self, stored: int) -> bool:
        """Whether a chunk of so many bytes still goes into this pack."""
        return self.bytes + stored <= PACK_BYTES and len(self.entries) < PACK_CHUNKS

    def add(
        self, address: bytes, xxh3_128: bytes, data: memoryview, codec: int = RAW, length: int | None = None
    ) -> Entry:
        """Append a chunk; `length` is what it stands for when `data` is compressed.

        Raises:
            OSError: it cannot be written; what remains is to `abandon`.
        """
        self._sink.pad_to(_alignment(data.nbytes))
        at = self._sink.append(data)
        entry = Entry(address, xxh3_128, at, data.nbytes, data.nbytes if length is None else length, codec)
        self.bytes = at + data.nbytes
        self.entries.append(entry)
        return entry

    def finish(self) -> int:
        """Write the index, bring everything to the disk, then give the pack its name; its size in bytes.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        try:
            index = b"".join(
                _ENTRY.pack(e.address, e.xxh3_128, e.at, e.stored, e.length, e.codec) for e in self.entries
            )
            at = self._sink.append(memoryview(index))
            digest = xxhash.xxh3_128_digest(index)
            self._sink.append(memoryview(_FOOTER.pack(at, len(index), digest, _MAGIC)))
            self._sink.finish()
            self._aside.rename(self.path)
            try:
                fsync_folder(self.path.parent)
            except BaseException:
                self._remove(self.path)
                raise
        except BaseException:
            self.abandon()
            raise
        self.bytes = at + len(index) + _FOOTER.size
        return self.bytes

    def abandon(self) -> None:
        """Remove what was written aside; never raises."""
        with contextlib.suppress(Exception):
            self._sink.abandon()
        self._remove(self._aside)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_index(path: Path) -> list[Entry]:
    """The chunks of a pack in the order they lie in it.

    Everything but the chunks themselves and the zeros between them is checked. The file may come from anywhere: no
    number in it is believed before it fits what the file is.

    Raises:
        CheckpointError: the pack cannot be read or is damaged; names it.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _read_index(path, file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def padding_after(entries: Sequence[Entry], place: int) -> int:
    """How many zeros lie between a chunk and the next; there are none before the index."""
    entry = entries[place]
    return entries[place + 1].at - entry.at - entry.stored if place + 1 < len(entries) else 0


def _read_index(path: Path, file: int) -> list[Entry]:
    size = os.fstat(file).st_size
    if size < _HEADER.size + _FOOTER.size:
        raise CheckpointError(f"{path} is damaged: it ends too early")
    magic, version, reserved = _HEADER.unpack(_read(path, file, 0, _HEADER.size))
    if magic != _MAGIC or reserved:
        raise CheckpointError(f"{path} is damaged: it does not begin as a pack")
    if version != _VERSION:
        raise CheckpointError(
            f"{path} is a pack of version {version}, and this TrainForge reads version {_VERSION}: install the one "
            "that wrote it"
        )
    footer_at = size - _FOOTER.size
    at, length, digest, magic = _FOOTER.unpack(_read(path, file, footer_at, _FOOTER.size))
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is damaged: it does not end as a pack")
    count, rest = divmod(length, _ENTRY.size)
    if at < _HEADER.size or at + length != footer_at or rest or count > PACK_CHUNKS:
        raise CheckpointError(f"{path} is damaged: its index cannot lie where it says")
    index = _read(path, file, at, length)
    if xxhash.xxh3_128_digest(index) != digest:
        raise CheckpointError(f"{path} is damaged: the checksum of its index does not match")
    entries = [Entry(*fields) for fields in _ENTRY.iter_unpack(index)]
    _check(path, entries, at)
    first_at = entries[0].at if entries else at
    if any(_read(path, file, _HEADER.size, first_at - _HEADER.size)):
        raise CheckpointError(f"{path} is damaged: what follows its header is not zero")
    return entries


def _check(path: Path, entries: Sequence[Entry], end: int) -> None:
    """Chunks fill the file between header and index, in order, with no more than alignment between them."""
    position = _HEADER.size
    for entry in entries:
        if entry.at != position + -position % _alignment(entry.stored):
            raise CheckpointError(f"{path} is damaged: its index places chunks where none can lie")
        fits = entry.stored == entry.length if entry.codec == RAW else entry.stored < entry.length
        if not fits or entry.length > CHUNK_BYTES or entry.codec not in (RAW, ZSTD):
            raise CheckpointError(f"{path} is damaged: its index holds a chunk that cannot be")
        position = entry.at + entry.stored
    if position != end:
        raise CheckpointError(f"{path} is damaged: its chunks do not end where its index begins")
    if len({entry.address for entry in entries}) != len(entries):
        raise CheckpointError(f"{path} is damaged: its index holds a chunk twice")


def _alignment(stored: int) -> int:
    return _PAGE if stored >= _PAGE else _LINE


def _read(path: Path, file: int, at: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(file, count, at)
        if not part:
            raise CheckpointError(f"{path} is damaged: it ends too early")
        parts.append(part)
        at, count = at + len(part), count - len(part)
    return b"".join(parts)
