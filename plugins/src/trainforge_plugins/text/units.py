"""Cuts the files of a data set into units that can be tokenised one by one.

Plain text and JSONL are cut into spans, which the workers read themselves. Everything else (compressed, an address, a
JSON array, CSV, parquet) is read once from its start, here, and its units carry their bytes or rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trainforge.errors import DataError
from trainforge_plugins.text.containers import (
    MAX_ROW_BYTES,
    Fault,
    Item,
    csv_items,
    json_items,
    parquet_items,
)
from trainforge_plugins.text.formats import RowFormat
from trainforge_plugins.text.opening import open_plain
from trainforge_plugins.text.sources import Format, Source

UNIT_BYTES = 1 << 20
"""Bytes in one unit of work: small, so that a worker's memory does not depend on the size of a file."""

IMAGE_UNIT_BYTES = 1 << 14
"""The same for rows with images: some 50 of them, which take seconds."""

WINDOW_BYTES = 1 << 16
WHITESPACE = b" \t\r\n\f\v"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Unit:
    """A part of one file that is tokenised at once. Rows are never cut.

    Attributes:
        source: number of the source.
        path: where it lies.
        format: what it holds.
        start: first byte in the stored file (about, when it is compressed or not cut into spans).
        stop: the byte after the last.
        last: whether it is the last of its source.
        number: its number within the source.
        data: its bytes, when workers cannot read them from `start` to `stop` themselves.
        items: its rows, when they are not lines.
        rows: how its rows become conversations.
        repeat: which pass over the file this is, from 0.
        share: how much of the rows this pass uses.
    """

    source: int
    path: Path | str
    format: Format
    start: int
    stop: int
    last: bool
    number: int = 0
    data: bytes | None = None
    items: tuple[bytes | dict[str, Any] | Fault, ...] | None = None
    rows: RowFormat = field(default_factory=RowFormat)
    repeat: int = 0
    share: float = 1.0

    @property
    def folder(self) -> Path | None:
        """The folder that the file lies in; None for an address."""
        return self.path.parent if isinstance(self.path, Path) else None

    def __str__(self) -> str:
        return f"{self.path} (bytes {self.start} to {self.stop})"

    def place(self, number: int) -> str:
        """Where the row with this number (of the whole file) is, for a person."""
        return f"{self.path}:{number}" if self.items is None else f"{self.path} row {number}"


