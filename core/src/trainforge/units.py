"""Sizes and durations as people write them: `24GiB`, `512MB`, `10min`, `1.5h`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _SIZES[f"{_letter}B"] = 1000**_power
    _SIZES[f"{_letter}IB"] = 1024**_power
_DURATIONS = {"": 1.0, "S": 1.0, "SEC": 1.0, "MIN": 60.0, "M": 60.0, "H": 3600.0, "D": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: Any) -> int:
    """Bytes of `24GiB`, `512MB` or a plain number.

    Raises:
        ValueError: it is not a size.
    """
    return round(_parse(text, _SIZES, "a size such as 24GiB or 512MB"))


def parse_seconds(text: Any) -> float:
    """Seconds of `10min`, `1.5h`, `30s` or a plain number.

    Raises:
        ValueError: it is not a duration.
    """
    return _parse(text, _DURATIONS, "a duration such as 30s, 10min or 1.5h")


def format_bytes(count: float) -> str:
    """A size for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration for people: `1 h 03 min`, `2 min 05 s`, `8.4 s`, `12 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _parse(text: Any, units: dict[str, Any], what: str) -> float:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"must be {what}")
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].upper() not in units:
        raise ValueError(f"must be {what}, not {text!r}")
    return float(match[1]) * float(units[match[2].upper()])


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
