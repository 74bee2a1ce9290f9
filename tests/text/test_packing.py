"""Rows and batches against a slow, obvious construction from the documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.helpers import rows_of_text, text_data, write_jsonl

from trainforge.stages import IGNORED, Batch

END = 256


def slow_rows(documents: list[str], length: int) -> list[list[tuple[int, int, int, int]]]:
    """Rows of (token, label, position, document), token by token."""
    stream = [
        (token, number, place)
        for number, text in enumerate(documents)
        for place, token in enumerate([*text.encode(), END])
    ]
    rows = []
    for begin in range(0, len(stream), length):
        row = []
        first_number = stream[begin][1]
        for at in range(begin, min(begin + length, len(stream))):
            token, number, place = stream[at]
            follows = at + 1 < len(stream) and stream[at + 1][1] == number
            in_row = place if number != first_number else at - begin
            row.append((token, stream[at + 1][0] if follows else IGNORED, in_row, number - first_number))
        row += [(END, IGNORED, i, -1) for i in range(length - len(row))]
        rows.append(row)
    return rows


def as_tuples(batch: Batch, row: int) -> list[tuple[int, int, int, int]]:
    documents = batch.document_ids
    if documents is None:
        documents = torch.zeros_like(batch.input_ids)
    tensors = (batch.input_ids, batch.labels, batch.position_ids, documents)
    return list(zip(*(tensor[row].tolist() for tensor in tensors), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(alphabet="abä", min_size=1, max_size=12), min_size=1, max_size=12), st.integers(2, 9))
def test_rows_equal_the_slow_construction(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], length: int
):
    folder = tmp_path_factory.mktemp("pack")
    path = write_jsonl(folder / "a.jsonl", [{"text": text} for text in documents])
    data = text_data(folder, str(path), section={"max_len": length, "shuffle": False})
    expected = slow_rows(documents, length)
    assert data.samples == len(expected)
    for number, row in enumerate(expected):
        (batch,) = data.take(1)
        assert batch.sample_ids == (number,)
        assert as_tuples(batch, 0) == row
        assert batch.supervised == sum(label != IGNORED for _, label, _, _ in row)
        assert batch.real == sum(document >= 0 for _, _, _, document in row)
        assert batch.documents == len({document for _, _, _, document in row})
        assert (batch.document_ids is None) == (batch.documents == 1 and batch.real == length)
        assert {t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}


def test_every_token_but_the_first_of_each_document_is_predicted_once(tmp_path: Path):
    documents = ["one document", "x", "another one that is longer than a row"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    data = text_data(tmp_path, str(path), section={"shuffle": False})
    labels = [
        int(label) for batch in (data.take(1)[0] for _ in range(data.samples)) for label in batch.labels[0]
    ]
    assert [label for label in labels if label != IGNORED] == [
        t for d in documents for t in [*d.encode()[1:], END]
    ]


def test_a_text_file_is_one_document(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("de")
    data = text_data(tmp_path, str(tmp_path), section={"max_len": 7, "shuffle": False})
    (batch,) = data.take(1)
    assert batch.input_ids.tolist() == [[97, 98, 99, END, 100, 101, END]]
    assert batch.labels.tolist() == [[98, 99, END, IGNORED, 101, END, IGNORED]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_an_empty_batch_supervises_nothing(tmp_path: Path):
    data = text_data(tmp_path, str(rows_of_text(tmp_path, 1)), accumulate=3)
    full, *empty = data.take(3)
    assert full.real == 8
    for batch in empty:
        assert batch.input_ids.shape == (1, 8)
        assert (batch.real, batch.supervised, batch.sample_ids) == (0, 0, ())
        assert bool((batch.labels == IGNORED).all())
        assert batch.document_ids is not None
        assert bool((batch.document_ids == -1).all())
