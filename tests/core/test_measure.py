"""What is logged, and when too many bad steps stop a run."""

from types import SimpleNamespace

import pytest
import torch

from trainforge.errors import TrainForgeError
from trainforge.ledger import Ledger
from trainforge.measure import StepFigures
from trainforge.run_state import RunState
from trainforge.stages import Comm


class Listener:
    def __init__(self):
        self.told = []

    def metrics_logged(self, run, step, metrics):
        self.told.append(metrics)


def figures(max_bad_steps=3):
    run = SimpleNamespace(
        state=RunState(),
        stages=SimpleNamespace(
            comm=Comm(), model=SimpleNamespace(flops_per_token=lambda tokens: 6.0), named=lambda: []
        ),
        ledger=Ledger(torch.device("cpu")),
        events=Listener(),
        train=SimpleNamespace(max_bad_steps=max_bad_steps, lr=0.1),
        ctx=SimpleNamespace(device=torch.device("cpu"), world=1),
        row_tokens=8,
        tokens_measured=0,
        seconds_measured=0.0,
    )
    return StepFigures(run), run


def record(collected, loss, *, supervised=1, bad=False):
    norm = torch.tensor(float("inf") if bad else 2.0)
    collected.record(torch.tensor(loss), norm, torch.tensor(float(bad)), 0.1, supervised=supervised)


def test_the_loss_of_an_interval_is_weighted_by_tokens_also_when_it_was_read_in_parts():
    collected, run = figures()
    record(collected, 1.0, supervised=1)
    record(collected, 4.0, supervised=2)
    collected.read()  # for a save in the middle of the interval
    record(collected, 7.0, supervised=1)
    collected.read()
    collected.tell(3)
    assert run.events.told[0]["loss"] == pytest.approx((1 + 8 + 7) / 4)
    record(collected, 5.0)
    collected.read()
    collected.tell(4)
    assert run.events.told[1]["loss"] == 5.0
    assert run.state.loss_first == pytest.approx(3.0)  # what the first read saw
    assert run.state.loss_last == 5.0


def test_a_bad_step_is_counted_and_not_in_the_loss_and_an_interval_of_them_has_none():
    collected, run = figures()
    record(collected, 1.0)
    record(collected, float("nan"), bad=True)
    collected.read()
    collected.tell(2)
    assert run.events.told[0]["loss"] == 1.0
    assert run.state.skipped_steps == 1
    record(collected, float("nan"), bad=True)
    collected.read()
    collected.tell(3)
    assert "loss" not in run.events.told[1]


@pytest.mark.parametrize(
    ("bad", "stops"), [("xxx.", True), (".xxx", True), ("xx.x", False), ("xx|x.", True), ("x.|xx", False)]
)
def test_a_streak_stops_the_run_also_when_it_ended_before_the_log_or_spans_two(bad, stops):
    collected, run = figures(max_bad_steps=3)
    try:
        for step, mark in enumerate(bad + "|"):
            if mark == "|":
                collected.read()
                collected.tell(step)
            else:
                record(collected, 1.0, bad=mark == "x")
        stopped = False
    except TrainForgeError as error:
        stopped = "3 steps in a row" in str(error)
    assert stopped is stops
    assert run.state.skipped_steps == bad.count("x")
