"""What the tests of the store share: a plain storage, pieces, and a store that is looked at from outside."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash
from blake3 import blake3

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.store import Store


class PlainSink:
    """Appends to a file through `Path.open`, which tests watch."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._at = 0

    def append(self, data: memoryview) -> int:
        begin, view = self._at, memoryview(data).cast("B")
        while view:
            view = view[self._file.write(view) :]
        self._at += memoryview(data).nbytes
        return begin

    def pad_to(self, alignment: int) -> None:
        self.append(memoryview(bytes(-self._at % alignment)))

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


class PlainSource:
    """Reads from a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)

    def read_into(self, at: int, out: memoryview) -> None:
        while out.nbytes:
            got = os.preadv(self._file, [out], at)
            if not got:
                raise CheckpointError(f"{self._path} ends too early")
            at, out = at + got, out[got:]

    def close(self) -> None:
        os.close(self._file)


class PlainStorage:
    """The smallest storage there is."""

    mode, reason, retried = "buffered", None, 0

    def create(self, path: Path) -> PlainSink:
        return PlainSink(path)

    def open(self, path: Path) -> PlainSource:
        return PlainSource(path)


@dataclass
class Toy:
    """A piece; notes whether it is open and how often it was opened."""

    data: bytes
    known: Ref | None = None
    opened_times: int = 0
    is_open: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def opened(self) -> Toy:
        self.opened_times += 1
        self.is_open = True
        return self

    def __enter__(self) -> memoryview:
        return memoryview(self.data)

    def __exit__(self, *error: object) -> None:
        self.is_open = False


def ref_of(data: bytes) -> Ref:
    """A chunk's name, by the libraries themselves."""
    return Ref(blake3(data).digest(), xxhash.xxh3_128_digest(data), len(data))


def content(seed: int, size: int) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size)


def store_in(folder: Path, storage: object = None, **options: object) -> Store:
    return Store(folder, storage or PlainStorage(), **options)


def save(store: Store, save_id: str, chunks: Iterable[bytes], rank: int = 0) -> list[Ref]:
    return store.write(save_id, rank, [Toy(chunk) for chunk in chunks]).refs


def read(store: Store, ref: Ref) -> bytes:
    out = bytearray(ref.length)
    store.read(ref, memoryview(out))
    return bytes(out)


def packs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, at: int, bit: int = 1) -> None:
    """As a disk forgets: nothing about the file tells."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def addresses(*refs: Ref) -> list[bytes]:
    """What a collection is told of."""
    return [ref.address for ref in refs]
