"""`forge data inspect`: what a run would train on, and each row that it would not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tests.run.runs import MODEL

from trainforge.cli import main

SURROGATE = json.dumps({"instruction": "Half.", "output": "\ud83d"}).encode()
LATIN = '{"instruction": "Grüße?", "output": "x"}'.encode("latin-1")

GOOD = [
    {"instruction": "Say hi.", "output": "hi"},
    {"instruction": "Say it twice.", "input": "yes", "output": "yes yes"},
]


def chat(*turns: tuple[str, str]) -> dict[str, list[dict[str, str]]]:
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


BAD: list[tuple[Any, str, str]] = [  # row, reason, detail
    ({"instruction": "No output."}, "no column 'output'", ""),
    ({"instruction": "Null.", "output": None}, "'output' is null", ""),
    ({"instruction": "Empty.", "output": " "}, "'output' is empty", ""),
    ({"instruction": "An object.", "output": {"a": 1}}, "'output' is not text", "it is an object"),
    ({"conversations": "a, b"}, "'conversations' is text that is not JSON", ""),
    (chat(("human", "a"), ("narrator", "b")), "a role that is not known", "turn 2, 'narrator'"),
    (chat(("human", "a"), ("gpt", "b"), ("system", "c")), "a system turn that is not the first", ""),
    (chat(("gpt", "a")), "an answer without a question", ""),
    (chat(("human", "a")), "no assistant turn", ""),
    (SURROGATE, "half of a surrogate pair", "\\ud83d at character 1"),
    (LATIN, "not UTF-8", "byte 0xfc at offset "),
    ({"instruction": "Too long.", "output": "x" * 500}, "longer than text.max_len", "needs 539 tokens"),
    ([1, 2], "not a JSON object", "it is a list"),
    (b"not JSON,", "not JSON", "Expecting value at column 1"),
    (b'{"instruction": "NUL", "output": "a\0b"}', "not JSON", "Invalid control character at"),
    (b'\xef\xbb\xbf{"instruction": "BOM", "output": "x"}', "not JSON", "Unexpected UTF-8 BOM"),
]
"""Each with what must be said of it."""


def forge(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["data", *arguments], prog_name="forge")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINFORGE_CACHE", str(tmp_path / "cache"))
    rows = [*GOOD, *(row for row, _, _ in BAD)]
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    Path("rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
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
    assert f"rows: {len(GOOD) + len(BAD)} seen, 2 used, 0 cut, {len(BAD)} skipped" in shown


def test_each_bad_row_has_its_line_and_its_reason_on_the_screen(recipe: str):
    shown = forge("inspect", recipe, "--rows", "0").output
    ledger = shown[shown.index("rows: ") :].splitlines()
    said: dict[int, tuple[str, str]] = {}  # line of the file -> (reason, what is said of the row)
    for line in ledger[1:]:
        if heading := re.fullmatch(r"\d+ skipped: (.*)", line):
            reason = heading[1]
        elif row := re.fullmatch(r"  \S*rows\.jsonl:(\d+)(?: \((.*)\))?", line):
            said[int(row[1])] = (reason, row[2] or "")
    assert sorted(said) == list(range(3, 3 + len(BAD)))
    for number, (_, reason, detail) in enumerate(BAD, start=3):
        assert said[number][0].startswith(reason), (number, said[number])
        assert said[number][1].startswith(detail), (number, said[number])
        assert detail or not said[number][1]
    assert len({reason for reason, _ in said.values()}) >= 10


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
