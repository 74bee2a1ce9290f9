"""Cuts the token stream into rows and collates rows into micro-batches.

Row k is tokens k·L up to (k+1)·L of all documents one after the other, so every row but the last is full and nothing
is truncated. Within a row, tokens attend only within their document and positions restart with each document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainforge.stages import IGNORED, Batch
from trainforge_plugins.text.cache import TokenCache

PADDING = -1
"""The document id of padding."""


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


class Rows:
    """The rows of a token cache, made when they are asked for."""

    def __init__(self, cache: TokenCache, length: int, padding_id: int) -> None:
        self._cache, self._length, self._padding_id = cache, length, padding_id

    def __len__(self) -> int:
        return math.ceil(self._cache.tokens / self._length)

    def __getitem__(self, number: int) -> Row:
        """Row `number`, counted from 0."""
        length, begin = self._length, number * self._length
        ids = self._cache.read(begin, begin + length + 1)  # one more: the last label
        real = min(length, len(ids))
        starts = self._cache.starts(begin, begin + real)
        input_ids = np.full(length, self._padding_id, np.int64)
        input_ids[:real] = ids[:real]
        labels = np.full(length, IGNORED, np.int64)
        labels[: len(ids) - 1] = ids[1:]
        labels[starts - 1] = IGNORED  # what follows is another document
        cuts = starts[starts < real]
        if real < length:
            cuts = np.append(cuts, real)
        document_ids = np.zeros(length, np.int64)
        document_ids[cuts] = 1
        document_ids = document_ids.cumsum()
        first = np.concatenate((np.zeros(1, np.int64), cuts))
        position_ids = np.arange(length, dtype=np.int64) - first[document_ids]
        document_ids[real:] = PADDING
        return Row(input_ids, labels, position_ids, document_ids, real, len(first))


def collate(rows: Rows, numbers: Sequence[int], length: int, index: int, pin: bool) -> Batch:
    """The micro-batch of rows `numbers`; without any, one row of padding that supervises nothing.

    `pin` puts the tensors in page-locked memory, from which copies to a device do not hold up the host.
    """
    if not numbers:
        return _batch([_empty(length)], (), index, pin)
    return _batch([rows[number] for number in numbers], tuple(numbers), index, pin)


def _empty(length: int) -> Row:
    zeros = np.zeros(length, np.int64)
    return Row(
        zeros, np.full(length, IGNORED, np.int64), np.arange(length, dtype=np.int64), zeros + PADDING, 0, 1
    )


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
