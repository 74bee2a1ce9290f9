"""Processes of a host that take turns: at downloading a model, at copying its code to a cache that they share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trainforge.errors import TrainForgeError
from trainforge.units import format_seconds

if TYPE_CHECKING:
    from trainforge.context import Console

_TOLD_AFTER_S = 10.0
_PAUSE_S = 0.1


@contextlib.contextmanager
def turn(path: Path, doing: str, console: Console, limit_s: float) -> Iterator[None]:
    """Hold the lock `path`, which one process holds at a time; it goes with the process.

    Args:
        doing: what is done meanwhile, for those who wait: `downloading a model`.
        limit_s: the longest wait for others.

    Raises:
        TrainForgeError: it took longer; names who has the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as lock:
        began, told = time.monotonic(), False
        while not _taken(lock):
            waited = time.monotonic() - began
            if waited > limit_s:
                raise TrainForgeError(
                    f"{_holder(lock)} has been {doing} for {format_seconds(waited)} and this run waits for it: end "
                    f"it if it gets no further (it holds {path}), and start again"
                )
            if waited > _TOLD_AFTER_S and not told:
                told = True
                console.note(f"waiting for {_holder(lock)}, which is {doing}")
            time.sleep(_PAUSE_S)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return f"process {lock.read().strip() or 'unknown'}"
