"""Recipes: what is read, what is refused, with line, dotted key, found value and the nearest valid key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.site import Site, stage

from trainforge.errors import ConfigError
from trainforge.planning import Plan, make_plan
from trainforge.recipe_file import dump_recipe, parse_recipe

CONFIG = """
from pydantic import Field, BaseModel
from trainforge.units import ByteCount
class Part(BaseModel):
    model_config = {"extra": "forbid"}
    every: int = 1
class Own(Section):
    gpu_budget: ByteCount = 0
    pin: bool = True
    level: int | None = None
    part: Part | None = None
    names: dict[str, int] = {}
"""


@pytest.fixture
def rich(site: Site) -> Site:
    model = "class M(Section):\n    width: int = 4\n    config: dict = {}\n" + stage("model", "config=M")
    site.standard().add(
        "own",
        {"own": CONFIG + stage("memory", "config=Own"), "spare": stage("comm"), "net": model},
        folder="a",
    )
    return site


def plan(site: Site, text: str, *overrides: str, **more: Any) -> Plan:
    recipe = site.folder / "recipe.yaml"
    recipe.write_text(text)
    return make_plan(recipe, overrides=overrides, catalog=site.scan(), **more)


def refusal(site: Site, text: str, *overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(site, text, *overrides, **more)
    return str(caught.value)


def test_a_recipe_is_validated_by_core_and_the_chosen_plugins(rich: Site):
    made = plan(
        rich,
        "plugins: [own, net]\nrun: {name: a}\nmodel: {width: 8}\ntrain: {steps: 3, lr: 1e-2}\n"
        "own: {gpu_budget: 2KiB}\n",
    )
    recipe = made.recipe
    assert (recipe.run.name, recipe.train.lr, recipe.model.width) == ("a", 0.01, 8)
    assert made.chosen["memory"].config.gpu_budget == 2048
    assert made.chosen["model"].config is recipe.model
    assert made.chosen["data"].config is recipe.sections["d_data"]
    assert recipe.source == rich.folder / "recipe.yaml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {steps: 1\n", "line 2: not YAML"),
        ("a: 1\n\tb: 2\n", "line 2: not YAML"),
        ("- a\n- b\n", "holds a list; it must be a mapping"),
        ("just words", "holds plain text"),
        ("", "is empty"),
        ("train: {steps: 1}\nrun: {}\ntrain: {steps: 2}\n", "line 3: train is given twice (first in line 1)"),
        ("train:\n  steps: 1\n  steps: 2\n", "line 3: steps is given twice (first in line 2)"),
        ("1: 2\n", "the key 1 must be text"),
        ("a: !!python/object:os.system x\n", "not YAML"),
        ("plugins: {a: 1}\n", "plugins: must be a list"),
        ("train: [1]\n", "train: must be a mapping of keys, not [1]"),
        ("run: {}\n", "train: say how long to train"),
    ],
)
def test_what_is_no_recipe(rich: Site, text: str, says: str):
    assert says in refusal(rich, text)


def test_files_that_cannot_be_read(rich: Site, tmp_path: Path):
    for path, says in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=says):
            make_plan(path, catalog=rich.scan())
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match="not UTF-8"):
        make_plan(tmp_path / "bytes.yaml", catalog=rich.scan())


def test_all_mistakes_are_told_at_once(rich: Site):
    text = refusal(
        rich,
        "plugins: [own]\nrun: {sed: 1}\ntrain: {steps: many, lrr: 0.1, micro_batch: small, "
        "save_every: often, mtbf: never}\n"
        "own: {gpu_budjet: 1, level: x, pin: 7, part: {evry: 2}, names: {a: b}}\n"
        "chekpoint: {every: 3}\nmodel: {w: 1}\n",
    )
    for line in (
        "run.sed: unknown key, found 1: did you mean run.seed?",
        "train.steps: must be a valid integer",
        "found 'many'",
        "train.lrr: unknown key, found 0.1: did you mean train.lr?",
        "train.micro_batch: must be a valid integer or 'auto', found 'small'",
        "train.save_every: must be a number of steps, a duration such as 10min, or auto, found 'often'",
        "train.mtbf: must be a duration such as 30s, 10min or 1.5h, found 'never'",
        "own.gpu_budjet: unknown key, found 1: did you mean own.gpu_budget?",
        "own.level: must be a valid integer",
        "own.pin: must be true or false, found 7",
        "own.part.evry: unknown key, found 2: did you mean own.part.every?",
        "own.names.a: must be a valid integer",
        "chekpoint: there is no section chekpoint",
        "model.w: unknown key",
    ):
        assert line in text, text


def test_sections_of_plugins_that_are_not_chosen(rich: Site):
    text = "train: {steps: 1}\nown: {no_such_key: 1}\nspare: {x: 1}\n"
    made = plan(rich, text)  # installed: left alone, whatever they hold
    assert "own" not in made.recipe.effective()
    said = refusal(rich, text, "own.pin=false", "spare.x=2")
    assert "own.pin: the plugin own is not chosen in this run" in said
    assert "spare.x: the plugin spare is not chosen" in said
    assert "own.no_such_key: unknown key" in refusal(rich, text, plugins=["own"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("own.pinn=false", "own.pinn: unknown key, found False: did you mean own.pin?"),
        ("onw.pin=false", "onw.pin: there is no section onw and no plugin of that name: did you mean own?"),
        ("pin=false", "must look like section.key=value"),
        ("train.lr", "must look like section.key=value"),
        ("train..lr=1", "must look like section.key=value"),
        ("plugins=[a]", "plugins are chosen with --plugins"),
        ("train.lr=[", "the value is not YAML"),
        ("train.lr.x=1", "what holds x is no mapping but a number"),
        ("net.width=1", "net is the model plugin; its configuration is the section model"),
    ],
)
def test_wrong_overrides(rich: Site, override: str, says: str):
    text = "plugins: [own, net]\ntrain: {steps: 1, lr: 0.1}\n"
    assert says in refusal(rich, text, override)


@pytest.mark.parametrize(
    "override",
    [
        *(
            "own.level=true",
            "own.gpu_budget=true",
            "train.steps=true",
            "train.lr=false",
            "train.betas=[true, 0.9]",
        ),
        *("train.save_every=true", "train.micro_batch=true", "run.seed=false", "run.devices=[true]"),
    ],
)
def test_true_is_no_number(rich: Site, override: str):
    key = override.partition("=")[0]
    said = refusal(rich, "plugins: [own]\ntrain: {steps: 1}\n", override)
    assert f"{key}: must be a number and not true or false, found " in said


def test_true_is_taken_where_it_may_stand(rich: Site):
    plan(
        rich,
        "plugins: [own, net]\nmodel: {config: {a: true}}\ntrain: {steps: 1, compile: true}\nown: {pin: false}\n",
    )


def test_overrides_win_in_order_and_reach_into_mappings(rich: Site):
    made = plan(
        rich,
        "plugins: [own, net]\nmodel: {config: {a: 1}}\ntrain: {steps: 1}\nown: {pin: true}\n",
        "own.pin=false",
        "train.steps=5",
        "train.steps=6",
        "model.config.b=1e-6",
        "own.names.k=3",
        "train.clip=null",
    )
    assert made.chosen["memory"].config.pin is False
    assert made.recipe.train.steps == 6
    assert made.recipe.train.clip is None
    assert made.recipe.model.config == {"a": 1, "b": 1e-6}
    assert made.chosen["memory"].config.names == {"k": 3}


def test_the_effective_recipe_holds_every_value_and_is_a_recipe(rich: Site):
    first = plan(rich, "plugins: [own]\ntrain: {steps: 1}\nown: {gpu_budget: 1KiB}\nspare: {}\n")
    effective = first.recipe.effective()
    assert effective["own"]["gpu_budget"] == 1024
    assert effective["train"]["eps"] == 1e-8
    again = plan(rich, dump_recipe(effective))
    assert again.recipe.effective() == effective


def test_plain_values_are_those_of_yaml_1_2():
    text = "a: 1e-6\nb: no\nc: 2024-01-01\nd: 010\ne: 0x1F\nf: .5\ng: ~\nh: true\n"
    text += "i: 10:30\nj: on\nk:\nl: -3\nm: 1_000\n"
    assert parse_recipe(text, "x") == {
        **{"a": 1e-6, "b": "no", "c": "2024-01-01", "d": 10.0, "e": 31, "f": 0.5, "g": None, "h": True},
        **{"i": "10:30", "j": "on", "k": None, "l": -3, "m": 1000},
    }


TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=6)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
AWKWARD = st.sampled_from(
    ["1e-6", "no", "true", "null", "~", "1_0", "0x1", "2024-01-01", "- a", "a: b", "", " ", "<<"]
)
VALUES = st.recursive(
    PLAIN | AWKWARD, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)


@settings(deadline=None)
@given(st.dictionaries(TEXT.filter(lambda key: key != "<<"), VALUES, min_size=1, max_size=4))
def test_what_is_dumped_is_read_back(recipe: dict[str, Any]):
    assert parse_recipe(dump_recipe(recipe), "x") == recipe
