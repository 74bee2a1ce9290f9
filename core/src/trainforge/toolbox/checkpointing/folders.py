"""The folder of checkpoints: committing by rename, pruning, leftovers.

step-00000012                  committed
.tmp-step-00000012-SAVEID      being written; its folder is locked (flock) for as long as rank 0 lives
.old-step-00000012             a checkpoint of the same step, until the one that replaces it has its name
.trash-step-00000012-SAVEID    pruned, being deleted
.removing-step-00000012        likewise, by hand (trainforge.checkpoints)
abandoned-step-00000012-TIME   set aside by a run that went back to an earlier step; whoever wants it gives it its name
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.retention import best_of, retention
from trainforge.stages import CheckpointInfo, checkpoint_name, is_checkpoint_name
from trainforge.toolbox.checkpointing.documents import NAME
from trainforge.values import REPLACED

if TYPE_CHECKING:
    from trainforge.sections import TrainSection

_TEMPORARY, _TRASH = ".tmp-", (".trash-", ".removing-")
ASIDE = "abandoned-"
"""What the name of a checkpoint begins with that a run has set aside."""


def temporary_folder(folder: Path, step: int, save_id: str) -> Path:
    """Where a save is written until it is committed."""
    return folder / f"{_TEMPORARY}{checkpoint_name(step)}-{save_id}"


def create_locked(path: Path) -> int:
    """Make a temporary folder and lock it; the file descriptor, when closed, gives the lock back."""
    make_durably(path.parent)
    path.mkdir()
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def commit(temporary: Path, final: Path) -> None:
    """Give a finished folder its name. A checkpoint of the same step makes way, and comes back if this fails."""
    fsync_folder(temporary)
    replaced = final.with_name(REPLACED + final.name) if final.exists() else None
    try:
        if replaced is not None:
            final.rename(replaced)
        temporary.rename(final)
        fsync_folder(final.parent)
    except OSError:
        if final.exists() and not temporary.exists():
            final.rename(temporary)
        if replaced is not None and replaced.exists():
            replaced.rename(final)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def prune(
    folder: Path, train: TrainSection, latest: Path, writer: str, is_sound: Callable[[Path], bool]
) -> None:
    """Delete the checkpoints that `train` does not keep, never `latest`.

    Checkpoints of other plugins are left alone, and those that the system does not let us read just now. Those that
    count (the newest `keep`, and the best) are looked at first: a damaged one takes nobody's place, as one that is not
    finite. It goes when it would go if it were whole: a disk that refuses to read for a moment looks like damage.
    """
    infos = [
        info
        for path in folder.iterdir()
        if (step := is_checkpoint_name(path.name)) is not None
        and (info := _info(step, path)) is not None
        and info.writer in (writer, "")
    ]
    outlived = {info.path for info in retention(infos, train.keep, train.keep_every, train.best)}
    while True:
        usable = sorted((info for info in infos if info.finite), key=lambda info: info.step)
        count = {*usable[-train.keep :], best_of(usable, train.best)} - {None}
        damaged = [info for info in count if info is not None and not is_sound(info.path)]
        if not damaged:
            break
        infos = [replace(info, finite=False) if info in damaged else info for info in infos]
    for info in retention(infos, train.keep, train.keep_every, train.best):
        if info.path != latest and info.path in outlived:
            discard(info.path, latest.name)


def discard(path: Path, reason: str) -> None:
    """Delete a checkpoint; its name goes first, on the disk too, so that no folder of that name is ever incomplete."""
    trash = path.with_name(f"{_TRASH[0]}{path.name}-{os.getpid()}-{reason}")
    path.rename(trash)
    fsync_folder(path.parent)
    shutil.rmtree(trash, ignore_errors=True)


def clean(folder: Path) -> int:
    """Remove what saves and prunings that were cut short have left; gives the number of unfinished saves.

    A folder that a living process is writing to is left alone.
    """
    keep_names_above(folder)
    leftovers = sorted(folder.iterdir()) if folder.is_dir() else []
    if any(path.name.startswith((*_TRASH, REPLACED)) for path in leftovers):
        fsync_folder(folder)  # the names that a killed process gave may not be on the disk yet
    unfinished = 0
    for path in leftovers:
        if path.name.startswith(_TEMPORARY) and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
            unfinished += 1
        elif path.name.startswith(_TRASH):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(REPLACED):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)
    return unfinished


def holds_checkpoint(name: str) -> bool:
    """Whether a folder of that name is a checkpoint, or one that may get its name back."""
    return is_checkpoint_name(name) is not None or name.startswith((REPLACED, ASIDE))


def fsync_folder(path: Path) -> None:
    """Bring the folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durably(folder: Path) -> None:
    """Make a folder and those above it that are missing, and bring their names to the disk."""
    if not folder.is_dir():
        make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def keep_names_above(folder: Path) -> None:
    """Bring the names of a folder, and of those above it, to the disk: who made them may not have done so."""
    if not folder.is_dir():
        return
    device = folder.stat().st_dev
    for above in folder.absolute().parents:
        with contextlib.suppress(OSError):
            if above.stat().st_dev == device:
                fsync_folder(above)


def forget_cached(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _in_use(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _info(step: int, path: Path) -> CheckpointInfo | None:
    """What a checkpoint says about itself; a damaged one has no writer and is not usable.

    None when the system refuses to read it, as with too many open files: it may be whole.
    """
    try:
        content = (path / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        content = b""
    except OSError:
        return None
    try:
        document = json.loads(content)
        metrics = {str(name): float(value) for name, value in document.get("metrics", {}).items()}
        finite = document.get("finite", True) is True
        return CheckpointInfo(
            step, path, str(document["writer"]), 0, float(document["saved_at"]), metrics, finite
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return CheckpointInfo(step, path, "", 0, 0.0, finite=False)
