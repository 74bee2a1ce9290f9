"""Several sources in one data set: how often the rows of each come."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.text.helpers import text_data
from tests.text.reading import Everything, read

from trainforge.errors import DataError
from trainforge_plugins.text.inspection import ledger_lines
from trainforge_plugins.text.rows import LEFT_OUT

ROWS = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        rows = [{"instruction": "q", "output": f"{name}{i}"} for i in range(ROWS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.txt").write_text("text")
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "q", "answer": "d"}))
    return tmp_path


def weighted(folder: Path, *sources: dict[str, Any], **section: Any) -> Everything:
    return read(sources=[{**source, "path": str(folder / source["path"])} for source in sources], **section)


def test_whole_weights_repeat_all_rows(folder: Path):
    found = weighted(folder, {"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"})
    counts = Counter(found.answers)
    assert {counts[f"a{i}"] for i in range(ROWS)} == {3}
    assert {counts[f"b{i}"] for i in range(ROWS)} == {1}
    assert found.faults == []


@pytest.mark.parametrize("name", ["b.jsonl", "b.json"])
@pytest.mark.parametrize("weight", [0.25, 1.5])
def test_fractions_choose_rows_evenly_and_always_the_same(folder: Path, name: str, weight: float):
    found = weighted(folder, {"path": name, "weight": weight})
    counts = Counter(found.answers)
    assert {counts[f"b{i}"] for i in range(ROWS)} == {int(weight), int(weight) + 1}
    share = weight % 1
    chosen = sum(count > int(weight) for count in counts.values())
    assert abs(chosen - share * ROWS) < 5 * (share * (1 - share) * ROWS) ** 0.5  # five standard deviations
    assert {reason for _, reason, _ in found.faults} == {LEFT_OUT}
    assert len(found.used) + len(found.faults) == ROWS * (int(weight) + 1)
    again = weighted(folder, {"path": name, "weight": weight})
    assert again.answers == found.answers


def test_each_source_has_its_own_format_and_columns(folder: Path):
    mapped = {"path": "d.jsonl", "columns": {"prompt": "question", "response": "answer"}, "weight": 2}
    assert weighted(folder, {"path": "b.json"}, mapped).answers[-2:] == ["d", "d"]
    found = weighted(
        folder, {"path": "d.jsonl", "format": "prompt_completion"}, columns={"response": "answer"}
    )
    assert [reason for _, reason, _ in found.faults] == ["no column 'prompt'"]


def test_faults_are_listed_once_however_often_a_source_comes(folder: Path):
    (folder / "a.jsonl").write_text('{"instruction": "q", "output": "a"}\nnot json\n')
    found = weighted(folder, {"path": "a.jsonl", "weight": 3})
    assert len(found.used) == 3
    assert [(place, reason) for place, reason, _ in found.faults] == [("a.jsonl:2", "not JSON")]


def test_a_part_of_a_document_is_refused(folder: Path):
    with pytest.raises(DataError, match=r"text\.sources\[0\]\.weight is 0\.5, but .*c\.txt is one document"):
        weighted(folder, {"path": "c.txt", "weight": 0.5})


def test_conversations_and_other_text_do_not_mix(folder: Path):
    with pytest.raises(DataError, match=r"a\.jsonl holds conversations and .*c\.txt other text"):
        weighted(folder, {"path": "c.txt"}, {"path": "a.jsonl"})


def test_the_option_that_is_wrong_is_named(folder: Path):
    with pytest.raises(DataError, match=r"text\.sources\[1\]\.path: .*none\.jsonl does not exist"):
        weighted(folder, {"path": "a.jsonl"}, {"path": "none.jsonl"})


def test_that_validation_shares_rows_with_training_is_said(folder: Path):
    def lines(weight: float, **section: Any) -> list[str]:
        sources = ({"path": str(folder / "a.jsonl"), "weight": weight},)
        options = {"sources": sources, "max_len": 64, "validation": 0.1, "path": None, **section}
        data = text_data(folder, None, section=options)
        return [line for line in data.start_report() if "held out as well" in line]

    assert len(lines(2)) == 1
    assert "text.validation" in lines(2)[0]
    assert lines(1) == lines(2, validation=None) == lines(2, validation=str(folder / "b.jsonl")) == []


def test_files_without_rows_are_listed(folder: Path):
    (folder / "header.csv").write_text("instruction,output\n")
    (folder / "none.jsonl").touch()
    (folder / "list.json").write_text("[]")
    paths = [str(folder / name) for name in ("none.jsonl", "a.jsonl", "header.csv", "list.json")]
    ledger = text_data(folder, paths, section={"max_len": 64}).ledger()
    assert ledger["skipped"] == {
        "empty file": {"count": 0, "rows": [paths[0]]},
        "file without rows": {"count": 0, "rows": paths[2:]},
    }
    assert "2 skipped: file without rows" in ledger_lines(ledger)
