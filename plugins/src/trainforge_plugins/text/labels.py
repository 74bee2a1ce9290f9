"""From a conversation to token ids and labels, out of one rendering and one tokenisation.

Where each content lies in the rendered text is found with a second rendering in which every content is replaced by a
sentinel: what is around the sentinels is the template's, and the first rendering must be exactly that with the contents
put in. So a template that changes or leaves out a content is noticed, and template text is told from content even where
they read the same. The second rendering serves all conversations of the same roles; with a built-in template, which is
known to change no content, the first is made from it too, without another pass through Jinja.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import numpy as np

from trainforge_plugins.text.chat import ChatTemplate, as_text
from trainforge_plugins.text.conversation import IMAGE, BadRow, Conversation, Message
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

    def expanded(self, placeholder: str, texts: Sequence[str]) -> tuple[Rendered, list[Span]]:
        """The same with `texts` in the place of the placeholders of images, and where each of them lies.

        Raises:
            BadRow: there are more or fewer placeholders.
        """
        pieces = self.text.split(placeholder)
        if len(pieces) != len(texts) + 1:
            raise BadRow(
                "the chat template does not write one placeholder for each image",
                f"{len(pieces) - 1} {placeholder} for {len(texts)} images",
            )
        stops: list[int] = []
        images: list[Span] = []
        old = new = 0
        for piece, text in zip(pieces, texts, strict=False):
            old, new = old + len(piece) + len(placeholder), new + len(piece)
            images.append((new, new + len(text)))
            stops.append(old)
            new += len(text)
        shifts = [0, *(image[1] - stop for image, stop in zip(images, stops, strict=True))]

        def moved(place: int) -> int:
            return place + shifts[bisect_right(stops, place)]

        contents = tuple((number, (moved(start), moved(stop))) for number, (start, stop) in self.contents)
        turns = tuple((i, Turn(moved(t.start), moved(t.end), moved(t.stop))) for i, t in self.turns)
        text = "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)
        return Rendered(text, contents, turns), images


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: spans are in tokens.

    Attributes:
        ids: token ids, int64 `[tokens]`.
        supervised: bool `[tokens]`: whether the model is to learn to write this token.
        prompts: the contents of system, user and tool turns.
        turns: the assistant's turns.
        images: what stands for each image.
    """

    ids: np.ndarray
    supervised: np.ndarray
    prompts: tuple[Span, ...]
    turns: tuple[Turn, ...]
    images: tuple[Span, ...] = ()

    @property
    def targets(self) -> int:
        """Tokens that get a label. The first token has none, since nothing stands before it."""
        return int(np.count_nonzero(self.supervised[1:]))


@dataclass(frozen=True)
class _Skeleton:
    """The text that a template puts around the contents of conversations of one shape.

    Attributes:
        parts: the template's own text, in turns with the numbers (see `_pieces`) of the contents that come between.
        marks: what it marks as the assistant's, with a sentinel for each content.
    """

    parts: list[str]
    marks: list[Span]

    def filled(self, conversation: Conversation) -> tuple[str, list[tuple[int, Span]], list[Span]]:
        """Text, contents and marks with the contents of a conversation, for a template that changes none."""
        known = _pieces(conversation)
        pieces, contents = [self.parts[0]], []
        before = after = len(self.parts[0])
        # from this character with sentinels on, a place is so much further on with contents
        befores, shifts = [0], [0]
        for number, own in zip(self.parts[1::2], self.parts[2::2], strict=True):
            message, content = known[int(number)]
            contents.append((message, (after, after + len(content))))
            before, after = before + len(number) + 2, after + len(content)
            befores.append(before)
            shifts.append(after - before)
            pieces += [content, own]
            before, after = before + len(own), after + len(own)

        def moved(place: int) -> int:
            return place + shifts[bisect_right(befores, place) - 1]

        return "".join(pieces), sorted(contents), [(moved(start), moved(stop)) for start, stop in self.marks]


_Shape = tuple[tuple[str, str | None], ...]


def _shape(conversation: Conversation) -> _Shape | None:
    """What decides a skeleton: roles, and contents that are blank. None where more than that does."""
    if conversation.tools:
        return None
    for message in conversation.messages:
        if message != Message(message.role, message.content, trained=message.trained):
            return None
    return tuple((m.role, None if m.content.strip() else m.content) for m in conversation.messages)


