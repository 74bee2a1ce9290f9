"""Ranks come and go, plugins too: what one saved another resumes, with the same bits."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.dcp.test_ranks import TRUTH, shard
from tests.dcp.toys import Toy, names, on_ranks
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.support.many_runs import Start
from tests.support.many_runs import on_ranks as runs_on_ranks
from tests.support.processes import PATIENCE_S
from tests.vault.toys import bits, keyed, random_bits, stage_in, step_path

from trainforge.context import SilentConsole
from trainforge.errors import CheckpointError
from trainforge.exporting import export_run
from trainforge.toolbox.checkpointing.protocol import Save
from trainforge_loongforge.vault.locking import locked
from trainforge_loongforge.vault.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_on(world, folder, step=2, **section):
    def work(rank, comm):
        stage = stage_in(folder, rank=rank, world=world, comm=comm, chunk_bytes=32, **section)
        stage.save(step, {"m": shard(rank, world, TRUTH)})
        stage.wait()
        assert [info.step for info in stage.committed()] == [step]
        stage.close()

    assert on_ranks(world, work) == [None] * world


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path, writers, readers):
    save_on(writers, tmp_path)
    got = {}

    def work(rank, comm):
        part = shard(rank, readers, torch.zeros(70))
        stage_in(tmp_path, rank=rank, world=readers, comm=comm).restore({"m": part}, step_path(tmp_path, 2))
        got[rank] = part

    assert on_ranks(readers, work) == [None] * readers
    assert torch.equal(torch.cat([got[r].spans["master", "w"][0][2] for r in range(readers)]), TRUTH)
    for part in got.values():
        assert torch.equal(part.spans["master", "r"][0][2], torch.arange(64).float())
        assert part.spans["step", "w"][0][2].item() == 5.0
        assert part.loaded == (3, {"consumed": 3})


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "bool", "float8_e5m2"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_other_layouts_of_other_dtypes(tmp_path, dtype, writers, readers):
    """Shards of random sizes on a random grid, written and read."""
    chance, truth = random.Random(writers), random_bits(dtype, (97,), 1)

    def edges(world):
        return [0, *sorted(chance.sample(range(97), world - 1)), 97]

    written, read, got = edges(writers), edges(readers), {}

    def part(places, rank, source):
        a, b = places[rank], places[rank + 1]
        return Toy({("value", "w"): [((97,), a, source[a:b].clone())]})

    def write(rank, comm):
        stage = stage_in(tmp_path, rank=rank, world=writers, comm=comm, chunk_bytes=16)
        stage.save(1, {"m": part(written, rank, truth)})
        stage.wait()

    def restore(rank, comm):
        got[rank] = part(read, rank, random_bits(dtype, (97,), 2))
        stage = stage_in(tmp_path, rank=rank, world=readers, comm=comm)
        stage.restore({"m": got[rank]}, step_path(tmp_path, 1))

    assert on_ranks(writers, write) == [None] * writers
    assert on_ranks(readers, restore) == [None] * readers
    assert b"".join(bits(got[r].spans["value", "w"][0][2]) for r in range(readers)) == bits(truth)


def test_another_world_size_writes_only_the_chunks_that_it_cuts_elsewhere(tmp_path):
    """Chunks lie on a grid over the whole tensor, so two ranks find what one has written, but at their border."""
    whole = torch.arange(1000.0)

    def save(rank, comm, world, step):
        a, b = [1000 * i // world + 3 * (0 < i < world) for i in (rank, rank + 1)]
        stage = stage_in(tmp_path, rank=rank, world=world, comm=comm, chunk_bytes=400, keep=3)
        stage.save(step, {"m": Toy({("v", "w"): [((1000,), a, whole[a:b])]})})
        stage.wait()
        stage.close()

    assert on_ranks(1, lambda rank, comm: save(rank, comm, 1, 1)) == [None]
    assert on_ranks(2, lambda rank, comm: save(rank, comm, 2, 2)) == [None, None]
    reader = stage_in(tmp_path, reads=True)
    assert reader.describe(step_path(tmp_path, 1))["new_bytes"] == 4000
    assert (
        reader.describe(step_path(tmp_path, 2))["new_bytes"] == 400
    )  # the chunk that the border at 503 cuts


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path, monkeypatch):
    real = Store.write

    def refuse(self, save_id, rank, *args, **kwargs):
        if rank == 1 and failing:
            raise OSError(28, "No space left on device")
        return real(self, save_id, rank, *args, **kwargs)

    failing = [True]
    monkeypatch.setattr(Store, "write", refuse)

    def work(rank, comm):
        stage = stage_in(tmp_path, rank=rank, world=2, comm=comm)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})
        with pytest.raises(CheckpointError, match="rank 1: no room"):
            stage.wait()
        comm.gather(None)
        if rank == 0:
            assert list((tmp_path / "checkpoints/packs").glob("*")) == []
            failing.clear()
        comm.gather(None)
        stage.save(2, {"m": shard(rank, 2, TRUTH)})
        stage.wait()
        assert stage.verify(step_path(tmp_path, 2)) == []

    assert on_ranks(2, work) == [None, None]


def test_a_disk_that_refuses_even_to_undo_is_told_with_the_first_reason(tmp_path, monkeypatch):
    """Nobody waits until the timeout for a rank whose cleaning up has failed, too."""

    real = Store.write

    def refuse(self, save_id, rank, *args):
        if rank == failing[0]:
            raise OSError(5, "Input/output error")
        return real(self, save_id, rank, *args)

    def read_only(self, save_id, rank):
        raise OSError(30, "Read-only file system")

    failing = [0]
    monkeypatch.setattr(Store, "write", refuse)
    monkeypatch.setattr(Store, "undo", read_only)
    for failing[0] in (0, 1):
        began = time.monotonic()

        def work(rank, comm):
            stage = stage_in(tmp_path, rank=rank, world=2, comm=comm)
            stage.save(1, {"m": keyed({})})
            with pytest.raises(CheckpointError, match="Input/output error"):
                stage.wait()

        assert on_ranks(2, work) == [None, None]
        assert time.monotonic() - began < 20


def test_a_rank_that_never_writes_ends_the_save_within_the_timeout(tmp_path, monkeypatch):
    def absent(self, record):
        raise CheckpointError("given up")

    monkeypatch.setattr(Save, "_follow", absent)

    def work(rank, comm):
        stage = stage_in(tmp_path, rank=rank, world=2, comm=comm, timeout=0.3)
        stage.save(1, {"m": shard(rank, 2, TRUTH)})
        with pytest.raises(CheckpointError, match="rank 1 has not written" if rank == 0 else "given up"):
            stage.wait()

    assert on_ranks(2, work) == [None, None]


def test_a_folder_of_packs_that_one_rank_cannot_list_is_told_to_all(tmp_path):
    save_on(1, tmp_path)
    (tmp_path / "checkpoints" / "packs").rename(tmp_path / "elsewhere")  # so that chunks are looked for again

    def refuse(again=()):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def work(rank, comm):
        stage = stage_in(tmp_path, rank=rank, world=2, comm=comm, reads=True)
        if rank == 1:
            stage._store._index.refresh = refuse
        stage.restore({"m": shard(rank, 2, torch.zeros(70))}, step_path(tmp_path, 2))

    first, second = on_ranks(2, work)
    assert isinstance(first, CheckpointError)
    assert isinstance(second, CheckpointError)
    assert str(second) == f"{step_path(tmp_path, 2)} cannot be read: {os.strerror(errno.ESTALE)}"


def test_what_fails_after_a_save_is_told_and_leaves_the_folder_unlocked(tmp_path, monkeypatch):
    stage = stage_in(tmp_path, timeout=0.3)

    def fail(save):
        raise RuntimeError("not tidied up")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_ended", fail)
        stage.save(1, {"m": keyed({})})
        with pytest.raises(RuntimeError, match="not tidied up"):
            stage.wait()
    stage.save(2, {"m": keyed({})})
    stage.wait()


# ------------------------------------------------------------------------------------------------------ whole runs


def vaulted(folder, *plugins, **sections):
    """A recipe with `vault` (and other plugins) beside the standard ones, and one without."""
    train = {"global_batch": 4, "micro_batch": 1, "steps": 8, "lr": 1e-3} | sections.pop("train", {})
    model = {"config": MODEL | {"attention_dropout": 0.0}}
    recipe = write_recipe(folder, 20, model=model, train=train, **sections)
    ours = folder / "vaulted.yaml"
    ours.write_text(recipe.read_text() + f"plugins: [{', '.join(('vault', *plugins))}]\n")
    return recipe, ours


def same_training(one, other):
    """Whether two runs took the same steps, bit for bit."""
    assert one.series("step") == other.series("step")
    assert one.series("loss") == other.series("loss")
    assert one.series("grad_norm") == other.series("grad_norm")
    assert one.summary["weights_digest"] == other.summary["weights_digest"]


def writers_of(outcome):
    return {
        path.name: json.loads((path / "checkpoint.json").read_text())["writer"]
        for path in sorted((outcome.folder / "checkpoints").glob("step-*"))
    }


def test_dcp_and_vault_resume_one_another(tmp_path):
    plain, ours = vaulted(tmp_path, train={"save_every": 2, "keep": 9})
    whole = run(plain, tmp_path / "whole")
    for name, legs in {"there": (plain, ours, plain), "back": (ours, plain, ours)}.items():
        for recipe, steps in zip(legs, (3, 2, None), strict=True):
            outcome = run(recipe, tmp_path / name, max_steps=steps)
            assert outcome.code == 0
        same_training(outcome, whole)
        assert outcome.summary["resumed_from"] == 5
        assert set(writers_of(outcome).values()) == {"dcp", "vault"}
        listed = subprocess.run(
            [sys.executable, "-m", "trainforge.cli", "checkpoints", str(tmp_path / name), "verify"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert listed.returncode == 0, listed.stdout + listed.stderr


def test_stream_and_cpu_adam_under_vault_go_on_as_if_never_stopped(tmp_path):
    """State in host RAM that the update overtakes while it is being written; every kept step resumes."""
    train = {"save_every": 1, "keep": 9, "dtype": "bf16"}
    _, ours = vaulted(tmp_path, "stream", "cpu_adam", train=train)
    whole = run(ours, tmp_path / "whole")
    assert whole.code == 0
    assert set(writers_of(whole)) == {f"step-{step:08d}" for step in range(1, 9)}
    run(ours, tmp_path / "parts", max_steps=3)
    parts = run(ours, tmp_path / "parts")
    same_training(parts, whole)
    for step in (1, 4, 7):
        again = run(ours, tmp_path / "whole", resume=step)
        assert again.summary["resumed_from"] == step
        assert again.summary["weights_digest"] == parts.summary["weights_digest"]
    waiting = tmp_path / "waiting.yaml"
    waiting.write_text(ours.read_text() + "vault: {copies: 0}\n")
    same_training(run(waiting, tmp_path / "waiting"), whole)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_that_of_dcp(tmp_path, tied):
    """C44: the head comes tied or as its own tensor, whichever plugin wrote the masters."""
    model = {"config": MODEL | {"attention_dropout": 0.0, "tie_word_embeddings": tied}}
    recipe, files = write_recipe(tmp_path, model=model, train={"steps": 2}), {}
    for name, plugins in {"dcp": [], "vault": ["vault"]}.items():
        assert run(recipe, tmp_path / name, plugins=plugins).code == 0
        export_run(tmp_path / name, tmp_path / f"out-{name}", SilentConsole(), dtype="fp32")
        files[name] = load_file(tmp_path / f"out-{name}/model.safetensors")
    assert ("lm_head.weight" in files["vault"]) is not tied
    assert {name: bits(tensor) for name, tensor in files["vault"].items()} == {
        name: bits(tensor) for name, tensor in files["dcp"].items()
    }
    described = stage_in(tmp_path / "vault", reads=True).describe(step_path(tmp_path / "vault", 2))
    masters = {name for name in described["tensors"] if name.startswith("memory/master/")}
    assert len(masters) == len(files["vault"])


@pytest.mark.ranks
def test_runs_move_between_two_ranks_and_one(tmp_path):
    """1 -> 2 -> 1 as under `dcp`, bit for bit; interrupted on two ranks is uninterrupted on two."""
    plain, ours = vaulted(tmp_path)
    recipes = {"dcp": plain, "vault": ours}
    for name, recipe in recipes.items():
        run(recipe, tmp_path / name, max_steps=3)
    starts = [Start(recipe, tmp_path / name, max_steps=3) for name, recipe in recipes.items()]
    starts += [
        Start(ours, tmp_path / "whole"),
        Start(ours, tmp_path / "parts", max_steps=5),
        Start(ours, tmp_path / "parts"),
    ]
    assert {end.code for ends in runs_on_ranks(2, starts) for end in ends} == {0}
    moved = {name: run(recipe, tmp_path / name) for name, recipe in recipes.items()}
    assert moved["vault"].summary["resumed_from"] == 6
    same_training(moved["vault"], moved["dcp"])
    parts, whole = Outcome(0, tmp_path / "parts"), Outcome(0, tmp_path / "whole")
    assert parts.summary["resumed_from"] == 5
    same_training(parts, whole)
    document = json.loads((step_path(tmp_path / "whole", 8) / "checkpoint.json").read_text())
    assert document["world"] == 2
    packs = sorted(path.name[17:23] for path in (tmp_path / "whole/checkpoints/packs").iterdir())
    assert packs == ["r00000", "r00001"]


# --------------------------------------------------------------------------------- other processes at the same time

READER = """
import sys, torch
from pathlib import Path
from tests.vault.test_ranks import content
from tests.vault.toys import all_bits, keyed, other_bits, stage_in, step_path

