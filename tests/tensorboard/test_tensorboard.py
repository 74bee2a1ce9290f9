"""The TensorBoard observer: what it writes, after a resume too, and what it says when the package is missing."""

import sys

import pytest
from tests.run.runs import run, write_recipe
from tests.tensorboard.writer import install, shown

from trainforge.errors import ConfigError
from trainforge.testing import ObserverConformance
from trainforge_plugins.resident.memory import Resident


@pytest.fixture
def writers(monkeypatch):
    return install(monkeypatch)


class TestTensorboard(ObserverConformance):
    plugin = "tensorboard"

    @pytest.fixture(autouse=True)
    def _stand_in(self, writers):
        """Without the package."""


def watched(recipe, folder, **options):
    return run(recipe, folder, plugins=["tensorboard"], **options)


def test_every_logged_metric_is_a_scalar_of_its_step(tmp_path, writers):
    outcome = watched(write_recipe(tmp_path, train={"steps": 4}), tmp_path / "run")
    (writer,) = writers
    assert (writer.log_dir, writer.closed) == (str(tmp_path / "run/tensorboard"), True)
    wanted = {
        (name, entry["step"]): value
        for entry in outcome.metrics
        for name, value in entry.items()
        if name not in ("step", "time")
    }
    assert shown(writers) == wanted
    assert ("loss", 4) in wanted


def test_steps_that_are_trained_again_are_not_there_twice(tmp_path, writers, monkeypatch):
    """Fails in step 6 with step 4 saved: 5 is trained again, and what the first start wrote of it goes."""
    recipe = write_recipe(tmp_path, train={"steps": 8, "save_every": 4})
    real, calls = Resident.forward_backward, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("torn")
        return real(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Resident, "forward_backward", failing)
        with pytest.raises(Exception, match="torn"):
            watched(recipe, tmp_path / "run")
    outcome = watched(recipe, tmp_path / "run")
    assert outcome.summary["resumed_from"] == 4
    assert [writer.purge_step for writer in writers] == [1, 5]
    assert all(writer.closed for writer in writers)
    losses = {step: value for (tag, step), value in shown(writers).items() if tag == "loss"}
    assert losses == dict(zip(range(1, 9), outcome.series("loss"), strict=True))
    twice = [step for writer in writers for tag, _, step in writer.scalars if tag == "loss"]
    assert twice.count(5) == 2, "the first start had written step 5 as well"


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainforge-plugins\[tensorboard\]'"):
        watched(write_recipe(tmp_path), tmp_path / "run")


def test_it_is_there_only_when_asked_for(tmp_path, writers):
    run(write_recipe(tmp_path, train={"steps": 1}), tmp_path / "run")
    assert not writers
