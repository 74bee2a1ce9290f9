"""Stop signals set a flag; a second Ctrl-C ends at once; handlers come back."""

from __future__ import annotations

import signal
import threading

import pytest

from trainforge.signals import STOPPING, StopSignals


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_sets_the_flag_and_its_name(number: signal.Signals):
    with StopSignals() as stop:
        assert stop.name is None
        signal.raise_signal(number)
        assert stop.name == number.name


def test_the_first_signal_gives_the_name():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGUSR1"


def test_a_second_interrupt_stops_at_once():
    with StopSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in STOPPING]
    with pytest.raises(ValueError), StopSignals():
        raise ValueError
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_nohup_stays_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.name is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_does_nothing():
    seen: list[str | None] = []

    def work() -> None:
        with StopSignals() as stop:
            seen.append(stop.name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
