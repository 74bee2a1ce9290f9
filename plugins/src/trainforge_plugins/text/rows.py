"""The rows of a unit: parsed, or with the reason why they cannot be used."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import xxhash

from trainforge_plugins.text.containers import MAX_ROW_BYTES, Fault
from trainforge_plugins.text.units import Unit
from trainforge_plugins.text.values import kind_of, parse_json

LEFT_OUT = "left out by the weight of the source"
"""The reason of rows that a weight below 1 does not choose."""


class Row(NamedTuple):
    """One row: its number within the unit (of a line: blank ones count), and the object or why there is none."""

    number: int
    value: dict[str, Any] | Fault


class Count:
    """How many lines a unit has, once it is read to its end."""

    def __init__(self) -> None:
        self.lines = 0


def read_rows(unit: Unit, count: Count) -> Iterator[Row]:
    """The rows of a unit, in order; blank lines are none.

    Raises:
        OSError: the file cannot be read any more.
    """
    for number, value in _numbered(unit, count):
        fault = isinstance(value, Fault)
        if (fault and unit.repeat == 0) or (not fault and is_chosen(unit, number)):
            yield Row(number, value)
        elif not fault:
            yield Row(number, Fault(LEFT_OUT))


def is_chosen(unit: Unit, number: int) -> bool:
    """Whether a pass with a share below 1 uses this row: decided by a hash of its place, so always in the same way."""
    if unit.share >= 1:
        return True
    hashed = xxhash.xxh3_64_intdigest(f"{unit.repeat}:{unit.number}:{number}".encode())
    return hashed < unit.share * 2**64


def _numbered(unit: Unit, count: Count) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    if unit.items is not None:
        count.lines = len(unit.items)
        for number, item in enumerate(unit.items, start=1):
            yield number, _parsed(item) if isinstance(item, bytes) else item
        return
    with open_unit(unit) as file:
        for number, (offset, line) in enumerate(lines_of(file, unit), start=1):
            count.lines = number
            if line is None:
                yield number, Fault(f"line is longer than {MAX_ROW_BYTES >> 20} MiB")
            elif line.strip():
                yield number, _parsed(line, offset if unit.data is None else None)


@contextmanager
def open_unit(unit: Unit) -> Iterator[BinaryIO]:
    """A file that stands where the unit starts."""
    if unit.data is not None:
        yield io.BytesIO(unit.data)
        return
    assert not isinstance(unit.path, str)
    with unit.path.open("rb") as file:
        file.seek(unit.start)
        yield file


def unit_bytes(unit: Unit) -> bytes:
    """All bytes of a unit of text."""
    with open_unit(unit) as file:
        return file.read(unit.stop - unit.start) if unit.data is None else file.read()


def lines_of(file: BinaryIO, unit: Unit) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a unit with their offsets; None stands for a line that is too long."""
    offset = unit.start if unit.data is None else 0
    stop = unit.stop if unit.data is None else len(unit.data)
    while offset < stop:
        line = file.readline(MAX_ROW_BYTES)
        if not line:
            return
        length = len(line)
        whole = line.endswith(b"\n") or offset + length >= stop
        while not line.endswith(b"\n") and offset + length < stop and line:
            line = file.readline(MAX_ROW_BYTES)
            length += len(line)
        yield offset, line if whole else None
        offset += length


def _parsed(text: bytes, offset: int | None = None) -> dict[str, Any] | Fault:
    try:
        value = parse_json(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault("not UTF-8", bad_byte(text, error, offset))
    except json.JSONDecodeError as error:
        return Fault("not JSON", f"{error.msg} at {_position(error, text)}")
    except (ValueError, RecursionError) as error:
        return Fault("not JSON", str(error))
    return value if isinstance(value, dict) else Fault("not a JSON object", f"it is {kind_of(value)}")


def _position(error: json.JSONDecodeError, text: bytes) -> str:
    several = b"\n" in text.strip()
    return f"line {error.lineno} of the row, column {error.colno}" if several else f"column {error.colno}"


def bad_byte(text: bytes, error: UnicodeDecodeError, offset: int | None) -> str:
    """Which byte is not UTF-8, and where: in the file when `offset`, the place of `text` there, is known."""
    byte = f"byte 0x{text[error.start]:02x} at offset "
    return (
        f"{byte}{error.start} of the row" if offset is None else f"{byte}{offset + error.start} of the file"
    )