folder, rounds = Path(sys.argv[1]), 0
stage = stage_in(folder, reads=True)
print("ready", flush=True)
while not (folder / "end").exists():
    for step in range(2, 21, 2):
        wanted = content(step)
        target = other_bits(wanted)
        stage.restore({"p": keyed(target)}, step_path(folder, step))
        assert all_bits(target) == all_bits(wanted), step
        assert stage.verify(step_path(folder, step)) == []
        rounds += 1
print(rounds)
"""


def content(step):
    """Eight tensors; three of those of an even step are as in the step before."""
    seeds = [100 * (step - (step % 2 == 0 and i < 3)) + i for i in range(8)]
    return {("v", f"w{i}"): random_bits("float32", (3000,), seed) for i, seed in enumerate(seeds)}


def test_a_reader_in_another_process_while_packs_are_rewritten(tmp_path):
    """It restores and verifies the even steps, while the odd ones go and with them the packs of both."""
    stage = stage_in(tmp_path, keep=20, chunk_bytes=2000)
    for step in range(1, 21):
        stage.save(step, {"p": keyed(content(step))})
    stage.wait()
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = reader.stdout.readline()
    before = set(names_of_packs(tmp_path))
    for step in range(1, 21, 2):
        if reader.poll() is None:
            time.sleep(0.05)
            assert stage.remove([step_path(tmp_path, step)]) > 0
    rewritten = before - set(names_of_packs(tmp_path))
    (tmp_path / "end").touch()
    told, errors = reader.communicate(timeout=PATIENCE_S)
    assert (started, reader.returncode) == ("ready\n", 0), errors
    assert len(rewritten) == 10
    assert int(told) >= 10
    stage.close()


def names_of_packs(run_dir):
    return names(run_dir) and sorted(path.name for path in (run_dir / "checkpoints/packs").iterdir())


def prune(run_dir, *options):
    command = [sys.executable, "-m", "trainforge.cli", "checkpoints", str(run_dir), "prune", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pruning_waits_for_a_save_in_flight(tmp_path, monkeypatch):
    """Chunks that the save has found in the store may belong to the very checkpoint that is pruned."""
    tensors = {("v", f"w{i}"): torch.randn(3000) for i in range(8)}
    stage = stage_in(tmp_path, keep=5)
    for step in (1, 2):
        stage.save(step, {"p": keyed(tensors)})
        stage.wait()
        tensors["v", "w0"].add_(1)
    reached, go_on, real = threading.Event(), threading.Event(), Store.write

    def slow(self, *args):
        written = real(self, *args)
        reached.set()
        assert go_on.wait(PATIENCE_S)
        return written

    monkeypatch.setattr(Store, "write", slow)
    tensors["v", "w0"].sub_(2)  # as it was in step 1
    stage.save(3, {"p": keyed(tensors)})
    assert reached.wait(PATIENCE_S)
    pruning = prune(tmp_path, "--keep", "1")
    time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        pruning.wait(6)  # longer than the command takes to start
    assert {"step-00000001", "step-00000002"} <= set(names(tmp_path))
    go_on.set()
    stage.wait()
    out, errors = pruning.communicate(timeout=PATIENCE_S)
    assert pruning.returncode == 0, out + errors
    steps = [name for name in names(tmp_path) if name.startswith("step-")]
    assert "step-00000001" not in steps
    assert "step-00000003" in steps
    for name in steps:
        assert stage.verify(tmp_path / "checkpoints" / name) == []
    stage.close()


def test_pruning_beside_a_save_that_does_not_end_is_refused(tmp_path, monkeypatch):
    from trainforge_loongforge.vault import checkpoint as module

    stage = stage_in(tmp_path)
    stage.save(1, {"p": keyed({("v", "w"): torch.ones(3)})})
    stage.wait()
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    reader = stage_in(tmp_path, reads=True)
    with (
        locked(tmp_path / "checkpoints", 1),
        pytest.raises(CheckpointError, match="another process has been"),
    ):
        reader.remove([step_path(tmp_path, 1)])
    assert reader.verify(step_path(tmp_path, 1)) == []
    assert reader.remove([step_path(tmp_path, 1)]) > 0
    assert names_of_packs(tmp_path) == []
