"""Turns one unit of a file into tokens, and notes every row that cannot be used. Runs in worker processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainforge_plugins.text.sources import Unit
from trainforge_plugins.text.tokenizers import Tokenizer

SHOWN_ROWS = 20
"""How many rows of each reason are kept by number; the rest are only counted."""

MAX_LINE_BYTES = 64 << 20
"""Longest line of JSONL that is taken as a row; a longer one would not fit in a worker's memory."""

SHOWN_FIELDS = 20


@dataclass
class Skipped:
    """Rows skipped for one reason: how many, and the first of them as (line within the unit, detail)."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, detail: str) -> None:
        """Count the row at `line`."""
        self.count += 1
        if len(self.first) < SHOWN_ROWS:
            self.first.append((line, detail))


@dataclass
class Piece:
    """What became of one unit. A row is a line, in both formats; lines are numbered from 1 within the unit.

    Attributes:
        tokens: token ids; in JSONL each document is followed by its end token.
        starts: where documents begin in `tokens` (JSONL; a text's only document begins with its first unit).
        newlines: line ends in the unit, to number the lines of the next one.
        rows: rows seen.
        used: rows that gave tokens.
        skipped: by reason.
        fields: names of fields seen in JSONL rows without the wanted one.
        top: the largest token id and the line where it first stands (in a text: the unit's first line), or None.
    """

    tokens: np.ndarray
    starts: np.ndarray
    newlines: int = 0
    rows: int = 0
    used: int = 0
    skipped: dict[str, Skipped] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    top: tuple[int, int] | None = None

    def skip(self, line: int, reason: str, detail: str = "") -> None:
        """Note that the row at `line` is not used."""
        self.skipped.setdefault(reason, Skipped()).add(line, detail)


def tokenise(unit: Unit, tokenizer: Tokenizer, field_name: str) -> Piece:
    """Read and tokenise one unit.

    Raises:
        OSError: the file cannot be read any more.
    """
    with unit.path.open("rb") as file:
        file.seek(unit.start)
        if unit.format == "text":
            return _text(file.read(unit.stop - unit.start), unit, tokenizer)
        return _jsonl(_lines(file, unit), unit, tokenizer, field_name)


def _text(raw: bytes, unit: Unit, tokenizer: Tokenizer) -> Piece:
    piece = Piece(np.empty(0, tokenizer.dtype), np.empty(0, np.int64), raw.count(b"\n"))
    piece.rows = piece.newlines + (unit.last and not raw.endswith(b"\n"))
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        raw = _good_lines(raw, unit, piece)
    piece.used = piece.rows - sum(skipped.count for skipped in piece.skipped.values())
    piece.tokens = tokenizer.encode(raw)
    if len(piece.tokens):
        piece.top = (int(piece.tokens.max()), 1)
    return piece


def _good_lines(raw: bytes, unit: Unit, piece: Piece) -> bytes:
    """The lines of `raw` that are UTF-8; the others are noted."""
    good, offset = [], unit.start
    for number, line in enumerate(_split(raw), start=1):
        try:
            line.decode("utf-8")
            good.append(line)
        except UnicodeDecodeError as error:
            piece.skip(number, "not UTF-8", _bad_byte(line, error, offset))
        offset += len(line)
    return b"".join(good)


def _split(raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        stop = raw.find(b"\n", start) + 1 or len(raw)
        yield raw[start:stop]
        start = stop


def _bad_byte(line: bytes, error: UnicodeDecodeError, offset: int) -> str:
    return f"byte 0x{line[error.start]:02x} at offset {offset + error.start} of the file"


def _lines(file: Any, unit: Unit) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a unit with their offsets in the file; None stands for a line that is too long."""
    offset = unit.start
    while offset < unit.stop:
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            return
        length = len(line)
        whole = line.endswith(b"\n") or offset + length >= unit.stop
        while not line.endswith(b"\n") and offset + length < unit.stop and line:
            line = file.readline(MAX_LINE_BYTES)
            length += len(line)
        yield offset, line if whole else None
        offset += length


def _jsonl(
    lines: Iterator[tuple[int, bytes | None]], unit: Unit, tokenizer: Tokenizer, field_name: str
) -> Piece:
    piece = Piece(np.empty(0, tokenizer.dtype), np.empty(0, np.int64))
    documents: list[np.ndarray] = []
    numbers: list[int] = []
    end = np.array([] if tokenizer.end is None else [tokenizer.end], tokenizer.dtype)
    number = 0
    for number, (offset, line) in enumerate(lines, start=1):
        text = _row_text(piece, number, line, offset, field_name)
        if text is not None:
            tokens = tokenizer.encode(text)
            if len(tokens):
                documents += [tokens, end]
                numbers.append(number)
            else:
                piece.skip(number, "no tokens")
    piece.newlines = number
    piece.used = len(numbers)
    if documents:
        piece.tokens = np.concatenate(documents)
        lengths = np.array([len(tokens) for tokens in documents], np.int64)
        piece.starts = (np.cumsum(lengths) - lengths)[::2]  # every other one is an end token
        at = int(piece.tokens.argmax())
        piece.top = (int(piece.tokens[at]), numbers[int(np.searchsorted(piece.starts, at, side="right")) - 1])
    return piece


def _row_text(piece: Piece, number: int, line: bytes | None, offset: int, field_name: str) -> bytes | None:
    """The text of one JSONL line as UTF-8, or None when it is blank or was noted as skipped."""
    if line is not None and not line.strip():
        return None
    piece.rows += 1
    if line is None:
        piece.skip(number, f"line is longer than {MAX_LINE_BYTES >> 20} MiB")
        return None
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        piece.skip(number, "not UTF-8", _bad_byte(line, error, offset))
        return None
    except json.JSONDecodeError as error:
        piece.skip(number, "not JSON", f"{error.msg} at column {error.colno}")
        return None
    except (ValueError, RecursionError) as error:
        piece.skip(number, "not JSON", str(error))
        return None
    return _field_text(piece, number, row, field_name)


def _field_text(piece: Piece, number: int, row: Any, field_name: str) -> bytes | None:
    if not isinstance(row, dict):
        piece.skip(number, "not a JSON object", f"it is {_kind(row)}")
        return None
    if field_name not in row:
        piece.skip(number, f"no field {field_name!r}")
        known = [name for name in row if name not in piece.fields]
        piece.fields += known[: SHOWN_FIELDS - len(piece.fields)]
        return None
    value = row[field_name]
    if not isinstance(value, str):
        piece.skip(number, f"{field_name!r} is not text", f"it is {_kind(value)}")
        return None
    if not value:
        piece.skip(number, f"{field_name!r} is empty")
        return None
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(value[error.start]):04x} at character {error.start + 1}"
        piece.skip(number, "half of a surrogate pair", escape)
        return None


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")
