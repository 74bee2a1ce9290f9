"""The order of an epoch is a permutation, another one for each epoch and seed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge_plugins.text.order import Permutation
from trainforge_plugins.text.split import split_rows


@given(st.integers(0, 700), st.integers(0, 2**40), st.integers(0, 1000))
def test_a_bijection_of_its_range(size: int, seed: int, epoch: int):
    order = Permutation(size, seed, epoch)
    assert sorted(order[i] for i in range(size)) == list(range(size))


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_differs_by_epoch_and_seed(seed: int, epoch: int):
    orders = [
        tuple(Permutation(50, s, e)[i] for i in range(50))
        for s, e in [(seed, epoch), (seed, epoch + 1), (seed + 1, epoch)]
    ]
    assert len(set(orders)) == 3


@given(st.integers(10**9, 10**12), st.randoms(use_true_random=False))
def test_large_ranges_need_no_list(size: int, rng: random.Random):
    order = Permutation(size, 1, 2)
    places = rng.sample(range(size), 20)
    values = [order[place] for place in places]
    assert len(set(values)) == 20
    assert all(0 <= value < size for value in values)


def test_every_value_is_as_likely_at_every_place():
    size, keys = 12, 6000
    counts = [[0] * size for _ in range(size)]
    for key in range(keys):
        order = Permutation(size, key, 0)
        for place in range(size):
            counts[place][order[place]] += 1
    expected = keys / size
    chi2 = sum((count - expected) ** 2 / expected for row in counts for count in row)
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom)


def test_neighbours_are_taken_apart():
    order = Permutation(10_000, 0, 0)
    close = sum(abs(order[i] - order[i + 1]) < 100 for i in range(9_999))
    assert close / 9_999 == pytest.approx(0.02, abs=0.006)


@pytest.mark.parametrize("index", [-1, 10])
def test_outside_of_the_range(index: int):
    with pytest.raises(IndexError):
        Permutation(10, 0, 0)[index]


@given(st.integers(1, 400).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows - 1))))
def test_the_split_puts_each_row_on_one_side(case: tuple[int, int]):
    rows, wanted = case
    split = split_rows(rows, wanted)
    training = [split.training_row(i) for i in range(split.training)]
    held_out = [split.validation_row(i) for i in range(split.held_out)]
    assert sorted(training + held_out) == list(range(rows))
    assert wanted - 15 <= len(held_out) <= wanted
    assert bool(held_out) == bool(wanted)


def test_held_out_rows_lie_in_blocks_over_the_whole_range():
    split = split_rows(1600, 160)
    held_out = [split.validation_row(i) for i in range(160)]
    assert held_out[:11] == [*range(90, 100), 190]
    assert held_out[-1] == 1599
