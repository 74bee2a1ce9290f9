"""`save_every: auto`: the interval that Young and Daly give, from costs measured while training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.cadence import AutoClock, save_interval
from trainforge.sections import TrainSection


@dataclass
class Fake:
    """A run whose time passes when the test says so."""

    mtbf: float = 86400.0
    now: float = 0.0
    blocked: float = 2.0
    slowdown: float = 0.0
    said: list[str] = field(default_factory=list)

    def clock(self, step: int = 0) -> AutoClock:
        return AutoClock(
            self.mtbf, step, lambda: self.blocked, lambda: self.slowdown, self.said.append, lambda: self.now
        )

    def saves(self, clock: AutoClock, steps: int, step_s: float = 1.0, first: int = 0) -> list[float]:
        """When it saves, in seconds, over so many steps that are saved whenever it is due."""
        times = []
        for step in range(first + 1, first + steps + 1):
            self.now += step_s
            if clock.due(step):
                times.append(self.now)
                clock.done()
        return times


@pytest.mark.parametrize(
    ("cost", "mtbf", "seconds"),
    [
        (2.0, 86400.0, 587.88),  # sqrt(2 x 2 x 86400) = sqrt(345600)
        (0.5, 14400.0, 120.0),  # sqrt(14400)
        (0.0, 86400.0, 60.0),  # never more often than once a minute
        (0.01, 86400.0, 60.0),
        (1e6, 3600.0, 900.0),  # never less often than four times before a failure
        (0.01, 40.0, 10.0),  # also where that is more often than once a minute
    ],
)
def test_the_interval_that_loses_least(cost: float, mtbf: float, seconds: float):
    assert save_interval(cost, mtbf) == pytest.approx(seconds, abs=0.01)


@given(st.floats(0.1, 100), st.floats(3600, 1e7))
def test_no_other_interval_loses_less(cost: float, mtbf: float):
    def lost(interval: float) -> float:  # per second: a save in each interval, half an interval at a failure
        return cost / interval + interval / 2 / mtbf

    best = save_interval(cost, mtbf)
    if 60 < best < mtbf / 4:
        assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.parametrize(("step_s", "first"), [(1.0, 20.0), (6.0, 120.0), (50.0, 150.0), (300.0, 300.0)])
def test_the_first_save_comes_after_20_steps_or_2_minutes_of_this_start(step_s: float, first: float):
    fake = Fake()
    assert fake.saves(fake.clock(step=1000), 20, step_s, first=1000)[0] == first


def test_then_saves_follow_the_measured_cost():
    fake = Fake()
    assert fake.saves(fake.clock(), 1300) == [20.0, 20.0 + 588, 20.0 + 2 * 588]
    assert fake.said == [
        "saving about every 9 min 48 s from now on: a save costs the run 2.0 s, and train.mtbf says that it fails "
        "every 24 h 00 min"
    ]


def test_a_save_that_was_taken_for_another_reason_counts_too():
    fake = Fake()
    clock = fake.clock()
    fake.now = 5.0
    clock.done()  # the best evaluation so far
    assert fake.saves(clock, 600, first=5) == [5.0 + 588]


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        ([20.0], 1859),  # sqrt(2 x 20 x 86400) = 1859.03
        ([20.0, 2.0], 588),  # the first one also made its buffers
        ([20.0, 2.0, 2.0, 50.0], 588),  # one slow save changes nothing
        ([2.0, 2.0, 2.0, 50.0, 50.0, 50.0], 2940),  # three of the newest five: sqrt(2 x 50 x 86400) = 2939.39
    ],
)
def test_the_middle_of_the_newest_five_costs_counts(costs: list[float], seconds: int):
    fake = Fake()
    clock = fake.clock()
    for fake.blocked in costs:
        clock.done()
    assert fake.saves(clock, 3000)[0] == pytest.approx(seconds, abs=1)


def test_what_the_background_costs_counts_once_it_is_known():
    fake = Fake()
    clock = fake.clock()
    fake.saves(clock, 21)
    fake.slowdown = 6.0  # of the save at 20 s, known only later: sqrt(2 x 8 x 86400) = 1175.8 s
    assert fake.saves(clock, 1200, first=21) == [20.0 + 1176]
    assert "costs the run 8.0 s" in fake.said[-1]


def test_little_changes_are_not_told():
    fake = Fake()
    clock = fake.clock()
    for index in range(10):
        fake.blocked = 2.0 + 0.2 * (index % 2)
        fake.saves(clock, 700, first=700 * index)
    assert len(fake.said) == 1


def test_nothing_is_said_after_the_last_step():
    fake = Fake()
    clock = fake.clock()
    clock.done()
    assert fake.said == []


def test_the_recipe_takes_auto_and_a_time_between_failures():
    train = TrainSection.model_validate({"steps": 1, "save_every": "auto", "mtbf": "4h", "keep_every": 2})
    assert (train.save_every, train.mtbf) == ("auto", 4 * 3600)
    assert math.isclose(TrainSection(steps=1).mtbf, 24 * 3600)
    with pytest.raises(ValueError, match=r"mtbf has no effect without save_every: auto"):
        TrainSection.model_validate({"steps": 1, "mtbf": "4h"})
