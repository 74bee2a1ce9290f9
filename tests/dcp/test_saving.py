"""Committing, pruning, background work, failures, leftovers."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.dcp.toys import Toy, checkpoint, names, whole

from trainforge.errors import CheckpointError, ConfigError
from trainforge.stages import Extent, LazyTensor, PartState, is_checkpoint_name
from trainforge.toolbox.checkpointing import folders
from trainforge.toolbox.checkpointing.layout import Chunk, Held
from trainforge.toolbox.checkpointing.staging import OneByOne, Staging
from trainforge_plugins.dcp import saving, storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[2]


def slow_write(monkeypatch, seconds=0.2):
    real = saving.save_chunks

    def slower(*args):
        time.sleep(seconds)
        return real(*args)

    monkeypatch.setattr(saving, "save_chunks", slower)


def test_what_changes_after_save_returns_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    slow_write(monkeypatch)
    tensor, data = torch.ones(1000), {"step": 1, "deep": [1]}
    part = Toy({("m", "w"): [((1000,), 0, tensor)]}, data)
    stage = checkpoint(tmp_path)
    stage.save(1, {"p": part})
    assert stage.committed() == []
    tensor.fill_(7)
    data["deep"].append(2)
    stage.wait()
    assert [(info.step, info.writer) for info in stage.committed()] == [(1, "dcp")]
    assert stage.committed() == []
    target = Toy({("m", "w"): [((1000,), 0, torch.zeros(1000))]})
    stage.restore({"p": target}, tmp_path / "checkpoints" / "step-00000001")
    assert torch.equal(target.spans["m", "w"][0][2], torch.ones(1000))
    assert target.loaded == (3, {"step": 1, "deep": [1]})


def test_a_disk_that_does_not_keep_up_is_told_once_until_it_gets_twice_as_bad(tmp_path):
    stage = checkpoint(tmp_path)
    for step, waited_s in ((1, 0.1), (2, 3.0), (3, 5.9), (4, 6.1), (5, 0.0)):
        stage._tell_if_slow(step, waited_s)
    first, second = stage._console.lines
    assert first.startswith("dcp: the checkpoint of step 2 had to wait 3.0 s for the one before")
    assert second.startswith("dcp: the checkpoint of step 4 had to wait 6.1 s")
    assert "save less often (train.save_every)" in first


def test_without_page_locked_memory_training_waits_unless_background_was_asked_for(tmp_path, monkeypatch):
    def refused(self, chunks, held):
        raise ConfigError("1.0 GiB of host RAM cannot be page-locked")

    monkeypatch.setattr(Staging, "snapshot", refused)
    stage = checkpoint(tmp_path)
    stage.save(1, {"p": whole(w=torch.ones(10))})
    assert names(tmp_path) == ["step-00000001"]
    assert "cannot be page-locked. Training waits while a checkpoint is written" in stage._console.lines[-1]
    target = torch.zeros(10)
    stage.restore({"p": whole(w=target)}, tmp_path / "checkpoints" / "step-00000001")
    assert target.tolist() == [1.0] * 10
    with pytest.raises(ConfigError, match="page-locked"):
        checkpoint(tmp_path / "b", background=True).save(1, {"p": whole(w=torch.ones(10))})


def test_plain_data_that_is_no_number_comes_back(tmp_path):
    """NaN is not equal to itself: reading back what was written must not take it for damage."""
    stage = checkpoint(tmp_path)
    part = Toy({("m", "w"): [((10,), 0, torch.ones(10))]}, {"loss": float("nan")})
    stage.save(1, {"p": part})
    stage.wait()
    target = Toy({("m", "w"): [((10,), 0, torch.zeros(10))]})
    stage.restore({"p": target}, tmp_path / "checkpoints" / "step-00000001")
    assert math.isnan(target.loaded[1]["loss"])


def test_how_long_a_save_waits_for_the_one_before_is_what_is_told(tmp_path, monkeypatch):
    slow_write(monkeypatch, 1.0)
    stage = checkpoint(tmp_path)
    for step in (1, 2):
        stage.save(step, {"p": whole(w=torch.ones(10))})
    stage.close()
    assert any("the checkpoint of step 2 had to wait" in line for line in stage._console.lines)


def test_a_second_save_waits_for_the_first_and_reuses_its_buffers(tmp_path, monkeypatch):
    slow_write(monkeypatch)
    tensor = torch.ones(10)
    stage = checkpoint(tmp_path)
    for step in (1, 2):
        tensor.fill_(step)
        stage.save(step, {"p": whole(w=tensor)})
    assert "step-00000001" in names(tmp_path)
    stage.wait()
    for step in (1, 2):
        target = torch.zeros(10)
        stage.restore({"p": whole(w=target)}, tmp_path / "checkpoints" / f"step-{step:08d}")
        assert target.tolist() == [float(step)] * 10
    assert set(stage.metrics()) == {"blocked_ms", "durable_ms", "bytes"}


def test_without_background_a_save_is_committed_when_it_returns(tmp_path):
    stage = checkpoint(tmp_path, background=False)
    stage.save(3, {"p": whole(w=torch.ones(3))})
    assert names(tmp_path) == ["step-00000003"]
    assert [info.step for info in stage.committed()] == [3]


def copied_bytes(monkeypatch):
    """How many bytes of copies were alive together at most, by the buffers that are taken for them."""
    taken = []
    real = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, **kw: (taken.append(size if isinstance(size, int) else 0), real(size, **kw))[1],
    )
    return taken


def test_without_background_no_copy_of_the_state_is_made(tmp_path, monkeypatch):
    tensors = {
        f"w{i}": torch.full((25_000,), float(i)) for i in range(40)
    }  # 4 MB in chunks of at most 100 kB
    taken = copied_bytes(monkeypatch)
    stage = checkpoint(tmp_path, background=False)
    stage.save(1, {"p": whole(**tensors)})
    assert max(taken) == 100_000
    assert sum(taken) < 200_000
    back = {name: torch.zeros(25_000) for name in tensors}
    stage.restore({"p": whole(**back)}, tmp_path / "checkpoints" / "step-00000001")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("free", "waits"), [(100_000, False), (30_000, True)])
def test_training_waits_where_there_is_no_ram_for_a_copy(tmp_path, monkeypatch, free, waits):
    from trainforge.toolbox.checkpointing import stage as module
    from trainforge.toolbox.host_limits import Limit

    monkeypatch.setattr(module, "host_limit", lambda wished: Limit("free RAM", free))
    slow_write(monkeypatch)
    stage = checkpoint(tmp_path, background="auto")
    stage.save(1, {"p": whole(w=torch.ones(10_000))})  # 40 kB
    assert bool(stage.committed()) == waits
    stage.wait()
    told = [line for line in stage._console.lines if "does not fit into free RAM" in line]
    assert bool(told) == waits
    target = torch.zeros(10_000)
    stage.restore({"p": whole(w=target)}, tmp_path / "checkpoints" / "step-00000001")
    assert torch.equal(target, torch.ones(10_000))


@pytest.mark.parametrize("keep", [1, 3])
def test_older_checkpoints_go_once_a_newer_one_is_committed(tmp_path, keep, monkeypatch):
    stage, seen = checkpoint(tmp_path, keep=keep), []
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **kw: (seen.append(names(tmp_path)), real(path, **kw)))
    for step in range(1, 6):
        stage.save(step, {"p": whole(w=torch.ones(3))})
        stage.wait()
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(6 - keep, 6)]
    for moment in seen:
        assert sum(is_checkpoint_name(name) is not None for name in moment) >= keep


def test_only_sound_checkpoints_count_and_other_plugins_are_left_alone(tmp_path):
    stage = checkpoint(tmp_path, keep=2)
    for step in (1, 2):
        stage.save(step, {"p": whole(w=torch.ones(3))})
    stage.close()
    foreign = tmp_path / "checkpoints" / "step-00000000"
    foreign.mkdir()
    (foreign / "checkpoint.json").write_text('{"step": 0, "writer": "other", "format": 1, "saved_at": 0.0}')
    damaged = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    stage = checkpoint(tmp_path, keep=2)
    stage.save(3, {"p": whole(w=torch.ones(3))})
    stage.wait()
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(4)]
    stage.save(4, {"p": whole(w=torch.ones(3))})
    stage.wait()
    assert names(tmp_path) == ["step-00000000", "step-00000003", "step-00000004"]


def test_what_cannot_be_read_for_a_moment_is_not_taken_for_damaged(tmp_path):
    stage = checkpoint(tmp_path, keep=2)
    stage.save(1, {"p": whole(w=torch.ones(3))})
    stage.wait()
    document = tmp_path / "checkpoints" / "step-00000001" / "checkpoint.json"
    document.rename(tmp_path / "aside")
    document.symlink_to(document)  # reading it is an OSError now, as with too many open files
    for step in (2, 3):
        stage.save(step, {"p": whole(w=torch.ones(3))})
        stage.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    (tmp_path / "aside").rename(document)
    assert stage.verify(document.parent) == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    stage = checkpoint(tmp_path, keep=1)
    for value in (1.0, 2.0):
        stage.save(1, {"p": whole(w=torch.full((3,), value))})
    stage.wait()
    target = torch.zeros(3)
    stage.restore({"p": whole(w=target)}, tmp_path / "checkpoints" / "step-00000001")
    assert target.tolist() == [2.0] * 3
    assert names(tmp_path) == ["step-00000001"]


def test_a_full_disk_is_said_with_numbers_and_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    stage = checkpoint(tmp_path)
    stage.save(1, {"p": whole(w=torch.ones(300_000))})
    stage.wait()
    real, written = storage.write_fully, []

    def full(file, data):
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(data)
        real(file, data)

    monkeypatch.setattr(storage, "write_fully", full)
    stage.save(2, {"p": whole(w=torch.ones(300_000))})
    with pytest.raises(CheckpointError, match=rf"no room .*{tmp_path}.* needs 1.1 MiB and .* are free"):
        stage.wait()
    assert names(tmp_path) == ["step-00000001"]
    assert stage.verify(tmp_path / "checkpoints" / "step-00000001") == []
    monkeypatch.undo()
    stage.save(3, {"p": whole(w=torch.ones(300_000))})
    stage.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    ("owner", "function", "says"),
    [
        (folders, "prune", "older checkpoint .* cannot be deleted"),
        (saving.DcpSave, "run", "cannot be written .*Input/output error"),
    ],
)
def test_what_the_disk_refused_is_said(tmp_path, monkeypatch, owner, function, says):
    def refuse(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(owner, function, refuse)
    stage = checkpoint(tmp_path)
    stage.save(1, {"p": whole(w=torch.zeros(4))})
    with pytest.raises(CheckpointError, match=says):
        stage.wait()


def test_a_failure_in_the_background_is_raised_by_the_next_save_or_committed(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saving, "save_chunks", refuse)
    stage = checkpoint(tmp_path)
    stage.save(1, {"p": whole(w=torch.ones(3))})
    with pytest.raises(CheckpointError, match="Input/output error"):
        stage.save(2, {"p": whole(w=torch.ones(3))})
    stage.save(3, {"p": whole(w=torch.ones(3))})
    while stage._thread is not None and stage._thread.is_alive():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="Input/output error"):
        stage.committed()
    assert names(tmp_path) == []


def test_a_file_that_the_disk_garbles_is_never_committed(tmp_path, monkeypatch):
    real = saving.save_chunks

    def garbled(path, chunks, copies):
        result = real(path, chunks, copies)
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        return result

    stage = checkpoint(tmp_path, keep=1)
    stage.save(1, {"p": whole(w=torch.ones(3))})
    stage.wait()
    monkeypatch.setattr(saving, "save_chunks", garbled)
    stage.save(2, {"p": whole(w=torch.ones(3))})
    with pytest.raises(CheckpointError, match="checksum"):
        stage.wait()
    assert names(tmp_path) == ["step-00000001"]


def test_an_unusable_folder_is_said(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        checkpoint(tmp_path).save(1, {"p": whole(w=torch.ones(3))})


def test_leftovers_are_cleaned_but_not_what_is_being_written(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    for name in (
        ".tmp-step-00000004-aa",
        ".trash-step-00000001-x",
        ".old-step-00000002",
        ".old-step-00000003",
    ):
        (folder / name).mkdir(parents=True)
    (folder / "step-00000003").mkdir()
    slow_write(monkeypatch, 0.5)
    other = checkpoint(tmp_path / "other")
    other.save(9, {"p": whole(w=torch.ones(3))})
    checkpoint(tmp_path / "other")
    other.wait()
    assert names(tmp_path / "other") == ["step-00000009"]
    checkpoint(tmp_path)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_who_only_reads_leaves_the_folder_as_it_is(tmp_path, monkeypatch):
    """A run may be writing there: between two renames of a checkpoint, say, or before it has locked its folder."""
    writer = checkpoint(tmp_path)
    writer.save(5, {"p": whole(w=torch.ones(3))})
    writer.wait()
    for name in (".tmp-step-00000004-aa", ".trash-step-00000001-x", ".old-step-00000002"):
        (tmp_path / "checkpoints" / name).mkdir()
    before = names(tmp_path)
    reader, target = checkpoint(tmp_path, reads=True), torch.zeros(3)
    reader.restore({"p": whole(w=target)}, tmp_path / "checkpoints/step-00000005")
    assert reader.verify(tmp_path / "checkpoints/step-00000005") == []
    assert names(tmp_path) == before
    assert target.tolist() == [1.0, 1.0, 1.0]


KILLED = """
import os, sys, torch
from pathlib import Path
from tests.dcp.toys import checkpoint, whole

