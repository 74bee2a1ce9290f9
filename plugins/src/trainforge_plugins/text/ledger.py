"""The row ledger: which rows of the input were used, and which were not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainforge.errors import DataError
from trainforge_plugins.text.rows import LEFT_OUT
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.tokenise import SHOWN_FIELDS, SHOWN_ROWS, Piece
from trainforge_plugins.text.units import Unit


class RowLedger:
    """Adds up what the units report, in order, and gives their lines the numbers they have in the file."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._source = -1
        self._lines_before = 0
        self.seen = self.used = self.documents = self.repeated = self.truncated = 0
        self.needed: int | None = None
        self.skipped: dict[str, dict[str, Any]] = {}
        self.fields: list[str] = []
        self.top: tuple[int, str] | None = None

    def add(self, unit: Unit, piece: Piece) -> None:
        """Count the rows of the next unit.

        Raises:
            DataError: a row cannot be used, and the recipe is strict; or it shows that none like it can be.
        """
        if unit.source != self._source:
            self._source, self._lines_before = unit.source, 0
        if piece.fatal is not None:
            raise DataError(f"{unit.place(self._lines_before + piece.fatal[0])}: {piece.fatal[1]}")
        self.documents += len(piece.starts)
        if unit.repeat:
            self.repeated += piece.used  # another pass over rows that are already counted
        else:
            self.seen += piece.rows
            self.used += piece.used
            self.truncated += piece.truncated
            self._add_skipped(unit, piece)
        if piece.top and (self.top is None or piece.top[0] > self.top[0]):
            self.top = (piece.top[0], unit.place(self._lines_before + piece.top[1]))
        self._lines_before += piece.newlines

    def _add_skipped(self, unit: Unit, piece: Piece) -> None:
        for reason, skipped in piece.skipped.items():
            rows = [
                unit.place(self._lines_before + line) + (f" ({detail})" if detail else "")
                for line, detail in skipped.first
            ]
            self._skip(reason, skipped.count, rows)
        if piece.needed is not None:
            self.needed = min(piece.needed, self.needed or piece.needed)
        new = [name for name in piece.fields if name not in self.fields]
        self.fields += new[: SHOWN_FIELDS - len(self.fields)]

    def add_file(self, source: Source, reason: str) -> None:
        """Note a file that gives no rows."""
        self._skip(reason, 0, [str(source.path)])

    def _skip(self, reason: str, count: int, rows: Sequence[str]) -> None:
        if self._strict and rows and reason != LEFT_OUT:
            raise DataError(f"{rows[0]}: {reason}: correct it, or set text.strict: false to skip such rows")
        entry = self.skipped.setdefault(reason, {"count": 0, "rows": []})
        entry["count"] += count
        entry["rows"] += rows[: SHOWN_ROWS - len(entry["rows"])]

    def as_dict(self) -> dict[str, Any]:
        """The ledger as plain data: rows seen, used, skipped by reason, truncated, used again by weight."""
        return {
            "seen": self.seen,
            "used": self.used,
            "skipped": self.skipped,
            "truncated": self.truncated,
            "documents": self.documents,
            **({"repeated": self.repeated} if self.repeated else {}),
        }

    def require_rows(self, field_name: str, sources: Sequence[Source], max_len: int | None = None) -> None:
        """Check that something can be used.

        Raises:
            DataError: nothing can; says what was expected, what was found and which option maps it.
        """
        if self.used and self.documents:
            return
        where = str(sources[0].path) if len(sources) == 1 else f"{len(sources)} files"
        none = f"none of the {self.seen} rows of {where} can be used"
        if self.needed is not None:
            limit = "text.max_len" if max_len is None else f"text.max_len ({max_len})"
            raise DataError(
                f"{none}: the shortest that {limit} leaves out needs {self.needed} tokens: set text.max_len to at "
                f"least {self.needed}"
            )
        if self.fields:
            raise DataError(f"{none}: {_expected(field_name, sources, self.fields)}")
        reasons = skipped_lines(self.as_dict())
        why = "; ".join(reasons) if reasons else "they hold no text"
        raise DataError(f"{none} ({why}): correct the file or text.format")


def _expected(field_name: str, sources: Sequence[Source], found: Sequence[str]) -> str:
    """What columns were expected and found, and which options map them."""
    rows = sources[0].rows
    columns = f"found the columns {', '.join(map(ascii, found))}"
    remap = "set text.columns, such as {prompt: question, response: answer}, to the columns of conversations"
    if sources[0].format == "chat":
        return f"expected {' or '.join(rows.expected())}, {columns}: {remap}"
    return (
        f"expected the field {field_name!r}, or {' or '.join(rows.expected())}, {columns}: set text.field to the "
        f"column that holds the text, or {remap}"
    )


def skipped_lines(ledger: dict[str, Any]) -> list[str]:
    """One line for each reason for which rows were skipped; nothing when all were used."""
    lines = []
    for reason, entry in ledger["skipped"].items():
        rows = entry["rows"]
        more = ", ..." if max(entry["count"], len(rows)) > 3 else ""
        share = f" ({entry['count'] / ledger['seen']:.2%})" if ledger["seen"] and entry["count"] else ""
        lines.append(f"{entry['count'] or len(rows)} skipped{share}, {reason}: {', '.join(rows[:3])}{more}")
    return lines
