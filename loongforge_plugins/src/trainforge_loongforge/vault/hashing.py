"""What of a save is new: chunks are hashed on threads, a few megabytes at a time, and handed on in order."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import xxhash
from blake3 import blake3

from trainforge_loongforge.vault.packs import CHUNK_BYTES, RAW, ZSTD

if TYPE_CHECKING:
    from types import TracebackType

_MOST_PIECES = 512  # of one batch, when they are tiny
_LARGE_BYTES = CHUNK_BYTES // 2  # so that a batch has at most two pieces open
_ZSTD_LEVEL = 1
_NICE = (
    5  # a quarter of a core beside a thread that wants all of it: an update may have to wait for these, too
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A chunk by what it holds: blake3 and xxh3-128 of its bytes, and how many they are."""

    address: bytes
    xxh3_128: bytes
    length: int


class Piece(Protocol):
    """A chunk to be saved."""

    @property
    def known(self) -> Ref | None:
        """What lay at this place of this tensor in the last step, if anything did."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has; at most CHUNK_BYTES."""

    def opened(self) -> AbstractContextManager[memoryview]:
        """Its bytes, contiguous; they do not change while it is open. Asked for once, on any thread."""


@dataclass(slots=True)
class Hashed:
    """A piece that has been looked at.

    Attributes:
        ref: its address and checksum.
        unchanged: it is what is known; its address was not computed.
        data: what to store, when the store does not hold it yet.
        codec: how `data` is stored.
    """

    ref: Ref
    unchanged: bool = False
    data: memoryview | None = None
    codec: int = RAW


@dataclass
class Batch:
    """Consecutive pieces that were hashed together; their data is there until it is closed."""

    pieces: list[Hashed] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for piece in self.pieces:
            piece.data = None
        self._open.close()

    def take(self, piece: Piece, has: Callable[[bytes], bool], compress: bool) -> None:
        """Hash a piece; it stays open only when its bytes are to be written as they are, and are many."""
        with ExitStack() as stack:
            data = stack.enter_context(piece.opened()).cast("B")
            hashed = _look(data, piece.known, has)
            if hashed.data is not None and compress:
                _compress(hashed)
            if hashed.data is data and data.nbytes >= _LARGE_BYTES:
                self._open.push(stack.pop_all())
            elif hashed.data is data:
                hashed.data = memoryview(bytes(data))  # what an open piece holds may be more than its bytes
            self.pieces.append(hashed)


def hashed_batches(
    pieces: Sequence[Piece], has: Callable[[bytes], bool], *, compress: bool, threads: int
) -> Generator[Batch, None, None]:
    """Look at all pieces on threads, and give them in order; each batch is closed when the next one is asked for.

    At most `threads` + 2 batches are held at a time, each of less than two chunks' bytes and at most two open pieces.

    Args:
        pieces: what to look at.
        has: whether the store holds the chunk of an address.
        compress: whether to compress what it does not hold.
        threads: how many hash at the same time.
    """

    def look(group: Sequence[Piece]) -> Batch:
        batch = Batch()
        try:
            for piece in group:
                batch.take(piece, has, compress)
        except BaseException:
            batch.__exit__(None, None, None)
            raise
        return batch

    ahead: deque[Future[Batch]] = deque()
    groups = _grouped(pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="vault-hash", initializer=give_way) as pool:
        try:
            while True:
                while len(ahead) <= threads and (group := next(groups, None)) is not None:
                    ahead.append(pool.submit(look, group))
                if not ahead:
                    return
                with ahead.popleft().result() as batch:
                    yield batch
        finally:
            _close(ahead)


def give_way() -> None:
    """Let the calling thread have only the time that others leave (on Linux): training comes first.

    The run itself may have been started with less than the usual priority, so this adds to what the thread has.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def _close(ahead: deque[Future[Batch]]) -> None:
    """Close what nobody will write any more."""
    for future in ahead:
        future.cancel()
    for future in ahead:
        if not future.cancelled() and future.exception() is None:
            future.result().__exit__(None, None, None)


def _grouped(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Runs of pieces that make up a chunk's bytes: handing a tiny one to a thread costs more than hashing it."""
    begin, size = 0, 0
    for place, piece in enumerate(pieces):
        size += piece.nbytes
        if size >= CHUNK_BYTES or place + 1 - begin == _MOST_PIECES:
            yield pieces[begin : place + 1]
            begin, size = place + 1, 0
    if begin < len(pieces):
        yield pieces[begin:]


def _look(data: memoryview, known: Ref | None, has: Callable[[bytes], bool]) -> Hashed:
    """The cheap checksum first; the address only for what it does not recognise, or what has been lost."""
    if data.nbytes > CHUNK_BYTES:
        raise ValueError(f"a chunk of {data.nbytes} bytes, and none may have more than {CHUNK_BYTES}")
    xxh3 = xxhash.xxh3_128_digest(data)
    if known is not None and known.xxh3_128 == xxh3 and known.length == data.nbytes and has(known.address):
        return Hashed(known, unchanged=True)
    ref = Ref(blake3(data).digest(), xxh3, data.nbytes)
    return Hashed(ref, data=None if has(ref.address) else data)


def _compress(hashed: Hashed) -> None:
    """Keep the compressed bytes where they are fewer."""
    packed = zstd().ZstdCompressor(level=_ZSTD_LEVEL).compress(hashed.data)
    if len(packed) < hashed.ref.length:
        hashed.data, hashed.codec = memoryview(packed), ZSTD


def zstd() -> Any:
    """The package `zstandard`.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        from trainforge.errors import CheckpointError

        raise CheckpointError(
            "compressed chunks need the package zstandard: pip install 'trainforge-loongforge[zstd]'"
        ) from None
    return zstandard
