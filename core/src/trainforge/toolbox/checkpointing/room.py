"""Room on the disk: whether checkpoints will fit, and what to say when the disk refuses."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.errors import CheckpointError
from trainforge.units import format_bytes

if TYPE_CHECKING:
    from trainforge.sections import TrainSection


def most_kept(train: TrainSection) -> int:
    """How many checkpoints lie on the disk at most, while one more is being written."""
    if train.save_every is None:
        return 1  # only at the end; one more when a signal stops the run
    forever = 0
    if train.keep_every is not None and train.steps is not None:
        forever = max(0, train.steps // train.keep_every - train.keep)
    return train.keep + 1 + (train.best is not None) + forever


def check_room(folder: Path, each: int, count: int) -> str | None:
    """Compare the free bytes with `count` checkpoints of `each` bytes, those that are there already included.

    Returns:
        A warning when they will not all fit.

    Raises:
        CheckpointError: there is not even room for one more.
    """
    free = free_bytes(folder)
    if free < each:
        raise CheckpointError(
            f"no room for a checkpoint in {folder}: one needs about {format_bytes(each)} and {format_bytes(free)} are "
            "free; make room, or choose another folder with --run-dir"
        )
    missing = each * count - _written(folder) - free
    if missing <= 0:
        return None
    return (
        f"{folder} has room for {(free + _written(folder)) // each} checkpoints and will need it for {count}, of about "
        f"{format_bytes(each)} each ({format_bytes(free)} are free): make room for {format_bytes(missing)} more, or "
        "lower train.keep"
    )


def disk_error(error: OSError, folder: Path, needed: int) -> CheckpointError:
    """What a person should read when the disk refuses a save of `needed` bytes."""
    intact = "earlier checkpoints are intact"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(free_bytes(folder))
        text = (
            f"no room for a checkpoint in {folder}: it needs {format_bytes(needed)} and {free} are free; make room, "
            f"or keep fewer with train.keep ({intact})"
        )
    else:
        text = f"the checkpoint cannot be written to {folder}: {error.strerror or error}; {intact}"
    failure = CheckpointError(text)
    failure.__cause__ = error
    return failure


def free_bytes(folder: Path) -> int:
    """Free bytes where the folder is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _written(folder: Path) -> int:
    """Bytes of what lies there."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
