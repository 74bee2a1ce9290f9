"""Processes that take turns: one after the other, told who is waited for, and not for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from trainforge.context import SilentConsole
from trainforge.errors import TrainForgeError
from trainforge_plugins.hf import turns


def test_one_at_a_time(tmp_path: Path):
    inside, most, gone_through = [], [], []

    def work():
        with turns.turn(tmp_path / "deep/lock", "working", SilentConsole(), 60.0):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()
        gone_through.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(gone_through) == 4
    assert max(most) == 1


def test_who_is_waited_for_is_told_and_the_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "_TOLD_AFTER_S", 0.0)
    console, lock = SilentConsole(), tmp_path / "lock"
    with turns.turn(lock, "downloading a model", SilentConsole(), 1.0):
        with (
            pytest.raises(
                TrainForgeError, match=f"process {os.getpid()} has been downloading a model for .*{lock}"
            ),
            turns.turn(lock, "downloading a model", console, 0.3),
        ):
            raise AssertionError("two hold the lock")
        assert console.lines == [f"waiting for process {os.getpid()}, which is downloading a model"]
    with turns.turn(lock, "downloading a model", console, 0.0):
        pass
