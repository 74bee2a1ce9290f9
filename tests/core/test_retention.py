"""Which checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.retention import best_of, measured, newest_usable, retention
from trainforge.stages import CheckpointInfo, PartState


def info(step: int, loss: float | None = None, *, finite: bool = True) -> CheckpointInfo:
    metrics = {} if loss is None else {"eval_loss": loss}
    return CheckpointInfo(step, Path(f"step-{step}"), "w", 1, float(step), metrics, finite)


def deleted(*arguments, **options) -> list[int]:
    return [gone.step for gone in retention(*arguments, **options)]


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        ([9, 10], {"keep": 2}),
        ([4, 8, 10], {"keep": 1, "keep_every": 4}),
        ([3, 9, 10], {"keep": 2, "best": "eval_loss"}),
        ([3, 5, 10], {"keep": 1, "keep_every": 5, "best": "eval_loss"}),
    ],
)
def test_what_is_asked_for_stays(kept, options):
    infos = [info(step, loss=abs(step - 3.2)) for step in range(1, 11)]
    assert deleted(infos, **options) == [step for step in range(1, 11) if step not in kept]


def test_what_is_not_finite_takes_nobodys_place():
    infos = [info(1), info(2), info(3, finite=False), info(4, 0.0, finite=False)]
    assert deleted(infos, keep=2, best="eval_loss") == [3]  # the newest of them stays to be looked at
    assert deleted([*infos, info(5)], keep=2) == [1, 3]
    assert deleted([*infos, info(5), info(6)], keep=2) == [1, 2, 3, 4]
    assert deleted(infos[2:], keep=1) == []
    assert newest_usable(infos) == infos[1]
    assert newest_usable(infos[2:]) is None


losses = st.none() | st.floats(0, 10)
many = st.dictionaries(st.integers(1, 60), st.tuples(losses, st.booleans()), max_size=20).map(
    lambda found: [info(step, loss, finite=finite) for step, (loss, finite) in found.items()]
)


@given(
    many, st.integers(1, 5), st.none() | st.integers(1, 7), st.sampled_from([None, "eval_loss"]), st.randoms()
)
def test_its_laws(infos, keep, keep_every, best, chance):
    gone = retention(infos, keep, keep_every, best)
    stay = [one for one in infos if one not in gone]
    usable = [one for one in infos if one.finite]
    newest = sorted(usable, key=lambda one: -one.step)[:keep]
    assert all(one in stay for one in newest)
    assert bool(usable) <= any(one.finite for one in stay)
    for one in usable:
        if keep_every and one.step % keep_every == 0:
            assert one in stay
    values = [one.metrics["eval_loss"] for one in usable if "eval_loss" in one.metrics]
    if best and values:
        kept = [one.metrics["eval_loss"] for one in stay if one.finite and "eval_loss" in one.metrics]
        assert min(kept) == min(values)
    extra = len(usable) - len([one for one in gone if one.finite]) - len(newest)
    forever = sum(one.step % keep_every == 0 for one in usable) if keep_every else 0
    assert extra <= forever + (best is not None)
    assert sum(not one.finite for one in stay) <= max(1, sum(not one.finite for one in infos) * (not usable))
    shuffled = chance.sample(infos, len(infos))
    assert retention(shuffled, keep, keep_every, best) == gone  # in any order
    assert retention(stay, keep, keep_every, best) == []  # and nothing more the next time


def test_the_best_is_the_lowest_and_the_earliest_of_equals():
    infos = [info(1, 2.0), info(2, 1.0), info(3, 1.0), info(4, 0.5, finite=False), info(5)]
    assert best_of(infos, "eval_loss") == infos[1]
    assert best_of(infos, None) is None
    assert best_of(infos[4:], "eval_loss") is None


@pytest.mark.parametrize(
    ("counters", "metrics"),
    [
        ({"step": 4, "eval_step": 4, "eval_loss": 2.5}, {"eval_loss": 2.5}),
        ({"step": 5, "eval_step": 4, "eval_loss": 2.5}, {}),
        ({"step": 4, "eval_step": 4, "eval_loss": math.nan}, {}),
        ({"step": 4, "eval_step": None, "eval_loss": None}, {}),
    ],
)
def test_only_what_was_measured_at_this_step_counts(counters, metrics):
    assert measured({"loop": PartState(1, {"counters": counters})}) == metrics
    assert measured({"data": PartState(1, {})}) == {}
