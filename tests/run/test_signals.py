"""A run that is asked to stop saves within a step and says how to go on; one that is killed loses nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.run.runs import run, write_recipe

LONG = {"steps": 100_000, "save_every": 3, "log_every": 1, "eval_every": 4}
HELD_OUT = {"validation": 2}  # rows, so that there is something to evaluate


def start(recipe, run_dir):
    command = [sys.executable, "-m", "trainforge.cli", "run", str(recipe), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_logged(run_dir):
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_steps(process, run_dir, steps):
    end = time.monotonic() + 120
    while steps_logged(run_dir) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_3(tmp_path, number):
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=LONG | {"save_every": None})
    process = start(recipe, tmp_path / "run")
    wait_for_steps(process, tmp_path / "run", 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, out + err
    assert "run again to resume" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped"
    resumed = run(recipe, tmp_path / "run", max_steps=1)
    assert resumed.summary["resumed_from"] == summary["steps"]


def test_a_signal_before_the_first_step_ends_without_a_traceback(tmp_path):
    process = start(write_recipe(tmp_path, text=HELD_OUT, train=LONG), tmp_path / "run")
    end = time.monotonic() + 60
    while not (tmp_path / "run/.lock").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, out + err
    assert "Traceback" not in err


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_at_most_what_came_after_the_last_save(tmp_path):
    """Killed again and again, then finished: the same weights as a run that was never stopped."""
    train = {"steps": 60, "save_every": 2, "log_every": 1, "keep": 2}
    recipe = write_recipe(tmp_path, train=train)
    whole = run(recipe, tmp_path / "whole")
    chance = random.Random(4)
    run_dir = tmp_path / "killed"
    for _ in range(6):
        process = start(recipe, run_dir)
        before = steps_logged(run_dir)
        end = time.monotonic() + 60
        while process.poll() is None and steps_logged(run_dir) in (0, before) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    finished = run(recipe, run_dir)
    assert finished.summary["weights_digest"] == whole.summary["weights_digest"]
    assert finished.series("loss") == whole.series("loss")
    assert finished.series("step") == list(range(1, 61))
