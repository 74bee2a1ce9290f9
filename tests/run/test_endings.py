"""How a run ends when something goes wrong: the first cause is what a person reads, and what was done is recorded."""

import importlib
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from tests.run.runs import run, write_recipe

import trainforge
from trainforge.context import SilentConsole
from trainforge.errors import (
    CheckpointError,
    DataError,
    DataExhausted,
    OutOfMemory,
    ProviderError,
    RanksError,
    TrainForgeError,
)
from trainforge.exporting import export_run
from trainforge.runner import _blaming_who_works
from trainforge.stages import Comm
from trainforge.toolbox import micro_batch
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint
from trainforge_plugins.hf.spec import HuggingFaceModel
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


def test_data_that_ends_too_early_fails_the_run_and_the_steps_done_are_saved(tmp_path, failing):
    failing(TextData, "take", DataExhausted(), call=4)
    recipe = write_recipe(tmp_path)
    with pytest.raises(
        TrainForgeError, match=r"after 3 of 15 steps, which are saved: lower train\.steps to 3"
    ):
        run(recipe, tmp_path / "run")
    short = write_recipe(tmp_path / "short", train={"steps": 15})
    trainforge.run(short, run_dir=tmp_path / "other", max_steps=3)
    digests = [
        export_run(tmp_path / name, tmp_path / f"{name}-out", SilentConsole(), step=3)
        for name in ("run", "other")
    ]
    assert digests[0] == digests[1]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 3)
    assert summary["loss_last"] is not None


def test_data_that_ends_on_another_rank_ends_the_run_here_too(tmp_path, monkeypatch):
    asked, real = [], Comm.control

    def control(self, values):
        asked.append(values)
        agreed = real(self, values)
        return [*agreed[:-1], 1.0] if len(asked) == 4 else agreed  # the first is made at the start

    monkeypatch.setattr(Comm, "control", control)
    with pytest.raises(TrainForgeError, match="after 2 of 15 steps"):
        run(write_recipe(tmp_path), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("call", "kept"), [(1, []), (3, ["step-00000002"])])
def test_data_that_ends_where_all_is_saved_saves_nothing_twice(tmp_path, failing, monkeypatch, call, kept):
    saves, real = [], DcpCheckpoint.save
    monkeypatch.setattr(
        DcpCheckpoint, "save", lambda self, step, parts: (saves.append(step), real(self, step, parts))[1]
    )
    failing(TextData, "take", DataExhausted(), call=call)
    with pytest.raises(TrainForgeError, match="the data ended"):
        run(write_recipe(tmp_path, train={"save_every": 2}), tmp_path / "run")
    assert saves == ([2] if kept else [])
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == kept


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

    with monkeypatch.context() as patched:
        signal_during(patched, Resident, "forward_backward")
        stopped = run(recipe, tmp_path / "run")
    assert (stopped.code, stopped.summary["steps"], stopped.summary["eval_loss"]) == (3, 1, None)
    assert run(recipe, tmp_path / "run").summary["eval_loss"] is not None


def signal_during(patched, owner, method, call=1):
    """Has SIGTERM come while a method of a stage works for the n-th time."""
    real, calls = getattr(owner, method), []

    def signalled(*arguments, **named):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **named)

    patched.setattr(owner, method, signalled)
    return calls


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_that_is_left_alone_says_which_save_failed_if_that_is_why(monkeypatch, failed):
    """The save failed everywhere; this rank hears of it only after the other has gone."""
    asked = []

    def committed():
        asked.append(1)
        if failed and len(asked) == 3:
            raise CheckpointError("no room for a checkpoint")
        return []

    monkeypatch.setattr("trainforge.runner._HEARSAY_S", 0.5)
    run = SimpleNamespace(stages=SimpleNamespace(checkpoint=SimpleNamespace(committed=committed)))
    expected = (
        pytest.raises(CheckpointError, match="no room") if failed else pytest.raises(RanksError, match="gone")
    )
    with expected, _blaming_who_works(run):
        raise RanksError("rank 0 is gone")
    assert len(asked) >= 3


def test_an_evaluation_stops_within_a_batch_and_is_no_evaluation(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, 20, train={"steps": 4, "eval_every": 2}, text={"validation": 10})
    whole = run(recipe, tmp_path / "whole")
    with monkeypatch.context() as patched:
        evaluated = signal_during(patched, micro_batch, "loss_of", call=2)
        stopped = run(recipe, tmp_path / "run")
    assert (stopped.code, stopped.summary["status"], stopped.summary["steps"]) == (3, "stopped", 2)
    assert stopped.summary["eval_loss"] is None
    assert len(evaluated) == 2, "the batch at hand was the last"
    resumed = run(recipe, tmp_path / "run")
    assert resumed.summary["eval_loss"] == whole.summary["eval_loss"]
    assert resumed.summary["weights_digest"] == whole.summary["weights_digest"]


@pytest.mark.parametrize(
    ("owner", "place"),
    [(Resident, "forward_backward"), (micro_batch, "loss_of")],
    ids=["training", "evaluating"],
)
def test_stopped_on_the_very_last_step(tmp_path, monkeypatch, owner, place):
    """All steps are saved; what is left, the last evaluation, is made up for by the next start."""
    recipe = write_recipe(tmp_path, 20, train={"steps": 3}, text={"validation": 10})
    whole = run(recipe, tmp_path / "whole")
    with monkeypatch.context() as patched:
        signal_during(patched, owner, place, call=3)
        stopped = run(recipe, tmp_path / "run")
    assert (stopped.code, stopped.summary["status"], stopped.summary["steps"]) == (3, "stopped", 3)
    assert stopped.summary["eval_loss"] is None
    again = run(recipe, tmp_path / "run")
    assert (again.code, again.summary["status"]) == (0, "finished")
    assert again.summary["eval_loss"] == whole.summary["eval_loss"]
    assert again.summary["weights_digest"] == whole.summary["weights_digest"]


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HuggingFaceModel, "load"),
        (TextData, "start_report"),
        (Resident, "__init__"),
        ("trainforge_plugins.text.cache", "tokenise_all"),
    ],
)
def test_a_signal_before_the_first_step_ends_the_start_where_it_is(
    tmp_path, monkeypatch, capsys, owner, method
):
    recipe = write_recipe(tmp_path, train={"steps": 4})
    with monkeypatch.context() as patched:
        signal_during(patched, importlib.import_module(owner) if isinstance(owner, str) else owner, method)
        code = trainforge.run(recipe, run_dir=tmp_path / "run")
    assert code == 3
    if method == "start_report":  # it is about to train: the first step is taken and saved
        assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1
    else:
        assert "SIGTERM: stopped before the first step" in capsys.readouterr().out
        assert not list((tmp_path / "run").glob("checkpoints/step-*"))
        assert "error" not in (tmp_path / "run/log.txt").read_text()
    assert run(recipe, tmp_path / "run").code == 0


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
    assert ledger["data"] < ledger["other"]
