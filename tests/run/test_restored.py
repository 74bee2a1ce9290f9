"""What a checkpoint fills is not read or drawn before: only frozen parameters are loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run.runs import run, write_recipe

from trainforge.context import SilentConsole
from trainforge.exporting import export_run
from trainforge.sampling import sample_run
from trainforge_plugins.hf.initial import RandomWeights
from trainforge_plugins.hf.spec import HuggingFaceModel

FROZEN = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters whose initial values were made."""
    names, draw = [], RandomWeights._draw

    def watching(self, spec):
        names.append(spec.name)
        return draw(self, spec)

    monkeypatch.setattr(RandomWeights, "_draw", watching)
    return names


@pytest.mark.parametrize("freeze", [[], [FROZEN]])
def test_only_frozen_weights_are_loaded_when_a_checkpoint_fills_the_rest(
    tmp_path: Path, drawn: list[str], freeze: list[str]
):
    recipe = write_recipe(tmp_path, model={"freeze": freeze})
    parts = run(recipe, tmp_path / "parts", max_steps=2)
    assert FROZEN in drawn
    assert len(drawn) > 20
    drawn.clear()
    sample_run(parts.folder, "the", SilentConsole(), tokens=1)
    assert drawn == freeze
    drawn.clear()
    digest = export_run(parts.folder, tmp_path / "out", SilentConsole())
    assert digest == parts.summary["weights_digest"]
    assert drawn == freeze
    drawn.clear()
    again = run(recipe, tmp_path / "parts", max_steps=2)
    assert drawn == freeze
    whole = run(recipe, tmp_path / "whole", max_steps=4)
    assert again.summary["weights_digest"] == whole.summary["weights_digest"]


def test_exporting_and_sampling_close_the_model(tmp_path, monkeypatch):
    closed, real = [], HuggingFaceModel.close
    monkeypatch.setattr(HuggingFaceModel, "close", lambda self: (closed.append(self), real(self))[1])
    folder = run(write_recipe(tmp_path, train={"steps": 1}), tmp_path / "run").folder
    closed.clear()
    sample_run(folder, "the", SilentConsole(), tokens=1)
    export_run(folder, tmp_path / "out", SilentConsole())
    assert len(closed) == 2


def test_a_run_that_starts_from_another_closes_that_ones_model_and_reader(tmp_path, monkeypatch):
    train = {"steps": 1}
    folder = run(write_recipe(tmp_path, train=train), tmp_path / "run").folder
    closed, real = [], HuggingFaceModel.close
    monkeypatch.setattr(HuggingFaceModel, "close", lambda self: (closed.append(self), real(self))[1])
    new = write_recipe(tmp_path / "new", train=train, model={"config": None, "init_from": str(folder)})
    run(new, tmp_path / "new/run")
    assert len(closed) == len(set(map(id, closed))) == 2
