"""A full disk, at every operation of a save: nothing is lost, nothing is left behind, and the message has numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.dcp.toys import checkpoint, names, whole
from tests.run.runs import run, write_recipe
from tests.support.crash_fs import Recorder

from trainforge.errors import CheckpointError
from trainforge.sections import TrainSection
from trainforge.stages import is_checkpoint_name
from trainforge.toolbox.checkpointing import room

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAYS = (
    r"no room for a checkpoint in .*: it needs [\d.]+ (B|KiB|MiB) and .* are free; make room, or keep fewer"
)


def value_of(run_dir: Path, step: int, size: int) -> float:
    stage, target = checkpoint(run_dir), torch.zeros(size)
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    assert stage.verify(path) == []
    stage.restore({"p": whole(w=target)}, path)
    assert bool((target == target[0]).all())
    return float(target[0])


@pytest.mark.parametrize("second", [2, 1], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("later", [1, 10**6], ids=["one operation", "all later ones too"])
def test_at_every_operation(tmp_path, monkeypatch, second, later):
    """The k-th operation of a save fails, or that and every later one that removes nothing; for every k."""
    for k in range(1, 100):
        root = tmp_path / f"run-{k}"
        stage = checkpoint(root, keep=1)
        stage.save(1, {"p": whole(w=torch.ones(9))})
        stage.wait()
        with monkeypatch.context() as patch:
            recorder = Recorder(root)
            recorder.install(patch)
            recorder.refused = range(k, k + later)
            told = said(stage, second)
        if recorder.asked < k:
            break
        assert re.search(SAYS, told) or "an older checkpoint" in told, told
        if "an older checkpoint" in told:
            assert value_of(root, 2, 9) == 2.0  # it is committed; only pruning was refused
        elif later == 1:
            assert names(root) == ["step-00000001"]
            assert value_of(root, 1, 9) == 1.0
        stage = checkpoint(root, keep=1)  # the next start
        assert [is_checkpoint_name(name) is not None for name in names(root)] == [True] * len(names(root))
        newest = is_checkpoint_name(names(root)[-1])
        assert value_of(root, newest, 9) in (1.0, 2.0)
        assert said(stage, 3) == ""
        assert names(root) == ["step-00000003"]
    assert k > 10
    assert told == ""
    assert value_of(root, second, 9) == 2.0


def said(stage, step, size=9, value=2.0) -> str:
    """What a save is refused with."""
    try:
        stage.save(step, {"p": whole(w=torch.full((size,), value))})
        stage.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_on_a_disk_that_is_really_full(small_disk):
    """Between 0 and 260 KiB are free, a save needs 200 KiB: with less it is refused, and nothing is lost."""
    size, filler = 50_000, small_disk / "filler"
    stage, outcomes, step = checkpoint(small_disk, keep=1), [], 1
    stage.save(1, {"p": whole(w=torch.ones(size))})
    stage.wait()
    for kib in range(0, 261, 20):
        filler.unlink(missing_ok=True)
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(free - kib * 1024))
        told = said(stage, step + 1, size, step + 1.0)
        assert told == "" or re.search(r"needs 195.3 KiB and .* are free", told), told
        outcomes.append(told == "")
        step += told == ""
        assert names(small_disk) == [f"step-{step:08d}"]
        assert value_of(small_disk, step, size) == step
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def disk(free: int):
    return lambda folder: SimpleNamespace(total=10**9, used=0, free=free)


def test_room_is_counted_before_anything_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    monkeypatch.setattr(shutil, "disk_usage", disk(10_000))
    assert room.check_room(folder, 3_000, 3) is None
    assert "room for 3 checkpoints and will need it for 4" in str(room.check_room(folder, 3_000, 4))
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001" / "data").write_bytes(bytes(3_000))
    assert room.check_room(folder, 3_000, 4) is None
    with pytest.raises(CheckpointError, match=r"about 10\.7 KiB and 9\.8 KiB are free"):
        room.check_room(folder, 11_000, 1)


@pytest.mark.parametrize(("train", "most"), [({}, 1), ({"save_every": 2, "keep": 3}, 4)])
def test_as_many_as_are_kept_and_the_next_one(train, most):
    assert room.most_kept(TrainSection(steps=1000, **train)) == most


def test_a_run_warns_or_does_not_begin(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, train={"steps": 2, "save_every": 1, "keep": 4})
    monkeypatch.setattr(shutil, "disk_usage", disk(1_000_000))
    assert run(recipe, tmp_path / "run").code == 0
    assert "checkpoints and will need it for 5, of about" in (tmp_path / "run/log.txt").read_text()
    monkeypatch.setattr(shutil, "disk_usage", disk(1_000))
    with pytest.raises(CheckpointError, match="1000 B are free"):
        run(recipe, tmp_path / "other")
    assert not list((tmp_path / "other").glob("checkpoints/*"))
