"""What the launcher does with signals, and how much time it gives: without ranks of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainforge.launcher import _Watch


class Agent:
    """Stands in for the agent: what the watch asks it for is given by hand."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_ranks_that_start_after_a_signal_get_it_and_all_the_time_to_save(tmp_path: Path, child):
    watch = _Watch(Agent(), tmp_path, grace_s=1000.0)  # type: ignore[arg-type]
    watch._on_signal(signal.SIGTERM, None)
    watch._pass_on({})
    assert watch._deadline is not None
    assert watch._deadline[0] - time.monotonic() < 10
    watch._pass_on({0: child.pid})
    assert watch._deadline[0] - time.monotonic() > 900
    assert "did not finish saving within 1000 s" in watch._deadline[1]
    assert child.wait(60) == -signal.SIGTERM
    before = watch._deadline
    watch._on_signal(signal.SIGINT, None)
    watch._pass_on({0: child.pid})
    assert watch._deadline == before, "a second signal gives no more time"


def test_a_signal_gives_ranks_that_are_dying_no_more_time(tmp_path: Path, child):
    watch = _Watch(Agent(), tmp_path, grace_s=1000.0)  # type: ignore[arg-type]
    watch._failed = True
    watch._arm(5.0, "")
    before = watch._deadline
    watch._on_signal(signal.SIGINT, None)
    watch._pass_on({0: child.pid})
    assert watch._deadline == before
