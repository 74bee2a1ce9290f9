"""Copying many chunks on several threads, each chunk on one.

PyTorch copies a chunk on all threads and waits for the last of them, every few megabytes. Where cores are busy, as
while a save is hashed and training goes on, that was four times as slow as what is done here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from torch import Tensor

T = TypeVar("T")

_MOST_THREADS = 8  # more do not make memory faster


class Helpers:
    """Threads that help whoever has much to do. They begin with the first work, and end with `close`."""

    def __init__(self) -> None:
        self._count = min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Do the work for all items, on this thread and on those that have time; raises what one raises."""
        left = iter(items)

        def some() -> None:
            while True:
                with self._lock:
                    item = next(left, None)
                if item is None:
                    return
                work(item)

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max(1, self._count), thread_name_prefix="vault-copy")
            futures = [self._pool.submit(some) for _ in range(self._count)]
        try:
            some()
        finally:
            for future in futures:
                if not future.cancel():  # it has begun
                    future.result()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def copy_bytes(out: Tensor, data: Tensor) -> None:
    """Copy bytes in host RAM on this thread alone, with others running meanwhile."""
    np.copyto(out.numpy(), data.numpy())
