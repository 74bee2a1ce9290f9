"""Takes rows out of files that are more than lines: JSON arrays, CSV, parquet. In bounded memory, row by row.

Each reader gives pairs of a row and its size in bytes (about). A row is JSON text that is still to be parsed, or an
object, or a `Fault`, which says why there is none.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from trainforge.errors import DataError
from trainforge_plugins.text.opening import need

MAX_ROW_BYTES = 64 << 20
"""Longest row that is read; a longer one would not fit in memory several times over."""

MAX_CELL_CHARACTERS = 16 << 20
WINDOW_BYTES = 1 << 20
PARQUET_ROWS = 256

_CHARACTERS = (
    rb'"(?:[^"\\\n]++|\\[^\n])*+'  # of a string; a line end stops it, as JSON allows none in a string
)
_OPEN = rb"|(" + _CHARACTERS + rb")"  # group 1: a string that is not closed, or not yet
_BETWEEN = re.compile(_CHARACTERS + rb'"' + _OPEN + rb"|[\[\]{},]")
"""The signs between elements."""
_WITHIN = re.compile(rb"(?:" + _CHARACTERS + rb'"[\s:,]*+)++' + _OPEN + rb"|[\[\]{}]")
"""The signs within an element that tell where it ends; strings in a row are taken at once."""

_LIST_KEYS = (b"data", b"rows", b"examples", b"instances", b"train")
_LIST_IN_OBJECT = re.compile(rb'\s*\{[^\[\]{}]*?"(?:' + b"|".join(_LIST_KEYS) + rb')"\s*:\s*\[')


class Fault(NamedTuple):
    """Why there is no row where one was expected."""

    reason: str
    detail: str = ""


Item = tuple["bytes | dict[str, Any] | Fault", int]


def json_shape(start: bytes) -> str:
    """What a .json file holds, by its first bytes: `array`, `lines` (JSONL) or `objects` (over several lines)."""
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    first, _, rest = start.partition(b"\n")
    opened = closed = 0
    for token in _WITHIN.finditer(first):
        opened += token[0] in b"[{"
        closed += token[0] in b"]}"
    if start[:1] == b"[" and not _is_line_of_list(start):
        return "array"
    if _LIST_IN_OBJECT.match(start) and not (opened <= closed and rest.lstrip()[:1] == b"{"):
        return "array"
    return "lines" if opened <= closed or len(first) == len(start) else "objects"


def _is_line_of_list(start: bytes) -> bool:
    """Whether the first line is a whole list and others follow: then it is one bad row of many, not the array."""
    first, _, rest = start.lstrip().partition(b"\n")
    return first.rstrip().endswith(b"]") and rest.lstrip()[:1] in (b"{", b"[")


def json_items(file: BinaryIO) -> Iterator[Item]:
    """The elements of the array that the file holds, alone or as a list within one object, or objects in a row.

    Elements are found by their brackets alone, so one with a mistake within does not hide the next. A comma after the
    last element is let pass.
    """
    start = file.read(WINDOW_BYTES).removeprefix(b"\xef\xbb\xbf")
    inside = _LIST_IN_OBJECT.match(start)
    array = inside is not None or start.lstrip()[:1] == b"["
    offset = inside.end() if inside else start.index(b"[") + 1 if array else 0
    yield from _Elements(file, start[offset:], array, inside is not None).read()


class _Elements:
    """Walks over the signs of JSON text, and cuts it where an element ends."""

    def __init__(self, file: BinaryIO, start: bytes, array: bool, more_may_follow: bool) -> None:
        self._file, self._buffer, self._array = file, start, array
        self._more_may_follow = more_may_follow
        self._begin = self._at = 0
        self._open: list[int] = []
        self._ended = False

    def read(self) -> Iterator[Item]:
        """All elements, in order."""
        while True:
            yield from self._whole_tokens()
            if self._ended:
                break
            self._buffer = self._buffer[self._begin :]
            self._at -= self._begin
            self._begin = 0
            if len(self._buffer) > MAX_ROW_BYTES:
                yield (
                    Fault(f"row is longer than {MAX_ROW_BYTES >> 20} MiB", "nothing after it was read"),
                    0,
                )
                return
            more = self._file.read(max(WINDOW_BYTES, len(self._buffer)))
            if not more:
                yield from self._rest()
                return
            self._buffer += more
        yield from self._after_end()

    def _whole_tokens(self) -> Iterator[Item]:
        buffer, stack = self._buffer, self._open
        while token := (_WITHIN if stack else _BETWEEN).search(buffer, self._at):
            if token[1] is not None and len(buffer) - token.end() < 2:
                return  # a string that goes on
            self._at = token.end()
            sign = buffer[token.start()]
            if sign != 0x22:
                yield from self._sign(sign, token.start())
                if self._ended:
                    return

    def _after_colon(self, place: int) -> bool:
        while place > self._begin and self._buffer[place - 1] in b" \t\r\n":
            place -= 1
        return self._buffer[place - 1] == 0x3A

    def _sign(self, sign: int, place: int) -> Iterator[Item]:
        stack = self._open
        if sign == 0x7B and stack and stack[-1] == 0x7B and not self._after_colon(place):
            stack.pop()
            if not stack:
                yield from self._cut(place)  # the former element was never closed
        if sign in b"[{":
            stack.append(sign)
        elif sign in b"]}":
            opening = sign - 2
            if opening in stack:
                del stack[len(stack) - 1 - stack[::-1].index(opening) :]
                if not stack and not self._array:
                    yield from self._cut(place + 1)
            elif not stack and sign == 0x5D and self._array:
                self._ended = True
                yield from self._cut(place)
                self._begin = place + 1
        elif sign == 0x2C and not stack and self._array:
            yield from self._cut(place, empty=True)
            self._begin = place + 1

    def _cut(self, end: int, empty: bool = False) -> Iterator[Item]:
        element = self._buffer[self._begin : end].strip(b" \t\r\n" if empty else b" \t\r\n,")
        self._begin = end
        if element or empty:
            yield element, len(element)

    def _rest(self) -> Iterator[Item]:
        rest = self._buffer[self._begin :].strip(b" \t\r\n,")
        if rest:
            yield rest, len(rest)
        if self._array:
            yield Fault("the file ends before its array does"), 0

    def _after_end(self) -> Iterator[Item]:
        rest = (self._buffer[self._begin :] + self._file.read(WINDOW_BYTES)).strip()
        if rest and not self._more_may_follow:
            yield Fault("text after the end of the array"), 0


def csv_items(file: BinaryIO, name: str, delimiter: str) -> Iterator[Item]:
    """The rows of CSV as objects from column to text; an empty cell is empty text.

    Raises:
        DataError: the header has a name twice.
    """
    previous = csv.field_size_limit(MAX_CELL_CHARACTERS)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    try:
        start = text.readline()
        if delimiter == "," and "," not in start and ";" in start:
            delimiter = ";"
        reader = csv.reader(chain([start], text), delimiter=delimiter, strict=True)
        try:
            header = _header(next(reader, []), name)
        except csv.Error as error:
            raise DataError(
                f"the first line of {name} is not the header of CSV ({error}): correct it"
            ) from None
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Fault("not CSV", f"{error}, line {reader.line_num} of the file"), 1
                continue
            if cells:
                yield _csv_row(header, cells), sum(map(len, cells))
    finally:
        text.detach()
        csv.field_size_limit(previous)


def _header(cells: list[str], name: str) -> list[str]:
    cells = [cell.strip() for cell in cells]
    twice = sorted({cell for cell in cells if cell and cells.count(cell) > 1})
    if twice:
        raise DataError(f"{name} has two columns called {twice[0]!a}: give each a name of its own")
    return cells


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any] | Fault:
    if len(cells) > len(header):
        return Fault("more cells than the header has columns", f"{len(cells)} instead of {len(header)}")
    for column, cell in zip(header, cells, strict=False):
        try:
            cell.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(cell[error.start]) - 0xDC00
            return Fault("not UTF-8", f"byte 0x{byte:02x} in column {column!a}")
    return dict(zip(header, cells, strict=False))


def parquet_items(file: BinaryIO, name: str) -> Iterator[tuple[Item, float]]:
    """The rows of a parquet file as objects, with the share of the file that is read. One row group is in memory.

    Raises:
        DataError: pyarrow is not installed, or the file is not parquet.
    """
    pyarrow = need("pyarrow", f"reading {name}")
    try:
        table = importlib.import_module("pyarrow.parquet").ParquetFile(file, pre_buffer=False)
        total, done = max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(PARQUET_ROWS):
            size = batch.nbytes // max(1, batch.num_rows)
            for row in _rows_of_batch(batch):
                done += 1
                yield (row, size), done / total
    except pyarrow.ArrowException as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"cannot read {name} as parquet ({first}): check the file") from None


def _rows_of_batch(batch: Any) -> list[dict[str, Any] | Fault]:
    try:
        return list(batch.to_pylist())
    except (UnicodeDecodeError, ValueError, OverflowError):
        rows: list[dict[str, Any] | Fault] = []
        for number in range(batch.num_rows):
            try:
                rows += batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError:
                rows.append(Fault("not UTF-8"))
            except (ValueError, OverflowError) as error:
                rows.append(Fault("a value that cannot be read", str(error)[:100]))
        return rows
