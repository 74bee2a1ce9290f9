"""What every format of instruction data becomes: a conversation, as chat templates take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IMAGE = "\ufdd3"
"""What stands for an image in a content: a character that Unicode keeps for such use inside a program."""

ROLES = ("system", "user", "assistant", "tool")


class BadRow(Exception):
    """A row that cannot be used.

    Attributes:
        reason: why, for a person; the same words for all rows with the same fault, so that they can be counted.
        detail: what is special to this row, or an empty text.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


class LacksColumn(BadRow):
    """A row without a column that its format needs."""


@dataclass(frozen=True)
class ImageReference:
    """An image as a row names it: the path of its file, or its bytes when the row holds them."""

    path: str = ""
    data: bytes | None = None


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: one of `ROLES`; `tool` is the result of a call.
        content: the text; may be empty only for an assistant that calls tools, a user, a system or a tool. `IMAGE`
            stands where an image is.
        tool_calls: of an assistant: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, where
            the arguments are an object (templates write them with `tojson`).
        name: of a tool's result: which tool gave it; empty when unknown.
        tool_call_id: of a tool's result: which call it answers; empty when unknown.
        reasoning: of an assistant: the text that it thought before it answered (`reasoning_content`); may be empty.
        trained: false where the row itself asks to learn nothing from this turn (OpenAI's `weight: 0`).
        images: the image of each `IMAGE`; None for one that the row keeps elsewhere and that is not known yet.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""
    trained: bool = True
    images: tuple[ImageReference | None, ...] = ()

    def for_template(self, in_parts: bool = False) -> dict[str, Any]:
        """The message as `apply_chat_template` takes it; keys without a value are left out.

        `in_parts`: the content is a list of parts, `{"type": "image"}` and `{"type": "text", "text": ...}`.
        """
        content = self._parts() if in_parts else self.content
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        optional = (
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
            ("reasoning_content", self.reasoning),
        )
        message.update({key: value for key, value in optional if value})
        return message

    def _parts(self) -> list[dict[str, str]]:
        parts: list[dict[str, str]] = []
        for number, text in enumerate(self.content.split(IMAGE)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return parts


@dataclass(frozen=True)
class Conversation:
    """One row of instruction data: at least one assistant turn, with at most one system turn, which comes first.

    Attributes:
        messages: the turns in order.
        tools: descriptions of the functions that may be called, as OpenAI writes them
            (`{"type": "function", "function": {"name": ..., "parameters": {...}}}`).
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def images(self) -> tuple[ImageReference, ...]:
        """All images, in order."""
        return tuple(image for message in self.messages for image in message.images if image is not None)

    def for_template(
        self, in_parts: bool = False
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages (see there) and the tools (None without any) as `apply_chat_template` takes them."""
        tools = [dict(tool) for tool in self.tools]
        return [message.for_template(in_parts) for message in self.messages], tools or None
