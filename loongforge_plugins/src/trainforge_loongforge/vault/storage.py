"""How bytes reach a file and come back: around the page cache where the file system takes it, through it elsewhere.

Measured (ext4 on a virtual disk, 2 cores, 1 GiB, medians of 4 to 6 runs; `dd` is given 8 MiB at a time):

                                      durable after   CPU per byte
    O_DIRECT from aligned memory          0.31 s         0.02 ns
    O_DIRECT through the bounce buffer    0.43 s         0.10 ns
    page cache, written back early        0.51 s         0.42 ns   0.31 to 1.47 s: it depends on where pages come from
    dd oflag=direct                       0.76 s
    dd conv=fdatasync                     1.62 s

Reading it back cold takes two threads 0.42 s (0.12 ns) with O_DIRECT, 0.63 s (0.29 ns) through the page cache, and
`dd iflag=direct` 0.41 s. So O_DIRECT is what `auto` takes wherever the file system does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from trainforge.errors import CheckpointError, ConfigError

BLOCK = 4096
"""Bytes that every offset, length and bounce buffer of a direct transfer is a multiple of."""

BOUNCE_BYTES = 8 * 2**20
_STRAIGHT_BYTES = 2**20  # from here on writing from the caller's memory beats collecting small pieces
_DIRECT_READ_BYTES = 2**18  # below it a read through the page cache also brings what lies beside it
_READ_BYTES = 6 * 2**20  # a chunk of 4 MiB at any offset, in whole huge pages
_WRITEBACK_BYTES = 2 * 2**20
_IN_MEMORY = ("tmpfs", "ramfs")
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_Bytes = Any  # bytes, memoryview, mmap: whatever has a contiguous buffer


class Storage:
    """Opens the files of one folder in the way that works there.

    Attributes:
        mode: what runs: "direct" (O_DIRECT), "buffered" (the page cache) or "gds" (KvikIO, see `gds.py`).
        reason: why not a better one; None when there is none.
        takes_direct: whether files are opened with O_DIRECT.
        memory_alignment: bytes that memory must be aligned to for a direct transfer without a copy.
    """

    def __init__(
        self, mode: str = "buffered", reason: str | None = None, memory_alignment: int = BLOCK
    ) -> None:
        self.mode, self.reason, self.memory_alignment = mode, reason, memory_alignment
        self.takes_direct = mode == "direct"
        self._retried = 0
        self._lock = threading.Lock()

    @staticmethod
    def choose(wanted: str, folder: Path) -> Storage:
        """The best storage for a folder: of all (`auto`), of O_DIRECT and the page cache (`posix`), or KvikIO (`gds`).

        The folder, or where it is missing the nearest one above it, is tried with a file that has no name.

        Raises:
            ConfigError: `gds` is wanted and cannot be had; the message says why and what to install.
        """
        if wanted not in ("auto", "gds", "posix"):
            raise ConfigError(f"a storage called {wanted!r} is not known: say auto, gds or posix")
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        alignment, refusal = probe(folder)
        posix = Storage("buffered" if alignment is None else "direct", refusal, alignment or BLOCK)
        if wanted == "posix":
            return posix
        from trainforge_loongforge.vault import gds

        try:
            return gds.open_storage(folder, posix)
        except gds.Unavailable as why:
            if wanted == "gds":
                raise ConfigError(
                    f"GPUDirect Storage was asked for and cannot be had: {why}; write `auto` to do without it, or "
                    f"{gds.INSTALL}"
                ) from None
            posix.reason = "; ".join(filter(None, [f"no GPUDirect Storage: {why}", refusal]))
            return posix

    @property
    def retried(self) -> int:
        """Direct transfers so far that failed and went through the page cache (or, with `gds`, around KvikIO)."""
        return self._retried

    def count_retry(self) -> None:
        """Note such a transfer; from any thread."""
        with self._lock:
            self._retried += 1

    def create(self, path: Path) -> Sink:
        """Begin a new file; one of that name is overwritten. OSError as the system raises it."""
        return Sink(path, self)

    def open(self, path: Path) -> Source:
        """Open a file for reading. OSError as the system raises it."""
        return Source(path, self)


class Sink:
    """A file that is being written, front to back, by one thread.

    Whole blocks go to the disk from a bounce buffer, or straight from the caller's memory where its alignment allows.
    What is left at the end is shorter than a block and goes through the page cache, so that a file never has padding
    that would have to be cut off. OSError as the system raises it, from every method but `abandon`.
    """

    def __init__(self, path: Path, storage: Storage) -> None:
        self.path, self._storage = path, storage
        self._block = 1 if storage.mode == "buffered" else BLOCK
        self._direct = False
        self._bounce = bounce_buffer(BOUNCE_BYTES)
        self._held = 0  # bytes in the bounce buffer
        self._size = self._written = self._told = 0
        self._file = path.open("wb", buffering=0)

    def append(self, data: _Bytes) -> int:
        """Add bytes, which may change once this returns; gives the offset they have in the file."""
        at, view = self._size, as_bytes(data)
        while view:
            if self._goes_straight(view):
                self._drain()
                taken = len(view) // self._block * self._block
                self._transfer(view[:taken])
            else:
                taken = min(len(view), BOUNCE_BYTES - self._held)
                copy_into(self._bounce[self._held :], view[:taken])
                self._held += taken
                if self._held == BOUNCE_BYTES:
                    self._drain()
            self._size += taken
            view = view[taken:]
        return at

    def pad_to(self, alignment: int) -> int:
        """Add zeros up to a multiple of `alignment`; gives the size that the file has then."""
        self.append(bytes(-self._size % alignment))
        return self._size

    def finish(self) -> int:
        """Bring all bytes to the disk and close the file; gives its size. The name needs an fsync of the folder."""
        rest = self._held % self._block
        tail = self._bounce[self._held - rest : self._held]
        self._held -= rest
        self._drain()
        self._write(tail, direct=False)
        self._release()
        os.fsync(self._file.fileno())
        self._forget()
        self._file.close()
        return self._size

    def abandon(self) -> None:
        """Close and remove the file; never raises."""
        for undo in (self._release, self._file.close, self.path.unlink):
            with contextlib.suppress(OSError):
                undo()

    def _goes_straight(self, view: memoryview) -> bool:
        return (
            len(view) >= _STRAIGHT_BYTES
            and self._held % self._block == 0
            and (self._block == 1 or address(view) % self._storage.memory_alignment == 0)
        )

    def _drain(self) -> None:
        """Write what the bounce buffer holds: whole blocks."""
        held, self._held = self._held, 0
        if held:
            self._transfer(self._bounce[:held])

    def _transfer(self, data: memoryview) -> None:
        """Write whole blocks at a multiple of the block size. `gds.py` has another way."""
        self._write(data, direct=self._storage.takes_direct)

    def _write(self, data: memoryview, direct: bool) -> None:
        """Write all of it; the rest of a short write that ends inside a block, and what O_DIRECT refuses, buffered."""
        while data:
            self._set_direct(direct)
            try:
                written = self._file.write(data)
            except OSError as error:
                if not self._direct or error.errno not in _REFUSALS:
                    raise
                self._storage.count_retry()
                direct = False
                continue
            if not written:
                raise OSError(errno.EIO, "nothing was written", str(self.path))
            self._written += written
            data = data[written:]
            direct = direct and written % BLOCK == 0
        if not self._direct and self._written - self._told >= _WRITEBACK_BYTES:
            self._forget()

    def _set_direct(self, direct: bool) -> None:
        if direct == self._direct:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
            self._direct = direct
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._storage.count_retry()

    def _forget(self) -> None:
        """Start writing the page cache back and drop what has been: dirty pages do not pile up until the fsync."""
        begin = max(0, self._told - _WRITEBACK_BYTES)
        os.posix_fadvise(self._file.fileno(), begin, self._written - begin, os.POSIX_FADV_DONTNEED)
        self._told = self._written

    def _release(self) -> None:
        """Give back what is needed for transfers only."""


class Source:
    """A finished file. `read_into` may be called by many threads at once; `close` when none is reading."""

    def __init__(self, path: Path, storage: Storage) -> None:
        self.path, self._storage = path, storage
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        if storage.takes_direct:
            with contextlib.suppress(OSError):  # then reads go through the page cache
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read_into(self, at: int, out: _Bytes) -> None:
        """Fill `out` with the bytes at offset `at`.

        Raises:
            CheckpointError: the file ends before, or the disk cannot read it; names the file.
        """
        view = as_bytes(out)
        try:
            if self._direct is not None and len(view) >= _DIRECT_READ_BYTES:
                done = self._read_direct(self._direct, at, view)
                at, view = at + done, view[done:]
            while view:
                count = os.preadv(self._file, [view], at)
                if not count:
                    raise CheckpointError(f"{self.path} ends at byte {at}, {len(view)} bytes too early")
                at, view = at + count, view[count:]
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read at byte {at}: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Close the file; again is no error."""
        for descriptor in (self._file, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._file, self._direct = -1, None

    def _read_direct(self, descriptor: int, at: int, view: memoryview) -> int:
        """Read around the page cache as far as that goes; gives how much of `view` is filled.

        Through a bounce buffer even where the memory is aligned: its huge pages make up for the copy (0.4 s per GiB
        against 0.8 s into memory of small pages).
        """
        done = 0
        try:
            while done < len(view):
                skip = (at + done) % BLOCK
                bounce = own_bounce()[: -(-(skip + len(view) - done) // BLOCK) * BLOCK]
                count = os.preadv(descriptor, [bounce], at + done - skip) - skip
                if count <= 0:
                    break
                count = min(count, len(view) - done)
                copy_into(view[done:], bounce[skip : skip + count])
                done += count
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._storage.count_retry()
        return done


def probe(folder: Path) -> tuple[int | None, str | None]:
    """Write a block around the page cache: bytes that memory must be aligned to, or None and the reason why not."""
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        return None, f"{folder} lies in memory ({kind}), so there is no disk to write to directly"
    refused = f"the file system of {folder} ({kind}) does not take O_DIRECT"
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".tmp-", buffering=0) as file:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            area = bounce_buffer(2 * BLOCK)
            for alignment in (64, 512, BLOCK):
                with contextlib.suppress(OSError):
                    if os.pwrite(file.fileno(), area[alignment : alignment + BLOCK], 0) == BLOCK:
                        return alignment, None
    except OSError as error:
        if error.errno not in _REFUSALS:
            return None, f"{folder} cannot be tried with O_DIRECT ({error.strerror})"
    return None, refused


def file_system(folder: Path) -> str:
    """The type of the file system that a folder lies on, as the kernel calls it."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == wanted:
                return source.split()[0]
    return "unknown"


def bounce_buffer(size: int) -> memoryview:
    """Page-aligned memory, in huge pages where there are any: a transfer then has few segments."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


_thread = threading.local()


def own_bounce() -> memoryview:
    """The calling thread's buffer for reads."""
    if not hasattr(_thread, "bounce"):
        _thread.bounce = bounce_buffer(_READ_BYTES)
    bounce: memoryview = _thread.bounce
    return bounce


def as_bytes(data: _Bytes) -> memoryview:
    """The bytes of a contiguous buffer of any type; `cast` alone does not take an empty one."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def copy_into(out: memoryview, data: memoryview) -> None:
    """Copy bytes to the front of `out` with other threads running meanwhile."""
    np.frombuffer(out, np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)


def address(view: memoryview) -> int:
    """Where the first byte lies in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
