"""Every kind of file gives its rows, in bounded memory, and each row is used or listed with its place and reason."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.reading import Everything, read

from trainforge.errors import DataError
from trainforge_plugins.text import containers, opening
from trainforge_plugins.text.containers import Fault, json_items

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"instruction": f"q{i}", "output": f"a{i} 語"} for i in range(7)]
ANSWERS = [row["output"] for row in ROWS]


def as_array(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=2, ensure_ascii=False).encode()


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: list[Any]) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    return compressor.compress(data[:50]) + compressor.compress(data[50:])  # two frames, as appending gives


WRITERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: as_lines(ROWS),
    "lines.json": lambda: as_lines(ROWS),
    "array.json": lambda: as_array(ROWS),
    "oneline.json": lambda: json.dumps(ROWS).encode(),
    "bom.json": lambda: b"\xef\xbb\xbf" + as_array(ROWS),
    "inside.json": lambda: json.dumps({"version": "1.0", "data": ROWS, "more": [1]}, indent=1).encode(),
    "objects.json": lambda: b"\n".join(json.dumps(row, indent=2).encode() for row in ROWS),
    "comma.json": lambda: b"[" + b",".join(json.dumps(row).encode() for row in ROWS) + b",\n]",
    "a.csv": lambda: as_csv(ROWS),
    "bom.csv": lambda: b"\xef\xbb\xbf" + as_csv(ROWS),
    "semicolon.csv": lambda: as_csv(ROWS, ";"),
    "a.tsv": lambda: as_csv(ROWS, "\t"),
    "a.parquet": lambda: as_parquet(ROWS),
    "a.jsonl.gz": lambda: gzip.compress(as_lines(ROWS)),
    "a.json.gz": lambda: gzip.compress(as_array(ROWS)),
    "a.csv.gz": lambda: gzip.compress(as_csv(ROWS)),
    "a.jsonl.zst": lambda: zstd(as_lines(ROWS)),
    "a.json.zst": lambda: zstd(as_array(ROWS)),
}


@pytest.mark.parametrize("unit_bytes", [1 << 20, 64])
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, unit_bytes: int):
    (tmp_path / name).write_bytes(WRITERS[name]())
    found = read(tmp_path / name, unit_bytes)
    assert found.answers == ANSWERS
    assert found.faults == []


def test_a_folder_of_mixed_files_and_a_glob(tmp_path: Path):
    for name in ("a.jsonl", "array.json", "a.csv", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(WRITERS[name]())
    (tmp_path / "dataset_info.json").write_text('{"x": {"file_name": "a.jsonl"}}')
    assert read(tmp_path).answers == ANSWERS * 4
    assert read(f"{tmp_path}/*.[cj]s*").answers == ANSWERS * 4


def test_a_bad_row_of_an_array_hides_no_other(tmp_path: Path):
    parts = [
        '{"instruction": "q", "output": "first"}',
        '{"instruction": "q", "output": "trailing",}',
        '{"instruction": "q", "output": "never closed"',
        '{"instruction": "q", "output": "closed twice"]}',
        '{"instruction": "q", "output": [1}',
        "7",
        '{"instruction": "q", "output": "no quote}',
        '{"instruction": "q", "output": "caf\xe9"}',
        '{"instruction": "q", "output": "la]s\\"t}"}',
    ]
    (tmp_path / "a.json").write_bytes(("[\n" + ",\n".join(parts) + "\n]").encode("latin-1"))
    found = read(tmp_path / "a.json")
    assert found.answers == ["first", 'la]s"t}']
    assert [(place, reason) for place, reason, _ in found.faults] == [
        ("a.json row 2", "not JSON"),
        ("a.json row 3", "not JSON"),
        ("a.json row 4", "not JSON"),
        ("a.json row 5", "not JSON"),
        ("a.json row 6", "not a JSON object"),
        ("a.json row 7", "not JSON"),
        ("a.json row 8", "not UTF-8"),
    ]
    assert found.faults[-1][2] == f"byte 0xe9 at offset {parts[7].index(chr(0xE9))} of the row"


@pytest.mark.parametrize(
    ("text", "answers", "faults"),
    [
        ('[{"instruction": "q", "output": "a"},', ["a"], ["the file ends before its array does"]),
        (
            '[{"instruction": "q", "output": "a"}, {"instr',
            ["a"],
            ["not JSON", "the file ends before its array does"],
        ),
        ('[{"instruction": "q", "output": "a"}] more', ["a"], ["text after the end of the array"]),
        ('[,{"instruction": "q", "output": "a"}]', ["a"], ["not JSON"]),
    ],
)
def test_arrays_that_end_too_early_or_too_late(
    tmp_path: Path, text: str, answers: list[str], faults: list[str]
):
    (tmp_path / "a.json").write_text(text)
    found = read(tmp_path / "a.json", format="alpaca")
    assert found.answers == answers
    assert [reason for _, reason, _ in found.faults] == faults


def test_bad_rows_of_csv(tmp_path: Path):
    lines = [
        b"instruction,output",
        b"q,first",
        b"q,",
        b"q,a,b",
        b"q",
        b'q,"bad"quote',
        b"q,caf\xe9",
        b"q,last",
    ]
    (tmp_path / "a.csv").write_bytes(b"\r\n".join(lines))
    found = read(tmp_path / "a.csv")
    assert found.answers == ["first", "last"]
    assert [(place, reason) for place, reason, _ in found.faults] == [
        ("a.csv row 2", "'output' is empty"),
        ("a.csv row 3", "more cells than the header has columns"),
        ("a.csv row 4", "no column 'output'"),
        ("a.csv row 5", "not CSV"),
        ("a.csv row 6", "not UTF-8"),
    ]
    assert found.faults[-1][2] == "byte 0xe9 in column 'output'"


def test_csv_with_quotes_over_several_lines_and_lists_as_json(tmp_path: Path):
    messages = json.dumps(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "two\nlines, 😀"}]
    )
    (tmp_path / "a.csv").write_bytes(as_csv([{"id": "1", "messages": messages}]))
    assert read(tmp_path / "a.csv").answers == ["two\nlines, 😀"]


def test_csv_with_a_column_twice(tmp_path: Path):
    (tmp_path / "a.csv").write_text("instruction,output,output\nq,a,b\n")
    with pytest.raises(DataError, match="two columns called 'output'"):
        read(tmp_path / "a.csv")


def test_parquet_with_nested_turns_nulls_and_numbers(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "n": 1.5},
        {"messages": None, "n": None},
        {"messages": [{"role": "user", "content": None}], "n": 2.0},
    ]
    (tmp_path / "a.parquet").write_bytes(as_parquet(rows))
    found = read(tmp_path / "a.parquet")
    assert found.answers == ["a"]
    assert [(place, reason) for place, reason, _ in found.faults] == [
        ("a.parquet row 2", "'messages' is null"),
        ("a.parquet row 3", "'content' of a user turn is empty"),
    ]


def test_types_that_change_far_down_lock_nothing_in(tmp_path: Path):
    lines: list[str] = [json.dumps({"instruction": "q", "input": None, "output": "a"})] * 2000
    lines += [json.dumps({"instruction": "q", "input": "text", "output": "a"})] * 997
    lines += ['{"instruction": "q", "output": 3.10}', '{"instruction": "q", "output": {"k": "v"}}']
    lines += ['{"instruction": "q", "output": "a",}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(tmp_path / "a.jsonl")
    assert len(found.used) == 2998
    assert found.answers[-1] == "3.10"
    assert found.faults == [
        ("a.jsonl:2999", "'output' is not text", "it is an object"),
        ("a.jsonl:3000", "not JSON", found.faults[1][2]),
    ]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl.gz", gzip.compress(as_lines(ROWS))[:-20], "to its end"),
        ("a.jsonl.gz", b"no gzip at all", "cannot read"),
        ("a.jsonl.zst", None, "to its end"),
        ("b.jsonl.zst", b"no zstd at all", "not zstd or damaged"),
        ("a.parquet", b"no parquet at all", "as parquet"),
    ],
    ids=["cut gzip", "no gzip", "cut zstd", "no zstd", "no parquet"],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes | None, words: str):
    pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(zstd(as_lines(ROWS))[:-5] if data is None else data)
    with pytest.raises(DataError) as caught:
        read(path, 32)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("a.jsonl.zst", "zstandard", "zstd")],
)
def test_a_missing_extra_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
):
    (tmp_path / name).write_bytes(b"something")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"pip install 'trainforge-plugins\[{extra}\]'"):
        read(tmp_path / name)


def test_addresses_are_read_through_fsspec(monkeypatch: pytest.MonkeyPatch):
    fsspec = pytest.importorskip("fsspec")
    for name in ("a.jsonl", "array.json", "a.jsonl.gz", "a.csv"):
        with fsspec.open(f"memory://bucket/{name}", "wb") as file:
            file.write(WRITERS[name]())
    assert read("memory://bucket/a.jsonl", 64).answers == ANSWERS
    assert read("memory://bucket/*.j*").answers == ANSWERS * 3
    assert read("memory://bucket").answers == ANSWERS * 4
    with pytest.raises(DataError, match=r"memory://bucket/none\.jsonl"):
        read("memory://bucket/none.jsonl")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DataError, match=r"trainforge-plugins\[remote\]"):
        read("memory://bucket/a.jsonl")


def test_an_element_of_an_array_may_span_many_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(containers, "WINDOW_BYTES", 8)
    rows: list[Any] = [{"a": 'x"\\ é\n' * 40, "b": [{"c": []}, "]}{["]}, {}, 1.5, "é", None, [[], {"d": 1}]]
    for indent in (None, 1):
        data = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
        assert [
            json.loads(item) for item, _ in json_items(io.BytesIO(data)) if isinstance(item, bytes)
        ] == rows


def test_a_row_too_long_for_memory_ends_the_array_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(containers, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(containers, "WINDOW_BYTES", 64)
    data = json.dumps([{"a": 1}, {"a": "x" * 5000}, {"a": 2}]).encode()
    items = [item for item, _ in json_items(io.BytesIO(data))]
    assert items[0] == b'{"a": 1}'
    assert isinstance(items[-1], Fault)
    assert "longer" in items[-1].reason


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.fixed_dictionaries(
    {},
    optional={name: VALUES | st.text(max_size=8) for name in ("instruction", "input", "output", "system")},
)
DAMAGE = st.sampled_from(["none", "comma", "latin-1", "surrogate", "cut", "bom"])


def damaged(row: Any, damage: str) -> bytes:
    text = json.dumps(row, ensure_ascii=damage == "surrogate").encode("utf-8", "surrogatepass")
    if damage == "comma":
        return text[:-1] + b",}"
    if damage == "latin-1":
        return text[:-1] + b',"x":"\xe9"}' if row else b'{"x":"\xe9"}'
    if damage == "surrogate":
        return b'{"instruction": "\\ud83d", "output": "x"}'
    if damage == "cut":
        return text[: len(text) // 2].replace(b"\n", b" ") or b"{"
    return b"\xef\xbb\xbf" + text if damage == "bom" else text


@settings(max_examples=150)
@given(st.lists(st.tuples(OBJECTS, DAMAGE), max_size=12), st.sampled_from([16, 100, 1 << 20]))
def test_every_line_is_used_or_listed_with_its_number(rows: list[tuple[Any, str]], unit_bytes: int):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"\n".join(damaged(row, damage) for row, damage in rows))
        if path.stat().st_size == 0:
            return
        found = read(path, unit_bytes, format="alpaca")
        places = [place for place, _ in found.used] + [place for place, _, _ in found.faults]
    assert sorted(places) == sorted(f"a.jsonl:{number}" for number in range(1, len(rows) + 1))
    for _, conversation in found.used:
        for message in conversation.messages:
            assert message.content.encode("utf-8") is not None


@settings(max_examples=150)
@given(st.lists(OBJECTS, max_size=10), st.sampled_from([16, 1 << 20]))
def test_arrays_csv_and_lines_say_the_same(rows: list[Any], unit_bytes: int):
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, data in (("a.json", as_array(rows)), ("a.jsonl", as_lines(rows))):
            Path(folder, name).write_bytes(data + b"\n")
            results.append(read(Path(folder, name), unit_bytes, format="alpaca"))
    first, second = results
    assert first.answers == second.answers
    assert [fault[1:] for fault in first.faults] == [fault[1:] for fault in second.faults]
    assert len(first.used) + len(first.faults) == len(rows)


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.text('[]{},:"\\ \n1aé', max_size=200).map(str.encode))
def test_no_bytes_at_all_end_in_a_traceback(data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.json", "a.jsonl", "a.csv", "a.txt", "a.json.gz"):
            path = Path(folder, name)
            path.write_bytes(data)
            try:
                found: Everything | DataError = read(path, 16, format="openai")
            except DataError as error:
                found = error
            if isinstance(found, Everything):
                assert found.used == []


def test_the_readers_do_not_depend_on_the_locale():
    files = [str(Path(__file__)), str(Path(__file__).with_name("test_formats.py"))]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *(*files, "-k", "every_kind or any_object or bad or every_line or value"),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout.decode(errors="replace")


def test_memory_stays_small_for_large_files(tmp_path: Path):
    row = json.dumps({"instruction": "q" * 300, "output": "a" * 700}).encode()
    for name, separator, before, after in (("a.json", b",\n", b"[", b"]"), ("a.jsonl.gz", b"\n", b"", b"\n")):
        opened: Any = gzip.open if name.endswith("gz") else open
        with opened(tmp_path / name, "wb") as file:
            file.write(before)
            for index in range(60):
                file.write((separator if index else b"") + separator.join([row] * 1000))
            file.write(after)
    code = (
        "import sys; from tests.text.reading import read; from trainforge_plugins.text.inputs import find_inputs\n"
        "from trainforge_plugins.text import TextSection; from trainforge_plugins.text.units import cut_units\n"
        "from trainforge_plugins.text.rows import Count, read_rows\n"
        "import resource; base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; n = 0\n"
        "for unit in cut_units(find_inputs(TextSection(path=sys.argv[1]))):\n"
        "    n += sum(1 for _ in read_rows(unit, Count()))\n"
        "print(n, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10)"
    )
    for name in ("a.json", "a.jsonl.gz"):  # 60 MB each
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
        rows, megabytes = map(int, done.stdout.split())
        assert rows == 60_000
        assert megabytes < 50, name


def test_every_extra_is_declared():
    import tomllib

    project = tomllib.loads((ROOT / "plugins" / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(opening.EXTRAS.values()) <= set(project["optional-dependencies"])
