"""Chunks come back: each is compared with its checksum, and sought elsewhere when a pack has gone or is damaged."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.folders import forget_cached
from trainforge_loongforge.vault.hashing import Ref, zstd
from trainforge_loongforge.vault.index import Index, Place
from trainforge_loongforge.vault.packs import CHUNK_BYTES, RAW

if TYPE_CHECKING:
    from trainforge_loongforge.vault.storage import Source, Storage

Wanted = tuple[Ref, Callable[[memoryview], None] | memoryview]
T = TypeVar("T")
R = TypeVar("R")

_OPEN_PACKS = 32
_MOST_CHUNKS = 256  # that one thread takes at a time, when they are tiny
_MOST_WINDOW = 2 * CHUNK_BYTES  # of zstd: more memory is not given to a chunk from elsewhere
_SAME = 2  # a chunk is missing when the folder looks the same so many times
_PAGE = 4096


class Reader:
    """Reads chunks of the packs of an index. Threads may share it."""

    def __init__(self, index: Index, storage: Storage) -> None:
        self._index = index
        self._sources = _Sources(index.folder, storage)
        self._scratch = threading.local()

    def read(self, ref: Ref, out: memoryview) -> None:
        """Fill `out` with a chunk; what it holds after an error is undefined.

        Raises:
            CheckpointError: no pack holds it undamaged; names packs and reasons.
        """
        if out.nbytes != ref.length:
            raise CheckpointError(f"a chunk of {ref.length} bytes was to be read into {out.nbytes} bytes")
        problem = self._sought(ref, out)
        if problem is not None:
            raise CheckpointError(problem)

    def read_many(self, wanted: Iterable[Wanted], threads: int) -> None:
        """Read chunks in the order in which they lie on the disk, on several threads.

        A callable is called once with the bytes of its chunk, on any thread; they are its own only while it runs.

        Raises:
            CheckpointError: as `read`; the rest is not read then.
        """
        for _ in self._spread(list(wanted), lambda item: item[0], self._deliver, threads):
            pass

    def verify(self, refs: Iterable[Ref], threads: int) -> dict[Ref, str]:
        """What is wrong with each chunk of which no copy is as it was written; the zeros behind it count too."""
        unique = list(dict.fromkeys(refs))
        packs = {place.pack for ref in unique for place in self._index.places(ref.address)}
        self._sources.close(None)
        self._index.refresh(again=packs | self._index.damaged.keys())
        for pack in packs & self._index.packs.keys():
            with contextlib.suppress(OSError):
                forget_cached(self._index.folder / pack)  # what is asked for is what the disk holds
        problems = self._problems(unique, threads)
        same = 0
        while problems and same < _SAME:  # as in `_sought`, but the folder is listed once for all
            same = 0 if self._index.refresh() else same + 1
            problems = self._problems(list(problems), threads)
        return problems

    def _problems(self, refs: Sequence[Ref], threads: int) -> dict[Ref, str]:
        checked = self._spread(refs, lambda ref: ref, self._checked, threads)
        return {ref: problem for ref, problem in checked if problem is not None}

    def stored(self, place: Place) -> memoryview:
        """The stored bytes of a copy, checked; this thread's until it reads again.

        Raises:
            CheckpointError: the copy is damaged.
        """
        entry = place.entry
        stored = self._buffer("stored", entry.stored)
        raw = stored if entry.codec == RAW else self._buffer("raw", entry.length)
        problem = self._fill(place, Ref(entry.address, entry.xxh3_128, entry.length), stored, raw)
        if problem is not None:
            self._index.distrust(place)
            raise CheckpointError(self._told(place, problem))
        return stored

    def close(self, pack: str | None = None) -> None:
        """Close the files that are open, or that of one pack."""
        self._sources.close(pack)

    def _deliver(self, item: Wanted) -> None:
        ref, target = item
        if isinstance(target, memoryview):
            self.read(ref, target)
        else:
            if ref.length > CHUNK_BYTES:
                raise CheckpointError(f"a chunk of {ref.length} bytes is asked for, and none is that long")
            out = self._buffer("raw", ref.length)
            self.read(ref, out)
            target(out)

    def _checked(self, ref: Ref) -> tuple[Ref, str | None]:
        if ref.length > CHUNK_BYTES:
            return ref, f"a chunk of {ref.length} bytes, and none is that long"
        return ref, self._problem(ref, self._buffer("raw", ref.length), padding=True)

    def _sought(self, ref: Ref, out: memoryview) -> str | None:
        """As `_problem`, and looks again where another process may have moved the chunk meanwhile.

        A folder that is listed while names come and go may show neither the old place nor the new one.
        """
        problem = self._problem(ref, out)
        same = 0
        while problem is not None and same < _SAME:
            same = 0 if self._index.refresh() else same + 1
            problem = self._problem(ref, out)
        return problem

    def _problem(self, ref: Ref, out: memoryview, *, padding: bool = False) -> str | None:
        """Fill `out` from the first copy that is whole; None, or why there is none."""
        problems = []
        for place in self._index.places(ref.address):
            try:
                problem = self._fill_checked(place, ref, out) if padding else self._copy(place, ref, out)
            except (OSError, CheckpointError) as error:
                problem = str(error)
            if problem is None:
                return None
            self._index.distrust(place)
            problems.append(self._told(place, problem))
        return "; ".join(problems) or self._missing(ref)

    def _copy(self, place: Place, ref: Ref, out: memoryview) -> str | None:
        entry = place.entry
        return self._fill(
            place, ref, out if entry.codec == RAW else self._buffer("stored", entry.stored), out
        )

    def _fill_checked(self, place: Place, ref: Ref, out: memoryview) -> str | None:
        """As `_copy`, with the zeros behind the chunk."""
        entry = place.entry
        extended = self._buffer("stored", entry.stored + place.padding)
        stored = extended[: entry.stored]
        problem = self._fill(place, ref, extended, stored if entry.codec == RAW else out)
        if problem is None and bytes(extended[entry.stored :]).strip(b"\0"):
            problem = "what lies between it and the next is not zero"
        return problem

    def _fill(self, place: Place, ref: Ref, stored: memoryview, raw: memoryview) -> str | None:
        """Read into `stored`, and make `raw` of it where it is compressed; None, or what is wrong with it."""
        entry = place.entry
        if entry.length != ref.length:
            return f"it has {entry.length} bytes there, not {ref.length}"
        if stored.nbytes:
            with self._sources.opened(place.pack) as source:
                source.read_into(entry.at, stored)
        if entry.codec != RAW and not _unpack(stored[: entry.stored], raw):
            return "it cannot be decompressed"
        if xxhash.xxh3_128_digest(raw) != ref.xxh3_128:
            return "its checksum does not match its content"
        return None

    def _told(self, place: Place, problem: str) -> str:
        path = self._index.folder / place.pack
        return (
            f"{path} is damaged in chunk {place.entry.address.hex()[:12]} at byte {place.entry.at}: {problem}"
        )

    def _missing(self, ref: Ref) -> str:
        text = f"chunk {ref.address.hex()[:12]} is in no pack of {self._index.folder}"
        damaged = list(self._index.damaged.values())
        return f"{text}; perhaps it was in one that cannot be used: {'; '.join(damaged)}" if damaged else text

    def _buffer(self, name: str, size: int) -> memoryview:
        """Memory of this thread that begins at a page; the same each time."""
        view: memoryview | None = getattr(self._scratch, name, None)
        if view is None:
            view = memoryview(mmap.mmap(-1, CHUNK_BYTES + _PAGE))
            setattr(self._scratch, name, view)
        return view[:size]

    def _spread(
        self, items: Sequence[T], ref_of: Callable[[T], Ref], work: Callable[[T], R], threads: int
    ) -> Iterator[R]:
        """Do the work for all items on threads, in the order of the disk."""

        def where(item: T) -> tuple[str, int]:
            places = self._index.places(ref_of(item).address)
            return (places[0].pack, places[0].entry.at) if places else ("", 0)

        ordered = sorted(items, key=where)
        runs = list(_runs(ordered, ref_of))
        with ThreadPoolExecutor(threads, thread_name_prefix="vault-read") as pool:
            futures = [pool.submit(lambda run: [work(item) for item in run], run) for run in runs]
            try:
                for future in futures:
                    yield from future.result()
            finally:
                for future in futures:
                    future.cancel()


def _runs(items: Sequence[T], ref_of: Callable[[T], Ref]) -> Iterator[Sequence[T]]:
    begin, size = 0, 0
    for place, item in enumerate(items):
        size += ref_of(item).length
        if size >= 2 * CHUNK_BYTES or place + 1 - begin == _MOST_CHUNKS:
            yield items[begin : place + 1]
            begin, size = place + 1, 0
    if begin < len(items):
        yield items[begin:]


def _unpack(stored: memoryview, out: memoryview) -> bool:
    """Decompress exactly as many bytes as `out` has, whatever the stored bytes promise; False when they do not fit."""
    package = zstd()
    unpacker = package.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        with unpacker.stream_reader(stored, read_across_frames=False) as reader:
            filled = 0
            while filled < out.nbytes and (got := reader.readinto(out[filled:])):
                filled += got
            return filled == out.nbytes and not reader.read(1)
    except package.ZstdError:
        return False


@dataclass(slots=True)
class _Opened:
    source: Source
    users: int = 0


class _Sources:
    """Open packs, a limited number of them; one is never closed while a thread reads from it."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        self._folder, self._storage = folder, storage
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(self, pack: str) -> Iterator[Source]:
        with self._lock:
            opened = self._opened.get(pack)
            if opened is None:
                opened = self._opened[pack] = _Opened(self._storage.open(self._folder / pack))
            opened.users += 1
            self._opened.move_to_end(pack)
        try:
            yield opened.source
        finally:
            with self._lock:
                opened.users -= 1
                self._close_idle(_OPEN_PACKS)

    def close(self, pack: str | None) -> None:
        with self._lock:
            self._close_idle(0, pack)

    def _close_idle(self, most: int, only: str | None = None) -> None:
        for name, opened in list(self._opened.items())[: max(0, len(self._opened) - most)]:
            if not opened.users and only in (None, name):
                del self._opened[name]
                opened.source.close()
