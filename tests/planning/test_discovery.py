"""Finding plugins: each once, clashes refused, failures explained; and nothing imported that was not asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.planning.site import HEAD, Site, stage

from trainforge.discovery import load_provider, scan
from trainforge.errors import SelectionError
from trainforge.selection import select


def path_of(site: Site) -> list[str]:
    return [entry for entry in sys.path if entry.startswith(str(site.folder))]


def test_the_same_distribution_found_again_counts_once(site: Site):
    where = site.add("one", {"alpha": stage("data")})
    link = site.folder / "lib64"
    link.symlink_to(where, target_is_directory=True)
    site.on_path(link)
    # an editable install beside its source tree: another folder, the same distribution
    site.add("one", {"alpha": stage("data")}, folder="source", version="1.1")
    catalog = scan([*path_of(site), str(where), f"{where}/"])
    assert len(catalog.plugins["alpha"]) == 1
    assert catalog.find("alpha").version == "1.1"  # the first on the path, as for imports


def test_distribution_names_are_compared_normalised(site: Site):
    site.add("My.Dist", {"alpha": stage("data")})
    site.add("my-dist", {"alpha": stage("data")}, folder="other")
    assert len(site.scan().plugins["alpha"]) == 1


def test_two_distributions_of_one_name_are_refused_when_it_is_chosen(site: Site):
    site.standard()
    first = site.add("one", {"alpha": stage("data"), "other": stage("comm")}, folder="a")
    second = site.add("two", {"alpha": stage("data")}, folder="b")
    catalog = site.scan()
    select(catalog, command_line=["other"])  # nobody asked for alpha
    with pytest.raises(SelectionError, match="two distributions claim") as caught:
        select(catalog, command_line=["alpha"])
    for part in ("one 1.0", "two 1.0", str(first), str(second)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("alhpa", "did you mean alpha?"),
        ("zzzz", "Installed: alpha, d_checkpoint"),
        ("train", "section of every recipe"),
    ],
)
def test_an_unknown_name_says_what_there_is(site: Site, asked: str, says: str):
    site.standard().add("one", {"alpha": stage("data")}, folder="a")
    with pytest.raises(SelectionError) as caught:
        select(site.scan(), command_line=[asked])
    assert says in str(caught.value)


def test_a_plugin_that_cannot_load_is_fatal_only_when_asked_for(site: Site):
    site.standard().add(
        "heavy",
        {"broken": "import no_such_library_xyz\n" + stage("data")},
        folder="a",
        requires="Provides-Extra: gpu\nRequires-Dist: no-such-library-xyz; extra == 'gpu'\n",
    )
    catalog = site.scan()
    assert select(catalog).stages["data"].plugin == "d_data"
    with pytest.raises(SelectionError) as caught:
        select(catalog, command_line=["broken"])
    text = str(caught.value)
    assert "broken of heavy 1.0" in text
    assert "No module named 'no_such_library_xyz'" in text
    assert 'pip install "heavy[gpu]"' in text


def test_only_chosen_plugins_and_defaults_of_open_stages_are_imported(site: Site):
    site.standard().add("one", {"alpha": stage("data"), "beta": stage("comm")}, folder="a")
    select(site.scan(), command_line=["alpha"])
    assert "one_alpha" in site.imported()
    assert not {"one_beta", "standard_d_data"} & site.imported()


def test_a_local_file_is_registered_once_however_it_is_given(site: Site, monkeypatch: pytest.MonkeyPatch):
    site.standard()
    file = site.folder / "mine.py"
    file.write_text(HEAD + "calls = []\n" + stage("data").replace("return", "calls.append(1)\n    return"))
    (site.folder / "again.py").symlink_to(file)
    monkeypatch.chdir(site.folder)
    chosen = select(site.scan(), command_line=["./mine.py", str(file), "again.py"]).stages["data"]
    assert (chosen.plugin, chosen.distribution, chosen.how) == ("mine", "local file", "command line")
    (module,) = [module for name, module in sys.modules.items() if name.startswith("trainforge_local_mine")]
    assert module.calls == [1]


def test_a_local_file_named_like_another_chosen_plugin_is_refused(site: Site):
    site.standard()
    file = site.folder / "d_comm.py"
    file.write_text(HEAD + stage("data"))
    with pytest.raises(SelectionError, match="two plugins are called d_comm"):
        select(site.scan(), command_line=[str(file)])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.py", None, "cannot be read: No such file"),
        ("bad.py", "def (", "SyntaxError"),
        ("run.py", "", "section of every recipe; rename"),
        ("no-hook.py", "x = 1", "implements no hook"),
        ("1.py", "", "must be a Python file whose name"),
        ("boom.py", "raise RuntimeError('no luck')", "RuntimeError: no luck"),
    ],
)
def test_a_bad_local_file_is_explained(site: Site, tmp_path: Path, name: str, content: str | None, says: str):
    site.standard()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SelectionError) as caught:
        select(site.scan(), command_line=[str(tmp_path / name)])
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_load_provider_gives_one_plugins_provider_apart_from_a_run(site: Site):
    site.add("one", {"alpha": stage("checkpoint", "default=True")})
    assert load_provider("alpha", "checkpoint").default
    with pytest.raises(SelectionError, match="does not serve the stage data"):
        load_provider("alpha", "data")
