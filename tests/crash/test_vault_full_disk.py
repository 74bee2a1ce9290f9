"""Disks that fill, refuse or write less than they should: nothing is lost or left behind, and the next save works."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
from typing import Any

import pytest
import torch
from tests.crash.test_full_disk import small_disk  # noqa: F401  (a fixture)
from tests.crash.vault_stage import kept, leftovers, save, state, vault
from tests.dcp.toys import names, on_ranks, whole
from tests.support.crash_fs import Recorder

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault import packs
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint
from trainforge_loongforge.vault.storage import Sink

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAYS = {
    errno.ENOSPC: r"no room for a checkpoint in .*: it needs [\d.]+ B and .* are free; make room, or keep fewer",
    errno.EIO: r"the checkpoint cannot be written to .*: Input/output error; earlier checkpoints are intact",
}


@pytest.fixture(autouse=True)
def _small_chunks_and_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VaultCheckpoint, "chunk_bytes", 64)
    monkeypatch.setattr(packs, "PACK_BYTES", 400)


def said(stage: VaultCheckpoint, step: int, version: int | None = None, parts: Any = None) -> str:
    """What a save is refused with."""
    try:
        stage.save(step, {"p": parts or whole(**state(step if version is None else version))})
        stage.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("second", [4, 3], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("later", [1, 10**6], ids=["one operation", "all later ones too"])
def test_at_every_operation(in_memory, monkeypatch, second, later, code):
    """The k-th operation of a save fails, or that and every later one that removes nothing; for every k."""
    for k in range(1, 100):
        root = in_memory / f"run-{k}"
        stage = vault(root, keep=1)
        for step in (1, 2, 3):
            save(stage, step)
        with monkeypatch.context() as patch:
            recorder = Recorder(root)
            recorder.install(patch)
            recorder.refused, recorder.code = range(k, k + later), code
            told = said(stage, second, 4)
        if recorder.asked < k:
            break
        found = kept(root)
        if told and "an older checkpoint" not in told:
            assert re.search(SAYS[code], told), told
            if later == 1:
                assert found == [(3, 3)]
                assert leftovers(root) == []
        else:
            assert found[-1] == (second, 4)
        stage.close()
        stage = vault(root, keep=1)  # the next start
        assert kept(root)[-1] in ((3, 3), (second, 4))
        assert leftovers(root) == []
        assert said(stage, 5) == ""
        stage.close()
        assert kept(root) == [(5, 5)]
        assert leftovers(root) == []
    assert k > 15
    assert told == ""
    assert kept(root) == [(second, 4)]


def test_short_writes_lose_nothing(tmp_path, monkeypatch):
    """Every write takes a few bytes only, as a disk that is nearly full or a signal makes it."""
    with monkeypatch.context() as patch:
        recorder = Recorder(tmp_path)
        recorder.install(patch)
        recorder.most = 37
        stage = vault(tmp_path, keep=2)
        for step in (1, 2, 3):
            save(stage, step)
        stage.close()
    assert sum(op.kind == "write" for op in recorder.log) > 100
    assert kept(tmp_path) == [(2, 2), (3, 3)]


def test_the_kernel_refuses_what_is_longer_than_a_file_may_be(tmp_path, monkeypatch):
    """RLIMIT_FSIZE: a write that crosses the limit is short, the next one fails, with O_DIRECT too."""
    monkeypatch.setattr(VaultCheckpoint, "chunk_bytes", 2**20)
    monkeypatch.setattr(packs, "PACK_BYTES", 2**30)
    stage = vault(tmp_path, keep=1)
    save(stage, 1)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20 + 12_345, -1))
        big = {"w": torch.arange(2**20, dtype=torch.float64)}
        try:
            stage.save(2, {"p": whole(**big)})
            stage.wait()
            os._exit(3)
        except CheckpointError as error:
            os._exit(0 if "File too large" in str(error) and names(tmp_path) == KEPT else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept(tmp_path) == [(1, 1)]
    assert leftovers(tmp_path) == []


KEPT = ["packs", "step-00000001", "vault.lock"]


def test_on_a_disk_that_is_really_full(small_disk, monkeypatch):  # noqa: F811
    """Between 0 and 260 KiB are free, a save needs 200 KiB more: with less it is refused, and nothing is lost."""
    monkeypatch.setattr(VaultCheckpoint, "chunk_bytes", 2**14)
    monkeypatch.setattr(packs, "PACK_BYTES", 2**16)
    filler, outcomes, step = small_disk / "filler", [], 1
    stage = vault(small_disk, keep=1)
    stage.save(1, {"p": big(1)})
    stage.wait()
    for kib in range(0, 261, 20):
        filler.unlink(missing_ok=True)
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - kib * 1024))
        told = said(stage, step + 1, parts=big(step + 1))
        assert not told or "needs 195.3 KiB and " in told, told
        outcomes.append(not told)
        step += not told
        assert names(small_disk) == ["packs", f"step-{step:08d}", "vault.lock"]
        target = big(0)
        stage.restore({"p": target}, small_disk / f"checkpoints/step-{step:08d}")
        assert target.spans["master", "w"][0][2].equal(big(step).spans["master", "w"][0][2])
        assert leftovers(small_disk) == []
    stage.close()
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def big(seed: int) -> Any:
    return whole(w=torch.randn(50_000, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("full", [0, 1])
def test_the_disk_of_one_of_two_ranks_is_full_and_both_hear_it(tmp_path, monkeypatch, full):
    real, refuse = Sink.finish, [False]

    def finish(sink: Sink) -> int:
        if refuse[0] and f"-r{full:05d}-" in sink.path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(sink)

    monkeypatch.setattr(Sink, "finish", finish)
    told: dict[int, str] = {}

    def work(rank: int, comm: Any) -> None:
        stage = vault(tmp_path, rank=rank, world=2, comm=comm, keep=1)
        save(stage, 1)
        refuse[0] = True
        comm.gather(None)
        told[rank] = said(stage, 2)
        comm.gather(None)
        refuse[0] = False
        if rank == 0:
            assert kept(tmp_path) == [(1, 1)]
            (reason,) = leftovers(tmp_path)  # for whoever has not read it yet; the next start removes it
            assert reason.startswith(".tmp-step-00000002-")
        comm.gather(None)
        assert said(stage, 3) == ""
        stage.close()

    assert on_ranks(2, work) == [None, None]
    assert "no room for a checkpoint" in told[full]
    assert f"rank {full}: no room for a checkpoint" in told[1 - full] or full == 0
    assert "no room for a checkpoint" in told[1 - full]
    vault(tmp_path).close()
    assert kept(tmp_path) == [(3, 3)]
    assert leftovers(tmp_path) == []


def test_a_collection_without_room_stops_no_run(tmp_path, monkeypatch):
    """The checkpoint is committed; that packs cannot be written anew is said, and tried again after the next save."""
    warned: list[str] = []
    stage = vault(tmp_path, keep=1)
    monkeypatch.setattr(stage._console, "warn", warned.append, raising=False)
    real, refuse = Sink.finish, [True]

    def finish(sink: Sink) -> int:
        if refuse[0] and sink.path.name.startswith(".tmp-collect"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(sink)

    monkeypatch.setattr(Sink, "finish", finish)
    for step in range(1, 5):
        assert said(stage, step) == ""
    assert any("No space left on device" in text for text in warned)
    assert kept(tmp_path) == [(4, 4)]
    vault(tmp_path, keep=1).close()  # nor a start
    refuse[0] = False
    assert said(stage, 5) == ""
    assert kept(tmp_path) == [(5, 5)]
    assert leftovers(tmp_path) == []
