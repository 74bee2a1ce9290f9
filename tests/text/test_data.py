"""Which samples a step holds: on any number of ranks, in any epoch, after any resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.helpers import context, rows_of_text, text_data, write_jsonl

from trainforge.errors import DataError, IncompatibleError, RanksError
from trainforge.stages import Comm
from trainforge_plugins.text import TextSection, build
from trainforge_plugins.text.data import TextData

ROWS, GLOBAL_BATCH = 10, 4


def ranks(
    folder: Path, world: int, accumulate: int, *, rows: int = ROWS, batch: int = GLOBAL_BATCH, **more: Any
):
    path = str(rows_of_text(folder, rows))
    micro = batch // (world * accumulate)
    facts = {"world": world, "accumulate": accumulate, "micro": micro}
    return [text_data(folder, path, rank=rank, **facts, **more) for rank in range(world)]


def step(team: list[TextData], accumulate: int) -> list[int]:
    """The samples of one step in the order of the micro-batches over all ranks."""
    batches = [batch for data in team for batch in data.take(accumulate)]
    assert sorted(batch.index for batch in batches) == list(range(len(batches)))
    return [number for batch in sorted(batches, key=lambda b: b.index) for number in batch.sample_ids]


def flat(steps: list[list[int]]) -> list[int]:
    return [number for samples in steps for number in samples]


def through_json(data: TextData) -> tuple[int, dict[str, Any]]:
    state = data.state()
    return state.version, json.loads(json.dumps(state.data))


LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]


@pytest.mark.parametrize(("world", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("last", ["partial", "drop"])
def test_any_layout_gives_the_same_steps(tmp_path: Path, world: int, accumulate: int, last: str):
    section = {"last_batch": last}
    team = ranks(tmp_path, world, accumulate, section=section)
    reference = ranks(tmp_path, 1, 1, section=section)
    for _ in range(3 * team[0].steps_per_epoch):
        assert step(team, accumulate) == step(reference, 1)


@pytest.mark.parametrize(("world", "accumulate"), LAYOUTS)
def test_partial_gives_each_sample_once_per_epoch(tmp_path: Path, world: int, accumulate: int):
    team = ranks(tmp_path, world, accumulate)
    assert team[0].steps_per_epoch == 3
    epochs = [[step(team, accumulate) for _ in range(3)] for _ in range(3)]
    for epoch in epochs:
        assert [len(samples) for samples in epoch] == [4, 4, 2]
        assert sorted(flat(epoch)) == list(range(ROWS))
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 3


def test_drop_gives_full_steps_only(tmp_path: Path):
    team = ranks(tmp_path, 2, 1, section={"last_batch": "drop"})
    assert team[0].steps_per_epoch == 2
    for _ in range(3):
        samples = step(team, 1) + step(team, 1)
        assert len(set(samples)) == 8


def test_no_step_at_all_is_an_error_that_says_what_to_change(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        ranks(tmp_path, 2, 1, rows=3, section={"last_batch": "drop"})
    for word in ("3 training rows", "batch of 4", "2 ranks", "text.last_batch: partial", "at most 3"):
        assert word in str(caught.value)
    assert ranks(tmp_path, 2, 1, rows=3)[0].steps_per_epoch == 1


def test_without_shuffling_rows_come_in_order(tmp_path: Path):
    team = ranks(tmp_path, 1, 1, section={"shuffle": False})
    assert step(team, 1) + step(team, 1) + step(team, 1) == list(range(ROWS))


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 7, 10, 14, 15])
@pytest.mark.parametrize("before", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("after", [(1, 2), (2, 1)])
def test_resuming_gives_the_uninterrupted_sequence(
    tmp_path: Path, stop: int, before: tuple[int, int], after: tuple[int, int]
):
    whole = ranks(tmp_path, 1, 1, batch=2)
    wanted = [step(whole, 1) for _ in range(15)]  # 3 epochs of 5 steps
    first = ranks(tmp_path, *before, batch=2)
    got = [step(first, before[1]) for _ in range(stop)]
    second = ranks(tmp_path, *after, batch=2)
    for data in second:
        data.load(*through_json(first[0]))
    got += [step(second, after[1]) for _ in range(stop, 15)]
    assert got == wanted


@pytest.mark.parametrize("last", ["partial", "drop"])
def test_resuming_with_a_short_last_step(tmp_path: Path, last: str):
    section = {"last_batch": last}
    whole = ranks(tmp_path, 1, 1, section=section)
    steps = 3 * whole[0].steps_per_epoch
    states, wanted = [], []
    for _ in range(steps):
        states.append(through_json(whole[0]))
        wanted.append(step(whole, 1))
    for stop in range(steps):
        team = ranks(tmp_path, 2, 2, section=section)
        for data in team:
            data.load(*states[stop])
        assert [step(team, 2) for _ in range(stop, steps)] == wanted[stop:]


def test_the_position_is_what_was_consumed(tmp_path: Path):
    (data,) = ranks(tmp_path, 1, 1)
    places = []
    for _ in range(4):
        data.take(1)
        places.append((data.state().data["epoch"], data.state().data["consumed"]))
    assert places == [(0, 4), (0, 8), (1, 0), (1, 4)]
    list(data.validation())
    assert (data.state().data["epoch"], data.state().data["consumed"]) == (1, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, ["run.seed was 0 and is now 1"]),
        ({"section": {"max_len": 16}}, ["text.max_len was 8 and is now 16"]),
        ({"section": {"shuffle": False}}, ["text.shuffle was True and is now False"]),
        ({"section": {"last_batch": "drop"}}, ["text.last_batch was partial and is now drop"]),
        ({"section": {"validation": 2}}, ["text.validation", "was 0 and is now 2"]),
        ({"rows": 11}, ["data set was", "(80 tokens)", "(88 tokens)"]),
    ],
)
def test_other_samples_are_refused_with_both_values(tmp_path: Path, change: dict[str, Any], words: list[str]):
    (saved,) = ranks(tmp_path, 1, 1)
    state = through_json(saved)
    (other,) = ranks(tmp_path, 1, 1, **change)
    with pytest.raises(IncompatibleError) as caught:
        other.load(*state)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_version_is_refused(tmp_path: Path):
    (data,) = ranks(tmp_path, 1, 1)
    version, state = through_json(data)
    with pytest.raises(IncompatibleError, match=f"version {version + 1}"):
        data.load(version + 1, state)


def test_the_same_data_elsewhere_may_be_resumed(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (saved,) = ranks(tmp_path, 1, 1)
    (moved,) = ranks(tmp_path / "other", 1, 1)
    saved.take(1)
    moved.load(*through_json(saved))
    assert moved.take(1)[0].sample_ids == saved.take(1)[0].sample_ids


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_has_the_same_count_on_every_rank(tmp_path: Path, world: int):
    path = str(rows_of_text(tmp_path, 40))
    facts = {"world": world, "micro": 2, "section": {"validation": 7, "shuffle": False}}
    team = [text_data(tmp_path, path, rank=rank, **facts) for rank in range(world)]
    batches = [list(data.validation()) for data in team]
    assert len({len(of_rank) for of_rank in batches}) == 1
    held_out = sorted(n for of_rank in batches for batch in of_rank for n in batch.sample_ids)
    assert len(held_out) == len(set(held_out)) == 7
    trained = {
        n for _ in range(team[0].steps_per_epoch) for data in team for b in data.take(1) for n in b.sample_ids
    }
    assert trained | set(held_out) == set(range(40))
    assert not trained & set(held_out)
    assert [b.sample_ids for b in team[0].validation()] == [b.sample_ids for b in batches[0]]


def test_validation_rows_limits_an_evaluation_and_spreads_it(tmp_path: Path):
    path = str(rows_of_text(tmp_path, 400))
    data = text_data(tmp_path, path, section={"validation": 0.5, "validation_rows": 5})
    numbers = [n for batch in data.validation() for n in batch.sample_ids]
    assert len(numbers) == 5
    assert numbers[0] < 50
    assert numbers[-1] > 300
    assert data.samples < 210


def test_validation_from_another_file(tmp_path: Path):
    (tmp_path / "held.txt").write_text("0123456")
    path = str(rows_of_text(tmp_path, 4))
    data = text_data(tmp_path, path, section={"validation": str(tmp_path / "held.txt")})
    assert data.samples == 4
    (batch,) = data.validation()
    assert batch.input_ids[0].tolist() == [*b"0123456", 256]


@pytest.mark.parametrize(("validation", "held_out"), [(None, 0), (0, 0), (0.02, 1), (3, 3), (0.9, 5)])
def test_how_much_is_held_out(tmp_path: Path, validation: float | None, held_out: int):
    data = text_data(tmp_path, str(rows_of_text(tmp_path, 10)), section={"validation": validation})
    assert data.samples == 10 - held_out


def test_holding_everything_out_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds out 10 rows, but there are only 10"):
        text_data(tmp_path, str(rows_of_text(tmp_path, 10)), section={"validation": 10})


def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path):
    path = str(rows_of_text(tmp_path, 10))
    with pytest.raises(DataError, match=r"max_len is 512, but the model has 256 positions"):
        text_data(tmp_path, path, section={"max_len": 512}, max_positions=256)
    assert text_data(tmp_path, path, section={"max_len": 256}, max_positions=256).samples == 1
    assert text_data(tmp_path, path, max_positions=None).samples == 10


def test_documents_of_one_token_leave_nothing_to_predict(tmp_path: Path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
            }
        )
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 4)
    with pytest.raises(DataError, match="nothing to predict"):
        text_data(tmp_path, str(path), section={"tokenizer": str(tokenizer)})


def test_text_of_a_sample_goes_both_ways(tmp_path: Path):
    (data,) = ranks(tmp_path, 1, 1)
    ids = data.encode("Wal 🐋")
    assert ids == list("Wal 🐋".encode())
    assert data.decode([*ids, 256]) == "Wal 🐋"
    assert (
        data.decode([*ids, 256, *ids, 256]) == "Wal 🐋"
    )  # what is written after the end is another document
    assert data.encode("\ud800") == [ord("?")]


def test_ranks_with_other_files_are_refused(tmp_path: Path):
    class Two(Comm):
        def gather(self, value: Any) -> list[Any]:
            return [value, {**value, **other}]

    ctx = context(tmp_path, world=2)
    ctx.built["comm"] = Two()
    section = TextSection(path=str(rows_of_text(tmp_path, 8)), max_len=8)
    other: dict[str, Any] = {}
    build(ctx, section)
    other = {"data set": "another"}
    with pytest.raises(
        RanksError, match=r"rank 1 has other samples than rank 0: data set is another and not \w+ \(64"
    ):
        build(ctx, section)
