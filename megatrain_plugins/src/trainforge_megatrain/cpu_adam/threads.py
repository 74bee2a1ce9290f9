"""How many threads the update gets, and the pool of the kernel that they are."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainforge.context import Context


def update_threads(ctx: Context, wish: int | Literal["auto"], cores: int | None = None) -> int:
    """Threads of this rank's update.

    The ranks of a host share the cores of the affinity mask, so that the sum is never above them (but each has one).
    `run.threads` lowers the share. On an accelerator one core is left to the thread that launches its work.
    OMP_NUM_THREADS does not count: launchers set it to 1 for everybody.
    """
    if wish != "auto":
        return wish
    share = (len(os.sched_getaffinity(0)) if cores is None else cores) // ctx.local_world
    if ctx.run.threads is not None:
        share = min(share, ctx.run.threads)
    return max(1, share - (ctx.device.type != "cpu"))


def ignored_omp_threads(threads: int) -> str | None:
    """The value of OMP_NUM_THREADS when it is below `threads`, else None."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return value if value.isdigit() and 0 < int(value) < threads else None


class Pool:
    """The kernel's threads. They sleep between updates, and know nothing of Python's lock nor of OpenMP."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        library.pool_open.restype = ctypes.c_void_p
        library.pool_open.argtypes = [ctypes.c_int]
        library.pool_close.restype = None
        library.pool_close.argtypes = [ctypes.c_void_p]
        library.pool_update.restype = None
        library.pool_update.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._open()

    def _open(self) -> None:
        self._owner = os.getpid()
        self._pool = self._library.pool_open(self.threads)
        if not self._pool:
            raise OSError(
                f"the system gives no {self.threads} threads: lower cpu_adam.threads, or raise ulimit -u"
            )

    def update(self, chunks: ctypes.Array[Any], factors: ctypes.Structure) -> None:
        """Run the kernel on all chunks; other Python threads go on meanwhile."""
        if self._pool is None:
            raise RuntimeError("cpu_adam has been closed")
        if self._owner != os.getpid():
            self._open()  # a forked child has the memory of the pool, and none of its threads
        self._library.pool_update(self._pool, chunks, len(chunks), ctypes.byref(factors))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._owner == os.getpid():
            self._library.pool_close(self._pool)
        self._pool = None
