"""C17: a process that is killed or stuck ends the run in time with its name; nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from tests.run.runs import write_recipe
from tests.run.test_ranks import command, ranks_of, two_rank_recipe
from tests.support.processes import below, gone, shared_memory, wait_until, workers_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def start(recipe, run_dir, nproc):
    return subprocess.Popen(
        command(recipe, run_dir, nproc=nproc), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def big_recipe(folder):
    """Text that takes two workers long enough to be caught at it."""
    row = json.dumps({"text": "the whale swam by. " * 500}) + "\n"
    (folder / "rows.jsonl").write_text(row * 6000)
    return write_recipe(
        folder, text={"path": str(folder / "rows.jsonl"), "workers": 2, "worker_timeout": "5s"}
    )


@pytest.mark.parametrize(
    ("number", "says", "within"),
    [(signal.SIGKILL, "died of signal 9", 20), (signal.SIGSTOP, "stuck on", 25)],
)
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_tokenising_worker(tmp_path, number, says, within, nproc):
    recipe, before = big_recipe(tmp_path), shared_memory()
    process = start(recipe, tmp_path / "run", nproc)
    wait_until(lambda: len(workers_of(process.pid)) == 2, process)
    family = below(process.pid)
    os.kill(workers_of(process.pid)[1], number)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < within
    assert process.returncode == 1, out + err
    assert says in err
    assert "rows.jsonl (bytes " in err
    assert "worker " in err
    assert "Traceback" not in out + err
    assert gone(family)
    assert shared_memory() <= before


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_rank(tmp_path, stuck):
    recipe = two_rank_recipe(tmp_path, steps=100_000)
    recipe.write_text(recipe.read_text() + "ddp: {timeout: 3s}\n")
    before = shared_memory()
    process = start(recipe, tmp_path / "run", 2)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, process)
    family = below(process.pid)
    os.kill(ranks_of(process.pid)[stuck], signal.SIGSTOP)
    began = time.monotonic()
    out, err = process.communicate(timeout=90)
    assert time.monotonic() - began < 45
    assert process.returncode == 1, out + err
    assert re.search(rf"rank {stuck} (did not reach step|ended or hangs while rank {1 - stuck} was)", err), (
        err
    )
    assert "killed" not in err  # it was in the end, but only for being stuck
    assert "Traceback" not in out + err
    assert gone(family)
    assert shared_memory() <= before
