"""Turns one unit of a file into tokens, and notes every row that cannot be used. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainforge.errors import DataError
from trainforge_plugins.text.containers import Fault
from trainforge_plugins.text.conversation import BadRow, LacksColumn
from trainforge_plugins.text.formats import to_conversation
from trainforge_plugins.text.images import ImageFile
from trainforge_plugins.text.policy import DoesNotFit
from trainforge_plugins.text.rendering import Renderer, Rendering
from trainforge_plugins.text.rows import Count, bad_byte, read_rows, unit_bytes
from trainforge_plugins.text.tokenizers import Tokenizer
from trainforge_plugins.text.units import Unit
from trainforge_plugins.text.values import text_of

SHOWN_ROWS = 20
"""How many rows of each reason are kept by number; the rest are only counted."""

SHOWN_FIELDS = 20


@dataclass
class Skipped:
    """Rows skipped for one reason: how many, and the first of them as (row within the unit, detail)."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, detail: str) -> None:
        """Count the row at `line`."""
        self.count += 1
        if len(self.first) < SHOWN_ROWS:
            self.first.append((line, detail))


@dataclass
class Piece:
    """What became of one unit. A row of text or JSONL is a line; rows are numbered from 1 within the unit.

    Attributes:
        tokens: token ids; of rows with a text each document is followed by its end token.
        starts: where documents begin in `tokens` (a text's only document begins with its first unit).
        newlines: lines (or rows, where they are not lines) in the unit, to number those of the next one.
        labels: of conversations: 1 for a token that is to be learnt, else 0, uint8; None: all are.
        rows: rows seen.
        used: rows that gave tokens.
        truncated: rows that were cut.
        skipped: by reason.
        fields: names of columns seen in rows that lacked the wanted one.
        top: the largest token id and the row where it first stands (in a text: the unit's first line), or None.
        needed: the smallest `max_len` that would make a row usable which is skipped for its length, or None.
        images: (document within the piece, its images) of documents that have some.
        unused_images: images of rows that were skipped.
        fatal: what ends the run, with the row that showed it, or None.
    """

    tokens: np.ndarray
    starts: np.ndarray
    newlines: int = 0
    labels: np.ndarray | None = None
    rows: int = 0
    used: int = 0
    truncated: int = 0
    skipped: dict[str, Skipped] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    top: tuple[int, int] | None = None
    needed: int | None = None
    images: list[tuple[int, tuple[ImageFile, ...]]] = field(default_factory=list)
    unused_images: list[ImageFile] = field(default_factory=list)
    fatal: tuple[int, str] | None = None

    def skip(self, line: int, reason: str, detail: str = "") -> None:
        """Note that the row at `line` is not used."""
        self.skipped.setdefault(reason, Skipped()).add(line, detail)

    def lacks(self, row: Mapping[str, Any]) -> None:
        """Keep the names of the columns of a row that lacks the wanted one."""
        known = [name for name in row if name not in self.fields]
        self.fields += known[: SHOWN_FIELDS - len(self.fields)]


@dataclass(frozen=True)
class Reading:
    """What is to be read out of rows; picklable.

    Attributes:
        field: the column that holds a row's text, of rows that are texts.
        rendering: of rows that are conversations; None when there are none.
    """

    field: str
    rendering: Rendering | None = None


