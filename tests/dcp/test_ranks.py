"""Several ranks: each element written once, any layout restored into any other, failures told to all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.dcp.toys import Toy, checkpoint, names, on_ranks

from trainforge.errors import CheckpointError, ConfigError
from trainforge.stages import Extent
from trainforge.toolbox.checkpointing.layout import plan_chunks
from trainforge_plugins.dcp import saving
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TRUTH = torch.arange(70, dtype=torch.float32)


def shard(rank, world, source, split=None):
    """Rank's part of a sharded tensor `w`, beside replicated `r` and a replicated 0-dim count."""
    edges = split or [70 * i // world for i in range(world + 1)]
    piece = source[edges[rank] : edges[rank + 1]].clone()
    scale = 1.0 if source is TRUTH else 0.0
    return Toy(
        {
            ("master", "w"): [((7, 10), edges[rank], piece)],
            ("master", "r"): [((64,), 0, torch.arange(64).float() * scale)],
            ("step", "w"): [((), 0, torch.tensor(5.0 * scale))],
        },
        {"consumed": 3},
    )


def save_on(world, folder, **kwargs):
    def work(rank, comm):
        stage = checkpoint(folder, rank=rank, world=world, comm=comm, **kwargs)
        stage.save(2, {"m": shard(rank, world, TRUTH)})
        stage.wait()
        assert [info.step for info in stage.committed()] == [2]

    assert on_ranks(world, work) == [None] * world


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path, writers, readers):
    save_on(writers, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000002"
    got = {}

    def work(rank, comm):
        part = shard(rank, readers, torch.zeros(70))
        checkpoint(tmp_path, rank=rank, world=readers, comm=comm).restore({"m": part}, path)
        got[rank] = part

    assert on_ranks(readers, work) == [None] * readers
    assert torch.equal(torch.cat([got[r].spans["master", "w"][0][2] for r in range(readers)]), TRUTH)
    for part in got.values():
        assert torch.equal(part.spans["master", "r"][0][2], torch.arange(64).float())
        assert part.spans["step", "w"][0][2].item() == 5.0
        assert part.loaded == (3, {"consumed": 3})
    assert names(tmp_path) == ["step-00000002"]


def test_every_element_is_written_once(tmp_path):
    save_on(2, tmp_path)
    document = json.loads((tmp_path / "checkpoints" / "step-00000002" / "checkpoint.json").read_text())
    stored = sum(span["length"] for t in document["parts"]["m"]["tensors"] for span in t["spans"])
    assert stored == 70 + 64 + 1
    assert document["world"] == 2
    assert sorted(document["files"]) == ["rank-00000.safetensors", "rank-00001.safetensors"]


def test_other_shards_are_cut_on_the_same_grid():
    whole = [["m/master/w", [30], "float32", 0, 30]]
    halves = [[["m/master/w", [30], "float32", 0, 13]], [["m/master/w", [30], "float32", 13, 17]]]
    one, two = plan_chunks([whole], 32), plan_chunks(halves, 32)
    assert [(chunk.offset, chunk.length) for chunk in one] == [(0, 8), (8, 8), (16, 8), (24, 6)]
    cut = [(chunk.offset, chunk.length, chunk.rank) for chunk in two]
    assert cut == [(0, 8, 0), (8, 5, 0), (13, 3, 1), (16, 8, 1), (24, 6, 1)]


def test_replicated_state_is_shared_out_evenly():
    table = [[f"m/master/{i}", [500, i + 1], "float32", 0, 500 * (i + 1)] for i in range(12)]
    chunks = plan_chunks([table] * 4, 4000)
    load = Counter()
    for chunk in chunks:
        load[chunk.rank] += chunk.bytes
    assert sum(load.values()) == sum(500 * (i + 1) * 4 for i in range(12))
    assert max(load.values()) - min(load.values()) <= 4000
    assert max(chunk.bytes for chunk in chunks) <= 4000


def test_a_whole_and_a_half_of_the_same_tensor_are_written_once():
    chunks = plan_chunks([[["m/k/w", [10], "float32", 0, 10]], [["m/k/w", [10], "float32", 4, 6]]], 4000)
    assert [(c.offset, c.length, c.rank) for c in chunks] == [(0, 4, 0), (4, 6, 1)]


def test_ranks_that_disagree_about_a_shape_are_told(tmp_path):
    def work(rank, comm):
        part = Toy({("k", "w"): [((10 + rank,), 0, torch.zeros(10 + rank))]})
        checkpoint(tmp_path, rank=rank, world=2, comm=comm).save(1, {"m": part})

    raised = on_ranks(2, work)
    assert all(isinstance(error, CheckpointError) for error in raised)
    assert "m/k/w" in str(raised[0])
    assert names(tmp_path) == []


def test_what_fails_on_one_rank_fails_on_all_with_its_reason(tmp_path, monkeypatch):
    real = saving.save_chunks

    def refuse(path, chunks, copies):
        if "00001" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, chunks, copies)

    monkeypatch.setattr(saving, "save_chunks", refuse)
    told = {}

    def work(rank, comm):
        stage = checkpoint(tmp_path, rank=rank, world=2, comm=comm)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})
        with pytest.raises(CheckpointError, match="rank 1: no room"):
            stage.wait()
        monkeypatch.setattr(saving, "save_chunks", real)
        comm.gather(None)
        stage.save(2, {"m": shard(rank, 2, TRUTH)})
        stage.wait()
        told[rank] = True

    assert on_ranks(2, work) == [None, None]
    checkpoint(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_a_rank_that_cannot_take_its_snapshot_is_told_to_who_waits_for_its_part(tmp_path, monkeypatch):
    real, began = DcpCheckpoint._save_of, time.monotonic()

    def refuse(self, facts, held):
        if facts.rank == 1:
            raise ConfigError("0.3 GiB of host RAM cannot be page-locked")
        return real(self, facts, held)

    monkeypatch.setattr(DcpCheckpoint, "_save_of", refuse)

    def work(rank, comm):
        stage = checkpoint(tmp_path, rank=rank, world=2, comm=comm, timeout=30)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})
        stage.wait()

    first, second = on_ranks(2, work)
    assert isinstance(first, CheckpointError)
    assert str(first) == "rank 1: 0.3 GiB of host RAM cannot be page-locked"
    assert isinstance(second, ConfigError)
    assert time.monotonic() - began < 20
    checkpoint(tmp_path)
    assert names(tmp_path) == []


