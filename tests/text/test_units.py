"""How streams are cut into units: nothing is lost behind a row that is too long, nothing read twice."""

from __future__ import annotations

import gc
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.text.reading import read

from trainforge_plugins.text import TextSection, units
from trainforge_plugins.text.containers import csv_items
from trainforge_plugins.text.inputs import find_inputs


@pytest.mark.parametrize("length", range(300, 340))
def test_rows_behind_a_line_that_is_too_long_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
):
    """Whatever place of a read the line's end falls on."""
    for name, value in (("MAX_ROW_BYTES", 100), ("UNIT_BYTES", 32)):
        monkeypatch.setattr(units, name, value)
    row = json.dumps({"instruction": "q", "output": "a"})
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(f"{row}\n{'x' * length}\n{row}\n{row}\n".encode()))
    found = read(path, unit_bytes=32)
    assert found.answers == ["a"] * 3
    assert [reason for _, reason, _ in found.faults] == ["line is longer than 0 MiB"]


def test_csv_that_is_not_read_to_its_end_leaves_no_complaint(monkeypatch: pytest.MonkeyPatch):
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    items = csv_items(io.BytesIO(b"a,b\n1,2\n3,4\n"), "a.csv", ",")
    assert next(items)[0] == {"a": "1", "b": "2"}
    items.close()  # type: ignore[attr-defined]
    del items
    gc.collect()
    assert complaints == []


def test_lines_with_a_list_called_data_are_lines(tmp_path: Path):
    rows = [{"id": i, "data": [{"turn": 1}], "instruction": "q", "output": f"a{i}"} for i in range(3)]
    path = tmp_path / "a.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path).answers == ["a0", "a1", "a2"]
    path.write_text(json.dumps({"version": 1, "data": rows}) + "\n")
    assert read(path).answers == ["a0", "a1", "a2"]
    path.write_text(json.dumps({"version": 1, "data": rows}, indent=1))
    assert read(path).answers == ["a0", "a1", "a2"]


@pytest.mark.parametrize("container", ["jsonl.gz", "txt.gz"])
def test_a_compressed_file_is_read_to_its_end_wherever_its_parts_end(tmp_path: Path, container: str):
    lines = [json.dumps({"instruction": "q", "output": f"{i:02}"}) + "\n" for i in range(12)]
    text = "".join(lines).encode()
    path = tmp_path / f"a.{container}"
    path.write_bytes(gzip.compress(text))
    for unit_bytes in range(5, 2 * len(lines[0]) + 5):
        found = list(units.cut_units(find_inputs(TextSection(path=str(path))), unit_bytes))
        assert b"".join(unit.data or b"" for unit in found) == text
        assert [unit.last for unit in found] == [False] * (len(found) - 1) + [True]
