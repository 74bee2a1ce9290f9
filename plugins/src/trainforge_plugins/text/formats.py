"""The formats of instruction data: from a row, whatever its columns are called, to a conversation.

A format is only a set of default column names. `alpaca` and `prompt_completion` hold a question and an answer in two
columns; `sharegpt` and `openai` hold a list of turns in one. The names of columns and roles that LLaMA-Factory's
registries use (`prompt`, `query`, `response`, `messages`; `role_tag`, `user_tag`, ...) are understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainforge_plugins.text.conversation import BadRow, Conversation, LacksColumn, Message
from trainforge_plugins.text.images import place_images, read_column
from trainforge_plugins.text.turns import Tags, read_tools, read_turns
from trainforge_plugins.text.values import as_list, text_of

ChatFormat = Literal["alpaca", "sharegpt", "openai", "prompt_completion"]

COLUMNS: dict[ChatFormat, dict[str, tuple[str, ...]]] = {
    "openai": {"messages": ("messages",)},
    "sharegpt": {"messages": ("conversations", "conversation")},
    "alpaca": {"prompt": ("instruction",), "query": ("input",), "response": ("output",)},
    "prompt_completion": {"prompt": ("prompt",), "response": ("completion", "response")},
}
"""Where each format keeps what, in the order in which `auto` tries the formats."""

COMMON: dict[str, tuple[str, ...]] = {
    "system": ("system",),
    "tools": ("tools",),
    "history": ("history",),
    "images": ("images", "image"),
}

ALIASES = {
    "instruction": "prompt",
    "input": "query",
    "output": "response",
    "completion": "response",
    "conversations": "messages",
}
"""Other names under which `text.columns` takes a column."""

COLUMN_NAMES = ("prompt", "query", "response", "system", "history", "messages", "tools", "images")
TAG_NAMES = (
    "role_tag",
    "content_tag",
    "user_tag",
    "assistant_tag",
    "observation_tag",
    "function_tag",
    "system_tag",
)


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a file are to be read.

    Attributes:
        format: one of the chat formats, or `auto`: each row by its keys.
        columns: from the names in `COLUMN_NAMES` (or `ALIASES`) to the columns of the file; an empty name: not used.
        tags: from the names in `TAG_NAMES` to the keys and roles of the file's turns.
    """

    format: ChatFormat | Literal["auto"] = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {ALIASES.get(name, name): column for name, column in self.columns.items()}
        object.__setattr__(self, "columns", known)
        for given, names, what in ((known, COLUMN_NAMES, "columns"), (self.tags, TAG_NAMES, "tags")):
            for name in given:
                if name not in names:
                    raise ValueError(f"{what}: {name!r} is none of {', '.join(names)}")

    def identity(self) -> dict[str, Any]:
        """What decides how a row is read, as plain data."""
        return {"format": self.format, "columns": dict(self.columns), "tags": dict(self.tags)}

    def expected(self) -> list[str]:
        """What rows may look like, for a person, one entry for each format."""
        return [" + ".join(self._required(name)) for name in self._candidates()]

    def recognise(self, row: Mapping[str, Any]) -> ChatFormat | None:
        """The format of `row`; in `auto` the first whose question or answer column, or list of turns, is there."""
        if self.format != "auto":
            return self.format
        for name in self._candidates():
            if any(column in row for column in self._places(name)["first"]):
                return name
        for name in self._candidates():
            if any(column in row for column in self._places(name)["last"]):
                return name
        return None

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether all columns that some format needs are there."""
        return any(
            all(any(column in row for column in self.names(name, key)) for key in _needed(name))
            for name in self._candidates()
        )

    def _candidates(self) -> list[ChatFormat]:
        if self.format != "auto":
            return [self.format]
        if "messages" in self.columns:
            return ["openai"]
        if {"prompt", "query", "response"} & set(self.columns):
            return ["alpaca"]
        return list(COLUMNS)

    def _places(self, name: ChatFormat) -> dict[str, tuple[str, ...]]:
        """Columns that tell a format: `first` alone does, `last` when no format's `first` is there."""
        if "messages" in COLUMNS[name]:
            return {"first": self.names(name, "messages"), "last": ()}
        return {"first": self.names(name, "prompt"), "last": self.names(name, "response")}

    def _required(self, name: ChatFormat) -> tuple[str, ...]:
        return tuple(repr(column) for key in _needed(name) for column in self.names(name, key)[:1])

    def names(self, name: ChatFormat, key: str) -> tuple[str, ...]:
        """The columns in which rows of format `name` keep `key`, the first that is there counts; may be empty."""
        if key in self.columns:
            return (self.columns[key],) if self.columns[key] else ()
        return COLUMNS[name].get(key) or COMMON.get(key, ())


