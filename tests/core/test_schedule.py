import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainforge.schedule import learning_rate
from trainforge.sections import TrainSection


def section(**values):
    return TrainSection(steps=100, **values)


def test_warmup_rises_linearly_and_reaches_the_peak_at_its_last_step():
    train = section(lr=1.0, warmup=10, schedule="constant")
    assert [learning_rate(train, step, 100) for step in (1, 5, 10, 11, 100)] == [0.1, 0.5, 1.0, 1.0, 1.0]


def test_a_warmup_below_one_is_a_share_of_the_run():
    assert learning_rate(section(lr=1.0, warmup=0.2, schedule="constant"), 10, 100) == 0.5


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("linear", 50, 0.5),
        ("linear", 100, 0.0),
        ("cosine", 50, 0.5),
        ("cosine", 25, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 100, 0.0),
        ("wsd", 80, 1.0),
        ("wsd", 90, 0.5),
        ("wsd", 100, 0.0),
    ],
)
def test_shapes(schedule, step, expected):
    assert learning_rate(section(lr=1.0, schedule=schedule), step, 100) == pytest.approx(expected, abs=1e-12)


def test_wsd_decay_as_steps():
    train = section(lr=1.0, schedule="wsd", decay=10)
    assert [learning_rate(train, step, 100) for step in (90, 95, 100)] == [1.0, 0.5, 0.0]


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 500),
    st.floats(0, 400),
    st.floats(0, 1e-4),
)
def test_every_rate_lies_between_zero_and_the_peak_and_ends_at_lr_end(schedule, steps, warmup, lr_end):
    lr_end = 0.0 if schedule == "constant" else lr_end  # which has no end of its own
    train = TrainSection(steps=steps, lr=1e-3, schedule=schedule, warmup=warmup, lr_end=lr_end)
    rates = [learning_rate(train, step, steps) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 1e-3 * (1 + 1e-9) for rate in rates)
    assert all(rate > 0 for rate in rates[:-1])
    if schedule != "constant" and warmup < steps * 0.7 and steps > 20 and warmup >= 1:
        assert rates[-1] == pytest.approx(lr_end, abs=1e-9)
