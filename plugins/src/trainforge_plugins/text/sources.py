"""Finds the files of a data set and cuts them into units that can be tokenised one by one."""

from __future__ import annotations

import glob
import importlib.resources
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from trainforge.errors import DataError

Format = Literal["text", "jsonl"]

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
BINARY_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".parquet", ".arrow", ".pdf", ".docx")

UNIT_BYTES = 1 << 20
"""Bytes in one unit of work: small, so that a worker's memory does not depend on the size of a file."""

WINDOW_BYTES = 1 << 16
WHITESPACE = b" \t\r\n\f\v"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One input file, as it was when it was found."""

    path: Path
    format: Format
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Unit:
    """A span of one file that is tokenised at once. Lines of JSONL are never cut."""

    source: int
    path: Path
    format: Format
    start: int
    stop: int
    last: bool

    def __str__(self) -> str:
        return f"{self.path} (bytes {self.start} to {self.stop})"


def find_sources(patterns: str | Sequence[str], format: Literal["auto", "text", "jsonl"]) -> list[Source]:
    """Give the files that `patterns` name, in their order, files of a folder or glob sorted; each file once.

    Raises:
        DataError: a pattern finds nothing, or a file cannot be read, or is of a kind that holds no text.
    """
    found: dict[Path, Source] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for path in _expand(pattern):
            absolute = Path(os.path.abspath(path))
            if absolute not in found:
                found[absolute] = _describe(absolute, format)
    if not found:
        raise DataError("text.path is an empty list: name at least one file")
    if all(source.size == 0 for source in found.values()):
        names = ", ".join(str(path) for path in list(found)[:3])
        raise DataError(
            f"text.path: {names} {'is' if len(found) == 1 else 'are'} empty: give a file that holds text"
        )
    return list(found.values())


def _expand(pattern: str) -> list[Path]:
    if pattern.startswith("package:"):
        return [_in_package(pattern)]
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path]
    if glob.has_magic(pattern):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [match for match in matches if not match.is_dir()]
        if files:
            return files
        raise DataError(f"text.path: no file matches {pattern} (looked in {os.getcwd()})")
    raise DataError(f"text.path: {pattern} does not exist (looked in {os.getcwd()}): check the path")


def _in_package(pattern: str) -> Path:
    package, _, inside = pattern.removeprefix("package:").partition("/")
    try:
        path = Path(str(importlib.resources.files(package).joinpath(inside)))
    except (ModuleNotFoundError, TypeError, ValueError):
        raise DataError(
            f"text.path: {pattern} names the package {package!r}, which is not installed"
        ) from None
    if not inside or not path.is_file():
        raise DataError(f"text.path: {pattern}: the package {package} holds no file {inside!r}")
    return path


def _in_folder(folder: Path) -> list[Path]:
    suffixes = TEXT_SUFFIXES + JSONL_SUFFIXES
    files = sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith(".")
    )
    if not files:
        raise DataError(
            f"text.path: the folder {folder} holds no file that ends in {', '.join(suffixes)}: "
            f"name the files with a glob such as {folder}/**/*.log"
        )
    return files


def _describe(path: Path, format: Literal["auto", "text", "jsonl"]) -> Source:
    suffix = path.suffix.lower()
    if suffix in BINARY_SUFFIXES:
        raise DataError(
            f"text.path: {path} is a {suffix} file, not text: unpack or convert it to .txt or .jsonl"
        )
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"text.path: {path} is not a regular file: save its content in a file first")
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"text.path: cannot read {path}: {error.strerror}: check its permissions") from None
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"text.path: {path} is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    chosen: Format = format if format != "auto" else "jsonl" if suffix in JSONL_SUFFIXES else "text"
    return Source(path, chosen, status.st_size, status.st_mtime_ns)


def cut_units(sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> Iterator[Unit]:
    """Cut every file into units of about `unit_bytes`, in order, at places that change no token (or next to none).

    JSONL is cut between lines. Text is cut where a line begins with a visible character, so that no run of
    whitespace, which tokenizers like to merge, is taken apart; a text without such a place within 64 KiB is cut
    at any whitespace, else between two characters.
    """
    for index, source in enumerate(sources):
        if source.size:
            try:
                yield from _units_of(index, source, unit_bytes)
            except OSError as error:
                raise DataError(f"cannot read {source.path} any more: {error.strerror}") from None


def _units_of(index: int, source: Source, unit_bytes: int) -> Iterator[Unit]:
    with source.path.open("rb") as file:
        start = _after_mark(file)
        while start < source.size:
            stop = _cut(file, source, start + unit_bytes)
            yield Unit(index, source.path, source.format, start, stop, stop == source.size)
            start = stop


def _after_mark(file: BinaryIO) -> int:
    return len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0


def _cut(file: BinaryIO, source: Source, at: int) -> int:
    """The place at or after byte `at` where `source` may be cut."""
    if at >= source.size:
        return source.size
    file.seek(at)
    if source.format == "text":
        return min(source.size, at + safe_cut(file.read(WINDOW_BYTES)))
    while block := file.read(WINDOW_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            return min(source.size, at + newline + 1)
        at += len(block)
    return source.size


def safe_cut(window: bytes) -> int:
    """Where in `window` a text may be cut with the least harm to its tokens: an index up to its length."""
    newline = window.find(b"\n")
    fallback = newline + 1
    while newline >= 0:
        after = newline + 1
        if after < len(window) and window[after] not in WHITESPACE:
            return after
        newline = window.find(b"\n", after)
    if fallback:
        return fallback
    space = window.find(b" ")
    if space >= 0:
        return space
    cut = 0
    while cut < len(window) and window[cut] & 0xC0 == 0x80:  # inside a character of several bytes
        cut += 1
    return cut


def split_text(text: bytes, size: int) -> Iterator[bytes]:
    """Cut `text` into blocks of about `size` bytes at the places that `safe_cut` finds."""
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            stop += safe_cut(text[stop : stop + WINDOW_BYTES])
        yield text[start:stop]
        start = stop
