"""The lock under which one process builds a token cache while the others wait, and see how far it is."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from trainforge.context import Console
from trainforge.units import format_seconds
from trainforge_plugins.text.pool import WorkerError

POLL_S = 0.1
HEAD_START_S = 2.0


def give_head_start(path: Path, is_done: Callable[[], bool]) -> None:
    """Let another process take the lock first: wait a moment, until one shows progress in it or `is_done`.

    So it is the process whose terminal is seen that builds, and says why.
    """
    until = time.monotonic() + HEAD_START_S
    while time.monotonic() < until and not (path.exists() and _shown(path)) and not is_done():
        time.sleep(POLL_S)


@contextmanager
def locked(path: Path, console: Console, patience_s: float) -> Iterator[Callable[[str], None]]:
    """Hold an exclusive lock on `path`; the system gives it back when this process ends, however that happens.

    Gives the function with which its holder shows those that wait how far it is.

    Raises:
        WorkerError: who holds it has shown no progress for `patience_s`.
    """
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        if not _taken(file):
            console.note("waiting for another process, which tokenises the same text")
            _wait(file, path, patience_s)

        def progress(words: str) -> None:
            file.truncate(0)
            file.write(words)
            file.flush()

        yield progress
        file.truncate(0)


def _taken(file: TextIO) -> bool:
    """Take the lock unless another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shown(path: Path) -> str:
    return path.read_text("utf-8", "replace")


def _wait(file: TextIO, path: Path, patience_s: float) -> None:
    shown, since = _shown(path), time.monotonic()
    while not _taken(file):
        now = _shown(path)
        if now != shown:
            shown, since = now, time.monotonic()
        if time.monotonic() > since + patience_s:
            holder = shown or "another process"
            raise WorkerError(
                f"the process that tokenises for the others has been stuck for {format_seconds(patience_s)}: {holder}. "
                "Look at that part of the file, end the process, or raise text.worker_timeout"
            )
        time.sleep(POLL_S)
