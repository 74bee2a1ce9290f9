from types import SimpleNamespace

import pytest
import torch

from trainforge.ledger import Ledger


class Clock:
    """Shows the time that the test lets pass, in seconds."""

    def __init__(self):
        self.now = 100.0

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("trainforge.ledger.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_time_is_booked_under_the_lap_that_it_took(clock):
    ledger = Ledger(torch.device("cpu"))
    ledger.restart()
    for data_s, compute_s in ((0.02, 0.04), (0.04, 0.1)):
        clock.passes(data_s)
        ledger.lap("data")
        clock.passes(compute_s)
        ledger.lap("compute")
        ledger.end_step()
    per_step, step_ms = ledger.read()
    assert per_step["data"] == pytest.approx(30)
    assert per_step["compute"] == pytest.approx(70)
    assert step_ms == pytest.approx(per_step["data"] + per_step["compute"])
    assert len(ledger.step_ms) == 2
    assert ledger.mean_ms()["data"] == pytest.approx(per_step["data"])


def test_what_happens_between_read_and_restart_belongs_to_no_step(clock):
    ledger = Ledger(torch.device("cpu"))
    clock.passes(30)
    ledger.restart()
    clock.passes(0.01)
    ledger.lap("compute")
    ledger.end_step()
    ledger.read()
    assert ledger.median_step_ms() == ledger.step_ms[0] == pytest.approx(10)


def test_nothing_read_is_nothing():
    ledger = Ledger(torch.device("cpu"))
    assert ledger.median_step_ms() == 0.0
    assert set(ledger.mean_ms().values()) == {0.0}
