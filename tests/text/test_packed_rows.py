"""Conversations in rows: whole, apart from each other, tightly packed, in an order that survives everything."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.helpers import context, text_data, write_jsonl

from trainforge.context import SilentConsole
from trainforge.errors import ConfigError, DataError, IncompatibleError
from trainforge.stages import IGNORED, Batch
from trainforge_plugins.text import TextSection, build
from trainforge_plugins.text.data import TextData
from trainforge_plugins.text.packing import pack

END = 256


def alpaca(count: int, answer: int = 10) -> list[dict[str, str]]:
    return [{"instruction": f"Say {i} in words.", "output": "x" * (i * 7 % answer + 1)} for i in range(count)]


def chat_data(folder: Path, rows: list[Any], **section: Any) -> TextData:
    facts = {key: section.pop(key) for key in ("micro", "accumulate", "world", "rank") if key in section}
    path = write_jsonl(folder / "rows.jsonl", rows)
    return text_data(folder, str(path), section={"max_len": 128, **section}, **facts)


def rendered(row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Tokens and labels of a row in the plain template, by hand."""
    prompt = list(f"### User:\n{row['instruction']}\n\n### Assistant:\n".encode())
    answer = [*row["output"].encode(), END]
    ids = [*prompt, *answer, *b"\n\n"]
    return ids, [IGNORED] * (len(prompt) - 1) + answer + [IGNORED] * 3


