"""One test per hook: a plugin that implements it, and what core does with that. tests/docs holds the list complete."""

from __future__ import annotations

import pytest

from trainforge.planning import make_plan
from trainforge.testing import tiny_run

PROVIDER = """
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.testing import reference

@hookimpl
def forge_{stage}():
    provider = reference.forge_{stage}()
    return Provider(build=build(provider), config=provider.config)

def build(provider):
    def built(ctx, config):
        (ctx.run_dir / "built-{stage}").write_text(ctx.plugin)
        return provider.build(ctx, config)
    return built
"""


def stage_hook(stage, tmp_path):
    """A run in which only `stage` comes from the plugin: it is chosen, built once with its name, and the run trains."""
    plugin = tmp_path / f"my_{stage}.py"
    plugin.write_text(PROVIDER.format(stage=stage))
    outcome = tiny_run(tmp_path / "run", plugins=[str(plugin)])
    assert outcome.code == 0
    assert (outcome.path / f"built-{stage}").read_text() == f"my_{stage}"
    assert outcome.summary["plugins"][stage] == f"my_{stage}"
    assert outcome.losses[-1] < outcome.losses[0]


def test_forge_model(tmp_path):
    stage_hook("model", tmp_path)


def test_forge_data(tmp_path):
    stage_hook("data", tmp_path)


def test_forge_memory(tmp_path):
    stage_hook("memory", tmp_path)


def test_forge_comm(tmp_path):
    stage_hook("comm", tmp_path)


def test_forge_optimizer(tmp_path):
    stage_hook("optimizer", tmp_path)


def test_forge_checkpoint(tmp_path):
    stage_hook("checkpoint", tmp_path)


OBSERVER = """
import json
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider

class Observer:
    def __init__(self, path):
        self.path = path

    def say(self, *what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")

    @hookimpl
    def forge_run_started(self, run, plan):
        self.say("run_started", run.state.step, run.steps, sorted(plan.chosen))

    @hookimpl
    def forge_step_ended(self, run, step):
        self.say("step_ended", step, run.state.step)

    @hookimpl
    def forge_metrics_logged(self, run, step, metrics):
        self.say("metrics_logged", step, metrics["loss"], metrics["lr"])

    @hookimpl
    def forge_checkpoint_saved(self, run, step, path):
        self.say("checkpoint_saved", step, path.name, (path / "checkpoint.json").exists())

    @hookimpl
    def forge_run_ended(self, run, error):
        self.say("run_ended", run.state.step, None if error is None else type(error).__name__)

@hookimpl
def forge_observer():
    return Provider(build=lambda ctx, config: Observer(ctx.run_dir / "events"))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What an observer was told in a run of 4 steps that logs every 2 and saves every 3."""
    import json

    folder = tmp_path_factory.mktemp("observer")
    (folder / "watcher.py").write_text(OBSERVER)
    train = {"steps": 4, "log_every": 2, "save_every": 3}
    outcome = tiny_run(folder / "run", plugins=[str(folder / "watcher.py")], train=train)
    assert outcome.code == 0
    return outcome, [json.loads(line) for line in (outcome.path / "events").read_text().splitlines()]


def of(told, event):
    return [entry[1:] for entry in told[1] if entry[0] == event]


def test_forge_observer(told):
    plan = make_plan(overrides=["train.steps=1"], plugins=[str(told[0].path.parent / "watcher.py")])
    assert [chosen.plugin for chosen in plan.observers if chosen.how != "default"] == ["watcher"]


def test_forge_run_started(told):
    assert told[1][0] == ["run_started", 0, 4, ["checkpoint", "comm", "data", "memory", "model", "optimizer"]]
    assert len(of(told, "run_started")) == 1


def test_forge_step_ended(told):
    assert of(told, "step_ended") == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_forge_metrics_logged(told):
    logged = of(told, "metrics_logged")
    assert [step for step, _, _ in logged] == [2, 4]
    assert [loss for _, loss, _ in logged] == told[0].losses
    assert [lr for _, _, lr in logged] == told[0].learning_rates


def test_forge_checkpoint_saved(told):
    assert of(told, "checkpoint_saved") == [[3, "step-00000003", True], [4, "step-00000004", True]]


def test_forge_run_ended(told):
    assert told[1][-1] == ["run_ended", 4, None]
    assert len(of(told, "run_ended")) == 1
