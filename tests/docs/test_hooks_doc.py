"""Every hook is documented with its exact signature and has a test (the idea is Datasette's)."""

import inspect
import re
from pathlib import Path

import pytest

from trainforge import hookspecs

ROOT = Path(__file__).parents[2]
HOOKS = {name: function for name, function in vars(hookspecs).items() if name.startswith("forge_")}


def signature(name):
    return f"{name}({', '.join(inspect.signature(HOOKS[name]).parameters)})"


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_a_heading_of_hooks_md_with_its_exact_signature(name):
    headings = re.findall(r"^### `(.+)`$", (ROOT / "docs/hooks.md").read_text(), re.MULTILINE)
    assert signature(name) in headings


def test_no_heading_of_hooks_md_names_a_hook_that_does_not_exist():
    headings = re.findall(r"^### `(\w+)\(.*`$", (ROOT / "docs/hooks.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_what_it_is_for(name):
    assert inspect.getdoc(HOOKS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_test(name):
    tests = (ROOT / "tests/planning/test_each_hook.py").read_text()
    assert re.search(rf"def test_{name}\b", tests), f"write test_{name} in tests/planning/test_each_hook.py"
