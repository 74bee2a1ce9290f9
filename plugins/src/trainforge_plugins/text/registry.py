"""Reads a registry of data sets as LLaMA-Factory keeps it: `dataset_info.json`, one entry for each name.

As there, an entry that names columns uses no others, and one that names none has no system prompt, tools or history.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainforge.errors import DataError
from trainforge_plugins.text.formats import COLUMN_NAMES, COMMON, RowFormat
from trainforge_plugins.text.sources import REGISTRY

HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url")
KNOWN = (
    *HUB_KEYS,
    "file_name",
    "cloud_file_name",
    "formatting",
    "ranking",
    "columns",
    "tags",
    "num_samples",
    "subset",
    "folder",
    "split",
)
PREFERENCES = ("chosen", "rejected", "kto_tag")
MEDIA = ("videos", "audios")


@dataclass(frozen=True)
class Entry:
    """A data set of a registry: its files, how their rows are read, and how many of the first are."""

    name: str
    path: str
    rows: RowFormat
    limit: int | None


def read_registry(folder: Path, names: Sequence[str]) -> list[Entry]:
    """The entries of `names` in the registry of `folder`; a name may hold several, with commas between them.

    Raises:
        DataError: there is no such registry or entry, or it asks for what this plugin does not do.
    """
    path = folder.expanduser() / REGISTRY
    try:
        registry = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise DataError(
            f"text.dataset_dir: cannot read {path}: {error.strerror}: set text.dataset_dir to the folder that holds "
            f"{REGISTRY}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}: correct it") from None
    if not isinstance(registry, dict):
        raise DataError(f"{path} is not an object from names to data sets: correct it")
    wanted = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if not wanted:
        raise DataError(f"text.dataset is empty: name one of {_some(registry)}")
    return [_entry(registry, name, path) for name in wanted]


def _some(registry: dict[str, Any]) -> str:
    shown = list(registry)[:10]
    return ", ".join(shown) + (", ..." if len(registry) > len(shown) else "")


def _entry(registry: dict[str, Any], name: str, path: Path) -> Entry:
    if name not in registry:
        close = difflib.get_close_matches(name, registry, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {_some(registry)}"
        raise DataError(f"text.dataset: {path} has no data set {name!r}: {hint}")
    entry, where = registry[name], f"{path}, data set {name!r}"
    if not isinstance(entry, dict):
        raise DataError(f"{where}: it is not an object: correct it")
    for key in entry:
        if key not in KNOWN:
            close = difflib.get_close_matches(key, KNOWN, 1)
            raise DataError(f"{where}: unknown key {key!r}: {_hint(close)}")
    if entry.get("ranking"):
        raise DataError(f"{where}: it holds preference pairs (ranking), which this plugin does not train on")
    columns, tags = _names(entry, "columns", where), _names(entry, "tags", where)
    for column in (*PREFERENCES, *MEDIA):
        if column in columns:
            what = "preference data" if column in PREFERENCES else "videos or sound"
            raise DataError(f"{where}: the column {column!r} is for {what}, which text cannot use: remove it")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise DataError(f"{where}: formatting is {formatting!r}: set alpaca, sharegpt or openai")
    unused = [name for name in COLUMN_NAMES if columns or name in COMMON]
    try:
        columns = {**dict.fromkeys(unused, ""), **RowFormat("auto", columns).columns}
        rows = RowFormat(formatting, columns, tags)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    if not all(rows.names(formatting, key) for key in _needed(formatting, columns)):
        raise DataError(
            f"{where}: columns names none for {' or '.join(_needed(formatting, columns))}: add them"
        )
    return Entry(name, _place(entry, path.parent, where), rows, _limit(entry, where))


def _needed(formatting: str, columns: dict[str, str]) -> tuple[str, ...]:
    if formatting != "alpaca":
        return ("messages",)
    return ("query" if columns.get("query") else "prompt", "response")


def _hint(close: list[str]) -> str:
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(KNOWN)}"


def _names(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    """Names given by names; those that are null are left out."""
    value = entry.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(name, str | None) for name in value.values()):
        raise DataError(f"{where}: {key} is not an object from names to names: correct it")
    return {name: column for name, column in value.items() if column is not None}


def _place(entry: dict[str, Any], folder: Path, where: str) -> str:
    if entry.get("cloud_file_name"):
        return str(entry["cloud_file_name"])
    file_name = entry.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        hub = next((key for key in HUB_KEYS if key in entry), None)
        if hub:
            raise DataError(
                f"{where}: {hub} names {entry[hub]!r} on a hub, which is not read from here: download its files and "
                "set file_name"
            )
        raise DataError(f"{where}: no file_name: name its file or folder")
    path = folder / file_name
    for key in ("subset", "folder"):
        if entry.get(key) and path.is_dir():
            path /= str(entry[key])
    return str(path)


def _limit(entry: dict[str, Any], where: str) -> int | None:
    limit = entry.get("num_samples")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise DataError(f"{where}: num_samples is {limit!r}: set a whole number above 0")
    return limit
