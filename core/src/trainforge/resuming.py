"""Going on where a run stopped: finds the checkpoint and has it read by the plugin that wrote it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.checkpoints import list_checkpoints, read_writer, writer_reference
from trainforge.discovery import load_provider
from trainforge.errors import CheckpointError, ConfigError
from trainforge.units import format_seconds

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.live import Run
    from trainforge.options import RunOptions
    from trainforge.runfolder import RunFolder
    from trainforge.stages import Checkpoint, CheckpointInfo


def find_checkpoint(ctx: Context, folder: RunFolder, options: RunOptions) -> tuple[int, Path | None]:
    """The checkpoint to resume from: rank 0 looks, the others follow."""
    found: CheckpointInfo | None = None
    if ctx.rank == 0:
        existing = list_checkpoints(folder.checkpoints)
        found = existing[-1] if existing else None
        if options.resume is not None:
            found = next((info for info in existing if info.step == options.resume), None)
            if found is None:
                kept = ", ".join(str(info.step) for info in existing) or "none"
                raise ConfigError(
                    f"--resume {options.resume}: no checkpoint of that step in {folder.path}; kept: {kept}"
                )
    step, path = ctx.comm.gather([found.step, str(found.path)] if found else [0, None])[0]
    return step, Path(path) if path else None


def set_later_aside(folder: RunFolder, step: int) -> list[Path]:
    """Rename the checkpoints after `step`: a run that goes back to it must not go on from them the next time.

    Returns:
        Where they are now. They are complete, only no longer found as checkpoints.
    """
    moved = []
    for info in list_checkpoints(folder.checkpoints):
        if info.step > step:
            target = info.path.with_name(f"abandoned-{info.path.name}-{time.time_ns()}")
            info.path.rename(target)
            moved.append(target)
    return moved


def resume(run: Run, step: int, path: Path) -> None:
    """Fill every part from the checkpoint, read by the plugin that wrote it."""
    reader = reader_of(run, path)
    began = time.perf_counter()
    try:
        reader.restore(run.parts, path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    assert run.state.step == step, "a checkpoint's folder name says its step"
    run.resumed_from = step
    if run.options.resume is not None and run.ctx.rank == 0:
        for path_aside in set_later_aside(run.folder, step):
            run.console.note(
                f"--resume {step}: a later checkpoint was set aside as {path_aside}; delete it when you like"
            )
    run.console.note(
        f"resumed from step {step} of {run.steps} in {format_seconds(time.perf_counter() - began)}: {path}"
    )


def reader_of(run: Run, path: Path) -> Checkpoint:
    """The checkpoint stage that can read `path`: the chosen one, or one built from the plugin that wrote it."""
    writer = read_writer(path)
    if writer == run.plan.chosen["checkpoint"].plugin:
        return run.stages.checkpoint
    provider = load_provider(writer_reference(run.path, writer), "checkpoint")
    run.ctx.plugin = writer
    reader: Checkpoint = provider.build(run.ctx, provider.config())
    return reader
