"""Power cuts with vault: what a save has reported is there, all that is found is whole, and nothing is left lying."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.crash.vault_stage import kept, leftovers, save, state, vault
from tests.dcp.toys import checkpoint as dcp
from tests.dcp.toys import on_ranks, whole
from tests.support.crash_fs import Recorder, crashes, write_tree

from trainforge.checkpoints import list_checkpoints, remove_checkpoints
from trainforge_loongforge.vault import packs
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _small_chunks_and_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VaultCheckpoint, "chunk_bytes", 64)
    monkeypatch.setattr(packs, "PACK_BYTES", 400)


@pytest.fixture
def recorder(in_memory: Path) -> Recorder:
    (in_memory / "run").mkdir()
    return Recorder(in_memory / "run")


@pytest.fixture
def place(in_memory: Path) -> Path:
    """Where trees are made real."""
    return in_memory / "after"


def save_marked(stage: VaultCheckpoint, recorder: Recorder, step: int, version: int | None = None) -> None:
    mark = (step, step if version is None else version)
    recorder.mark(("begun", mark))
    save(stage, *mark)
    recorder.mark(("committed", mark))


def look_after_each(log: list[Any], place: Path, since: int = 0) -> int:
    """Check every crash, the next start, and one more save; gives how many crashes there were."""
    seen: dict[str, tuple[int, int] | None] = {}
    count = 0
    for length, tree in crashes(log, random.Random(0)):
        if length < since:
            continue
        key = repr(tree)
        if key not in seen:
            shutil.rmtree(place, ignore_errors=True)
            write_tree(tree, place)
            seen[key] = _look(place)
        marks = [op.mark for op in log[:length] if op.kind == "mark"]
        reported = [mark for kind, mark in marks if kind == "committed"]
        allowed = [reported[-1] if reported else None]
        if marks and marks[-1][0] == "begun":
            allowed.append(marks[-1][1])
        assert seen[key] in allowed, (length, log[max(0, length - 3) : length], allowed)
        count += 1
    return count


def _look(place: Path) -> tuple[int, int] | None:
    """Step and version that the next start would go on from."""
    before = kept(place)  # as somebody who only reads
    stage = vault(place)  # the next start
    found = kept(place)
    assert set(before) <= set(found)
    assert leftovers(place) == []
    save(stage, 50)
    stage.close()
    assert kept(place) == [*found, (50, 50)][-2:]
    assert leftovers(place) == []
    return found[-1] if found else None


def test_at_every_moment_of_saves_collections_and_a_resumed_process(monkeypatch, recorder, place):
    with monkeypatch.context() as patch:
        recorder.install(patch)
        for steps in ((1, 2, 3, 4), (5, 6, 7)):
            stage = vault(recorder.root, keep=2)
            for step in steps:
                save_marked(stage, recorder, step)
            stage.close()
    names = {op.target for op in recorder.log if op.kind == "move"}
    assert any(name.startswith("collect") for name in names), "packs were written anew"
    assert look_after_each(recorder.log, place) > 2000


@pytest.mark.parametrize("stage_in", [vault, dcp], ids=["vault", "dcp"])
def test_folders_that_were_there_before_are_kept_too(monkeypatch, recorder, stage_in):
    """Whoever made the run folder did not bring its name to the disk; a save that is reported must not go with it."""
    with monkeypatch.context() as patch:
        recorder.install(patch)
        (recorder.root / "runs/r/checkpoints").mkdir(parents=True)
        stage = stage_in(recorder.root / "runs/r")
        save(stage, 1)
        stage.close()
    after = [tree for length, tree in crashes(recorder.log, random.Random(0)) if length == len(recorder.log)]
    assert after
    for tree in after:
        assert "step-00000001" in tree["runs"]["r"]["checkpoints"]


def test_at_every_moment_of_replacing_a_checkpoint_of_the_same_step(monkeypatch, recorder, place):
    with monkeypatch.context() as patch:
        recorder.install(patch)
        stage = vault(recorder.root, keep=1)
        for version in (1, 2, 3):
            save_marked(stage, recorder, 7, version)
    assert look_after_each(recorder.log, place) > 300


def test_at_every_moment_of_removing_by_hand(monkeypatch, recorder, place):
    stage = vault(recorder.root, keep=9)
    for step in range(1, 5):
        save(stage, step)
    stage.close()
    recorder = Recorder(recorder.root)
    recorder.mark(("committed", (4, 4)))
    since = len(recorder.log)
    with monkeypatch.context() as patch:
        recorder.install(patch)
        remove_checkpoints(list_checkpoints(recorder.root / "checkpoints")[:3])
    assert look_after_each(recorder.log, place, since) > 100


@pytest.mark.parametrize("aside", [".old-step-00000002", "abandoned-step-00000002-1"])
def test_a_checkpoint_that_may_get_its_name_back_keeps_its_chunks(tmp_path, aside):
    """A kill while a step was replaced, or `--resume` of an earlier one; then others are removed by hand."""
    stage = vault(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(stage, step)
    stage.close()
    folder = tmp_path / "checkpoints"
    (folder / "step-00000002").rename(folder / aside)
    remove_checkpoints(list_checkpoints(folder)[:1])
    vault(tmp_path, keep=9).close()
    if (folder / aside).exists():
        (folder / aside).rename(folder / "step-00000002")
    assert kept(tmp_path) == [(2, 2), (3, 3)]


def test_a_damaged_one_that_was_set_aside_does_not_fill_the_disk(tmp_path):
    stage = vault(tmp_path, keep=9)
    for step in (1, 2):
        save(stage, step)
    stage.close()
    folder = tmp_path / "checkpoints"
    (folder / "step-00000002/checkpoint.json").write_bytes(b"{}")
    (folder / "step-00000002").rename(folder / "abandoned-step-00000002-1")
    vault(tmp_path, keep=9).close()
    assert leftovers(tmp_path) == ["abandoned-step-00000002-1"]
    assert kept(tmp_path) == [(1, 1)]


def test_at_every_moment_of_saves_of_two_ranks(monkeypatch, recorder, place):
    """Ranks write at the same time; a checkpoint of theirs is read by one."""

    def work(rank: int, comm: Any) -> None:
        stage = vault(recorder.root, rank=rank, world=2, comm=comm, keep=1)
        for step in (1, 2, 3):
            if rank == 0:
                recorder.mark(("begun", (step, step)))
            comm.gather(None)
            save(stage, step)
            comm.gather(None)
            if rank == 0:
                recorder.mark(("committed", (step, step)))

    with monkeypatch.context() as patch:
        recorder.install(patch)
        assert on_ranks(2, work) == [None, None]
    written = {op.target for op in recorder.log if op.kind == "move" and op.target.endswith(".pack")}
    assert any("r00001" in name for name in written)
    assert look_after_each(recorder.log, place) > 1000


class Killed(BaseException):
    """The process is gone."""


def _kill_at(patch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """Let the k-th operation, and all that would clean up after it, end the process; gives what was done."""
    patch.setattr(threading, "excepthook", lambda arguments: None)
    done: list[str] = []

    def until_then(name: str, real: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            if len(done) >= moment:
                raise Killed
            done.append(name)
            return real(*arguments, **options)

        return called

    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        patch.setattr(os, name, until_then(name, getattr(os, name)))
    return done


def _close_files_below(root: Path) -> None:
    """What the system does for a process that is gone: its locks go too."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(root)):
                os.close(descriptor)


@pytest.mark.slow
def test_a_kill_anywhere_and_then_a_power_cut_while_the_next_start_cleans_up(in_memory, monkeypatch, place):
    """What a killed process had not synced is still not on the disk when the next one relies on it."""
    count = moment = 0
    while True:
        root = in_memory / f"run-{moment}"
        root.mkdir()
        recorder = Recorder(root)
        with monkeypatch.context() as patch:
            recorder.install(patch)
            stage = vault(root, keep=1)
            for version in (1, 2, 3):
                save_marked(stage, recorder, 7, version)
            with monkeypatch.context() as killing:
                done = _kill_at(killing, moment)
                recorder.mark(("begun", (7, 4)))
                with contextlib.suppress(Killed):
                    stage.save(7, {"p": whole(**state(4))})
                if stage._thread is not None:
                    stage._thread.join()
            _close_files_below(root)
            since = len(recorder.log)
            vault(root, keep=1).close()
        count += look_after_each(recorder.log, place, since)
        if len(done) < moment:
            break
        moment += 1
    assert moment > 12
    assert count > 1000