class Labeller:
    """Renders conversations with one template and finds what to learn from.

    Args:
        template: the chat template.
        tokenizer: gives ids.
        train_on: `assistant`: every assistant turn and its end token; `last`: only the last one; `all`: every token.
            A turn that its row asks not to learn (`Message.trained`) is left out of each.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, train_on: TrainOn) -> None:
        self._template, self._tokenizer, self._train_on = template, tokenizer, train_on
        self._end = re.compile(r"\s*(" + "|".join(map(re.escape, template.ends)) + ")")
        self._control = re.compile("|".join(map(re.escape, tokenizer.special)) or r"(?!)")
        self._skeletons: dict[_Shape, _Skeleton] = {}

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokens and labels of a conversation without images.

        Raises:
            BadRow: it cannot be rendered faithfully; says why.
        """
        return self.encode_rendered(conversation, self.render(conversation))

    def encode_rendered(
        self, conversation: Conversation, rendered: Rendered, images: Sequence[Span] = ()
    ) -> Encoded:
        """Tokens and labels of a rendering. What stands for `images` is never learnt."""
        cuts = sorted(
            {cut for _, span in rendered.contents for cut in span}
            | {cut for _, turn in rendered.turns for cut in (turn.start, turn.end, turn.stop)}
            | {cut for span in images for cut in span}
        )
        ids, ends = self._tokenizer.encode_with_ends(rendered.text, cuts)
        # to each cut the number of tokens that end at or before that character
        token = dict(zip(cuts, np.searchsorted(ends, cuts, side="right").tolist(), strict=True))
        turns = [(i, Turn(token[t.start], token[t.end], token[t.stop])) for i, t in rendered.turns]
        messages = conversation.messages
        supervised = np.full(len(ids), self._train_on == "all")
        for number, turn in turns[-1:] if self._train_on == "last" else turns:
            supervised[turn.start : turn.stop] = messages[number].trained
        spans = tuple((token[start], token[stop]) for start, stop in images)
        for start, stop in spans:
            supervised[start:stop] = False
        prompts = [
            (token[start], token[stop])
            for number, (start, stop) in rendered.contents
            if messages[number].role != "assistant"
        ]
        return Encoded(ids, supervised, tuple(prompts), tuple(turn for _, turn in turns), spans)

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, and where contents and assistant turns lie in it.

        Raises:
            BadRow: the template changes or leaves out a content, or marks no end.
        """
        for number, message in enumerate(conversation.messages, start=1):
            called = as_text(message.tool_calls) if message.tool_calls else ""
            for text in (message.content, message.reasoning, message.name, message.tool_call_id, called):
                if found := self._control.search(text):
                    raise BadRow(
                        "a message holds a control token of the tokenizer", f"{found[0]} in message {number}"
                    )
        if conversation.tools and (found := self._control.search(as_text(conversation.tools))):
            raise BadRow("the tools hold a control token of the tokenizer", found[0])
        shape = _shape(conversation)
        skeleton = self._skeletons.get(shape) if shape is not None else None
        if skeleton is not None and self._template.verbatim:
            text, contents, marks = skeleton.filled(conversation)
        else:
            text, marks = self._template.render(conversation)
            skeleton = skeleton or self._skeleton(conversation, shape)
            contents = self._contents(conversation, text, skeleton.parts)
        speaking = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
        if len(marks) == len(speaking):
            turns = [self._marked(text, mark) for mark in marks]
        else:
            spans = dict(contents)
            turns = [self._found(conversation, text, i, spans.get(i)) for i in speaking]
        return Rendered(text, tuple(contents), tuple(zip(speaking, turns, strict=True)))

    def _contents(self, conversation: Conversation, text: str, skeleton: list[str]) -> list[tuple[int, Span]]:
        """Where each content lies: walks along the skeleton of the template's own text."""
        messages = conversation.messages
        pieces = _pieces(conversation)
        found: dict[int, Span] = {}
        at = len(skeleton[0])
        if not text.startswith(skeleton[0]):
            raise self._unfaithful("its own text depends on the contents")
        for piece, after in zip(map(int, skeleton[1::2]), skeleton[2::2], strict=True):
            number, content = pieces[piece]
            for written in _variants(content):
                stop = at + len(written)
                if text.startswith(written, at) and text.startswith(after, stop):
                    break
            else:
                raise self._unfaithful(
                    f"message {number + 1} ({messages[number].role}) is not written as it is"
                )
            found[piece] = (at, stop)
            at = stop + len(after)
        if at != len(text):
            raise self._unfaithful("its own text depends on the contents")
        for piece, (number, _) in enumerate(pieces):
            if piece not in found:
                raise self._unfaithful(f"message {number + 1} ({messages[number].role}) is left out")
        return sorted((pieces[piece][0], span) for piece, span in found.items())

    def _unfaithful(self, detail: str) -> BadRow:
        return BadRow(f"the chat template {self._template.name} does not render it faithfully", detail)

    def _skeleton(self, conversation: Conversation, shape: _Shape | None) -> _Skeleton:
        """The template's own text around the contents of a conversation; kept for others of this `shape`."""
        numbers = count()

        def marked(content: str) -> str:
            parts = content.split(IMAGE)
            return IMAGE.join(f"\ufdd1{next(numbers)}\ufdd2" if part.strip() else part for part in parts)

        messages = [replace(message, content=marked(message.content)) for message in conversation.messages]
        text, marks = self._template.render(replace(conversation, messages=tuple(messages)))
        skeleton = _Skeleton(_SENTINEL.split(text), marks)
        if shape is not None and len(self._skeletons) < _KEPT_SKELETONS:
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


def _pieces(conversation: Conversation) -> list[tuple[int, str]]:
    """(message, text) of all that stands between images and is not blank: a template may put images before it all."""
    return [
        (number, text)
        for number, message in enumerate(conversation.messages)
        for text in message.content.split(IMAGE)
        if text.strip()
    ]


def _variants(content: str) -> list[str]:
    """How templates write a content: as it is, without whitespace around it, or inside a JSON string."""
    written = [content, content.strip(), content.lstrip(), content.rstrip(), as_text(content)[1:-1]]
    return [text for i, text in enumerate(written) if text not in written[:i]]
