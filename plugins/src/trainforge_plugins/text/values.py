"""One rule for values of every kind of file: what counts as text, what as missing, what cannot be used."""

from __future__ import annotations

import json
import math
from typing import Any

from trainforge_plugins.text.conversation import BadRow


class JsonFloat(float):
    """A fraction of a JSON file, which remembers how it is written there: 3.10 stays 3.10."""

    text: str

    def __new__(cls, text: str) -> JsonFloat:
        """Parse `text`, and keep it."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def parse_json(text: str) -> Any:
    """Parse one JSON value; fractions become `JsonFloat`.

    Raises:
        ValueError: it is not JSON (`json.JSONDecodeError` where the place is known).
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_float=JsonFloat)


def text_of(value: Any, column: str, required: bool = False) -> str:
    """The text of a value: text as it is, a number as its JSON text, true and false as these words, null as none.

    Args:
        value: as parsed from a file of any kind.
        column: its name, for the message.
        required: refuse null, and text of nothing but whitespace.

    Raises:
        BadRow: it is an object, a list or another thing that is no text; it holds half a surrogate pair; or nothing
            is there and it is required.
    """
    if value is None:
        if required:
            raise BadRow(f"{column!r} is null")
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value, column)
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is not text", f"it is {kind_of(value)}")
    if required and not value.strip():
        raise BadRow(f"{column!r} is empty")
    check_characters(value)
    return value


def _number(value: int | float, column: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{column!r} is not text", "it is a number that is not finite")
    try:
        return value.text if isinstance(value, JsonFloat) else json.dumps(value)
    except ValueError:  # more digits than Python prints
        raise BadRow(f"{column!r} is not text", "it is a number of too many digits") from None


def check_characters(text: str) -> None:
    """Refuse what UTF-8 cannot hold.

    Raises:
        BadRow: `text` holds half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        raise BadRow("half of a surrogate pair", place) from None


def as_list(value: Any, column: str) -> list[Any]:
    """A list, or the list that a text holds as JSON (all that CSV can do).

    Raises:
        BadRow: it is neither, or the list is empty.
    """
    found = structured(value, column)
    if not isinstance(found, list):
        raise BadRow(f"{column!r} is not a list", f"it is {kind_of(found)}")
    if not found:
        raise BadRow(f"{column!r} is empty")
    return found


def structured(value: Any, column: str) -> Any:
    """A list or object, parsed when it comes as text.

    Raises:
        BadRow: it is text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError):
        raise BadRow(f"{column!r} is text that is not JSON") from None


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words."""
    kinds = {bool: "true or false", int: "a number", float: "a number", JsonFloat: "a number", str: "text"}
    kinds |= {list: "a list", dict: "an object", bytes: "bytes"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
