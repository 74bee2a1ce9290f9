"""Who serves a stage: command line over recipe over default, stage by stage."""

from __future__ import annotations

import itertools

import pytest
from tests.planning.site import Site, stage

from trainforge.errors import SelectionError
from trainforge.provider import STAGES
from trainforge.selection import Selection, select, split_names


@pytest.fixture
def full(site: Site) -> Site:
    site.standard().add(
        "more",
        {
            "m1": stage("memory"),
            "m2": stage("memory"),
            "c1": stage("comm"),
            "both": stage("memory") + stage("comm"),
            "eye": stage("observer"),
            "ear": "@hookimpl\ndef forge_step_ended(step): pass\n",
        },
        folder="a",
    )
    return site


def names(selection: Selection) -> dict[str, tuple[str, str]]:
    return {name: (chosen.plugin, chosen.how) for name, chosen in selection.stages.items()}


def test_without_a_wish_every_stage_has_its_default(full: Site):
    selection = select(full.scan())
    assert names(selection) == {name: (f"d_{name}", "default") for name in STAGES}
    assert [(o.plugin, o.how) for o in selection.observers] == [("watcher", "default")]


def test_the_command_line_wins_stage_by_stage(full: Site):
    chosen = names(select(full.scan(), recipe=["m1", "c1"], command_line=["m2"]))
    assert chosen["memory"] == ("m2", "command line")
    assert chosen["comm"] == ("c1", "recipe")
    assert chosen["data"] == ("d_data", "default")


def test_a_plugin_named_by_both_counts_as_of_the_command_line(full: Site):
    assert names(select(full.scan(), recipe=["m1", "m2"], command_line=["m1"]))["memory"] == (
        "m1",
        "command line",
    )


def test_the_order_of_names_does_not_matter(full: Site):
    results = {
        str(names(select(full.scan(), command_line=list(order))))
        for order in itertools.permutations(["m1", "c1", "eye"])
    }
    assert len(results) == 1


@pytest.mark.parametrize("how", ["recipe", "command_line"])
def test_two_owners_are_refused_with_the_flag_that_settles_it(full: Site, how: str):
    with pytest.raises(SelectionError) as caught:
        select(full.scan(), **{how: ["m1", "both"]})
    text = str(caught.value)
    for part in ("m1 of more 1.0", "both of more 1.0", "--stage memory=m1", "--stage memory=both"):
        assert part in text
    settled = names(select(full.scan(), **{how: ["m1", "both"]}, stages={"memory": "m1"}))
    assert settled["memory"] == ("m1", "command line")
    assert settled["comm"][0] == "both"


def test_settling_a_stage_loads_the_plugin_it_names(full: Site):
    assert names(select(full.scan(), stages={"comm": "c1"}))["comm"] == ("c1", "command line")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ({"com": "c1"}, "there is no stage com: did you mean comm?"),
        ({"data": "c1"}, "does not serve data"),
        ({"comm": "c2"}, "no plugin is called c2"),
    ],
)
def test_settling_wrongly_is_explained(full: Site, stages: dict[str, str], says: str):
    with pytest.raises(SelectionError, match=says):
        select(full.scan(), stages=stages)


def test_observers_come_in_order_and_can_be_left_out(full: Site):
    def observers(**kwargs: list[str]) -> list[str]:
        return [o.plugin for o in select(full.scan(), **kwargs).observers]

    assert observers(command_line=["eye"]) == ["watcher", "eye"]
    assert observers(command_line=["eye", "watcher"]) == ["eye", "watcher"]
    assert observers(command_line=["eye"], without=["watcher"]) == ["eye"]
    assert observers(recipe=["eye"], without=["eye", "watcher"]) == []
    with pytest.raises(SelectionError, match="did you mean watcher"):
        observers(without=["wacher"])
    with pytest.raises(SelectionError, match="no observer of this run"):
        observers(without=["d_data"])


def test_a_plugin_of_events_alone_is_a_listener(full: Site):
    selection = select(full.scan(), command_line=["ear"])
    assert [plugin.name for plugin in selection.listeners] == ["ear"]
    assert "ear" not in [o.plugin for o in selection.observers]


def test_a_recipes_plugin_that_lost_its_stage_takes_no_part(full: Site):
    selection = select(full.scan(), recipe=["m1"], command_line=["m2"])
    assert "m1" not in selection.sources()
    assert "m1" not in selection.sections()


def test_two_defaults_of_a_stage_matter_only_when_it_is_open(full: Site):
    full.add("rival", {"r": stage("comm", "default=True")}, defaults=["comm=r"], folder="b")
    with pytest.raises(SelectionError) as caught:
        select(full.scan())
    for part in ("d_comm of standard", "r of rival", "--stage comm=d_comm", "--stage comm=r"):
        assert part in str(caught.value)
    assert names(select(full.scan(), command_line=["c1"]))["comm"][0] == "c1"
    assert names(select(full.scan(), stages={"comm": "r"}))["comm"] == ("r", "command line")


def test_a_default_must_say_so_itself(site: Site):
    site.standard()
    (site.folder / "site-packages" / "standard_d_comm.py").write_text(
        (site.folder / "site-packages" / "standard_d_comm.py").read_text().replace("default=True", "")
    )
    with pytest.raises(SelectionError, match=r"d_comm.*does not say default=True"):
        select(site.scan())


def test_no_default_installed_says_how_to_get_one(site: Site):
    with pytest.raises(
        SelectionError, match="nothing installed serves the stage model by default: pip install"
    ):
        select(site.scan())


def test_a_broken_default_observer_is_left_out_with_a_note(site: Site):
    site.standard()
    (site.folder / "site-packages" / "standard_watcher.py").write_text("import no_such_library_xyz")
    selection = select(site.scan())
    assert selection.observers == ()
    assert "watcher" in selection.notes[0]
    assert "no_such_library_xyz" in selection.notes[0]


def test_one_plugin_has_one_section(site: Site):
    site.standard().add(
        "odd",
        {
            "odd": "class A(Section): x: int = 1\nclass B(Section): y: int = 1\n"
            + stage("data", "config=A")
            + stage("comm", "config=B")
        },
        folder="a",
    )
    with pytest.raises(SelectionError, match="different configurations for data and comm"):
        select(site.scan(), command_line=["odd"])


def test_names_may_be_joined_repeated_and_padded():
    assert split_names(["a,b", " c ", "a", ",,b"]) == ["a", "b", "c"]
