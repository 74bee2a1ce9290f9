"""Whole runs over two ranks: the same training as over one, and back."""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from tests.run.runs import MODEL, Outcome, run, write_recipe
from tests.support.many_runs import Start, on_ranks
from tests.support.processes import PATIENCE_S, ended, forge_run, start_forge_run, steps_logged, wait_until

from trainforge.checkpoints import list_checkpoints
from trainforge_plugins.dcp import manifest

pytestmark = pytest.mark.ranks


def two_ranks(recipe, run_dir, *options):
    command = forge_run(recipe, run_dir, "--nproc", 2, *options)
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return Outcome(result.returncode, run_dir)


def two_rank_recipe(folder, **train):
    model = {"config": MODEL | {"attention_dropout": 0.0}}
    return write_recipe(
        folder, 20, model=model, train={"global_batch": 4, "micro_batch": 1, "steps": 10, "lr": 1e-3} | train
    )


def patient(recipe):
    """Ranks that would wait an hour for one another: whatever ends them before is not a timeout."""
    recipe.write_text(recipe.read_text() + "ddp: {timeout: 1h}\n")
    return recipe


def left_to_memory(folder):
    """A recipe whose memory plugin chooses the micro-batch, and not the same on both ranks."""
    folder.mkdir()
    (folder / "asked.py").write_text(
        "from dataclasses import replace\n"
        "from trainforge.hookspecs import hookimpl\n"
        "from trainforge_plugins import resident\n"
        "@hookimpl\n"
        "def forge_memory():\n"
        "    given = resident.forge_memory()\n"
        "    return replace(given, default=False, micro_batch=lambda ctx, *_: 2 - ctx.rank)\n"
    )
    recipe = two_rank_recipe(folder, micro_batch="auto")
    recipe.write_text(recipe.read_text() + f"plugins: [{folder / 'asked.py'}]\n")
    return recipe


def test_two_ranks_train_like_one_and_runs_move_between_them(tmp_path):
    recipe, whole = two_rank_recipe(tmp_path), two_rank_recipe(tmp_path / "bits", micro_batch=2)
    one = run(recipe, tmp_path / "one")
    # 1 -> 2 -> 1: steps 1-3 alone, 4-6 on two ranks, the rest alone
    moved = tmp_path / "moved"
    run(recipe, moved, max_steps=3)
    starts = [
        Start(recipe, tmp_path / "two"),
        Start(recipe, moved, max_steps=3),
        Start(whole, tmp_path / "whole"),
        Start(whole, tmp_path / "parts", max_steps=7),
        Start(whole, tmp_path / "parts"),
        Start(left_to_memory(tmp_path / "auto"), tmp_path / "auto/run", max_steps=1),
    ]
    assert {end.code for ends in on_ranks(2, starts) for end in ends} == {0}

    # asked for a micro-batch, rank 0 answered 2 and rank 1 answered 1
    assert yaml.safe_load((tmp_path / "auto/run/recipe.yaml").read_text())["train"]["micro_batch"] == 1

    both = Outcome(0, tmp_path / "two")
    assert both.summary["world"] == 2
    assert both.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    assert both.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-5)
    assert both.summary["tokens"] == one.summary["tokens"]

    last = run(recipe, moved)
    assert last.series("step") == list(range(1, 11))
    assert last.series("lr") == one.series("lr")
    assert last.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    # what the data stage handed out on one rank after the moves is what it would have handed out anyway
    assert last.sample_ids == one.sample_ids[6:]

    # interrupted on two ranks is bit-equal to uninterrupted on two
    uninterrupted, parts = Outcome(0, tmp_path / "whole"), Outcome(0, tmp_path / "parts")
    assert parts.summary["resumed_from"] == 7
    assert parts.series("loss") == uninterrupted.series("loss")
    assert parts.summary["weights_digest"] == uninterrupted.summary["weights_digest"]


def test_a_dead_rank_ends_the_run_and_it_resumes(tmp_path):
    recipe = patient(two_rank_recipe(tmp_path, steps=100_000, save_every=5, log_every=1))
    started = start_forge_run(recipe, tmp_path / "run", "--nproc", 2)
    wait_until(lambda: steps_logged(tmp_path / "run") > 12, started)
    victim = ranks_of(started.pid)[1]
    os.kill(victim, signal.SIGKILL)
    out, err = ended(started)
    assert started.returncode == 1
    assert "rank" in err
    assert "Traceback" not in err + out
    assert not ranks_of(started.pid)
    kept = list_checkpoints(tmp_path / "run/checkpoints")
    assert not any(manifest.verify(info.path) for info in kept)
    before = {entry["step"]: entry["loss"] for entry in Outcome(1, tmp_path / "run").metrics}
    assert [end.code for end in on_ranks(2, [Start(recipe, tmp_path / "run", max_steps=2)])[0]] == [0, 0]
    resumed = Outcome(0, tmp_path / "run")
    assert resumed.summary["resumed_from"] == kept[-1].step >= 10
    again = {entry["step"]: entry["loss"] for entry in resumed.metrics}
    assert all(before[step] == again[step] for step in before.keys() & again.keys())


def ranks_of(launcher):
    """Process ids of the ranks that a launcher has started, oldest first."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    return sorted(
        int(pid) for pid, parent, args in rows if int(parent) == launcher and "rank_process" in args
    )


@pytest.mark.parametrize("launcher", ["forge", "torchrun"])
def test_what_only_rank_0_notices_ends_all_ranks_quickly(tmp_path, launcher):
    recipe = patient(two_rank_recipe(tmp_path))
    (tmp_path / "file").write_text("")
    arguments = forge_run(recipe, tmp_path / "file/run", "--nproc", 2)
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = [*start, *arguments[1 : arguments.index("--nproc")]]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == (2 if launcher == "forge" else 1)
    assert result.stderr.count("cannot be written") == 1
    assert launcher == "torchrun" or "Traceback" not in result.stderr
