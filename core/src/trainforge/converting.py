"""Writing a checkpoint again with another plugin: the same state, bit for bit, in the other's format."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainforge.blame import blaming
from trainforge.checkpoints import (
    bring_back,
    build_reader,
    checkpoints_folder,
    context_outside,
    list_checkpoints,
    open_reader,
)
from trainforge.discovery import scan
from trainforge.errors import CheckpointError, UserError
from trainforge.runfolder import held_apart
from trainforge.stages import LazyTensor, NamedTensor, PartState
from trainforge.stored_run import choose_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from trainforge.context import Console, Task
    from trainforge.stages import CheckpointInfo


def convert_checkpoint(run_dir: Path, step: int | None, to: str, console: Console) -> CheckpointInfo:
    """Write a checkpoint of a run again with the plugin `to`, in the place of the one that there is.

    Every byte is verified as it is read; RAM holds a few chunks at a time. Killed at any moment, or out of disk, it
    leaves the old checkpoint or the new one. No other checkpoint changes.

    Args:
        step: None takes the newest with finite weights.
        to: an installed checkpoint plugin's name, or its file.

    Returns:
        The new checkpoint.

    Raises:
        UserError: a run is using the folder, there is no such checkpoint, or `to` has written it itself.
        SelectionError: this plugin, or the one that wrote the checkpoint, is not installed.
        CheckpointError: the checkpoint is damaged, or the new one cannot be written.
    """
    writer, folder = scan().find(to).name, checkpoints_folder(run_dir)
    with held_apart(folder.parent):
        bring_back(folder)
        info = choose_checkpoint(run_dir, step)
        if writer == info.writer:
            raise UserError(f"step {info.step} was written by {writer} already: there is nothing to convert")
        _convert(info, writer, to, console)
    return next(new for new in list_checkpoints(folder) if new.step == info.step)


def _convert(info: CheckpointInfo, writer: str, to: str, console: Console) -> None:
    ctx = context_outside(info.path.parent.parent, console)
    with contextlib.closing(open_reader(info)) as reader:
        with blaming(ctx, info.writer, "checkpoint", f"reading {info.path}"):
            contents = reader.contents(info.path)
        total = sum(named.tensor.nbytes for state in contents.values() for named in state.tensors)
        with (
            contextlib.closing(build_reader(writer, to, ctx)) as saver,
            blaming(ctx, writer, "checkpoint", f"converting {info.path}"),
            console.task(f"step {info.step}: {info.writer} to {writer}", total, "bytes") as task,
            _Watch(task) as watch,
        ):
            saver.save(info.step, {name: _Kept(watch.over(state)) for name, state in contents.items()})
            saver.wait()
        with blaming(ctx, info.writer, "checkpoint", "making room"):
            reader.remove([])  # what only the old one needed


class _Kept:
    """A part that is what a checkpoint holds of it."""

    def __init__(self, state: PartState) -> None:
        self._state = state

    def state(self) -> PartState:
        return self._state

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Never called: it is only saved."""
        raise AssertionError("a conversion restores nothing")


class _Watch:
    """Moves the progress bar as tensors are read; after Ctrl-C nothing more is, so that the save comes to an end."""

    def __init__(self, task: Task) -> None:
        self._task, self._stopped = task, False

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self._stopped = kind is not None

    def over(self, state: PartState) -> PartState:
        """The same part, watched."""
        return replace(state, tensors=tuple(self._watched(named) for named in state.tensors))

    def _watched(self, named: NamedTensor) -> NamedTensor:
        counted = 0

        def load(start: int, out: Tensor) -> None:
            nonlocal counted
            if self._stopped:
                raise CheckpointError("the conversion was stopped: the checkpoint is as it was")
            named.read(start, out)
            stop = (start + len(out)) * out.element_size()
            if stop > counted:  # a saver may read twice
                self._task.advance(stop - counted)
                counted = stop

        return LazyTensor(named.key, named.extent, named.tensor, load=load)