def conversations_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The documents of a batch: (tokens, labels); checks that positions restart."""
    found = []
    for row in range(len(batch.input_ids)):
        documents = (
            np.zeros(batch.input_ids.shape[1], int)
            if batch.document_ids is None
            else batch.document_ids[row].numpy()
        )
        for document in sorted({*documents.tolist()} - {-1}):
            here = np.flatnonzero(documents == document)
            assert batch.position_ids[row, here].tolist() == list(range(len(here)))
            assert here.tolist() == list(range(here[0], here[-1] + 1))
            found.append((batch.input_ids[row, here].tolist(), batch.labels[row, here].tolist()))
    return found


def epoch(data: TextData) -> list[Batch]:
    return [batch for _ in range(data.steps_per_epoch) for batch in data.take(1)]


@pytest.mark.parametrize("packing", [True, False])
def test_every_conversation_comes_whole_and_once_per_epoch(tmp_path: Path, packing: bool):
    rows = alpaca(40)
    batches = epoch(chat_data(tmp_path, rows, packing=packing, micro=3))
    found = [conversation for batch in batches for conversation in conversations_of(batch)]
    assert sorted(found) == sorted(rendered(row) for row in rows)
    for batch in batches:
        assert batch.supervised == int((batch.labels != IGNORED).sum())
        documents = batch.document_ids
        assert batch.real == (batch.input_ids.numel() if documents is None else int((documents >= 0).sum()))
        if documents is not None:
            runs = sum(1 + int((row[1:] != row[:-1]).sum()) for row in documents)
            assert batch.documents == runs
            assert (batch.labels[documents < 0] == IGNORED).all()


def test_without_packing_rows_are_as_long_as_the_longest_of_the_micro_batch(tmp_path: Path):
    rows = alpaca(3)
    (batch,) = chat_data(tmp_path, rows, packing=False, micro=3, shuffle=False).take(1)
    lengths = [len(rendered(row)[0]) for row in rows]
    assert batch.input_ids.shape == (3, max(lengths))
    assert batch.real == sum(lengths)
    assert batch.sample_ids == (0, 1, 2)


def test_rows_are_full(tmp_path: Path):
    data = chat_data(tmp_path, alpaca(2000, answer=60), max_len=512)
    real = sum(batch.real for batch in epoch(data))
    total = sum(batch.input_ids.numel() for batch in epoch(data))
    assert real / total > 0.98
    assert any("are learnt (train_on: assistant); rows are 9" in line for line in data.start_report())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 70))
def test_packing_puts_each_document_into_one_row(sizes: list[int], window: int):
    order, firsts = pack(np.array(sizes), 20, window)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    rows = [order[a:b].tolist() for a, b in pairwise(firsts)]
    assert all(row and row == sorted(row) and sum(sizes[i] for i in row) <= 20 for row in rows)
    for begin in range(0, len(sizes), window):
        mine = [row for row in rows if begin <= row[0] < begin + window]
        assert (
            sum(2 * sum(sizes[i] for i in row) < 20 for row in mine) <= 1
        )  # two half empty ones would be one
        assert [row[0] for row in mine] == sorted(row[0] for row in mine)


def test_any_layout_and_any_resume_give_the_same_samples(tmp_path: Path):
    rows = alpaca(60)
    whole = chat_data(tmp_path, rows, micro=4)
    wanted = [whole.take(1)[0].sample_ids for _ in range(2 * whole.steps_per_epoch)]
    for stop in range(len(wanted)):
        before = chat_data(tmp_path, rows, micro=2, accumulate=2)
        for _ in range(stop):
            before.take(2)
        state = before.state()
        after = [chat_data(tmp_path, rows, micro=2, world=2, rank=rank) for rank in range(2)]
        for data in after:
            data.load(state.version, json.loads(json.dumps(state.data)))
        step = [after[0].take(1)[0].sample_ids + after[1].take(1)[0].sample_ids for _ in wanted[stop:]]
        assert step == wanted[stop:]


def test_validation_rows_hold_other_conversations(tmp_path: Path):
    rows = alpaca(60)
    data = chat_data(tmp_path, rows, validation=4)
    held = [c for batch in data.validation() for c in conversations_of(batch)]
    trained = [c for batch in epoch(data) for c in conversations_of(batch)]
    assert held
    assert sorted(held + trained) == sorted(rendered(row) for row in rows)


@pytest.mark.parametrize("change", [{"packing": False}, {"train_on": "all"}, {"template": "chatml"}])
def test_a_resume_with_other_labels_or_rows_is_refused(tmp_path: Path, change: dict[str, Any]):
    rows = alpaca(20)
    state = chat_data(tmp_path, rows).state()
    with pytest.raises(IncompatibleError, match=r"text\.packing|data set"):
        chat_data(tmp_path, rows, **change).load(state.version, state.data)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"template": "chatml"}, "template"),
        ({"train_on": "last"}, "train_on"),
        ({"max_len": 127}, "max_len"),
        ({"too_long": "cut_tail"}, "too_long"),
    ],
)
def test_the_cache_is_kept_and_rebuilt_for_a_reason_that_is_said(
    tmp_path: Path, change: dict[str, Any], key: str
):
    path = str(write_jsonl(tmp_path / "rows.jsonl", alpaca(5)))

    def notes(**section: Any) -> list[str]:
        ctx = context(tmp_path)
        build(ctx, TextSection(**{"path": path, "max_len": 128, "validation": None, **section}))
        assert isinstance(ctx.console, SilentConsole)
        return ctx.console.lines

    assert notes() == notes() == []
    assert notes(**change) == [f"tokenising again: text.{key} has changed"]


def test_long_rows_are_dropped_and_counted(tmp_path: Path):
    rows = [*alpaca(4), {"instruction": "Go on.", "output": "y" * 500}]
    data = chat_data(tmp_path, rows)
    assert data.ledger()["skipped"] == {
        "longer than text.max_len": {
            "count": 1,
            "rows": [f"{tmp_path}/rows.jsonl:5 (needs 536 tokens)"],
        }
    }
    assert (data.ledger()["used"], data.ledger()["truncated"]) == (4, 0)
    assert any("1 skipped (20.00%), longer than text.max_len" in line for line in data.start_report())


@pytest.mark.parametrize("too_long", ["cut_prompt", "cut_tail"])
def test_cut_rows_are_used_and_counted(tmp_path: Path, too_long: str):
    long = {"instruction": "q" * 200, "output": "a"}
    if too_long == "cut_tail":
        long = {"instruction": "q", "output": "a" * 200}
    data = chat_data(tmp_path, [*alpaca(4), long], too_long=too_long)
    assert (data.ledger()["used"], data.ledger()["truncated"], data.ledger()["skipped"]) == (5, 1, {})
    assert any(f"1 cut to 128 tokens (20.00%, too_long: {too_long})" in line for line in data.start_report())
    lengths = sorted(len(ids) for batch in epoch(data) for ids, _ in conversations_of(batch))
    assert lengths[-1] == 128


def test_nothing_affected_gives_no_message(tmp_path: Path):
    assert len(chat_data(tmp_path, alpaca(4), too_long="cut_tail").start_report()) == 2


@pytest.mark.parametrize("too_long", ["drop", "cut_prompt", "cut_tail"])
def test_no_row_with_a_token_to_learn_names_the_length_that_would_do(tmp_path: Path, too_long: str):
    rows = [{"instruction": "a long question " * 9, "output": "yes"}] * 8
    with pytest.raises(DataError) as caught:
        chat_data(tmp_path, rows, max_len=16, too_long=too_long)
    message = str(caught.value)
    for words in ("none of the 8 rows", "text.max_len (16)", "set text.max_len to at least"):
        assert words in message
    needed = int(message.split("at least ")[1])
    assert chat_data(tmp_path, rows, max_len=needed, too_long=too_long).ledger()["used"] == 8
    with pytest.raises(DataError):
        chat_data(tmp_path, rows, max_len=needed - 1, too_long=too_long)


def test_one_usable_row_among_long_ones_is_trained_on(tmp_path: Path):
    rows = [{"instruction": "a long question " * 9, "output": "yes"}] * 7 + [
        {"instruction": "?", "output": "no"}
    ]
    data = chat_data(tmp_path, rows, max_len=40)
    (batch,) = data.take(1)
    assert batch.supervised == 3
    assert data.ledger()["used"] == 1


@pytest.mark.parametrize(
    "section", [{"template": "chatml"}, {"train_on": "all"}, {"too_long": "cut_tail"}, {"packing": False}]
)
def test_keys_for_conversations_are_refused_for_other_text(tmp_path: Path, section: dict[str, Any]):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    (key,) = section
    with pytest.raises(ConfigError, match=rf"text\.{key} is for conversations"):
        text_data(tmp_path, str(path), section=section)


@pytest.mark.parametrize("at_once", [1, 7, 64, 10_000])
def test_learnt_tokens_are_counted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr("trainforge_plugins.text.cache.COUNTED_AT_ONCE", at_once)
    rows = alpaca(20)
    for train_on in ("assistant", "all"):
        expected = sum(label != IGNORED for row in rows for label in rendered(row)[1])
        if train_on == "all":
            expected = sum(len(rendered(row)[0]) - 1 for row in rows)
        assert chat_data(tmp_path, rows, train_on=train_on).ledger()["supervised"] == expected


@pytest.mark.ranks
def test_workers_give_the_same_conversations(tmp_path: Path):
    rows = alpaca(300, answer=60)
    one, two = (
        chat_data(tmp_path, rows, workers=workers, cache=tmp_path / str(workers), template="chatml")
        for workers in (0, 2)
    )
    assert one.state() == two.state()
    assert one.ledger() == two.ledger()
