"""`train.early_stop`, `train.best`, `train.keep_every`, and weights that are not finite, over whole runs."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from tests.run.runs import run, write_recipe

from trainforge import runner
from trainforge.checkpoints import list_checkpoints
from trainforge.cli import main
from trainforge.errors import CheckpointError

LOSSES = {1: 5.0, 2: 4.0, 3: 4.5, 4: 3.9, 5: 4.1, 6: 4.2, 7: 4.0, 8: 3.0}
TRAIN = {"steps": 15, "eval_every": 1, "early_stop": {"patience": 3}}
HELD_OUT = {"validation": 2}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Evaluations that give these losses, by step."""
    losses = dict(LOSSES)
    monkeypatch.setattr("trainforge.loop.evaluate", lambda run, stop: losses[run.state.step])
    return losses


def steps_in(outcome) -> list[int]:
    return [info.step for info in list_checkpoints(outcome.folder / "checkpoints")]


def test_a_run_that_no_longer_gets_better_ends(tmp_path, scripted, capsys):
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=TRAIN)
    outcome = run(recipe, tmp_path / "run")
    assert outcome.code == 0
    assert (outcome.summary["status"], outcome.summary["steps"]) == ("early_stopped", 7)
    assert steps_in(outcome) == [7]
    assert "at best 3.9000 and did not fall in 3 evaluations" in capsys.readouterr().out
    again = run(recipe, tmp_path / "run")
    assert again.code == 0
    assert again.sample_ids == []
    assert again.summary["status"] == "early_stopped"
    assert "has ended early at step 7" in capsys.readouterr().out
    patient = run(
        write_recipe(tmp_path, text=HELD_OUT, train=TRAIN | {"early_stop": {"patience": 4}}),
        tmp_path / "run",
        max_steps=1,
    )
    assert (patient.summary["status"], patient.summary["steps"]) == ("max_steps", 8)


def test_a_small_fall_does_not_count(tmp_path, scripted, capsys):
    stop = {"patience": 3, "min_delta": 0.5}
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=TRAIN | {"early_stop": stop})
    assert run(recipe, tmp_path / "run").summary["steps"] == 5  # 5.0, 4.0 counted; 4.5, 3.9, 4.1 in vain
    assert "at best 3.9000 and did not fall by more than 0.5 in 3 evaluations" in capsys.readouterr().out


def test_stopped_in_between_it_ends_at_the_same_step(tmp_path, scripted):
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=TRAIN)
    assert run(recipe, tmp_path / "run", max_steps=6).summary["status"] == "max_steps"
    assert run(recipe, tmp_path / "run").summary["steps"] == 7


def test_a_loss_that_is_no_number_is_no_fall(tmp_path, scripted):
    scripted.update(dict.fromkeys(range(3, 9), float("nan")))
    recipe = write_recipe(tmp_path, text=HELD_OUT, train=TRAIN)
    assert run(recipe, tmp_path / "run").summary["steps"] == 5


def test_the_best_and_those_for_ever_are_kept_and_marked(tmp_path, scripted):
    train = {"steps": 8, "eval_every": 1, "save_every": 3, "keep": 1, "keep_every": 3, "best": "eval_loss"}
    scripted[8] = 6.0
    outcome = run(write_recipe(tmp_path, text=HELD_OUT, train=train), tmp_path / "run")
    assert steps_in(outcome) == [3, 4, 6, 8]  # 4 was saved because it was the best so far
    shown = CliRunner().invoke(main, ["checkpoints", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    lines = {line.split()[0]: line for line in shown.splitlines()[1:] if line.split()[0].isdigit()}
    assert "3.9000" in lines["4"]
    assert [step for step, line in lines.items() if "best" in line.split()] == ["4"]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Spoil a master just before these steps are saved."""
    from trainforge_plugins.resident.memory import Resident

    real = runner.train.__globals__["save"]
    state = Resident.state

    def spoiling(run):
        def poisoned(self):
            found = state(self)
            if run.state.step in steps:
                next(t for t in found.tensors if t.key == "master").tensor.view(-1)[0] = torch.nan
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Resident, "state", poisoned)
            real(run)

    monkeypatch.setattr("trainforge.loop.save", spoiling)


def test_weights_that_are_not_finite_never_rotate_out_good_ones(tmp_path, monkeypatch, capsys):
    recipe = write_recipe(tmp_path, train={"steps": 5, "save_every": 1, "keep": 2, "max_bad_steps": 100})
    poison(monkeypatch, {3, 4, 5})
    outcome = run(recipe, tmp_path / "run")
    assert steps_in(outcome) == [1, 2, 5]
    assert "the weights of step 3 are not finite" in capsys.readouterr().out
    listed = CliRunner().invoke(main, ["checkpoints", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert listed.count("NOT FINITE") == 1
    monkeypatch.undo()
    resumed = run(recipe, tmp_path / "run")
    assert resumed.summary["resumed_from"] == 2
    assert "the weights of step 5 are not finite: going back to step 2" in capsys.readouterr().out
    assert resumed.summary["status"] == "finished"
    assert [info.finite for info in list_checkpoints(tmp_path / "run/checkpoints")] == [True, True]


def test_without_any_good_checkpoint_a_resume_is_refused(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, train={"steps": 3, "max_bad_steps": 100})
    poison(monkeypatch, {2})
    run(recipe, tmp_path / "run", max_steps=2)
    with pytest.raises(CheckpointError, match="weights that are all finite: start over with --fresh"):
        run(recipe, tmp_path / "run")
