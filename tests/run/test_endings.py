"""How a run ends when something goes wrong: the first cause is what a person reads, and what was done is recorded."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from tests.run.runs import run, write_recipe

import trainforge
from trainforge.errors import CheckpointError, DataError, OutOfMemory, ProviderError, TrainForgeError
from trainforge_plugins.resident.memory import Resident
from trainforge_plugins.text.data import TextData


@pytest.fixture
def failing(monkeypatch):
    """Has a method of a standard stage raise at its n-th call."""

    def fail(owner, method, error, call=1):
        real, calls = getattr(owner, method), []

        def raising(*arguments, **named):
            calls.append(1)
            if len(calls) == call:
                raise error
            return real(*arguments, **named)

        monkeypatch.setattr(owner, method, raising)

    return fail


def unwritable(run_dir, name):
    (run_dir / f".{name}.tmp").mkdir(parents=True)


def test_no_memory_left_in_a_step_fails_the_run_and_says_what_to_lower(tmp_path, failing):
    failing(
        Resident,
        "forward_backward",
        torch.OutOfMemoryError("CUDA out of memory."),
        call=3,
    )
    with pytest.raises(
        OutOfMemory, match=r"running forward and backward of step 3.*train\.micro_batch"
    ) as caught:
        run(write_recipe(tmp_path), tmp_path / "run")
    assert caught.value.exit_code == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)


def test_a_mistake_that_comes_to_light_in_the_middle_is_a_failed_run(tmp_path, failing):
    failing(TextData, "take", DataError("row 7 is no text"), call=2)
    with pytest.raises(DataError, match="row 7") as caught:
        run(write_recipe(tmp_path), tmp_path / "run")
    assert caught.value.exit_code == 1
    assert DataError("before the run").exit_code == 2


def test_a_summary_that_cannot_be_written_does_not_hide_what_ended_the_run(tmp_path, failing, capsys):
    unwritable(tmp_path / "run", "summary.json")
    failing(TextData, "take", ValueError("torn"), call=2)
    with pytest.raises(ProviderError, match="taking the batches of step 2: ValueError: torn"):
        run(write_recipe(tmp_path), tmp_path / "run")
    assert "summary.json cannot be written" in capsys.readouterr().out


def test_a_summary_that_cannot_be_written_is_told_and_made_up_for(tmp_path):
    unwritable(tmp_path / "run", "summary.json")
    recipe = write_recipe(tmp_path, train={"steps": 2})
    with pytest.raises(TrainForgeError, match=r"summary\.json cannot be written"):
        run(recipe, tmp_path / "run")
    (tmp_path / "run/.summary.json.tmp").rmdir()
    made_up = run(recipe, tmp_path / "run")
    assert made_up.code == 0
    assert (made_up.summary["status"], made_up.summary["steps"]) == ("finished", 2)
    whole = run(recipe, tmp_path / "whole")
    assert made_up.summary["weights_digest"] == whole.summary["weights_digest"]
    told = whole.summary["seconds"]
    assert run(recipe, tmp_path / "whole").summary["seconds"] == told, "a summary that is there stays"


def test_a_sample_that_fails_does_not_fail_the_run(tmp_path, failing, capsys):
    failing(Resident, "generate", RuntimeError("no room"))
    done = run(write_recipe(tmp_path, run={"sample": "the"}, train={"steps": 2}), tmp_path / "run")
    assert done.code == 0
    assert "sample      none: RuntimeError: no room" in capsys.readouterr().out


def test_who_stops_a_run_does_not_wait_for_an_evaluation(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, train={"steps": 4, "eval_every": 1}, text={"validation": 2})

    class Stopped:
        def __enter__(self):
            return SimpleNamespace(name="SIGTERM")

        def __exit__(self, *unused):
            pass

    with monkeypatch.context() as patched:
        patched.setattr("trainforge.runner.StopSignals", Stopped)
        stopped = run(recipe, tmp_path / "run")
    assert (stopped.code, stopped.summary["steps"], stopped.summary["eval_loss"]) == (3, 1, None)
    assert run(recipe, tmp_path / "run").summary["eval_loss"] is not None


def test_a_damaged_newest_checkpoint_names_the_older_one(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 4, "save_every": 2})
    run(recipe, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000004"
    weights = next(newest.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(CheckpointError, match="--resume 2"):
        run(recipe, tmp_path / "run")
    assert run(recipe, tmp_path / "run", resume=2).summary["resumed_from"] == 2


def test_a_start_without_a_checkpoint_binds_nothing(tmp_path):
    run(write_recipe(tmp_path, train={"steps": 2, "global_batch": 2}), tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    free = write_recipe(tmp_path, train={"steps": 2, "global_batch": None, "micro_batch": 5})
    again = run(free, tmp_path / "run")
    assert again.summary["resumed_from"] is None
    assert "global_batch: 5" in (tmp_path / "run/recipe.yaml").read_text()


def test_what_observers_take_is_booked_as_other(tmp_path):
    observer = tmp_path / "slow.py"
    observer.write_text(
        "import time\nfrom trainforge.hookspecs import hookimpl\n\n\n@hookimpl\n"
        "def forge_metrics_logged(run):\n    time.sleep(0.2)\n"
    )
    code = trainforge.run(
        write_recipe(tmp_path, train={"steps": 4}), run_dir=tmp_path / "run", plugins=[str(observer)]
    )
    assert code == 0
    ledger = json.loads((tmp_path / "run/summary.json").read_text())["ledger"]
    assert ledger["other"] > 100
    assert ledger["data"] < 100