class Tokeniser:
    """Tokenises units."""

    def __init__(self, tokenizer: Tokenizer, reading: Reading) -> None:
        self._tokenizer, self._field = tokenizer, reading.field
        self._renderer = Renderer(reading.rendering, tokenizer) if reading.rendering is not None else None

    def tokenise(self, unit: Unit) -> Piece:
        """Read and tokenise one unit.

        Raises:
            OSError: the file cannot be read any more.
        """
        if unit.format == "text":
            return _text(unit, self._tokenizer)
        piece = Piece(np.empty(0, self._tokenizer.dtype), np.empty(0, np.int64))
        if unit.format == "chat":
            self._conversations(unit, piece)
        else:
            self._texts(unit, piece)
        piece.used = len(piece.starts)
        return piece

    def _texts(self, unit: Unit, piece: Piece) -> None:
        documents: list[np.ndarray] = []
        numbers: list[int] = []
        end = self._tokenizer.end
        for number, row in _usable_rows(unit, piece):
            text = _field_text(piece, number, row, self._field)
            if text is not None:
                tokens = self._tokenizer.encode(text)
                if len(tokens):
                    documents.append(tokens if end is None else np.append(tokens, tokens.dtype.type(end)))
                    numbers.append(number)
                else:
                    piece.skip(number, "no tokens")
        _join(piece, documents, numbers)

    def _conversations(self, unit: Unit, piece: Piece) -> None:
        assert self._renderer is not None
        documents: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        numbers: list[int] = []
        for number, row in _usable_rows(unit, piece):
            if unit.rows.recognise(row) is None:
                piece.lacks(row)
            try:
                conversation = to_conversation(row, unit.rows)
                fitted = self._renderer.render(conversation, unit.folder)
            except DataError as error:
                piece.fatal = (number, str(error))
                break
            except BadRow as bad:
                piece.skip(number, bad.reason, bad.detail)
                piece.unused_images += self._renderer.opened
                if isinstance(bad, LacksColumn):
                    piece.lacks(row)
                if isinstance(bad, DoesNotFit):
                    piece.needed = min(bad.needed, piece.needed or bad.needed)
                continue
            piece.truncated += fitted.truncated
            if fitted.images:
                piece.images.append((len(documents), fitted.images))
            documents.append(fitted.ids.astype(piece.tokens.dtype))
            labels.append(fitted.supervised)
            numbers.append(number)
        _join(piece, documents, numbers)
        piece.labels = np.concatenate([np.empty(0, bool), *labels]).astype(np.uint8)


def tokenise(unit: Unit, tokenizer: Tokenizer, field_name: str) -> Piece:
    """Read and tokenise one unit of texts."""
    return Tokeniser(tokenizer, Reading(field_name)).tokenise(unit)


def _join(piece: Piece, documents: list[np.ndarray], numbers: list[int]) -> None:
    """Put documents (from the rows `numbers`) one after the other."""
    if documents:
        piece.tokens = np.concatenate(documents)
        lengths = np.array([len(tokens) for tokens in documents], np.int64)
        piece.starts = np.cumsum(lengths) - lengths
        at = int(piece.tokens.argmax())
        piece.top = (int(piece.tokens[at]), numbers[int(np.searchsorted(piece.starts, at, side="right")) - 1])


def _usable_rows(unit: Unit, piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that could be read; the others are noted."""
    count = Count()
    for number, value in read_rows(unit, count):
        piece.rows += 1
        if isinstance(value, Fault):
            piece.skip(number, value.reason, value.detail)
        else:
            yield number, value
    piece.newlines = count.lines


def _field_text(piece: Piece, number: int, row: dict[str, Any], field_name: str) -> bytes | None:
    """The text of a row as UTF-8, or None when it was noted as skipped."""
    if field_name not in row:
        piece.skip(number, f"no field {field_name!r}")
        piece.lacks(row)
        return None
    try:
        return text_of(row[field_name], field_name, required=True).encode("utf-8")
    except BadRow as bad:
        piece.skip(number, bad.reason, bad.detail)
        return None


def _text(unit: Unit, tokenizer: Tokenizer) -> Piece:
    raw = unit_bytes(unit)
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
            place = offset if unit.data is None else None
            piece.skip(number, "not UTF-8", bad_byte(line, error, place))
        offset += len(line)
    return b"".join(good)


def _split(raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        stop = raw.find(b"\n", start) + 1 or len(raw)
        yield raw[start:stop]
        start = stop
