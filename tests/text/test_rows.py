"""Every row is used or accounted for: by file, line and reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.text.helpers import text_data, write_jsonl

from trainforge.errors import DataError
from trainforge_plugins.text import rows, tokenise
from trainforge_plugins.text.data import TextData


def all_text(data: TextData) -> str:
    ids = [int(token) for row in range(len(data._rows)) for token in data._rows[row].input_ids]
    return data.tokenizer.decode(ids)


def skipped(data: TextData) -> dict[str, tuple[int, list[str]]]:
    return {reason: (entry["count"], entry["rows"]) for reason, entry in data.ledger()["skipped"].items()}


def test_nothing_skipped_gives_no_message(tmp_path: Path):
    data = text_data(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": "world"}])))
    assert data.ledger() | {"tokens": 0, "packed_rows": 0} == {
        "seen": 2,
        "used": 2,
        "skipped": {},
        "truncated": 0,
        "documents": 2,
        "tokens": 0,
        "packed_rows": 0,
    }
    assert len(data.start_report()) == 1


def test_each_bad_row_has_line_and_reason(tmp_path: Path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "good one"},
            '{"text": "trailing comma",}',
            "",
            {"text": ""},
            {"text": None},
            {"text": 7},
            {"text": {"nested": "object"}},
            {"other": "x"},
            [1, 2],
            '{"text": "half \\ud83d pair"}',
            {"text": "good two 😀 語"},
            "[" * 100_000,
        ],
    )
    data = text_data(tmp_path, str(path))
    found = skipped(data)
    assert {reason: rows[0].removeprefix(str(path)).split(" ")[0] for reason, (_, rows) in found.items()} == {
        "not JSON": ":2",
        "'text' is empty": ":4",
        "'text' is null": ":5",
        "'text' is not text": ":7",
        "no field 'text'": ":8",
        "not a JSON object": ":9",
        "half of a surrogate pair": ":10",
    }
    assert "at column 27" in found["not JSON"][1][0]
    assert [row.split(" ", 1)[1] for row in found["'text' is not text"][1]] == [
        "(it is an object)",
    ]
    assert r"\ud83d at character 6" in found["half of a surrogate pair"][1][0]
    assert (data.ledger()["seen"], data.ledger()["used"]) == (11, 3)
    assert "good one" in all_text(data)
    assert "7" in all_text(data)
    assert "good two 😀 語" in all_text(data)
    assert "nested" not in all_text(data)


def test_no_schema_is_taken_from_the_first_rows(tmp_path: Path):
    rows: list[Any] = [{"text": f"row {i}", "extra": None} for i in range(2000)]
    rows += [{"text": f"row {i}", "extra": "now text"} for i in range(2000, 3000)]
    data = text_data(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert data.ledger()["used"] == 3000


def test_lines_are_numbered_over_units_and_rows_listed_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainforge_plugins.text.units.cut_units.__defaults__", (64,))
    rows: list[Any] = [{"text": "fine"} if i % 10 else "broken" for i in range(1, 501)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    count, shown = skipped(text_data(tmp_path, str(path)))["not JSON"]
    assert count == 50
    assert len(shown) == tokenise.SHOWN_ROWS
    assert [int(row.split(":")[1].split(" ")[0]) for row in shown] == [10 * i for i in range(1, 21)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_bad_bytes_are_skipped_with_their_offset(tmp_path: Path, name: str):
    lines = [b'{"text": "first"}\n', '{"text": "caf\xe9"}\n'.encode("latin-1"), b'{"text": "third"}\n']
    path = tmp_path / name
    path.write_bytes(b"".join(lines))
    data = text_data(tmp_path, str(path))
    offset = len(lines[0]) + lines[1].index(b"\xe9")
    assert skipped(data) == {
        "not UTF-8": (1, [f"{path}:2 (byte 0xe9 at offset {offset} of the file)"]),
    }
    assert data.ledger()["used"] == 2
    assert "first" in all_text(data)
    assert "third" in all_text(data)
    assert "caf" not in all_text(data)
    assert any("skipped (33.33%), not UTF-8" in line for line in data.start_report())


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_byte_order_mark_and_locale_do_not_matter(tmp_path: Path, name: str):
    text = '{"text": "grüße 😀 語"}\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    code = (
        "import sys; from pathlib import Path; from tests.text.helpers import text_data\n"
        "from tests.text.test_rows import all_text\n"
        "text = all_text(text_data(Path(sys.argv[1]), sys.argv[2]))\n"
        "sys.stdout.buffer.write(text.encode())"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / name)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert "grüße 😀 語" in done.stdout.decode()
    assert "\ufeff" not in done.stdout.decode()


def test_strict_stops_at_the_first_bad_row(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": None}])
    with pytest.raises(DataError, match=rf"{path}:2: 'text' is null: .*text\.strict: false"):
        text_data(tmp_path, str(path), section={"strict": True})


def test_no_usable_row_names_expected_and_found_fields_and_the_option(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}] * 3)
    with pytest.raises(DataError) as caught:
        text_data(tmp_path, str(path))
    message = str(caught.value)
    for word in ("3 rows", str(path), "'text'", "'question', 'answer'", "text.field", "text.columns"):
        assert word in message
    assert caught.value.exit_code == 2
    assert text_data(tmp_path, str(path), section={"field": "answer"}).ledger()["used"] == 3


def test_no_usable_row_for_other_reasons(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ["[", '{"text": "x"},', "]"])
    with pytest.raises(DataError, match=r"none of the 3 rows .* not JSON: .*a\.jsonl:1"):
        text_data(tmp_path, str(path))
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="hold no text"):
        text_data(tmp_path, str(tmp_path / "b.jsonl"))


def test_an_empty_file_among_others_is_noted(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_text("some text")
    data = text_data(tmp_path, str(tmp_path))
    assert skipped(data) == {"empty file": (0, [str(tmp_path / "a.txt")])}
    assert any("a.txt" in line for line in data.start_report())


def test_a_line_too_long_for_memory_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 50)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 200}, {"text": "fits"}, {"text": "y" * 37}])
    data = text_data(tmp_path, str(path))
    (entry,) = data.ledger()["skipped"].values()
    assert entry == {"count": 1, "rows": [f"{path}:1"]}
    assert all_text(data).rstrip("\x00").startswith("fits" + "y" * 37)
