"""From a conversation to token ids and labels, out of one rendering and one tokenisation.

Where each content lies in the rendered text is found with a second rendering in which every content is replaced by a
sentinel: what is around the sentinels is the template's, and the first rendering must be exactly that with the contents
put in. So a template that changes or leaves out a content is noticed, and template text is told from content even where
they read the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainforge_plugins.text.chat import ChatTemplate, as_text
from trainforge_plugins.text.conversation import BadRow, Conversation, Message
from trainforge_plugins.text.tokenizers import Tokenizer

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]
_SENTINEL = re.compile("\ufdd1(\\d+)\ufdd2")
_KEPT_SKELETONS = 4096


@dataclass(frozen=True)
class Turn:
    """What the assistant writes in one turn, as a span of characters or tokens.

    Attributes:
        start: where it begins.
        end: where its end token begins (the same as `stop` when it has none).
        stop: after its end token.
    """

    start: int
    end: int
    stop: int


@dataclass(frozen=True)
class Rendered:
    """A conversation as text: spans are in characters.

    Attributes:
        text: the whole rendering.
        contents: (message, span) for each content that is not empty.
        turns: (message, turn) for each assistant message.
    """

    text: str
    contents: tuple[tuple[int, Span], ...]
    turns: tuple[tuple[int, Turn], ...]


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: spans are in tokens.

    Attributes:
        ids: token ids, int64 `[tokens]`.
        supervised: bool `[tokens]`: whether the model is to learn to write this token.
        prompts: the contents of system, user and tool turns.
        turns: the assistant's turns.
    """

    ids: np.ndarray
    supervised: np.ndarray
    prompts: tuple[Span, ...]
    turns: tuple[Turn, ...]

    @property
    def targets(self) -> int:
        """Tokens that get a label. The first token has none, since nothing stands before it."""
        return int(np.count_nonzero(self.supervised[1:]))


