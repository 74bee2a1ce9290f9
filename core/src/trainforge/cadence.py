"""`Cadence`: every so many steps, or every so much time."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainforge.units import parse_seconds


class CadenceClock:
    """Says when something is due: every N steps, every so many seconds, or (None) never.

    A time cadence counts from the last time that it was done; only rank 0's clock decides.
    """

    def __init__(self, every: int | str | None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps = every if isinstance(every, int) else None
        self._seconds = parse_seconds(every) if isinstance(every, str) else None
        self._now = now
        self._last = now()

    def due(self, step: int) -> bool:
        """Whether it is due after `step`."""
        if self._steps is not None:
            return step % self._steps == 0
        return self._seconds is not None and self._now() - self._last >= self._seconds

    def done(self) -> None:
        """It has been done just now."""
        self._last = self._now()
