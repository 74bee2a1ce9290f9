"""Plans: which recipe is taken, the hash, what plan.json holds; and that planning stays light."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.planning.site import HEAD, Site, stage
from tests.support.processes import cpu_seconds, python_starts

import trainforge
from trainforge.errors import ConfigError, IncompatibleError
from trainforge.planning import Plan, make_plan


@pytest.fixture
def recipe(site: Site, monkeypatch: pytest.MonkeyPatch) -> Path:
    site.standard()
    monkeypatch.chdir(site.folder)
    path = site.folder / "recipe.yaml"
    path.write_text("train: {steps: 2}\n")
    return path


def test_the_recipe_is_the_named_one_else_forge_yaml_else_the_quickstart(site: Site, recipe: Path):
    source = 'default=True, quickstart="quick_pack:start.yaml"'
    site.add("quick", {"fast": stage("data", source.replace("default=True, ", ""))}, folder="q")
    package = site.folder / "q" / "quick_pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "start.yaml").write_text("plugins: [slow]\nrun: {name: quick}\ntrain: {steps: 1}\n")
    site.add("slow", {"slow": stage("memory"), "other": stage("memory")}, folder="s")

    made = make_plan(plugins=["fast"], catalog=site.scan())
    assert (made.recipe.run.name, made.chosen["memory"].plugin, made.recipe.source) == ("quick", "slow", None)
    made = make_plan(
        plugins=["fast", "other"], catalog=site.scan()
    )  # the quickstart's plugins yield stage by stage
    assert made.chosen["memory"].plugin == "other"
    assert make_plan(plugins=["fast"], only=True, catalog=site.scan()).chosen["memory"].plugin == "d_memory"

    (site.folder / "forge.yaml").write_text("run: {name: house}\ntrain: {steps: 1}\n")
    assert make_plan(plugins=["fast"], catalog=site.scan()).recipe.run.name == "house"
    assert make_plan(recipe, catalog=site.scan()).recipe.run.name == "run"


def test_no_recipe_anywhere_is_explained(site: Site, recipe: Path):
    with pytest.raises(ConfigError, match="there is no recipe: give one"):
        make_plan(catalog=site.scan())


def test_the_hash_changes_with_versions_values_and_files_and_with_nothing_else(site: Site, recipe: Path):
    mine = site.folder / "mine.py"
    mine.write_text(HEAD + stage("comm"))

    def plan(**kwargs: object) -> Plan:
        return make_plan(recipe, catalog=site.scan(), **kwargs)  # type: ignore[arg-type]

    base = plan().hash
    assert plan().hash == base
    hashes = [base, plan(overrides=["run.seed=1"]).hash, plan(plugins=[str(mine)]).hash]
    elsewhere = site.folder / "another_host" / "mine.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text(mine.read_text())
    assert plan(plugins=[str(elsewhere)]).hash == hashes[2]
    mine.write_text(HEAD + stage("comm") + "# edited\n")
    hashes.append(plan(plugins=[str(mine)]).hash)
    metadata = next((site.folder / "site-packages").glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    hashes.append(plan().hash)
    assert len(set(hashes)) == len(hashes)


def test_plan_json_says_who_does_what(site: Site, recipe: Path):
    mine = site.folder / "mine.py"
    mine.write_text(HEAD + stage("comm"))
    made = make_plan(recipe, plugins=[str(mine)], catalog=site.scan())
    record = json.loads(json.dumps(made.as_dict()))
    assert record["stages"]["data"] == {
        **{"plugin": "d_data", "distribution": "standard", "version": "1.0", "how": "default"}
    }
    assert record["stages"]["comm"]["reference"] == str(mine)
    assert record["observers"][0]["plugin"] == "watcher"
    assert record["recipe"]["train"]["steps"] == 2
    assert record["hash"] == made.hash


def test_checks_are_made_for_world_and_device(site: Site, recipe: Path):
    site.add(
        "solo", {"solo": stage("comm", 'traits=Traits(max_world=1, devices=frozenset({"cuda"}))')}, folder="a"
    )

    def plan(**kwargs: object) -> Plan:
        return make_plan(recipe, plugins=["solo"], catalog=site.scan(), **kwargs)  # type: ignore[arg-type]

    made = plan()  # run.device is auto, so the device is not known yet
    with pytest.raises(IncompatibleError, match="this run is on cpu"):
        made.check("cpu", 1)
    made.check("cuda", 1)
    for kwargs in ({"world": 2}, {"device": "cpu"}, {"overrides": ["run.device=cpu"]}):
        with pytest.raises(IncompatibleError, match="solo"):
            plan(**kwargs)
    plan(overrides=["run.device=cuda:1"])


def test_events_of_a_plugin_without_provider_are_in_the_plan(site: Site, recipe: Path):
    mine = site.folder / "mine.py"
    mine.write_text(HEAD + "@hookimpl\ndef forge_step_ended(step): pass\n")
    ((name, module),) = make_plan(recipe, plugins=[str(mine)], catalog=site.scan()).listeners
    assert name == "mine"
    assert callable(module.forge_step_ended)  # type: ignore[attr-defined]


def test_plan_and_run_are_functions_of_the_package():
    assert trainforge.plan is make_plan
    assert callable(trainforge.run)
    with pytest.raises(AttributeError):
        trainforge.nothing  # noqa: B018


def test_planning_is_light_and_fast(site: Site, recipe: Path):
    """Within a second where Python itself starts in 15 ms."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {[str(site.folder / 'site-packages')]!r}\n"
        "from trainforge.discovery import scan\n"
        "from trainforge.planning import make_plan\n"
        f"make_plan({str(recipe)!r}, catalog=scan([sys.path[0]]))\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert cpu_seconds("-c", code)[0] < 66 * python_starts()