class Labeller:
    """Renders conversations with one template and finds what to learn from.

    Args:
        template: the chat template.
        tokenizer: gives ids.
        train_on: `assistant`: every assistant turn and its end token; `last`: only the last one; `all`: every token.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, train_on: TrainOn) -> None:
        self._template, self._tokenizer, self._train_on = template, tokenizer, train_on
        self._end = re.compile(r"\s*(" + "|".join(map(re.escape, template.ends)) + ")")
        self._control = re.compile("|".join(map(re.escape, tokenizer.special)) or r"(?!)")
        self._skeletons: dict[tuple[tuple[str, bool], ...], list[str]] = {}

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokens and labels of a conversation.

        Raises:
            BadRow: it cannot be rendered faithfully; says why.
        """
        rendered = self.render(conversation)
        cuts = sorted({cut for _, span in rendered.contents for cut in span})
        cuts = sorted({*cuts, *(cut for _, t in rendered.turns for cut in (t.start, t.end, t.stop))})
        ids, ends = self._tokenizer.encode_with_ends(rendered.text, cuts)

        def token(cut: int) -> int:
            """The number of tokens that end at or before character `cut`."""
            return int(np.searchsorted(ends, cut, side="right"))

        turns = [(i, Turn(token(t.start), token(t.end), token(t.stop))) for i, t in rendered.turns]
        messages = conversation.messages
        supervised = np.full(len(ids), self._train_on == "all")
        if self._train_on != "all":
            for number, turn in turns[-1:] if self._train_on == "last" else turns:
                supervised[turn.start : turn.stop] = messages[number].trained
        prompts = [
            (token(start), token(stop))
            for number, (start, stop) in rendered.contents
            if messages[number].role != "assistant"
        ]
        return Encoded(ids, supervised, tuple(prompts), tuple(turn for _, turn in turns))

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, and where contents and assistant turns lie in it.

        Raises:
            BadRow: the template changes or leaves out a content, or marks no end.
        """
        for number, message in enumerate(conversation.messages, start=1):
            if found := self._control.search(message.content + message.reasoning):
                raise BadRow(
                    "a message holds a control token of the tokenizer", f"{found[0]} in message {number}"
                )
        text, marks = self._template.render(conversation)
        contents = self._contents(conversation, text)
        speaking = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
        if len(marks) == len(speaking):
            turns = [self._marked(text, mark) for mark in marks]
        else:
            spans = dict(contents)
            turns = [self._found(conversation, text, i, spans.get(i)) for i in speaking]
        return Rendered(text, tuple(contents), tuple(zip(speaking, turns, strict=True)))

    def _contents(self, conversation: Conversation, text: str) -> list[tuple[int, Span]]:
        """Where each content lies: walks along the skeleton of the template's own text."""
        skeleton = self._skeleton(conversation)
        messages = conversation.messages
        found: dict[int, Span] = {}
        at = len(skeleton[0])
        if not text.startswith(skeleton[0]):
            raise self._unfaithful("its own text depends on the contents")
        for number, after in zip(map(int, skeleton[1::2]), skeleton[2::2], strict=True):
            for written in _variants(messages[number].content):
                stop = at + len(written)
                if text.startswith(written, at) and text.startswith(after, stop):
                    break
            else:
                raise self._unfaithful(
                    f"message {number + 1} ({messages[number].role}) is not written as it is"
                )
            found[number] = (at, stop)
            at = stop + len(after)
        if at != len(text):
            raise self._unfaithful("its own text depends on the contents")
        for number, message in enumerate(messages):
            if message.content.strip() and number not in found:
                raise self._unfaithful(f"message {number + 1} ({message.role}) is left out")
        return sorted(found.items())

    def _unfaithful(self, detail: str) -> BadRow:
        return BadRow(f"the chat template {self._template.name} does not render it faithfully", detail)

    def _skeleton(self, conversation: Conversation) -> list[str]:
        """The template's own text, in turns with the numbers of the messages whose contents come between."""
        messages = conversation.messages
        plain = not conversation.tools and not any(m.tool_calls or m.reasoning or m.name for m in messages)
        shape = tuple((message.role, bool(message.content.strip())) for message in messages)
        if plain and shape in self._skeletons:
            return self._skeletons[shape]
        marked = [
            replace(message, content=f"\ufdd1{i}\ufdd2") if message.content.strip() else message
            for i, message in enumerate(messages)
        ]
        text, _ = self._template.render(replace(conversation, messages=tuple(marked)))
        skeleton = _SENTINEL.split(text)
        if plain and len(self._skeletons) < _KEPT_SKELETONS:
            self._skeletons[shape] = skeleton
        return skeleton

    def _marked(self, text: str, mark: Span) -> Turn:
        """A turn that the template marks with `{% generation %}`; its end token may stand inside the mark or after."""
        start, stop = mark
        inside = text[start:stop].rstrip()
        for end in self._template.ends:
            if inside.endswith(end):
                body = len(inside) - len(end)
                return Turn(start, start + body, start + len(inside))
        return self._ended(text, start, stop)

    def _found(self, conversation: Conversation, text: str, number: int, content: Span | None) -> Turn:
        """A turn that no mark shows: its content, or what is between two prefixes when it calls tools or thinks."""
        message: Message = conversation.messages[number]
        if content is not None and not message.tool_calls and not message.reasoning:
            return self._ended(text, *content)
        before, _ = self._template.render(
            replace(conversation, messages=conversation.messages[:number]), generation_prompt=True
        )
        through, _ = self._template.render(
            replace(conversation, messages=conversation.messages[: number + 1])
        )
        if not (text.startswith(before) and text.startswith(through) and len(through) > len(before)):
            raise self._unfaithful(f"where message {number + 1} (assistant) begins and ends cannot be told")
        return self._marked(text, (len(before), len(through)))

    def _ended(self, text: str, start: int, stop: int) -> Turn:
        found = self._end.match(text, stop)
        if found is None:
            raise BadRow(
                f"the chat template {self._template.name} ends an assistant's turn without an end token",
                f"but with {text[stop : stop + 20]!r}",
            )
        return Turn(start, stop, found.end())


def _variants(content: str) -> list[str]:
    """How templates write a content: as it is, without whitespace around it, or inside a JSON string."""
    written = [content, content.strip(), content.lstrip(), content.rstrip(), as_text(content)[1:-1]]
    return [text for i, text in enumerate(written) if text not in written[:i]]
