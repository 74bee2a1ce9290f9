"""Room on the device for the weights of units that live in host RAM, and when each is filled.

A streamed unit always uses the same slot (its place in forward order, modulo the number of slots), so its parameters
alias that slot once and for all and nothing is unflattened. Weights travel on a stream of their own; two events guard
each room: its contents have landed, and whoever read them has finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainforge.toolbox.streams import Event, StreamsLike
from trainforge_megatrain.stream.units import Place, Unit

Wait = Callable[[str, Callable[[], object]], None]
"""`wait(place, wait)`: every wait of this plugin goes through one such function, so that tests can leave one out."""


class Room:
    """Room for one unit's weights."""

    def __init__(self, weights: Tensor, streams: StreamsLike) -> None:
        self.weights = weights
        self.landed: Event = streams.event()
        self.read: Event = streams.event()
        self.holds: Unit | None = None


class Rooms:
    """All rooms: the slots that streamed units share, and one of its own for each kept unit.

    Attributes:
        waited_s: seconds that the launching thread has spent waiting for updates in host RAM.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        slots: int,
        streams: StreamsLike,
        device: torch.device,
        dtype: torch.dtype,
        wait: Wait,
    ) -> None:
        self._streams, self._wait = streams, wait
        self._upload = streams.stream("upload")
        self._order = [unit for unit in units if unit.block is not None and unit.place is not Place.DEVICE]
        self._ahead = slots - 1
        streamed = [unit for unit in units if unit.place is Place.STREAMED]
        size = max((unit.layout.length for unit in streamed), default=0)
        count = min(slots, len(streamed))
        self.shared = [Room(torch.zeros(size, dtype=dtype, device=device), streams) for _ in range(count)]
        self._of = {unit: self.shared[index % count] for index, unit in enumerate(streamed)}
        for unit in units:
            if unit.place is Place.KEPT:
                own = torch.zeros(unit.layout.length, dtype=dtype, device=device)
                self._of[unit] = Room(own, streams)
        self._places = {unit: place for place, unit in enumerate(self._order)}
        self._current: Unit | None = None
        self.waited_s = 0.0

    def weights(self, unit: Unit) -> Tensor:
        """Where the model finds a unit's weights."""
        return unit.storage.weights if unit.place is Place.DEVICE else self._of[unit].weights

    def enter(self, unit: Unit, direction: int) -> None:
        """Have a block's weights ready for the computing stream, and fetch those that come next in `direction`."""
        if self._current is not unit:
            self.leave()
        if unit.place is not Place.DEVICE:
            self.hold(unit)
            self._current = unit
        place = self._places.get(unit)
        for step in range(1, self._ahead + 1 if place is not None else 0):
            following = place + direction * step  # type: ignore[operator]
            if 0 <= following < len(self._order):
                self.fetch_ahead(self._order[following])

    def hold(self, unit: Unit) -> None:
        """Have a unit's weights ready for the computing stream."""
        if unit.place is Place.DEVICE:
            return
        room = self._of[unit]
        if room.holds is not unit:
            self._load(unit, room)
        self._wait("a block's weights before it computes", room.landed.wait)

    def leave(self) -> None:
        """Say that what was asked of the computing stream so far is the last to read the current block's weights."""
        if self._current is not None:
            self._of[self._current].read.record()
            self._current = None

    def release(self, unit: Unit) -> None:
        """The same of a unit that is no block."""
        if unit.place is not Place.DEVICE:
            self._of[unit].read.record()

    def forget(self) -> None:
        """Weights are about to change: what lies in the rooms is no longer true."""
        for room in self._of.values():
            room.holds = None

    def fetch_ahead(self, unit: Unit) -> None:
        """Start an upload early, unless the unit's update is still under way. Nothing waits for it yet."""
        if unit.place is Place.DEVICE:
            return
        room = self._of[unit]
        if room.holds is not unit and unit.settled():
            self._load(unit, room)

    def _load(self, unit: Unit, room: Room) -> None:
        began = time.perf_counter()
        self._wait("a block's update before its weights go up", unit.settle)
        self.waited_s += time.perf_counter() - began
        self._wait("the readers of a room before it is overwritten", lambda: self._upload.wait(room.read))
        elements = unit.layout.length
        self._streams.copy(room.weights[:elements], unit.storage.weights, self._upload)
        room.landed.record(self._upload)
        room.holds = unit
