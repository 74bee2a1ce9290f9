"""Whole runs: `cpu_adam` trains like the default optimizer, and a checkpoint moves between the two."""

from __future__ import annotations

import pytest
import torch
from tests.run.runs import run, write_recipe
from tests.run.test_equivalence import weights_of

PLUGIN = """
from trainforge_megatrain.cpu_adam import build, CpuAdamSection
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider

@hookimpl
def forge_optimizer():
    return Provider(build=build, config=CpuAdamSection)
"""


@pytest.fixture
def options(tmp_path) -> dict:
    """What makes a run use `cpu_adam`, also where its distribution is not installed."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    return {"plugins": [str(tmp_path / "mine.py")]}


def test_a_run_is_that_of_the_default_optimizer_and_either_resumes_the_other(tmp_path, options):
    # eps above the smallest gradients: with 1e-8 Adam divides rounding errors by themselves
    recipe = write_recipe(tmp_path, train={"steps": 6, "clip": 0.5, "dtype": "fp32", "eps": 1e-5})
    plain = run(recipe, tmp_path / "plain")
    ours = run(recipe, tmp_path / "ours", **options)
    assert ours.code == 0
    assert ours.series("loss") == pytest.approx(plain.series("loss"), rel=1e-5)
    run(recipe, tmp_path / "there", max_steps=3)
    there = run(recipe, tmp_path / "there", **options)
    run(recipe, tmp_path / "back", max_steps=3, **options)
    back = run(recipe, tmp_path / "back")
    wanted = weights_of(plain.folder)
    for outcome in (ours, there, back):
        assert outcome.summary["steps"] == 6
        for name, weight in weights_of(outcome.folder).items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-5)
    assert [entry["optimizer/threads"] for entry in ours.metrics] == [1.0] * 6  # run.threads of the recipe


def test_moments_of_another_dtype_are_refused_by_name(tmp_path, options):
    recipe = write_recipe(tmp_path, train={"steps": 4})
    run(recipe, tmp_path / "run", max_steps=2)
    with pytest.raises(
        Exception, match=r"exp_avg.* is float32 in the checkpoint .* and bfloat16 in this run"
    ):
        run(recipe, tmp_path / "run", overrides=["mine.moments=bf16"], **options)
