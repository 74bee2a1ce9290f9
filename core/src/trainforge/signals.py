"""Stopping in order: a signal sets a flag, the loop reads it once per step on every rank, saves and ends.

Before the first step there is nothing to save. Then a signal ends the start at once, wherever it is.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and end. SIGUSR1 is what Slurm can be told to send before pre-emption (`--signal=USR1@120`);
SIGHUP comes when the terminal goes away (and stays ignored under nohup)."""


Handler = Callable[[int, FrameType | None], None]


def handle_stopping(handler: Handler) -> dict[signal.Signals, Any]:
    """Have stop signals call `handler` (main thread only); gives what was there before, for `restore`."""
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    taken = [number for number in STOPPING if not (under_nohup and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in taken}


def restore(before: dict[signal.Signals, Any]) -> None:
    """Put the handlers back that `handle_stopping` replaced."""
    for number, handler in before.items():
        # None: the handler was set by C code and cannot be given back through Python
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Stopped(BaseException):
    """A stop signal came while there was nothing to save; its text names the signal.

    Like KeyboardInterrupt it is no `Exception`, so that no plugin takes it for a failure of its own.
    """


class StopSignals:
    """A context in which stop signals are remembered instead of ending the process.

    A second Ctrl-C (SIGINT) stops at once with KeyboardInterrupt. Outside the main thread, where Python allows no
    handlers, it never sees a signal.

    Attributes:
        name: the first signal that came (`"SIGTERM"`), or None.
        at_once: whether the first signal raises `Stopped` where it finds the program.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.name: str | None = None
        self.at_once = at_once
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = handle_stopping(self._remember)
        return self

    def __exit__(self, *unused: object) -> None:
        restore(self._before)
        self._before = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if self.at_once:
            self.at_once = False  # once: what cleans up on the way out is left alone
            raise Stopped(self.name)
