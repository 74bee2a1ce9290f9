"""`vault.lock`: who saves or collects holds it, so that nobody takes a chunk that a save has decided to use again."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.folders import make_durably
from trainforge.units import format_seconds

LOCK = "vault.lock"


def lock(folder: Path, wait_s: float) -> int:
    """Lock a folder of checkpoints; gives the file descriptor that, when closed, gives the lock back.

    Raises:
        CheckpointError: somebody else has held it all the while.
    """
    make_durably(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(
                    f"another process has been saving or pruning in {folder} for {format_seconds(wait_s)}: try again "
                    "when it has ended"
                ) from None
        time.sleep(0.05)


@contextmanager
def locked(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock for a while; see `lock`."""
    descriptor = lock(folder, wait_s)
    try:
        yield
    finally:
        os.close(descriptor)
