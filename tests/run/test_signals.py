"""A run that is asked to stop saves within a step and says how to go on (killed: tests/crash/test_kill.py)."""

import json
import signal

import pytest
from tests.run.runs import run, write_recipe
from tests.support.processes import below, ended, gone, start_forge_run, steps_logged, wait_until, workers_of

LONG = {"steps": 100_000, "save_every": 3, "log_every": 1, "eval_every": 4}
HELD_OUT = {"validation": 2}  # rows, so that there is something to evaluate


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_3(tmp_path, number):
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=LONG | {"save_every": None})
    process = start_forge_run(recipe, tmp_path / "run")
    wait_until(lambda: steps_logged(tmp_path / "run") >= 2, process)
    process.send_signal(number)
    out, err = ended(process)
    assert process.returncode == 3, out + err
    assert "run again to resume" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped"
    resumed = run(recipe, tmp_path / "run", max_steps=1)
    assert resumed.summary["resumed_from"] == summary["steps"]


def test_a_signal_before_the_first_step_ends_without_a_traceback(tmp_path):
    process = start_forge_run(write_recipe(tmp_path, text=HELD_OUT, train=LONG), tmp_path / "run")
    wait_until((tmp_path / "run/.lock").exists, process)
    process.send_signal(signal.SIGTERM)
    out, err = ended(process)
    assert process.returncode == 3, out + err
    assert "Traceback" not in err


SLOW_STAGE = """
import time
from dataclasses import replace

from trainforge.hookspecs import hookimpl


@hookimpl(wrapper=True)
def forge_STAGE():
    provider = yield

    def build(ctx, config):
        if ctx.rank in RANKS:
            ctx.run_dir.mkdir(exist_ok=True)
            (ctx.run_dir / f"busy-{ctx.rank}").touch()
            time.sleep(3600)
        return provider.build(ctx, config)

    return replace(provider, build=build)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("nproc", "stage", "busy", "number"),
    [
        (1, "memory", [0], signal.SIGINT),
        (2, "model", [0, 1], signal.SIGTERM),
        (2, "memory", [1], signal.SIGINT),
    ],
)
def test_a_signal_while_a_stage_starts_ends_all_ranks_at_once(tmp_path, nproc, stage, busy, number):
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW_STAGE.replace("STAGE", stage).replace("RANKS", str(busy)))
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=LONG)
    process = start_forge_run(recipe, tmp_path / "run", "--plugins", slow, "--nproc", nproc)
    wait_until(lambda: all((tmp_path / f"run/busy-{rank}").exists() for rank in busy), process)
    check_that_it_stops_at_once(process, number, tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_while_text_is_tokenised(tmp_path, nproc):
    row = json.dumps({"text": "the whale swam by. " * 500}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 6000)
    text = {"path": str(tmp_path / "rows.jsonl"), "workers": 2}
    process = start_forge_run(
        write_recipe(tmp_path, train=LONG, text=text), tmp_path / "run", "--nproc", nproc
    )
    wait_until(lambda: len(workers_of(process.pid)) == 2, process)
    check_that_it_stops_at_once(process, signal.SIGTERM, tmp_path / "run")


def check_that_it_stops_at_once(process, number, run_dir):
    family = below(process.pid)
    process.send_signal(number)
    out, err = ended(process)
    assert process.returncode == 3, out + err
    assert f"{number.name}: stopped before the first step of this start, so nothing had to be saved" in out
    assert "Traceback" not in out + err
    assert "error" not in out + err
    assert not list(run_dir.glob("checkpoints/step-*"))
    assert gone(family)
