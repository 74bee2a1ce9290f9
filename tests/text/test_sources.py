"""Which files are found, what is said when none is, and where they are cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.errors import DataError
from trainforge_plugins.text.sources import Source, find_sources
from trainforge_plugins.text.units import cut_units, split_text


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")


def names(sources: list[Source], folder: Path) -> list[str]:
    return [str(source.path.relative_to(folder)) for source in sources]


def test_file_folder_glob_and_list(tmp_path: Path):
    fill(tmp_path, "b.txt", "a.jsonl", "c.log", ".hidden.txt", "sub/d.md")
    assert names(find_sources(str(tmp_path), "auto"), tmp_path) == ["a.jsonl", "b.txt", "sub/d.md"]
    assert names(find_sources(f"{tmp_path}/**/*.[lm]*", "auto"), tmp_path) == ["c.log", "sub/d.md"]
    both = find_sources([f"{tmp_path}/c.log", str(tmp_path), f"{tmp_path}/b.txt"], "auto")
    assert names(both, tmp_path) == ["c.log", "a.jsonl", "b.txt", "sub/d.md"]


def test_format_by_extension_or_as_told(tmp_path: Path):
    fill(tmp_path, "a.jsonl", "b.log")
    assert [s.format for s in find_sources(f"{tmp_path}/*", "auto")] == ["jsonl", "text"]
    assert [s.format for s in find_sources(f"{tmp_path}/*", "text")] == ["text", "text"]


def test_text_shipped_in_a_package():
    (source,) = find_sources("package:trainforge_plugins.text/demo/moby_dick.txt", "auto")
    assert source.size > 1_000_000


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{0}/none.txt", ["none.txt", "does not exist"]),
        ("{0}/*.md", ["*.md", "no file matches"]),
        ("{0}/sub", ["sub", "holds no file that ends in", "glob"]),
        ("{0}/empty.txt", ["empty.txt", "is empty"]),
        ("{0}/x.pdf", ["x.pdf", "not text"]),
        ("{0}/utf16.txt", ["utf16.txt", "UTF-16", "iconv"]),
        ("{0}/pipe.txt", ["pipe.txt", "not a regular file"]),
        ("package:no_such_package/x.txt", ["no_such_package", "not installed"]),
        ("package:trainforge_plugins.text/x.txt", ["trainforge_plugins.text", "no file 'x.txt'"]),
    ],
)
def test_one_sentence_for_each_mistake(tmp_path: Path, pattern: str, words: list[str]):
    fill(tmp_path, "sub/c.log", "x.pdf")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "utf16.txt").write_bytes("text".encode("utf-16"))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError) as caught:
        find_sources(pattern.format(tmp_path), "auto")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path, "a.txt")

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # as root, no real permission stops us
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        find_sources(str(tmp_path / "a.txt"), "auto")


def unit_bytes(path: Path, size: int) -> list[bytes]:
    content = path.read_bytes()
    units = list(cut_units(find_sources(str(path), "auto"), size))
    assert [unit.last for unit in units] == [False] * (len(units) - 1) + [True]
    return [content[unit.start : unit.stop] for unit in units]


@given(st.text(alphabet="ab \nä語", max_size=300).filter(bool), st.integers(1, 40))
def test_units_cover_the_text_and_cut_no_character(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    assert "".join(part.decode() for part in unit_bytes(path, size)) == text
    assert "".join(block.decode() for block in split_text(text.encode(), size)) == text


def test_text_is_cut_before_a_line_that_begins_with_a_visible_character(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\n  two\n\nthree\nfour")
    assert unit_bytes(path, 5) == [b"one\n\n  two\n\n", b"three\n", b"four"]


def test_jsonl_is_cut_between_lines_however_long(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 200_000 + b"\n" + b"y" * 10 + b"\n" + b"z")
    assert [len(part) for part in unit_bytes(path, 5)] == [200_001, 11, 1]


def test_a_byte_order_mark_is_left_out(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfab")
    assert unit_bytes(path, 100) == [b"ab"]
