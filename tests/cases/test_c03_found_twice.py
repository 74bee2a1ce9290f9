"""C03: a plugin that is found or named several times takes part once; two of one name are refused with both places."""

import sys

import pytest
from tests.run.runs import run, write_recipe

import trainforge
from trainforge.errors import SelectionError

SOURCE = """
from trainforge.hookspecs import hookimpl

@hookimpl
def forge_step_ended(run, step):
    with open({log!r}, "a") as file:
        file.write(f"{{step}} ")
"""


@pytest.fixture(autouse=True)
def forget_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("counting", "trainforge_local")):
            del sys.modules[name]


def install(folder, distribution, log):
    """A distribution with the plugin `counting`, as pip would leave it."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trainforge.plugins]\ncounting = counting_plugin\n")
    (folder / "counting_plugin.py").write_text(SOURCE.format(log=str(log)))
    return folder


def test_a_symlinked_folder_and_a_source_tree_count_once(tmp_path, monkeypatch):
    log = tmp_path / "steps"
    site = install(tmp_path / "lib", "counting", log)
    (tmp_path / "lib64").symlink_to(site, target_is_directory=True)
    # an editable install, run from its source folder: the same distribution is found there as well
    source = install(tmp_path / "source", "Counting", log)
    for folder in (source, tmp_path / "lib64", site, tmp_path / "lib/../lib"):
        monkeypatch.syspath_prepend(str(folder))
    recipe = write_recipe(tmp_path, train={"steps": 3})
    outcome = run(recipe, tmp_path / "run", plugins=["counting,counting", "counting"])
    assert outcome.code == 0
    assert log.read_text() == "1 2 3 "


def test_a_file_given_by_several_names_counts_once(tmp_path, monkeypatch):
    log = tmp_path / "steps"
    (tmp_path / "mine.py").write_text(SOURCE.format(log=str(log)))
    (tmp_path / "link.py").symlink_to(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, train={"steps": 2})
    names = ["./mine.py", "./mine.py,link.py", str(tmp_path / "mine.py")]
    assert run(recipe, tmp_path / "run", plugins=names).code == 0
    assert log.read_text() == "1 2 "


def test_named_in_the_recipe_and_on_the_command_line_counts_once(tmp_path):
    log = tmp_path / "steps"
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.format(log=str(log)))
    recipe = write_recipe(tmp_path, train={"steps": 2})
    recipe.write_text(f"plugins: [{file}]\n{recipe.read_text()}")
    assert run(recipe, tmp_path / "run", plugins=[str(file)]).code == 0
    assert log.read_text() == "1 2 "


def test_two_providers_of_one_name_are_refused_with_both_paths(tmp_path, monkeypatch):
    one = install(tmp_path / "one", "first", tmp_path / "log")
    other = install(tmp_path / "other", "second", tmp_path / "log")
    for folder in (one, other):
        monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(SelectionError, match="counting") as caught:
        trainforge.run(write_recipe(tmp_path), run_dir=tmp_path / "run", plugins=["counting"])
    for part in ("first", "second", str(one), str(other)):
        assert part in str(caught.value)
    # nobody asked for it: then it disturbs nobody
    assert run(write_recipe(tmp_path, train={"steps": 1}), tmp_path / "run").code == 0
