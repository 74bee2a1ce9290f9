"""Interrupted and resumed equals uninterrupted: sample ids, learning rates, losses, weights, random generators."""

import json

import pytest
from tests.run.runs import run, write_recipe

from trainforge.errors import CheckpointError, IncompatibleError, UserError

SERIES = ("step", "lr", "loss", "grad_norm", "tokens")


def rng_of(outcome):
    newest = sorted((outcome.folder / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "checkpoint.json").read_text())["parts"]["loop"]["data"]["rng"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_resume_is_uninterrupted_wherever_it_stops(tmp_path, accumulate):
    rows = 10 * accumulate
    recipe = write_recipe(tmp_path, rows, train={"global_batch": 2 * accumulate, "micro_batch": 2})
    whole = run(recipe, tmp_path / "whole")
    assert whole.summary["status"] == "finished"
    # 5 steps an epoch: within the first, at its end, within the second, at the end of all
    for stops in ((3,), (5,), (7,), (10,), (1, 4, 5)):
        folder = tmp_path / f"stops-{'-'.join(map(str, stops))}"
        ids = []
        for stop in stops:
            part = run(recipe, folder, max_steps=stop - len(ids))
            assert part.code == 0
            assert part.summary["status"] == "max_steps"
            ids += part.sample_ids
        last = run(recipe, folder)
        assert ids + last.sample_ids == whole.sample_ids
        for name in SERIES:
            assert last.series(name) == whole.series(name), (stops, name)
        assert last.summary["weights_digest"] == whole.summary["weights_digest"]
        assert last.summary["steps"] == 15
        assert rng_of(last) == rng_of(whole)


def test_every_epoch_has_each_sample_once_and_its_own_order(tmp_path):
    outcome = run(write_recipe(tmp_path), tmp_path / "run")
    epochs = [[i for step in outcome.sample_ids[e * 5 : e * 5 + 5] for i in step] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_finished_run_says_so_and_does_nothing(tmp_path, capsys):
    recipe = write_recipe(tmp_path, train={"steps": 3})
    first = run(recipe, tmp_path / "run")
    before = (tmp_path / "run/summary.json").read_text()
    again = run(recipe, tmp_path / "run")
    assert again.code == 0
    assert again.sample_ids == []
    assert "finished: 3 steps are done" in capsys.readouterr().out
    assert (tmp_path / "run/summary.json").read_text() == before
    assert first.summary["steps"] == 3


def test_raising_the_steps_trains_on_with_the_schedule_laid_over_the_new_length(tmp_path):
    run(write_recipe(tmp_path, train={"steps": 4, "warmup": 0}), tmp_path / "run")
    longer = run(write_recipe(tmp_path, train={"steps": 8, "warmup": 0}), tmp_path / "run")
    assert longer.summary["steps"] == 8
    # what was trained stays as it was: linear to zero over 4 steps; what follows: linear over 8
    assert longer.series("lr") == pytest.approx(
        [0.01 * (1 - s / 4) for s in (1, 2, 3, 4)] + [0.01 * (1 - s / 8) for s in (5, 6, 7, 8)]
    )


def test_a_changed_recipe_is_refused_with_both_values_allowed_by_name_and_fresh_starts_over(tmp_path):
    run(write_recipe(tmp_path), tmp_path / "run", max_steps=2)
    changed = write_recipe(tmp_path, train={"lr": 0.02})
    with pytest.raises(IncompatibleError, match=r"train\.lr: 0\.01 in the folder, 0\.02 now"):
        run(changed, tmp_path / "run")
    allowed = run(changed, tmp_path / "run", max_steps=1, allow_change=("train.lr",))
    assert allowed.summary["steps"] == 3
    fresh = run(changed, tmp_path / "run", max_steps=1, fresh=True)
    assert fresh.summary["steps"] == 1
    assert (tmp_path / "run.old-1/summary.json").exists()


def test_other_data_is_refused(tmp_path):
    run(write_recipe(tmp_path), tmp_path / "run", max_steps=2)
    with pytest.raises(IncompatibleError):
        run(write_recipe(tmp_path, rows=12), tmp_path / "run")


def test_resuming_an_older_step_sets_the_later_ones_aside_and_trains_the_same_again(tmp_path):
    recipe = write_recipe(tmp_path, train={"save_every": 1, "keep": 3, "steps": 6})
    whole = run(recipe, tmp_path / "run")
    again = run(recipe, tmp_path / "run", resume=4)
    assert again.sample_ids == whole.sample_ids[4:]
    assert again.summary["weights_digest"] == whole.summary["weights_digest"]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*"))[-1] == "step-00000006"
    with pytest.raises(UserError, match="--resume 99: no checkpoint of that step"):
        run(recipe, tmp_path / "run", resume=99)


def test_lines_of_steps_that_are_trained_again_are_dropped_from_the_metrics(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 6})
    run(recipe, tmp_path / "run", max_steps=3)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0}\n{"step": 5, "lo')  # what a run killed at step 5 had written
    assert run(recipe, tmp_path / "run").series("step") == [1, 2, 3, 4, 5, 6]


def test_another_optimizer_cannot_take_over_and_the_message_says_whose_state_it_is(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 4})
    run(recipe, tmp_path / "run", max_steps=2, plugins=["docs/examples/my_plugin.py"])
    with pytest.raises(CheckpointError, match=r"the optimizer my_plugin, this run has adamw"):
        run(recipe, tmp_path / "run")
    assert run(recipe, tmp_path / "run", plugins=["docs/examples/my_plugin.py"]).summary["steps"] == 4
