"""From the recipe's section to the files of a data set, with how each is read and how often its rows come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from trainforge.errors import ConfigError, DataError
from trainforge_plugins.text.containers import Fault
from trainforge_plugins.text.conversation import BadRow
from trainforge_plugins.text.formats import ChatFormat, RowFormat, to_conversation
from trainforge_plugins.text.registry import read_registry
from trainforge_plugins.text.rows import Count, read_rows
from trainforge_plugins.text.sources import Source, find_sources
from trainforge_plugins.text.units import cut_units

if TYPE_CHECKING:
    from trainforge_plugins.text import InputFormat, TextSection

PEEKED_ROWS = 100
PEEKED_BYTES = 1 << 16
OF_CONVERSATIONS = ("columns", "tags", "template", "train_on", "too_long", "packing", "image_dir")


def find_inputs(config: TextSection) -> list[Source]:
    """The files to train on, in the order in which they are read; one with a weight comes once for each pass.

    Raises:
        DataError: a file cannot be found or read, or conversations and other text are mixed.
    """
    if config.dataset is not None:
        names = [config.dataset] if isinstance(config.dataset, str) else config.dataset
        found = []
        for entry in read_registry(config.dataset_dir, names):
            sources = find_sources(entry.path, "jsonl", "text.dataset")
            if entry.limit is not None and len(sources) > 1:
                raise DataError(
                    f"text.dataset: num_samples of {entry.name!r} is for one file, and {entry.path} holds "
                    f"{len(sources)}: name one of them as file_name, or leave num_samples out"
                )
            for source in sources:
                source = dataclasses.replace(source, format="chat", rows=entry.rows, limit=entry.limit)
                found.append(dataclasses.replace(source, has_images=has_images(source)))
        return _of_one_kind(found)
    if config.sources is not None:
        found = []
        for number, part in enumerate(config.sources):
            option = f"text.sources[{number}].path"
            rows = _row_format(
                part.format or config.format, part.columns or config.columns, part.tags or config.tags
            )
            wanted = part.format or config.format
            for source in _found(part.path, wanted, rows, config.field, option):
                found += _passes(source, part.weight, f"text.sources[{number}].weight")
        return _of_one_kind(found)
    assert config.path is not None
    return find_files(config, config.path, "text.path")


def places(config: TextSection) -> list[str]:
    """What the recipe names as the data to train on, for messages and as the name of the cache."""
    if config.dataset is not None:
        names = [config.dataset] if isinstance(config.dataset, str) else config.dataset
        return [f"{config.dataset_dir}/{name}" for name in names]
    paths = [config.path] if config.sources is None else [part.path for part in config.sources]
    return [
        place for path in paths if path is not None for place in ([path] if isinstance(path, str) else path)
    ]


def check_wishes(config: TextSection, sources: Sequence[Source]) -> None:
    """Refuse keys that could change nothing with what the files hold.

    Raises:
        ConfigError: there is one; names it.
    """
    formats = {source.format for source in sources}
    fields = type(config).model_fields
    changed = [name for name, field in fields.items() if getattr(config, name) != field.default]
    if "field" in changed and "jsonl" not in formats:
        what = "conversations, which have columns" if "chat" in formats else "plain text, which has no fields"
        raise ConfigError(
            f"text.field is {config.field!r}, but {', '.join(places(config))} holds {what}: leave text.field out, or "
            "set text.format to jsonl"
        )
    if "chat" in formats:
        return
    of_sources = [
        f"sources[{number}].{name}"
        for number, source in enumerate(config.sources or ())
        for name in ("columns", "tags")
        if getattr(source, name)
    ]
    for name in [*of_sources, *(name for name in OF_CONVERSATIONS if name in changed)]:
        raise ConfigError(
            f"text.{name} is for conversations, and these files hold other text: leave it out, or set text.format "
            "to how their rows hold conversations"
        )


def find_files(config: TextSection, patterns: str | Sequence[str], option: str) -> list[Source]:
    """The files that `patterns` name, read as the section says; `option` is what the recipe calls them.

    Raises:
        DataError: a file cannot be found or read, or conversations and other text are mixed.
    """
    rows = _row_format(config.format, config.columns, config.tags)
    return _of_one_kind(_found(patterns, config.format, rows, config.field, option))


def has_images(source: Source) -> bool:
    """Whether some of the first rows of conversations have images."""
    for row in islice(_first_rows(source), PEEKED_ROWS):
        try:
            if to_conversation(row, source.rows).images:
                return True
        except BadRow:
            continue
    return False


def _row_format(format: InputFormat, columns: dict[str, str], tags: dict[str, str]) -> RowFormat:
    chat = format not in ("auto", "text", "jsonl")
    return RowFormat(cast(ChatFormat, format) if chat else "auto", columns, tags)


def _found(
    patterns: str | Sequence[str], format: InputFormat, rows: RowFormat, field: str, option: str
) -> list[Source]:
    wanted: Literal["auto", "text", "jsonl"] = (
        "auto" if format == "auto" else "text" if format == "text" else "jsonl"
    )
    found = []
    for source in find_sources(patterns, wanted, option):
        if source.format == "jsonl" and format != "jsonl":
            source = dataclasses.replace(source, rows=rows)
            if _holds_conversations(source, format, rows, field):
                source = dataclasses.replace(source, format="chat", has_images=has_images(source))
        found.append(source)
    return found


def _holds_conversations(source: Source, format: InputFormat, rows: RowFormat, field: str) -> bool:
    """Told by the format, by `text.columns`, or by the first rows that are either."""
    if format != "auto" or rows.columns or rows.tags:
        return True
    if field != "text":
        return False
    for row in islice(_first_rows(source), PEEKED_ROWS):
        if rows.matches(row):
            return True
        if field in row:
            return False
    return False


def _first_rows(source: Source) -> Iterator[dict[str, object]]:
    for unit in cut_units([source], PEEKED_BYTES):
        for _, value in read_rows(unit, Count()):
            if not isinstance(value, Fault):
                yield value
        return


def _passes(source: Source, weight: float, option: str) -> list[Source]:
    """A source once for each time its rows are used; the last pass may use a share of them."""
    whole = int(weight)
    shares = [1.0] * whole + ([weight - whole] if weight > whole else [])
    if source.format == "text" and len(shares) > whole:
        raise DataError(f"{option} is {weight:g}, but {source.path} is one document: set a whole number")
    return [dataclasses.replace(source, repeat=i, share=share) for i, share in enumerate(shares)]


def _of_one_kind(sources: list[Source]) -> list[Source]:
    """The sources, those that show no row of theirs taken for what the others are.

    Raises:
        DataError: conversations and other text are mixed.
    """
    chat = next((source for source in sources if source.format == "chat"), None)
    if chat is None:
        return sources
    for source in sources:
        if source.format != "chat" and not _shows_no_row(source):
            raise DataError(
                f"{chat.path} holds conversations and {source.path} other text, which cannot be trained on in one run: "
                "name files of one kind, or set text.format"
            )
    return [dataclasses.replace(source, format="chat") for source in sources]


def _shows_no_row(source: Source) -> bool:
    if source.format == "text":
        return source.size == 0 and isinstance(source.path, Path)
    return next(_first_rows(source), None) is None
