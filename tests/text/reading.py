"""Reads a data set down to conversations and faults, without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainforge_plugins.text import TextSection
from trainforge_plugins.text.containers import Fault
from trainforge_plugins.text.conversation import BadRow, Conversation
from trainforge_plugins.text.formats import to_conversation
from trainforge_plugins.text.inputs import find_inputs
from trainforge_plugins.text.rows import Count, read_rows
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.units import UNIT_BYTES, cut_units


class Everything:
    """All that was read.

    Attributes:
        used: (place, conversation).
        faults: (place, reason, detail).
        numbered: rows and blank lines counted, over all files.
    """

    def __init__(self, sources: Sequence[Source], unit_bytes: int = UNIT_BYTES) -> None:
        self.used: list[tuple[str, Conversation]] = []
        self.faults: list[tuple[str, str, str]] = []
        self.numbered = 0
        before, source = 0, -1
        for unit in cut_units(sources, unit_bytes):
            if unit.source != source:
                source, before = unit.source, 0
            count = Count()
            for number, value in read_rows(unit, count):
                place = unit.place(before + number).rpartition("/")[2]
                if isinstance(value, Fault):
                    self.faults.append((place, value.reason, value.detail))
                    continue
                try:
                    self.used.append((place, to_conversation(value, unit.rows)))
                except BadRow as bad:
                    self.faults.append((place, bad.reason, bad.detail))
            before += count.lines
            self.numbered += count.lines

    @property
    def answers(self) -> list[str]:
        """The last turn of each conversation."""
        return [conversation.messages[-1].content for _, conversation in self.used]


def read(path: Path | str | None = None, unit_bytes: int = UNIT_BYTES, **section: Any) -> Everything:
    """Read what a section names."""
    options = {"path": str(path), **section} if path is not None else section
    return Everything(find_inputs(TextSection(**options)), unit_bytes)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]
