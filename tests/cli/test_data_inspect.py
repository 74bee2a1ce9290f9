"""`forge data inspect`: what a run would train on, and each row that it would not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from tests.run.runs import MODEL

from trainforge.cli import main

ROWS = [
    {"instruction": "Say hi.", "output": "hi"},
    {"instruction": "Say it twice.", "input": "yes", "output": "yes yes"},
    {"instruction": "No output."},
    {"instruction": "Null.", "output": None},
    {"instruction": "Empty.", "output": ""},
    {"instruction": "An object.", "output": {"a": 1}},
    {"instruction": "Half.", "output": "\ud83d"},
    {"instruction": "Too long.", "output": "x" * 500},
    [1, 2],
    "not JSON,",
]


def forge(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["data", *arguments], prog_name="forge")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINFORGE_CACHE", str(tmp_path / "cache"))
    lines = [row if isinstance(row, str) else json.dumps(row) for row in ROWS]
    Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))
    sections = {
        "run": {"device": "cpu"},
        "model": {"config": MODEL},
        "train": {"steps": 1},
        "text": {"path": "rows.jsonl", "max_len": 64, "validation": None, "cache": "cache"},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(sections))
    return "recipe.yaml"


def test_lengths_rows_and_every_reason(recipe: str):
    result = forge("inspect", recipe, "--rows", "2")
    assert result.exit_code == 0, result.output
    shown = result.output
    assert "tokens per document: least " in shown
    assert "### User:\nSay hi.\n\n### Assistant:\n[[hi<end>]]" in shown
    assert "Say it twice.\nyes\n\n### Assistant:\n[[yes yes<end>]]" in shown
    assert "rows: 10 seen, 2 used, 0 cut, 8 skipped" in shown
    for number in range(3, 11):
        assert f"rows.jsonl:{number}" in shown


def test_the_recipe_may_come_after_the_options(recipe: str):
    result = forge("inspect", "--rows", "0", "--set", "text.train_on=all", recipe)
    assert result.exit_code == 0, result.output
    assert "train_on: all" in result.output
    assert "### User" not in result.output


def test_no_usable_row_ends_with_2(recipe: str):
    result = forge("inspect", recipe, "--set", "text.max_len=4")
    assert result.exit_code == 2
    assert "set text.max_len to at least" in result.output


def test_tools_are_listed_and_unknown_ones_refused(recipe: str):
    assert "inspect" in forge("--help").output
    assert forge("inspct", recipe).exit_code == 2
