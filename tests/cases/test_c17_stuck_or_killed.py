"""C17: a process that is killed or stuck ends the run in time with its name; nothing is left behind."""

import json
import os
import re
import signal

import pytest
from tests.run.runs import write_recipe
from tests.run.test_ranks import ranks_of, two_rank_recipe
from tests.support.processes import (
    below,
    ended,
    gone,
    has_open,
    shared_memory,
    start_forge_run,
    steps_logged,
    wait_until,
    workers_of,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def big_recipe(folder, worker_timeout):
    """Text that takes two workers long enough to be caught at it."""
    row = json.dumps({"text": "the whale swam by. " * 500}) + "\n"
    (folder / "rows.jsonl").write_text(row * 6000)
    return write_recipe(
        folder, text={"path": str(folder / "rows.jsonl"), "workers": 2, "worker_timeout": worker_timeout}
    )


@pytest.mark.parametrize(
    ("nproc", "number", "says", "worker_timeout"),
    [(1, signal.SIGSTOP, "stuck on", "5s"), (2, signal.SIGKILL, "died of signal 9", "1h")],
)
def test_a_tokenising_worker(tmp_path, nproc, number, says, worker_timeout):
    recipe, before = big_recipe(tmp_path, worker_timeout), shared_memory()
    process = start_forge_run(recipe, tmp_path / "run", "--nproc", nproc)
    wait_until(lambda: len(workers_of(process.pid)) == 2, process)
    victim, family = workers_of(process.pid)[1], below(process.pid)
    wait_until(lambda: has_open(victim, tmp_path / "rows.jsonl"), process)  # it has been given its work
    os.kill(victim, number)
    out, err = ended(process)
    assert process.returncode == 1, out + err
    assert says in err
    assert "rows.jsonl (bytes " in err
    assert "worker " in err
    assert "Traceback" not in out + err
    assert gone(family)
    assert shared_memory() <= before


HANGING = """
import time
from dataclasses import replace

from trainforge.hookspecs import hookimpl


@hookimpl(wrapper=True)
def forge_data():
    provider = yield

    def build(ctx, config):
        if ctx.rank == 1:
            (ctx.run_dir.parent / "hangs").touch()
            time.sleep(3600)
        return provider.build(ctx, config)

    return replace(provider, build=build)
"""


def test_a_rank_that_hangs_while_its_data_are_built(tmp_path):
    recipe = two_rank_recipe(tmp_path)
    recipe.write_text(recipe.read_text() + "ddp: {timeout: 8s}\n")
    (tmp_path / "hanging.py").write_text(HANGING)
    before = shared_memory()
    process = start_forge_run(recipe, tmp_path / "run", "--nproc", 2, "--plugins", tmp_path / "hanging.py")
    wait_until((tmp_path / "hangs").exists, process)
    family = below(process.pid)
    out, err = ended(process)
    assert process.returncode == 1, out + err
    assert "rank 1 did not reach step 1" in err
    assert "rank 1 was last seen starting (stage data)" in err
    assert err.splitlines()[-1] == "Nothing was saved: the next start begins at step 1."
    assert "Traceback" not in out + err
    assert gone(family)
    assert shared_memory() <= before


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_rank(tmp_path, stuck):
    recipe = two_rank_recipe(tmp_path, steps=100_000)
    recipe.write_text(recipe.read_text() + "ddp: {timeout: 8s}\n")  # ranks show how far they are every 0.8 s
    before = shared_memory()
    process = start_forge_run(recipe, tmp_path / "run", "--nproc", 2)
    wait_until(lambda: steps_logged(tmp_path / "run") > 150, process)
    family = below(process.pid)
    os.kill(ranks_of(process.pid)[stuck], signal.SIGSTOP)
    out, err = ended(process)
    assert process.returncode == 1, out + err
    assert re.search(rf"rank {stuck} (did not reach step|ended or hangs while rank {1 - stuck} was)", err), (
        err
    )
    assert re.search(rf"rank {stuck} was last seen .* (of step|steps up to) \d+ \(stage \w+\)", err), err
    assert "killed" not in err  # it was in the end, but only for being stuck
    assert "Traceback" not in out + err
    assert gone(family)
    assert shared_memory() <= before
