"""The time ledger: where the time of each step went, without asking the device while it works.

A step is cut into laps. On an accelerator a lap's end is an event recorded in the stream, so the difference of two
is what the *device* spent between them: a lap in which the host prepared something while the device was busy costs
nothing, one in which the device had to wait shows its exposed time. Events are read only when metrics are logged.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAPS = ("data", "compute", "comm", "optimizer", "evaluate", "checkpoint", "other")
"""What a step's time is booked under, in the order of a step. `other` is the loop itself, observers and logging."""


class Ledger:
    """Books the time between `lap` calls; `read` turns it into milliseconds per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, float | torch.Event]] = []
        self._spare: list[torch.Event] = []
        self._start: float | torch.Event = self._stamp()
        self.total_ms: dict[str, float] = dict.fromkeys(LAPS, 0.0)
        self.step_ms: list[float] = []

    def lap(self, name: str) -> None:
        """The time since the last lap went into `name`."""
        self._laps.append((name, self._stamp()))

    def end_step(self) -> None:
        """The step is over; what follows belongs to the next one."""
        self._laps.append(("", 0.0))

    def restart(self) -> None:
        """Start counting now: what happened since the last lap is not part of any step."""
        assert not self._laps, "restart between steps only, after read"
        self._start = self._stamp()

    def read(self) -> tuple[dict[str, float], float]:
        """Book the laps of the steps ended since the last read. Waits for the device.

        Returns:
            Milliseconds per step by name, and milliseconds per step in all (means over those steps).
        """
        if self._device.type != "cpu" and self._laps:
            import torch

            torch.accelerator.synchronize(self._device)
        booked = dict.fromkeys(LAPS, 0.0)
        step_ms, steps = 0.0, 0
        for name, stamp in self._laps:
            if not name:
                self.step_ms.append(step_ms)
                step_ms, steps = 0.0, steps + 1
                continue
            elapsed = self._elapsed_ms(self._start, stamp)
            booked[name] += elapsed
            step_ms += elapsed
            self._recycle(self._start)
            self._start = stamp
        self._laps.clear()
        for name, value in booked.items():
            self.total_ms[name] += value
        steps = max(steps, 1)
        return {name: value / steps for name, value in booked.items()}, sum(booked.values()) / steps

    def median_step_ms(self) -> float:
        """Median duration of a step, over all steps that were read."""
        return statistics.median(self.step_ms) if self.step_ms else 0.0

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step by name, over all steps that were read."""
        steps = max(len(self.step_ms), 1)
        return {name: value / steps for name, value in self.total_ms.items()}

    def _stamp(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        import torch

        event = self._spare.pop() if self._spare else torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, start: float | torch.Event, end: float | torch.Event) -> float:
        if isinstance(start, float):
            assert isinstance(end, float)
            return (end - start) * 1000
        assert not isinstance(end, float)
        return float(start.elapsed_time(end))

    def _recycle(self, stamp: float | torch.Event) -> None:
        if not isinstance(stamp, float):
            self._spare.append(stamp)