def save_for_ever(step):
    stage, tensor = checkpoint(Path(sys.argv[1]), keep=2), torch.zeros(300_000)
    while True:
        step += 1
        tensor.fill_(step)
        stage.save(step, {"p": whole(w=tensor)})

for line in sys.stdin:  # one import, many victims
    child = os.fork()
    if child == 0:
        save_for_ever(int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_checkpoint_restores(tmp_path):
    chance, newest, leftovers = random.Random(1), 0, 0
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    for _ in range(15):
        parent.stdin.write(f"{newest}\n")
        child = int(parent.stdout.readline())
        time.sleep(chance.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        assert parent.stdout.readline() == "dead\n"
        found = names(tmp_path) if (tmp_path / "checkpoints").exists() else []
        steps = [step for name in found if (step := is_checkpoint_name(name)) is not None]
        leftovers += len(found) - len(steps)
        stage = checkpoint(tmp_path)
        assert not found or all(name.startswith("step-") for name in names(tmp_path))
        for step in steps:
            assert stage.verify(tmp_path / "checkpoints" / f"step-{step:08d}") == []
        assert not newest or steps
        if steps:
            newest = max(steps)
            target = torch.zeros(300_000)
            stage.restore({"p": whole(w=target)}, tmp_path / "checkpoints" / f"step-{newest:08d}")
            assert bool((target == newest).all())
    parent.stdin.close()
    parent.wait()
    parent.stdout.close()
    assert newest
    assert leftovers


def test_a_save_outside_a_run_deletes_nothing_and_copies_nothing(tmp_path):
    """As `forge checkpoints RUN convert` has it: the folder stays as it is, but for the checkpoint of that step."""
    writer = checkpoint(tmp_path, keep=3)
    for step in (1, 2, 3):
        writer.save(step, {"p": whole(w=torch.full((3,), float(step)))})
    writer.wait()
    for name in (".tmp-step-00000004-aa", ".trash-step-00000001-x", ".old-step-00000007"):
        (tmp_path / "checkpoints" / name).mkdir()
    before = names(tmp_path)

    def load(start, out):
        assert len(names(tmp_path)) == len(before) + 1  # it is read while it is written, not before
        out.copy_(torch.arange(10.0)[start : start + len(out)])

    lazy = LazyTensor("master", Extent("w", (10,), 0, 10), torch.empty(10, device="meta"), load=load)
    outside = checkpoint(tmp_path, keep=1, reads=True, background=True)
    outside.save(2, {"p": SimpleNamespace(state=lambda: PartState(3, {"a": 1}, (lazy,)))})
    assert [info.step for info in outside.committed()] == [2]  # it has waited
    outside.close()
    assert names(tmp_path) == before
    target = whole(w=torch.zeros(10))
    checkpoint(tmp_path, reads=True).restore({"p": target}, tmp_path / "checkpoints/step-00000002")
    assert target.spans["master", "w"][0][2].tolist() == list(range(10))
    assert target.loaded == (3, {"a": 1})


def test_a_chunk_that_is_copied_alone_is_waited_for_on_the_device_that_it_is_on(monkeypatch):
    """The background thread's own device is the first one, whatever the rank's is."""
    waited, chunk = [], Chunk("p/master/w", (4,), "float32", 0, 4, 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(device))
    for place in ("cpu", "cuda:1"):
        tensor = SimpleNamespace(device=torch.device(place))
        named = SimpleNamespace(tensor=tensor, read=lambda start, out: out.fill_(2.0))
        assert OneByOne([chunk], {chunk.tensor: [Held(0, 4, named)]})[0].tolist() == [2.0] * 4
    assert waited == [torch.device("cuda:1")]
