"""Whole runs with `save_every: auto`."""

from __future__ import annotations

import re

import pytest
from tests.run.runs import run, write_recipe
from tests.run.test_ranks import two_rank_recipe, two_ranks

from trainforge.checkpoints import list_checkpoints


def test_a_run_saves_early_and_then_as_often_as_pays(tmp_path, monkeypatch):
    from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

    monkeypatch.setattr(DcpCheckpoint, "metrics", lambda self: {"slowdown_ms": 500_000.0})
    recipe = write_recipe(tmp_path, train={"steps": 24, "save_every": "auto", "keep": 9})
    outcome = run(recipe, tmp_path / "run", max_steps=22)
    assert [info.step for info in list_checkpoints(outcome.folder / "checkpoints")] == [20, 22]
    log = (outcome.folder / "log.txt").read_text()
    assert "saved as often as pays (train.save_every: auto)" in log
    # sqrt(2 x 500 s x 24 h) = 9295 s
    assert re.findall(r"saving about every (.*?) from now on: a save costs the run (.*?),", log) == [
        ("2 h 34 min", "8 min 20 s")
    ]
    run(recipe, tmp_path / "run")  # measures anew: two steps are too few for it
    assert [info.step for info in list_checkpoints(outcome.folder / "checkpoints")] == [20, 22, 24]


@pytest.mark.ranks
def test_ranks_save_together_when_the_first_says_so(tmp_path):
    recipe = two_rank_recipe(tmp_path, steps=24, save_every="auto", keep=9)
    outcome = two_ranks(recipe, tmp_path / "run")
    assert [info.step for info in list_checkpoints(outcome.folder / "checkpoints")] == [20, 24]
    assert (outcome.folder / "log.txt").read_text().count("saving about every 1 min 00 s") == 1
