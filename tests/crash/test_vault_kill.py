"""SIGKILL at every operation by which a real run with vault changes its files: nothing is lost, and it ends as ever."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.crash import LOADED
from tests.crash.vault_stage import leftovers
from tests.run.runs import write_recipe

import trainforge
from trainforge.checkpoints import list_checkpoints, verify_checkpoint
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint

OPERATIONS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
STEPS = 5


def in_child(work: Callable[[], Any], log: Path) -> int:
    """Do some work in a fork; gives its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            code = work() or 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(moment: int, folder: Path, count: Path | None = None) -> None:
    """End this process at the k-th operation below `folder`; note how many there were in `count`."""
    done = [0]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **options: Any) -> Any:
            at = f"/proc/self/fd/{options.get('dir_fd') or path}" if isinstance(path, int) else str(path)
            at = (
                os.readlink(f"/proc/self/fd/{options['dir_fd']}") if options.get("dir_fd") is not None else at
            )
            at = os.readlink(at) if at.startswith("/proc/self/fd/") else at
            if at.startswith(str(folder)):
                if done[0] == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                done[0] += 1
                if count is not None:
                    count.write_text(str(done[0]))
            return real(path, *arguments, **options)

        return called

    for name in OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))


def train(recipe: Path, run_dir: Path, max_steps: int | None = None, kill: int | None = None) -> int:
    if kill is not None:
        kill_at(kill, run_dir / "checkpoints")
    return trainforge.run(recipe, run_dir=run_dir, plugins=["vault"], max_steps=max_steps)


def result(run_dir: Path) -> tuple[Any, list[Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run_dir / "summary.json").read_text())["weights_digest"], [
        line["loss"] for line in lines
    ][-2:]


@pytest.mark.slow
def test_killed_at_every_operation_of_a_run_that_saves_every_step(tmp_path, monkeypatch):
    """From the third step on, so that saves, prunings and collections of a folder that is in use are all among them."""
    for name in LOADED:
        importlib.import_module(name)  # once, before the forks
    monkeypatch.setattr(VaultCheckpoint, "chunk_bytes", 2**13)
    train_section = {"steps": STEPS, "save_every": 1, "keep": 2}
    recipe, log = write_recipe(tmp_path, train=train_section), tmp_path / "log.txt"
    begun, whole, count = tmp_path / "begun", tmp_path / "whole", tmp_path / "count"
    assert in_child(lambda: train(recipe, begun, max_steps=2), log) == 0, log.read_text()
    shutil.copytree(begun, whole)

    def counted() -> int:
        kill_at(10**9, whole / "checkpoints", count)
        return train(recipe, whole)

    assert in_child(counted, log) == 0, log.read_text()
    operations = int(count.read_text())
    assert operations > 40
    for moment in range(operations):
        run_dir = tmp_path / "killed"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(begun, run_dir)

        assert in_child(partial(train, recipe, run_dir, kill=moment), log) == -signal.SIGKILL, (
            moment,
            log.read_text(),
        )
        found = list_checkpoints(run_dir / "checkpoints")
        assert found[-1].step >= 2, moment
        assert [problem for info in found for problem in verify_checkpoint(info)] == [], moment
        assert in_child(partial(train, recipe, run_dir), log) == 0, (moment, log.read_text())
        assert result(run_dir) == result(whole), moment
        steps = [info.step for info in list_checkpoints(run_dir / "checkpoints")]
        assert steps[-2:] == [STEPS - 1, STEPS], moment
        if found[-1].step < STEPS:  # else it was finished, and the second start had nothing to save or clean
            assert len(steps) == 2, moment
            assert leftovers(run_dir) == [], moment
