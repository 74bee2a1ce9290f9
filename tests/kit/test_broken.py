"""The kit rejects a broken plugin for every rule, with a message that says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.kit import broken

from trainforge import testing
from trainforge.errors import TrainForgeError
from trainforge.testing import PluginConformance

STAGES = ("model", "data", "memory", "comm", "optimizer", "checkpoint", "observer")


def rules(conformance: type) -> set[str]:
    return {name for name in dir(conformance) if name.startswith("test_")}


def conformance(stage: str) -> Any:
    return getattr(testing, f"{stage.title()}Conformance")


@pytest.mark.parametrize(("stage", "name", "rule", "message"), broken.CASES, ids=lambda value: str(value))
def test_a_broken_plugin_is_rejected(tmp_path: Path, stage: str, name: str, rule: str, message: str):
    kind = conformance(stage)
    facts = {"plugin": f"tests.kit.broken:{name}", **broken.FACTS.get(stage, {})}
    suite = type(f"Test{name}", (kind,), facts)()
    expected = (AssertionError, TrainForgeError) if message else Exception  # core may notice first
    with pytest.raises(expected, match="|".join(map(re.escape, message.split("|")))):
        getattr(suite, rule)(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_every_rule_has_a_broken_plugin(stage: str):
    own = rules(conformance(stage)) - rules(PluginConformance)
    assert own == {rule for case_stage, _, rule, _ in broken.CASES if case_stage == stage}


GOOD = """
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section

class Mine(Section):
    pass

def build(ctx, config):
    pass

@hookimpl
def forge_optimizer():
    return Provider(build=build, config=Mine)
"""

FILES = [
    ("test_importing_it_is_light", "import torch\n" + GOOD, "loads torch"),
    (
        "test_its_hooks_are_right",
        GOOD + "@hookimpl\ndef forge_optimiser(): pass\n",
        "there is no hook forge_optimiser",
    ),
    ("test_its_hooks_are_right", GOOD.replace("optimizer()", "optimizer(train)"), "unknown argument train"),
    (
        "test_its_hooks_are_right",
        GOOD + "@hookimpl\ndef forge_step_ended(run, step=1): pass\n",
        "must not have a default value",
    ),
    ("test_its_hooks_are_right", GOOD.replace("@hookimpl", ""), "lacks @hookimpl"),
    (
        "test_a_provider_is_a_value",
        GOOD.replace("build=build", "build=lambda c, s: 0"),
        "module-level functions",
    ),
    ("test_a_provider_is_a_value", GOOD.replace("build(ctx, config)", "build(ctx)"), "build must take"),
    (
        "test_a_provider_is_a_value",
        GOOD.replace("config=Mine", "config=Mine, tokenizer=print_it") + "def print_it(ctx):\n    pass\n",
        "tokenizer must take",
    ),
    (
        "test_a_provider_is_a_value",
        GOOD.replace("config=Mine", "quickstart='trainforge:no.yaml'"),
        "no quickstart",
    ),
    ("test_a_provider_is_a_value", GOOD.replace("return Provider", "return dict"), "must return a Provider"),
    (
        "test_its_section_is_strict",
        GOOD.replace("    pass\n\ndef", "    model_config = {'extra': 'ignore'}\n\ndef"),
        "accepts unknown keys",
    ),
    (
        "test_its_section_is_strict",
        GOOD.replace("    pass\n\ndef", "    model_config = {'frozen': False}\n\ndef"),
        "must stay frozen",
    ),
    (
        "test_its_section_is_strict",
        GOOD.replace("    pass\n\ndef", "    power: float = 2.0\n\ndef"),
        "needs a description",
    ),
]


@pytest.mark.parametrize(("rule", "source", "message"), FILES, ids=[f"{r}-{m}" for r, _, m in FILES])
def test_a_broken_file_is_rejected(tmp_path: Path, rule: str, source: str, message: str):
    file = tmp_path / "mine.py"
    file.write_text(source)
    suite = type("TestMine", (PluginConformance,), {"plugin": file})()
    with pytest.raises(AssertionError, match=message):
        getattr(suite, rule)(tmp_path)


def test_every_rule_for_any_plugin_has_a_broken_file():
    assert rules(PluginConformance) == {rule for rule, _, _ in FILES}


def test_the_good_file_passes(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    suite = type("TestMine", (PluginConformance,), {"plugin": file})()
    for rule in sorted(rules(PluginConformance)):
        getattr(suite, rule)(tmp_path)
