"""Hook implementations that would never be called, or not as meant, are refused before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.site import HEAD, Site, stage

from trainforge.errors import SelectionError
from trainforge.provider import Provider
from trainforge.selection import select

GOOD = stage("data")


def refusal(site: Site, source: str) -> str:
    site.standard()
    file = site.folder / "mine.py"
    file.write_text(HEAD + source)
    with pytest.raises(SelectionError) as caught:
        select(site.scan(), command_line=[str(file)])
    text = str(caught.value)
    assert "mine" in text
    assert str(file) in text
    return text


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("@hookimpl\ndef forge_memry():\n    pass\n", ["no hook forge_memry", "did you mean forge_memory?"]),
        (
            "@hookimpl\ndef training_began(run):\n    pass\n",
            ["no hook training_began", "hooks: forge_checkpoint"],
        ),
        (
            "@hookimpl\ndef forge_step_ended(run, stp):\n    pass\n",
            [
                "forge_step_ended",
                "unknown argument stp",
                "did you mean step?",
                "allowed arguments: run, step",
            ],
        ),
        (
            "@hookimpl\ndef forge_data(config):\n    pass\n",
            ["unknown argument config", "allowed arguments: none"],
        ),
        ("@hookimpl\ndef forge_step_ended(step=0):\n    pass\n", ["step must not have a default value"]),
        ("@hookimpl\ndef forge_step_ended(**all):\n    pass\n", ["argument all must be a plain named one"]),
        ("def forge_comm():\n    pass\n", ["forge_comm lacks @hookimpl"]),
        ("@hookimpl(specname='forge_comn')\ndef mine():\n    pass\n", ["no hook forge_comn", "forge_comm?"]),
    ],
)
def test_wrong_hooks_are_refused(site: Site, source: str, parts: list[str]):
    text = refusal(site, GOOD + source)
    for part in parts:
        assert part in text


def test_all_problems_are_told_at_once_with_their_lines(site: Site):
    source = (
        GOOD + "@hookimpl\ndef forge_dta():\n    pass\n@hookimpl\ndef forge_step_ended(stap):\n    pass\n"
    )
    text = refusal(site, source)
    for name in ("forge_dta", "forge_step_ended"):
        line = next(n for n, code in enumerate((HEAD + source).splitlines(), 1) if f"def {name}" in code)
        assert f"mine.py:{line - 1}: {name}" in text  # a decorated function begins with its decorator


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return None", "must return a Provider, not NoneType"),
        ("return 3", "must return a Provider, not int"),
        ("raise ValueError('oops')", "failed in forge_data: ValueError: oops"),
        ("import no_such_library_xyz", "pip install no_such_library_xyz"),
    ],
)
def test_a_hook_that_fails_names_its_plugin(site: Site, body: str, says: str):
    assert says in refusal(site, f"@hookimpl\ndef forge_data():\n    {body}\n")


def test_an_imported_spec_and_a_class_instance_are_no_mistake(site: Site):
    site.standard()
    source = "from trainforge.hookspecs import forge_comm\n" + GOOD
    source += "class Other:\n    @hookimpl\n    def forge_step_ended(self, run, step): pass\n"
    (site.folder / "mine.py").write_text(HEAD + source)
    assert select(site.scan(), command_line=[str(site.folder / "mine.py")]).stages["data"].plugin == "mine"


def test_a_wrapper_changes_anothers_provider_and_is_no_owner(site: Site):
    site.standard().add(
        "wrap",
        {
            "wide": """
                from dataclasses import replace
                @hookimpl(wrapper=True)
                def forge_comm():
                    given = yield
                    return replace(given, traits=Traits(max_world=7))
            """
        },
        folder="a",
    )
    selection = select(site.scan(), command_line=["wide"])
    comm = selection.stages["comm"]
    assert (comm.plugin, comm.provider.traits.max_world) == ("d_comm", 7)
    assert [source.name for source in selection.wrappers] == ["wide"]
    assert "wide" in selection.sources()
    plain = select(site.scan()).stages["comm"].provider
    assert isinstance(plain, Provider)
    assert plain.traits == replace(plain, quickstart=None).traits
    assert plain.traits.max_world is None


def test_a_plugin_may_be_an_instance_but_not_a_class(site: Site):
    site.standard()
    where = site.add(
        "objects",
        {
            "alpha": "class Alpha:\n    @hookimpl\n    def forge_data(self):\n"
            "        return Provider(build=build)\nalpha = Alpha()\n"
        },
        folder="a",
    )
    points = where / "objects-1.0.dist-info" / "entry_points.txt"
    points.write_text("[trainforge.plugins]\nalpha = objects_alpha:alpha\nwrong = objects_alpha:Alpha\n")
    assert select(site.scan(), command_line=["alpha"]).stages["data"].plugin == "alpha"
    with pytest.raises(SelectionError, match="is a class: give a module or an instance"):
        select(site.scan(), command_line=["wrong"])
