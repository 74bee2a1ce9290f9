"""Cuts the token stream into rows, or fills rows with whole conversations, and collates rows into micro-batches.

Text: row k is tokens k·L up to (k+1)·L of all documents one after the other, so every row but the last is full and
nothing is truncated. Conversations are never cut here: each row holds as many whole ones as fit, chosen among the
next 65,536 so that little is left free. Within a row, tokens attend only within their document and positions restart
with each document.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainforge.stages import IGNORED, Batch
from trainforge_plugins.text.cache import TokenCache

if TYPE_CHECKING:
    from trainforge_plugins.text.pictures import Pictures

PADDING = -1
"""The document id of padding."""

WINDOW = 1 << 16
"""Conversations among which those of a row are chosen."""


@dataclass(frozen=True)
class Row:
    """One row of L tokens: int64 arrays `[L]`.

    Attributes:
        input_ids: the tokens; padding repeats token `padding_id`.
        labels: the next token of the same document, which may be the first one of the next row; else `IGNORED`.
        position_ids: restart at 0 with each document and with the padding.
        document_ids: 0 for the first document in the row, 1 for the next, ...; -1 for padding.
        real: tokens that are not padding.
        documents: runs of equal document ids; padding counts as one.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    document_ids: np.ndarray
    real: int
    documents: int


