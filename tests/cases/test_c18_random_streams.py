"""C18: what data plugin and model draw differs over rank, micro-batch, step and epoch, and repeats with the seed."""

import json
from collections import defaultdict

import pytest
from tests.cases.reference import toy_run

RANKS = [1, pytest.param(2, marks=[pytest.mark.ranks, pytest.mark.slow])]
MODEL = {"dropout": 0.2}
TRAIN = {"steps": 8}  # two epochs of four steps


def drawn(run, who, ranks):
    """Numbers of Python, NumPy and torch by (step, micro-batch) of all starts in this folder."""
    found = defaultdict(list)
    for rank in range(ranks):
        for line in (run.path / f"draws-{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["who"] == who:
                found[entry["step"], entry.get("index", rank)].append(entry["drawn"])
    return dict(found)


def each_differs(numbers):
    lists = [values for entry in numbers.values() for values in entry]
    for generator in range(3):
        assert len({values[generator] for values in lists}) == len(lists) > 30


@pytest.mark.parametrize("ranks", RANKS)
def test_streams_differ_and_repeat_with_the_seed(tmp_path, ranks):
    one, other, reseeded = (
        toy_run(tmp_path / name, ranks=ranks, model=MODEL, train=TRAIN, seed=seed)
        for name, seed in (("one", 3), ("other", 3), ("reseeded", 4))
    )
    assert one.losses == other.losses
    for who in ("data", "model"):
        numbers = drawn(one, who, ranks)
        assert set(numbers) == {(step, index) for step in range(1, 9) for index in range(4)}
        each_differs(numbers)
        assert drawn(other, who, ranks) == numbers
        foreign = {x for entry in drawn(reseeded, who, ranks).values() for values in entry for x in values}
        assert not foreign & {x for entry in numbers.values() for values in entry for x in values}


@pytest.mark.parametrize("ranks", RANKS)
def test_resume_in_epoch_1_draws_what_it_would_have_drawn(tmp_path, ranks):
    options = {"ranks": ranks, "model": MODEL, "train": TRAIN | {"eval_every": 3}}
    whole = toy_run(tmp_path / "whole", **options)
    toy_run(tmp_path / "parts", **options, max_steps=6)
    parts = toy_run(tmp_path / "parts", **options)
    assert parts.losses == whole.losses
    for who in ("data", "model"):
        assert drawn(parts, who, ranks) == drawn(whole, who, ranks)
    # the validation set is the same in every evaluation, whatever training drew before, and of each rank its own
    evaluations = drawn(whole, "validation", ranks)
    assert {step for step, _ in evaluations} >= {3, 6, 8}
    for rank in range(ranks):
        assert len({str(evaluations[step, rank]) for step in (3, 6, 8)}) == 1
    assert len({str(evaluations[3, rank]) for rank in range(ranks)}) == ranks


@pytest.mark.parametrize("evaluate", [None, 1])
def test_evaluating_shifts_no_stream(tmp_path, evaluate):
    plain = toy_run(tmp_path / "plain", model=MODEL, train=TRAIN)
    run = toy_run(tmp_path / "run", model=MODEL, train=TRAIN | {"eval_every": evaluate, "save_every": 2})
    assert run.losses == plain.losses
    assert drawn(run, "data", 1) == drawn(plain, "data", 1)


@pytest.mark.ranks
def test_dropout_is_that_of_the_micro_batch_on_any_number_of_ranks(tmp_path):
    alone = toy_run(tmp_path / "alone", model=MODEL, train=TRAIN)
    both = toy_run(tmp_path / "both", model=MODEL, train=TRAIN, ranks=2)
    assert drawn(both, "model", 2) == drawn(alone, "model", 1)
    assert both.losses == pytest.approx(alone.losses, rel=1e-6)