def cut_units(sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> Iterator[Unit]:
    """Cut every file into units of about `unit_bytes`, in order, at places that change no token (or next to none).

    Rows are never cut. Text is cut where a line begins with a visible character, so that no run of whitespace, which
    tokenizers like to merge, is taken apart; a text without such a place within 64 KiB is cut at any whitespace, else
    between two characters.

    Raises:
        DataError: a file cannot be read (to its end).
    """
    for index, source in enumerate(sources):
        if source.size or not isinstance(source.path, Path):
            try:
                size = min(unit_bytes, IMAGE_UNIT_BYTES) if source.has_images else unit_bytes
                yield from _units_of(index, source, size)
            except OSError as error:
                raise DataError(f"cannot read {source.path} any more: {error.strerror}") from None


def _units_of(index: int, source: Source, unit_bytes: int) -> Iterator[Unit]:
    if source.in_spans:
        parts = _spans(source, unit_bytes)
    elif source.format == "text" or source.container == "lines":
        parts = _blocks(source, unit_bytes)
    else:
        parts = _groups(source, unit_bytes)
    number = 0
    part = next(parts, None)
    while part is not None:
        following = next(parts, None)
        start, stop, data, items = part
        yield Unit(
            index,
            source.path,
            source.format,
            start,
            stop if following is not None else max(start, source.size),
            following is None,
            number,
            data,
            items,
            source.rows,
            source.repeat,
            source.share,
        )
        part, number = following, number + 1


_Part = tuple[int, int, "bytes | None", "tuple[bytes | dict[str, Any] | Fault, ...] | None"]


def _spans(source: Source, unit_bytes: int) -> Iterator[_Part]:
    assert isinstance(source.path, Path)
    with source.path.open("rb") as file:
        start = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        while start < source.size:
            stop = _cut(file, source, start + unit_bytes)
            yield start, stop, None, None
            start = stop


def _blocks(source: Source, unit_bytes: int) -> Iterator[_Part]:
    """Blocks of whole lines of a stream (of text: cut as text is cut)."""
    rows_left = source.limit
    with open_plain(source.path, source.compression) as (file, raw):
        rest = file.read(unit_bytes).removeprefix(BYTE_ORDER_MARK)
        start = 0
        while rows_left != 0:
            more = file.read(unit_bytes)
            if not rest and not more:
                return
            block, rest = _first_block(rest + more, source.format, unit_bytes, not more)
            if rows_left is not None and source.format != "text":
                block, rows_left = _first_rows(block, rows_left)
            if block:
                yield start, raw.tell(), block, None
                start = raw.tell()
            elif len(rest) > MAX_ROW_BYTES and source.format != "text":
                rest = _after_line(file)
                yield start, raw.tell(), None, (Fault(f"line is longer than {MAX_ROW_BYTES >> 20} MiB"),)
                start = raw.tell()


def _first_block(buffer: bytes, format: Format, unit_bytes: int, at_end: bool) -> tuple[bytes, bytes]:
    """What of a buffer can be a unit (perhaps nothing yet), and the rest."""
    if at_end and len(buffer) <= unit_bytes:
        return buffer, b""
    if format == "text":
        window = buffer[unit_bytes : unit_bytes + WINDOW_BYTES]
        if len(window) < WINDOW_BYTES and not at_end:
            return b"", buffer
        place = unit_bytes + safe_cut(window)
    else:
        place = buffer.find(b"\n", min(unit_bytes, len(buffer))) + 1
        if not place and at_end:
            place = len(buffer)
    return buffer[:place], buffer[place:]


def _after_line(file: BinaryIO) -> bytes:
    """Read over the rest of a line; gives what was read of the next."""
    while more := file.read(UNIT_BYTES):
        newline = more.find(b"\n") + 1
        if newline:
            return more[newline:]
    return b""


def _first_rows(block: bytes, rows: int) -> tuple[bytes, int]:
    """The first `rows` lines that are not blank, and how many are still to come."""
    end = 0
    while rows and end < len(block):
        newline = block.find(b"\n", end) + 1 or len(block)
        rows -= bool(block[end:newline].strip())
        end = newline
    return block[:end], rows


def _groups(source: Source, unit_bytes: int) -> Iterator[_Part]:
    """Rows of files that are not lines, gathered to units."""
    gathered: list[bytes | dict[str, Any] | Fault] = []
    size = rows = start = 0
    with open_plain(source.path, source.compression) as (file, raw):
        stop = 0
        for item, item_bytes, position in _positioned(source, file, raw):
            gathered.append(item)
            size, rows, stop = size + item_bytes, rows + 1, position
            if size >= unit_bytes:
                yield start, stop, None, tuple(gathered)
                gathered, size, start = [], 0, stop
            if rows == source.limit:
                break
        if gathered:
            yield start, stop, None, tuple(gathered)


def _positioned(
    source: Source, file: BinaryIO, raw: BinaryIO
) -> Iterator[tuple[bytes | dict[str, Any] | Fault, int, int]]:
    """Each row with its size and the place in the stored file that reading has come to."""
    if source.container == "parquet":
        whole: BinaryIO = io.BytesIO(file.read()) if source.compression else file
        for (item, size), share in parquet_items(whole, str(source.path)):
            yield item, size, int(share * source.size)
        return
    items: Iterator[Item]
    if source.container == "json":
        items = json_items(file)
    else:
        items = csv_items(file, str(source.path), "\t" if source.container == "tsv" else ",")
    for item, size in items:
        yield item, size, raw.tell()


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
