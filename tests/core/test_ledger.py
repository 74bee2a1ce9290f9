import time

import pytest
import torch

from trainforge.ledger import Ledger


def test_time_is_booked_under_the_lap_that_it_took():
    ledger = Ledger(torch.device("cpu"))
    ledger.restart()
    for _ in range(2):
        time.sleep(0.02)
        ledger.lap("data")
        time.sleep(0.04)
        ledger.lap("compute")
        ledger.end_step()
    per_step, step_ms = ledger.read()
    assert 20 <= per_step["data"] < 35
    assert 40 <= per_step["compute"] < 55
    assert step_ms == pytest.approx(per_step["data"] + per_step["compute"])
    assert len(ledger.step_ms) == 2
    assert ledger.mean_ms()["data"] == pytest.approx(per_step["data"])


def test_what_happens_between_read_and_restart_belongs_to_no_step():
    ledger = Ledger(torch.device("cpu"))
    time.sleep(0.03)
    ledger.restart()
    ledger.lap("compute")
    ledger.end_step()
    ledger.read()
    assert ledger.median_step_ms() == ledger.step_ms[0] < 10


def test_nothing_read_is_nothing():
    ledger = Ledger(torch.device("cpu"))
    assert ledger.median_step_ms() == 0.0
    assert set(ledger.mean_ms().values()) == {0.0}
