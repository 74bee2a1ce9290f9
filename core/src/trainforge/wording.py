"""Small parts of error messages: the nearest valid name, and lists of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was most likely meant to be, or None when none is close."""
    by_key = {choice.lower().replace("-", "_"): choice for choice in choices}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), by_key, n=1, cutoff=0.55)
    return by_key[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`: did you mean NAME?` for the nearest choice, else an empty string."""
    found = nearest(word, choices)
    return f": did you mean {found}?" if found else ""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 rank`, `2 ranks`; `many` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(names: Iterable[str], empty: str = "none") -> str:
    """Names, sorted and separated by commas."""
    return ", ".join(sorted(names)) or empty