class Broken(Toy):
    """A part that fails in its own way."""

    def __init__(self):
        super().__init__({})

    def state(self):
        raise RuntimeError("the device has been lost")


@pytest.mark.parametrize("does", ["save", "restore"])
def test_whatever_fails_on_one_rank_is_told_to_all_before_they_wait(tmp_path, does):
    save_on(1, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000002"

    def work(rank, comm):
        stage = checkpoint(tmp_path, rank=rank, world=2, comm=comm)
        parts = {"m": Broken() if rank == 1 else shard(0, 1, torch.zeros(70))}
        if does == "save":
            stage.save(3, parts)
        else:
            stage.restore(parts, path)

    first, second = on_ranks(2, work)
    assert isinstance(first, CheckpointError)
    assert str(first) == "rank 1: the device has been lost"
    assert isinstance(second, RuntimeError)
    assert names(tmp_path) == ["step-00000002"]


def test_a_rank_that_cannot_see_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("trainforge.toolbox.checkpointing.stage._VISIBLE_S", 0.1)

    def work(rank, comm):
        stage = checkpoint(tmp_path / str(rank), rank=rank, world=2, comm=comm)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "rank 1 does not see" in str(error)
    assert names(tmp_path / "0") == []


def test_a_rank_that_never_writes_ends_the_save_within_the_timeout(tmp_path, monkeypatch):
    real = saving.DcpSave._follow

    def work(rank, comm):
        stage = checkpoint(tmp_path, rank=rank, world=2, comm=comm, timeout=0.3)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})
        with pytest.raises(CheckpointError, match="rank 1 has not written" if rank == 0 else "given up"):
            stage.wait()

    def absent(self, record):
        raise CheckpointError("given up")

    monkeypatch.setattr(saving.DcpSave, "_follow", absent)
    assert on_ranks(2, work) == [None, None]
    assert real is not absent


