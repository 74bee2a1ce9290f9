"""Power cuts: after each, the newest committed checkpoint is whole, and the last one that was reported or the next."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dcp.toys import Toy, checkpoint, whole
from tests.support.crash_fs import Recorder, Tree, crashes, write_tree

from trainforge.checkpoints import list_checkpoints
from trainforge.toolbox.checkpointing import folders

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = {"a": 24, "b": 3, "c": 1, "d": 40, "e": 5, "f": 6}


def state(value: float) -> Toy:
    """Weights that all have one value."""
    return whole(**{name: torch.full((size,), value) for name, size in SIZES.items()})


def save(stage: Any, recorder: Recorder, step: int, value: float) -> None:
    recorder.mark(("begun", step, value))
    stage.save(step, {"p": state(value)})
    stage.wait()
    if stage.committed():
        recorder.mark(("committed", step, value))


def newest(folder: Path) -> tuple[int, float] | None:
    """What a run would go on from: step and the value of all weights. Every checkpoint that is found must be whole."""
    stage = checkpoint(folder)
    found = list_checkpoints(folder / "checkpoints")
    for info in found:
        assert stage.verify(info.path) == []
    if not found:
        return None
    target = state(0.0)
    stage.restore({"p": target}, found[-1].path)
    values = {float(value) for spans in target.spans.values() for value in spans[0][2]}
    assert len(values) == 1, "half of one save and half of another"
    return found[-1].step, values.pop()


def look_after_each(log: list[Any], place: Path) -> int:
    """Check every crash; gives how many there were."""
    seen: dict[str, Any] = {}
    count = 0
    for length, tree in crashes(log, random.Random(0)):
        marks = [op.mark for op in log[:length] if op.kind == "mark"]
        known = seen.setdefault(repr(tree), None) if repr(tree) in seen else _look(tree, place)
        seen[repr(tree)] = known
        reported = [mark[1:] for mark in marks if mark[0] == "committed"]
        allowed = [reported[-1] if reported else None]
        if marks and marks[-1][0] == "begun":
            allowed.append(marks[-1][1:])
        assert known in allowed, (
            length,
            log[max(0, length - 3) : length],
            sorted(tree.get("checkpoints", {})),
        )
        count += 1
    return count


def _look(tree: Tree, place: Path) -> tuple[int, float] | None:
    shutil.rmtree(place, ignore_errors=True)
    write_tree(tree, place)
    return newest(place)


def test_at_every_moment_of_eight_saves_and_their_pruning(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "run")
    recorder.root.mkdir()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        stage = checkpoint(recorder.root, keep=2)
        for step in range(1, 9):
            save(stage, recorder, step, float(step))
    assert look_after_each(recorder.log, tmp_path / "after") > 5000


def test_at_every_moment_of_replacing_a_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "run")
    recorder.root.mkdir()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        stage = checkpoint(recorder.root, keep=1)
        save(stage, recorder, 7, 1.0)
        save(stage, recorder, 7, 2.0)
    assert look_after_each(recorder.log, tmp_path / "after") > 400


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("moment", ["before the name", "after the name", "before the old one goes"])
def test_a_kill_and_then_a_power_cut_while_the_next_start_cleans_up(tmp_path, monkeypatch, moment):
    """What a killed process had not synced is still not on the disk when the next one looks at it."""
    recorder = Recorder(tmp_path / "run")
    recorder.root.mkdir()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        stage = checkpoint(recorder.root, keep=1)
        save(stage, recorder, 7, 1.0)
        with monkeypatch.context() as killing:
            _kill(killing, moment)
            recorder.mark(("begun", 7, 2.0))
            stage.save(7, {"p": state(2.0)})
            assert stage._thread is not None
            stage._thread.join()
            stage._thread = None
        checkpoint(recorder.root, keep=1)
    assert look_after_each(recorder.log, tmp_path / "after") > 400


def _kill(patch: pytest.MonkeyPatch, moment: str) -> None:
    """Make the save of a background thread end without any handler that would clean up."""
    import threading

    patch.setattr(threading, "excepthook", lambda arguments: None)
    real_rename, real_sync, renamed = Path.rename, folders.fsync_folder, []

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp-") and moment == "before the name":
            raise Killed
        renamed.append(path)
        return real_rename(path, target)

    def sync(path: Path) -> None:
        if len(renamed) == 2 and moment == "after the name":
            raise Killed
        real_sync(path)
        if len(renamed) == 2 and moment == "before the old one goes":
            raise Killed

    patch.setattr(Path, "rename", rename)
    patch.setattr(folders, "fsync_folder", sync)