class Rows(ABC):
    """The rows of a token cache, made when they are asked for.

    Attributes:
        padding_id: the token that stands in padding.
    """

    padding_id: int

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, number: int) -> Row:
        """Row `number`, counted from 0."""

    def prepare(self, numbers: Iterable[int]) -> None:  # noqa: B027
        """Begin in the background with what the rows `numbers` will need beside their tokens."""

    def inputs(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """The model's inputs beside tokens that the rows `numbers` have (`pixel_values`, ...), one row after the other.

        Raises:
            DataError: they are not what they were when the rows were tokenised.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """End what works in the background."""


class TextRows(Rows):
    """Rows of `length` tokens of a stream of documents."""

    def __init__(self, cache: TokenCache, length: int, padding_id: int) -> None:
        self._cache, self._length, self.padding_id = cache, length, padding_id

    def __len__(self) -> int:
        """Number of rows; the last may be short."""
        return math.ceil(self._cache.tokens / self._length)

    def __getitem__(self, number: int) -> Row:
        """Row `number`, counted from 0."""
        length, begin = self._length, number * self._length
        ids = self._cache.read(begin, begin + length + 1)  # one more: the last label
        real = min(length, len(ids))
        starts = self._cache.starts(begin, begin + real)
        labels = np.full(real, IGNORED, np.int64)
        labels[: len(ids) - 1] = ids[1:]
        labels[starts - 1] = IGNORED  # what follows is another document
        return _padded(_row(ids[:real], labels, starts[starts < real]), length, self.padding_id)


class ConversationRows(Rows):
    """Rows of whole conversations: several in one, padded to `length`, or (`packed` False) one each, not padded.

    One with images always has a row of its own, not padded.
    """

    def __init__(
        self,
        cache: TokenCache,
        length: int,
        padding_id: int,
        packed: bool,
        pictures: Pictures | None = None,
    ) -> None:
        self._cache, self.padding_id, self._pictures = cache, padding_id, pictures
        self._length = length if packed else 0
        self._bounds = cache.bounds()
        if packed:
            alone = np.zeros(cache.documents, bool)
            alone[cache.images.documents] = True
            self._order, self._firsts = pack(np.diff(self._bounds), length, alone=alone)
        else:
            self._order = np.arange(cache.documents)
            self._firsts = np.arange(cache.documents + 1)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._firsts) - 1

    def members(self, number: int) -> list[int]:
        """The conversations of row `number`, in order."""
        members: list[int] = self._order[self._firsts[number] : self._firsts[number + 1]].tolist()
        return members

    def __getitem__(self, number: int) -> Row:
        """Row `number`, counted from 0."""
        ids, labels, cuts = [], [], [0]
        for member in self.members(number):
            begin, end = int(self._bounds[member]), int(self._bounds[member + 1])
            tokens, supervised = self._cache.read(begin, end), self._cache.supervised(begin, end)
            ids.append(tokens)
            labels.append(np.append(np.where(supervised[1:], tokens[1:], IGNORED), IGNORED))
            cuts.append(cuts[-1] + len(tokens))
        row = _row(np.concatenate(ids), np.concatenate(labels), np.array(cuts[1:-1], np.int64))
        length = 0 if self._with_images([number]) else self._length
        return _padded(row, max(length, row.real), self.padding_id)

    def _with_images(self, numbers: Iterable[int]) -> list[int]:
        """The documents of those of the rows `numbers` that have images."""
        known = self._cache.images.documents
        firsts = [int(self._order[self._firsts[number]]) for number in numbers]
        places = np.searchsorted(known, firsts).tolist()
        return [
            document
            for document, at in zip(firsts, places, strict=True)
            if at < len(known) and known[at] == document
        ]

    def prepare(self, numbers: Iterable[int]) -> None:
        """Begin with the images of the rows `numbers`."""
        if self._pictures is not None:
            self._pictures.prepare(self._with_images(numbers))

    def inputs(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the model's processor makes of the images of the rows `numbers`."""
        return {} if self._pictures is None else self._pictures.inputs(self._with_images(numbers))

    def close(self) -> None:
        """End the threads that decode."""
        if self._pictures is not None:
            self._pictures.close()


def pack(
    sizes: np.ndarray, length: int, window: int = WINDOW, alone: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Put documents of `sizes` (1 to `length`) into rows of `length`, within each window of documents.

    Gives the documents row after row, and where each row begins in that list (and its end). Documents within a row, and
    rows by their first document, keep the data's order. `alone` marks documents that share their row with no other.
    """
    orders, counts = (
        [np.empty(0, np.int64)],
        [0],
    )  # arrays take less memory than the rows of one window as lists
    single = np.zeros(len(sizes), bool) if alone is None else alone
    for begin in range(0, len(sizes), window):
        here = np.arange(begin, min(begin + window, len(sizes)))
        shared = here[~single[here]].tolist()
        filled = _fill_rows(sizes[shared].tolist(), length)
        together = [sorted(shared[place] for place in row) for row in filled]
        rows = sorted(together + [[document] for document in here[single[here]].tolist()])
        orders.append(np.fromiter((document for row in rows for document in row), np.int64, len(here)))
        counts += map(len, rows)
    return np.concatenate(orders), np.cumsum(counts)


def _fill_rows(sizes: list[int], length: int) -> Iterator[list[int]]:
    """Fill one row after the other: the longest document that is left, then what fits best into the rest."""
    of_size: list[list[int]] = [[] for _ in range(length + 1)]
    for document in range(len(sizes) - 1, -1, -1):
        of_size[sizes[document]].append(document)
    left = sum(1 << size for size in set(sizes))  # bit s: a document of size s is left
    while left:
        row: list[int] = []
        space = length
        chosen: tuple[int, ...] = (left.bit_length() - 1,)
        while chosen:
            for size in chosen:
                row.append(of_size[size].pop())
                if not of_size[size]:
                    left ^= 1 << size
                space -= size
            chosen = _best(left, of_size, space)
        yield row


def _best(left: int, of_size: list[list[int]], space: int) -> tuple[int, ...]:
    """The sizes to take next: the largest that fits, or near the row's end the one or two that fill it best."""
    largest = (left & ((2 << space) - 1)).bit_length() - 1
    if largest < 1:
        return ()
    if largest == space or 2 * largest < space:
        return (largest,)
    best: tuple[int, ...] = (largest,)
    filled = first = largest
    while 2 * first >= filled and first > 0:  # the larger of two; the smaller one fills what it leaves
        second = (left & ((2 << min(first, space - first)) - 1)).bit_length() - 1
        if second == first and len(of_size[first]) < 2:
            second = (left & ((1 << first) - 1)).bit_length() - 1
        if second > 0 and first + second > filled:
            best, filled = (first, second), first + second
            if filled == space:
                break
        first = (left & ((1 << first) - 1)).bit_length() - 1
    return best


def _row(ids: np.ndarray, labels: np.ndarray, cuts: np.ndarray) -> Row:
    """A row without padding; documents after the first begin at `cuts`."""
    document_ids = np.zeros(len(ids), np.int64)
    document_ids[cuts] = 1
    document_ids = document_ids.cumsum()
    first = np.concatenate((np.zeros(1, np.int64), cuts))
    position_ids = np.arange(len(ids), dtype=np.int64) - first[document_ids]
    return Row(ids, labels, position_ids, document_ids, len(ids), len(first))


def _padded(row: Row, length: int, padding_id: int) -> Row:
    more = length - len(row.input_ids)
    if more == 0:
        return row
    return Row(
        np.append(row.input_ids, np.full(more, padding_id)),
        np.append(row.labels, np.full(more, IGNORED)),
        np.append(row.position_ids, np.arange(more)),
        np.append(row.document_ids, np.full(more, PADDING)),
        row.real,
        row.documents + (row.real == len(row.input_ids)),
    )


def _empty(length: int, padding_id: int) -> Row:
    ids = np.full(length, padding_id, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    return Row(ids, labels, np.arange(length, dtype=np.int64), np.full(length, PADDING), 0, 1)


def collate(rows: Rows, numbers: Sequence[int], length: int, index: int, pin: bool) -> Batch:
    """The micro-batch of rows `numbers`, padded to its longest; without any, one row of padding of `length`.

    `pin` puts the tensors in page-locked memory, from which copies to a device do not hold up the host.
    """
    if not numbers:
        return _batch([_empty(length, rows.padding_id)], (), index, pin)
    made = [rows[number] for number in numbers]
    longest = max(len(row.input_ids) for row in made)
    batch = _batch([_padded(row, longest, rows.padding_id) for row in made], tuple(numbers), index, pin)
    batch.inputs = {
        name: tensor.pin_memory() if pin else tensor for name, tensor in rows.inputs(numbers).items()
    }
    return batch


def _batch(rows: list[Row], numbers: tuple[int, ...], index: int, pin: bool) -> Batch:
    def stacked(arrays: list[np.ndarray]) -> torch.Tensor:
        tensor = torch.from_numpy(np.stack(arrays))
        return tensor.pin_memory() if pin else tensor

    labels = [row.labels for row in rows]
    real = sum(row.real for row in rows)
    plain = all(row.documents == 1 and row.real for row in rows)
    return Batch(
        input_ids=stacked([row.input_ids for row in rows]),
        labels=stacked(labels),
        position_ids=stacked([row.position_ids for row in rows]),
        document_ids=None if plain else stacked([row.document_ids for row in rows]),
        supervised=sum(int(np.count_nonzero(row != IGNORED)) for row in labels),
        real=real,
        index=index,
        sample_ids=numbers,
        documents=sum(row.documents for row in rows),
    )
