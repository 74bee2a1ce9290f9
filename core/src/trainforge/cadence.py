"""When to save: every so many steps, every so much time, or (`auto`) as often as pays."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainforge.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from trainforge.live import Run

_FIRST_STEPS, _FIRST_S = 20, 120.0  # the first save of `auto`: early, so that there is something to go by
_LEAST_S = 60.0
_REMEMBERED = 5


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


class AutoClock:
    """Says when to save so that saves and the work that failures undo cost least together: `save_interval`.

    The cost of a save is measured in this start: until there was one, a save is due after 20 steps or 2 minutes. Of the
    newest five costs the middle one counts (of an even number the lower), because the first save also pays for buffers.
    A time cadence: only rank 0's clock decides, by rank 0's costs.

    Args:
        mtbf: mean time between failures, in seconds; `train.mtbf`.
        step: the step after which this start begins.
        blocked: how long the newest save kept training waiting, in seconds.
        slowdown: how much longer steps have taken because of what it did in the background, in seconds, as far as it
            is known; asked again when a save seems due, because it becomes known late.
        say: takes the line that tells a person of a new interval.
    """

    def __init__(
        self,
        mtbf: float,
        step: int,
        blocked: Callable[[], float],
        slowdown: Callable[[], float],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mtbf, self._first_step = mtbf, step + _FIRST_STEPS
        self._blocked, self._slowdown, self._say, self._now = blocked, slowdown, say, now
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._slowdowns: deque[float] = deque(maxlen=_REMEMBERED)
        self._undecided, self._interval, self._told = False, math.inf, math.inf
        self._last = now()

    def due(self, step: int) -> bool:
        """Whether a save is due after `step`."""
        elapsed = self._now() - self._last
        if not self._waits:
            return step >= self._first_step or elapsed >= _FIRST_S
        if self._undecided or elapsed >= self._interval:
            self._choose()
        return elapsed >= self._interval

    def done(self) -> None:
        """A save has been taken just now, due or not."""
        self._last = self._now()
        self._waits.append(self._blocked())
        self._slowdowns.append(0.0)
        self._undecided = True  # decided at the next step: after the last one nobody needs to know

    def _choose(self) -> None:
        self._undecided, self._slowdowns[-1] = False, self._slowdown()
        cost = statistics.median_low(map(sum, zip(self._waits, self._slowdowns, strict=True)))
        self._interval = save_interval(cost, self._mtbf)
        if math.isinf(self._told) or abs(self._interval - self._told) > self._told / 3:
            self._told = self._interval
            self._say(
                f"saving about every {format_seconds(self._interval)} from now on: a save costs the run "
                f"{format_seconds(cost)}, and train.mtbf says that it fails every {format_seconds(self._mtbf)}"
            )


def save_interval(cost: float, mtbf: float) -> float:
    """The time between saves that loses least, in seconds: sqrt(2 x cost x mtbf), by Young and Daly.

    At least a minute, but never more than a quarter of `mtbf`.

    Args:
        cost: what a save costs the run, in seconds.
        mtbf: mean time between failures, in seconds.
    """
    return min(max(math.sqrt(2 * cost * mtbf), _LEAST_S), mtbf / 4)


def clock_of_saves(run: Run) -> CadenceClock | AutoClock:
    """The clock that `train.save_every` asks for."""
    if run.train.save_every != "auto":
        return CadenceClock(run.train.save_every)
    return AutoClock(
        run.train.mtbf,
        run.state.step,
        lambda: run.save_blocked_ms[-1] / 1000,
        lambda: run.stages.checkpoint.metrics().get("slowdown_ms", 0.0) / 1000,
        run.console.note,
    )
