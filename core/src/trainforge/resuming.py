"""Going on where a run stopped: finds the checkpoint and has it read by the plugin that wrote it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.blame import blaming
from trainforge.checkpoints import Unreadable, build_reader, list_checkpoints, writer_reference
from trainforge.errors import CheckpointError, ConfigError
from trainforge.retention import newest_usable
from trainforge.stages import is_checkpoint_name
from trainforge.units import format_seconds

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.live import Run
    from trainforge.options import RunOptions
    from trainforge.runfolder import RunFolder
    from trainforge.stages import Checkpoint


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from, the same on every rank.

    Attributes:
        path: its folder.
        writer: the plugin that wrote it.
        reference: what that plugin is loaded by: its name, or its file.
    """

    step: int
    path: str
    writer: str
    reference: str


def find_checkpoint(ctx: Context, folder: RunFolder, options: RunOptions) -> Found | None:
    """The checkpoint to resume from, or None: rank 0 looks, the others follow.

    Raises:
        ConfigError: there is none of the step that was asked for.
        CheckpointError: there are some, and the weights of none are finite.
    """
    found = _look(ctx, folder, options) if ctx.rank == 0 else None
    facts = ctx.comm.gather(None if found is None else asdict(found))[0]
    return None if facts is None else Found(**facts)


def _look(ctx: Context, folder: RunFolder, options: RunOptions) -> Found | None:
    unreadable: list[Unreadable] = []
    existing = list_checkpoints(folder.checkpoints, unreadable)
    if unreadable and not existing:
        raise CheckpointError(f"{unreadable[0].about}: move it away")
    wanted = [info for info in existing if options.resume in (None, info.step)]
    if options.resume is not None and not wanted:
        kept = ", ".join(str(info.step) for info in existing) or "none"
        raise ConfigError(
            f"--resume {options.resume}: no checkpoint of that step in {folder.path}; kept: {kept}"
        )
    if not wanted:
        return None
    info = wanted[-1] if options.resume is not None else newest_usable(wanted)
    if info is None:
        raise CheckpointError(
            f"no checkpoint in {folder.path} has weights that are all finite: start over with --fresh and a lower "
            "train.lr"
        )
    if info is not wanted[-1]:
        ctx.console.warn(
            f"the weights of step {wanted[-1].step} are not finite: going back to step {info.step}. What led there may "
            "happen again: look at the rows in between, or lower train.lr with --allow-change train.lr"
        )
    for problem in unreadable:
        ctx.console.warn(f"{problem.about}. It is passed over, and set aside as {set_aside(problem.path)}")
    return Found(info.step, str(info.path), info.writer, writer_reference(folder.path, info.writer))


def set_later_aside(folder: RunFolder, step: int) -> list[Path]:
    """Rename the checkpoints after `step`: a run that goes back to it must not go on from them the next time.

    Returns:
        Where they are now. They are complete, only no longer found as checkpoints.
    """
    moved = []
    for path in sorted(folder.checkpoints.iterdir()):
        its = is_checkpoint_name(path.name)
        if its is not None and its > step:
            moved.append(set_aside(path))
    return moved


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is no longer found as one; gives where it is now."""
    return path.rename(path.with_name(f"abandoned-{path.name}-{time.time_ns()}"))


def resume(run: Run, found: Found) -> None:
    """Fill every part from the checkpoint, read by the plugin that wrote it.

    One that turns out to be damaged is passed over for the next older one, loudly, unless its step was asked for.

    Raises:
        CheckpointError: it cannot be read, nor any older one in its place; says the way out.
    """
    began = time.perf_counter()
    passed_over = False
    while True:
        try:
            _restore(run, found)
            break
        except CheckpointError as error:
            older = _older(run, found) if run.options.resume is None else None
            if older is None:
                raise
            run.console.warn(f"{error.__cause__ or error}. Going back to step {older.step}")
            found, passed_over = older, True
    assert run.state.step == found.step, "a checkpoint's folder name says its step"
    run.resumed_from = found.step
    if (passed_over or run.options.resume is not None) and run.ctx.rank == 0:
        why = f"--resume {found.step}: a later checkpoint" if not passed_over else "the damaged checkpoint"
        for path_aside in set_later_aside(run.folder, found.step):
            run.console.note(f"{why} was set aside as {path_aside}; delete it when you like")
    took = format_seconds(time.perf_counter() - began)
    run.console.note(f"resumed from step {found.step} of {run.steps} in {took}: {found.path}")


def _restore(run: Run, found: Found) -> None:
    with _reader(run, found) as reader, blaming(run.ctx, found.writer, "checkpoint", f"reading {found.path}"):
        try:
            reader.restore(run.parts, Path(found.path))
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {found.path} cannot be read: {error}{_way_out(run, found.step)}"
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_other_optimizer(run)}{_way_out(run, found.step)}") from error


def _older(run: Run, found: Found) -> Found | None:
    """The checkpoint to take instead of one that is damaged; None when there is none, or it is not damaged at all."""
    older = None
    if run.ctx.rank == 0:
        with _reader(run, found) as reader:
            damaged = reader.verify(Path(found.path))
        readable = list_checkpoints(run.folder.checkpoints, [])
        known = [info for info in readable if info.step < found.step]
        info = newest_usable(known) if damaged else None
        if info is not None:
            reference = writer_reference(run.folder.path, info.writer)
            older = Found(info.step, str(info.path), info.writer, reference)
    facts = run.ctx.comm.gather(None if older is None else asdict(older))[0]
    return None if facts is None else Found(**facts)


def _other_optimizer(run: Run) -> str:
    """A hint when the run in the folder was trained by another optimizer, whose state this one cannot use."""
    try:
        plan = json.loads((run.folder.path / "plan.json").read_text(encoding="utf-8"))
        before, now = plan["stages"]["optimizer"]["plugin"], run.plan.chosen["optimizer"].plugin
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if before == now:
        return ""
    return (
        f". It was trained with the optimizer {before}, this run has {now}: choose --stage optimizer={before}"
    )


def _way_out(run: Run, step: int) -> str:
    """What a person can do when the checkpoint of `step` cannot be used."""
    earlier = [info.step for info in list_checkpoints(run.folder.checkpoints, []) if info.step < step]
    back = f"go back to an earlier checkpoint with --resume {earlier[-1]}, or " if earlier else ""
    return f". Nothing was changed: {back}start over with --fresh"


@contextlib.contextmanager
def _reader(run: Run, found: Found) -> Iterator[Checkpoint]:
    """The checkpoint stage that can read it: the chosen one, or one built from the plugin that wrote it."""
    if found.writer == run.plan.chosen["checkpoint"].plugin:
        yield run.stages.checkpoint
        return
    reader = build_reader(found.writer, found.reference, run.ctx)
    try:
        yield reader
    finally:
        reader.close()