def _needed(name: ChatFormat) -> tuple[str, ...]:
    return ("messages",) if "messages" in COLUMNS[name] else ("prompt", "response")


def to_conversation(row: Mapping[str, Any], rows: RowFormat) -> Conversation:
    """Give the conversation that a row of instruction data holds.

    A number is taken as its JSON text, true and false as these words; null counts as missing; an object or a list
    where text belongs makes the row unusable.

    Raises:
        BadRow: the row cannot be used; says why.
    """
    name = rows.recognise(row)
    if name is None:
        raise BadRow(f"none of the columns of a known format ({'; '.join(rows.expected())})")
    tags = Tags.of(rows.tags)
    if "messages" in COLUMNS[name]:
        column, value = _find(row, rows.names(name, "messages"))
        messages = read_turns(as_list(value, column), column, tags)
    else:
        messages = _question_and_answer(row, rows, name, tags)
    column, value = _find(row, rows.names(name, "system"), required=False)
    if value not in (None, "") and messages and messages[0].role != "system":
        messages = [Message("system", text_of(value, column)), *messages]
    column, value = _find(row, rows.names(name, "tools"), required=False)
    tools = read_tools(value, column)
    column, value = _find(row, rows.names(name, "images"), required=False)
    marked = column in row or bool(rows.columns.get("images"))
    return _checked(place_images(messages, read_column(value, column), marked, column), tools)


def _find(row: Mapping[str, Any], columns: tuple[str, ...], required: bool = True) -> tuple[str, Any]:
    """The first of `columns` that holds something, with its value; else the first and None."""
    for column in columns:
        if row.get(column) is not None:
            return column, row[column]
    if required:
        if not columns:
            raise BadRow("text.columns leaves out a column that is needed")
        there = [column for column in columns if column in row]
        if there:
            raise BadRow(f"{there[0]!r} is null")
        raise LacksColumn(f"no column {columns[0]!r}")
    return (columns[0] if columns else ""), None


def _question_and_answer(
    row: Mapping[str, Any], rows: RowFormat, name: ChatFormat, tags: Tags
) -> list[Message]:
    answer_column, answer = _find(row, rows.names(name, "response"))
    column, prompt = _find(row, rows.names(name, "prompt"), required=False)
    if isinstance(prompt, list):  # turns before the answer, and the answer as turns
        messages = read_turns(prompt, column, tags, complete=False)
        if isinstance(answer, list):
            return messages + read_turns(answer, answer_column, tags)
        return [*messages, Message("assistant", text_of(answer, answer_column, required=True))]
    query_column, query = _find(row, rows.names(name, "query"), required=False)
    parts = [text_of(prompt, column), text_of(query, query_column)]
    question = "\n".join(part for part in parts if part)
    if not question:
        column = column or query_column
        if column in row:
            raise BadRow(f"{column!r} is empty")
        raise LacksColumn(f"no column {column!r}")
    text = text_of(answer, answer_column, required=True)
    column, history = _find(row, rows.names(name, "history"), required=False)
    past = _history(as_list(history, column), column) if history not in (None, "") else []
    return [*past, Message("user", question), Message("assistant", text)]


def _history(pairs: list[Any], column: str) -> list[Message]:
    messages = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"{column!r} is not a list of [question, answer]")
        messages.append(Message("user", text_of(pair[0], column, required=True)))
        messages.append(Message("assistant", text_of(pair[1], column, required=True)))
    return messages


def _checked(messages: list[Message], tools: tuple[dict[str, Any], ...]) -> Conversation:
    if any(message.role == "system" for message in messages[1:]):
        raise BadRow("a system turn that is not the first")
    if not any(message.role == "assistant" for message in messages):
        raise BadRow("no assistant turn")
    if messages[0].role == "assistant" and len(messages) == 1:
        raise BadRow("an answer without a question")
    return Conversation(tuple(messages), tools)
