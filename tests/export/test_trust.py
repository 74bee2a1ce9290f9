"""A run folder that came from somebody else: exporting, sampling and starting from it run no code that it names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.run.runs import MODEL, write_recipe

import trainforge
from trainforge.checkpoints import list_checkpoints, verify_checkpoint
from trainforge.context import SilentConsole
from trainforge.errors import UserError
from trainforge.exporting import export_run
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan
from trainforge.sampling import sample_run

MINE = """
from pathlib import Path
from trainforge.hookspecs import hookimpl
from trainforge_plugins import {plugin}

Path({mark!r}).touch()

@hookimpl
def forge_{stage}():
    return {plugin}.forge_{stage}()
"""
NETS = """
from pathlib import Path
Path({mark!r}).touch()
from tests.export.test_export import tied_toy as make
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once code has run."""
    return tmp_path / "code has run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert trainforge.run(write_recipe(folder, train={"steps": 1}), run_dir=folder / "run") == 0
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which somebody may have changed things; beside it is where the person is."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def changed(run_dir: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    change(recipe)
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def served_by(run_dir: Path, stage: str, plugin: str, file: Path, named: str) -> None:
    """Let recipe and plan say that a plugin file serves a stage."""

    def name_it(recipe: dict[str, Any]) -> None:
        recipe["plugins"] = [name for name in recipe["plugins"] if name != plugin] + [named]
        recipe["mine"] = recipe.pop(plugin, {})

    changed(run_dir, name_it)
    plan = json.loads((run_dir / "plan.json").read_text())
    record = {"plugin": "mine", "distribution": "local file", "version": "1", "reference": named}
    if stage == "observer":
        plan["observers"].append(record)
    else:
        plan["stages"][stage] = record
    (run_dir / "plan.json").write_text(json.dumps(plan))
    assert file.is_file()


def write_mine(folder: Path, mark: Path, stage: str, plugin: str) -> Path:
    (folder / "mine.py").write_text(MINE.format(plugin=plugin, stage=stage, mark=str(mark)))
    return folder / "mine.py"


def export(run_dir: Path, **options: Any) -> str:
    return export_run(run_dir, run_dir.parent / "out", SilentConsole(), force=True, **options)


def sample(run_dir: Path, **options: Any) -> str:
    return sample_run(run_dir, "the whale", SilentConsole(), tokens=3, **options).text


@pytest.mark.parametrize("relative", [False, True])
def test_a_plugin_file_that_may_have_come_along(run_dir: Path, mark: Path, relative: bool):
    file = write_mine(run_dir.parent if relative else run_dir, mark, "memory", "resident")
    served_by(run_dir, "memory", "resident", file, "./mine.py" if relative else str(file))
    expected = sample_run(
        run_dir.parent / "run", "the whale", SilentConsole(), tokens=3, trust_code=True
    ).text
    mark.unlink()
    export(run_dir)  # which needs no memory stage
    with pytest.raises(UserError, match=r"plugins: .*mine\.py.*allow it with --trust-code"):
        sample(run_dir)
    assert not mark.exists()
    assert sample(run_dir, trust_code=True) == expected
    assert mark.exists()


def test_a_plugin_file_that_only_observes_is_left_out(run_dir: Path, mark: Path):
    file = write_mine(run_dir, mark, "observer", "jsonl")
    served_by(run_dir, "observer", "jsonl", file, str(file))
    sample(run_dir)
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["no plan", "a plan of nobody", "others"])
def test_what_a_plugin_file_does_must_be_known(run_dir: Path, mark: Path, damage: str):
    file = write_mine(run_dir, mark, "observer", "jsonl")
    served_by(run_dir, "observer", "jsonl", file, str(file))
    plan = json.loads((run_dir / "plan.json").read_text())
    others = [record for record in plan["observers"] if "reference" in record]
    told = {"no plan": [], "a plan of nobody": {"stages": {}, "observers": [], "others": []}}
    (run_dir / "plan.json").write_text(json.dumps(told.get(damage, plan | {"others": others})))
    with pytest.raises(UserError, match="--trust-code"):
        export(run_dir)
    assert not mark.exists()


def test_a_plugin_file_elsewhere_on_this_machine_is_taken(run_dir: Path, mark: Path):
    (run_dir.parent / "elsewhere").mkdir()
    file = write_mine(run_dir.parent / "elsewhere", mark, "memory", "resident")
    served_by(run_dir, "memory", "resident", file, str(file))
    assert sample(run_dir)
    assert mark.exists()


def test_a_checkpoint_writer_is_never_found_by_a_relative_path(run_dir: Path, mark: Path):
    file = write_mine(run_dir.parent, mark, "checkpoint", "dcp")
    served_by(run_dir, "checkpoint", "dcp", file, "./mine.py")
    description = run_dir / "checkpoints/step-00000001/checkpoint.json"
    description.write_text(description.read_text().replace('"writer": "dcp"', '"writer": "mine"'))
    (info,) = list_checkpoints(run_dir / "checkpoints")
    with pytest.raises(UserError, match="no plugin is called mine"):
        verify_checkpoint(info)
    assert not mark.exists()


def test_a_function_that_makes_the_model(run_dir: Path, mark: Path):
    """It is imported by name, from the folder in which the person is too."""
    (run_dir.parent / "nets_of_somebody.py").write_text(NETS.format(mark=str(mark)))
    source = {"config": None, "factory": "nets_of_somebody:make"}
    changed(run_dir, lambda recipe: recipe["model"].update(source))
    for command in (export, sample):
        with pytest.raises(UserError, match=r"model\.factory: nets_of_somebody:make.*--trust-code"):
            command(run_dir)
    new = run_dir.parent / "new"
    recipe = write_recipe(new, model={"config": None, "init_from": str(run_dir)})
    with pytest.raises(UserError, match=r"add model\.factory: nets_of_somebody:make"):
        make_plan(recipe)
    recipe = write_recipe(new, model={"config": MODEL, "init_from": str(run_dir)})
    with pytest.raises(UserError, match=r"model\.factory: nets_of_somebody:make"):
        describe_model(make_plan(recipe))
    assert not mark.exists()


def test_code_of_a_model_folder(run_dir: Path):
    changed(run_dir, lambda recipe: recipe["model"].update(trust_remote_code=True))
    with pytest.raises(UserError, match=r"model\.trust_remote_code: true.*--trust-code"):
        export(run_dir)
    assert export(run_dir, trust_code=True)