def test_damage_that_one_rank_finds_is_told_to_all(tmp_path):
    save_on(2, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000002"
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")

    def work(rank, comm):
        checkpoint(tmp_path, rank=rank, world=2, comm=comm).restore(
            {"m": shard(rank, 2, torch.zeros(70))}, path
        )

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "rank-00001.safetensors" in str(error)


GLOO = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from tests.dcp.test_ranks import TRUTH, shard
from tests.dcp.toys import checkpoint
from trainforge.stages import Comm

class Gloo(Comm):
    def gather(self, value):
        values = [None] * 2
        dist.all_gather_object(values, value)
        return values

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
stage = checkpoint(folder, rank=rank, world=2, comm=Gloo())
for step in (1, 2, 3):
    stage.save(step, {"m": shard(rank, 2, TRUTH)})
    dist.all_reduce(torch.ones(1))  # training goes on while the save is being written
stage.wait()
part = shard(rank, 2, torch.zeros(70), [0, 11, 70])
stage.restore({"m": part}, folder / "checkpoints" / "step-00000003")
_, offset, piece = part.spans["master", "w"][0]
assert torch.equal(piece, TRUTH[offset : offset + piece.numel()])
stage.close()
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_two_processes_save_together_and_one_restores(tmp_path):
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO, str(tmp_path), str(rank)], cwd=root, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    stage = checkpoint(tmp_path)
    assert sorted(name for name in names(tmp_path)) == ["step-00000002", "step-00000003"]
    part = shard(0, 1, torch.zeros(70))
    stage.restore({"m": part}, tmp_path / "checkpoints" / "step-00000003")
    assert torch.equal(part.spans["master", "w"][0][2], TRUTH)


@pytest.mark.parametrize("chunk_bytes", [24, 64 * 2**20])
def test_ranges_of_what_several_ranks_wrote_are_whole(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(DcpCheckpoint, "chunk_bytes", chunk_bytes)
    save_on(3, tmp_path)
    contents = checkpoint(tmp_path, reads=True).contents(tmp_path / "checkpoints" / "step-00000002")
    assert (contents["m"].version, contents["m"].data) == (3, {"consumed": 3})
    found = {(named.key, named.extent.name): named for named in contents["m"].tensors}
    assert found["master", "w"].extent == Extent("w", (7, 10), 0, 70)
    assert found["step", "w"].extent == Extent("w", (), 0, 1)
    for start in range(0, 70, 7):
        for stop in range(start, 71, 5):
            out = torch.full((stop - start,), -1.0)
            found["master", "w"].read(start, out)
            assert torch.equal(out, TRUTH[start:stop])


def test_how_a_tensor_is_cut_is_said_with_its_digest(tmp_path):
    about = {}
    for world in (1, 2, 3):
        save_on(world, tmp_path / str(world))
        path = tmp_path / str(world) / "checkpoints" / "step-00000002"
        about[world] = checkpoint(tmp_path / str(world), reads=True).describe(path)
    assert [about[world]["cuts"]["m/master/w"] for world in (1, 2, 3)] == ["70", "35,35", "23,23,24"]
    assert {one["cuts"]["m/master/r"] for one in about.values()} == {"64"}
    assert len({one["tensors"]["m/master/r"] for one in about.values()}) == 1
    assert about[1]["tensor_bytes"] == {"m/master/w": 280, "m/master/r": 256, "m/step/w": 4}
