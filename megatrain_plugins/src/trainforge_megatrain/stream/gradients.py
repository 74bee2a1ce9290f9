"""How gradients leave the device: collected block by block, measured, and sent down to the host.

A block's gradients are added up in fp32 on the device while its micro-batches pass, so the host never adds. Two boxes
take turns: while one travels, the next block fills the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainforge.stages import ParameterSpec, Sink
from trainforge.toolbox.parameters import squared_norms
from trainforge.toolbox.streams import Event, StreamsLike
from trainforge_megatrain.stream.rooms import Wait
from trainforge_megatrain.stream.units import Place, Unit


class Box:
    """Room on the device for one unit's gradients.

    Attributes:
        sums: where they are added up.
        parcel: what travels: `sums` itself, or a copy of it in a narrower dtype; None when it stays on the device.
    """

    def __init__(self, sums: Tensor, parcel: Tensor | None, streams: StreamsLike) -> None:
        self.sums, self.parcel = sums, parcel
        self.computed: Event = streams.event()
        self.sent: Event = streams.event()


class Landed:
    """The event that a unit's gradients are in host RAM, as a sink gets it."""

    def __init__(self, event: Event, wait: Wait) -> None:
        self._event, self._wait = event, wait

    def wait(self) -> None:
        """Have the host wait: it reads them."""
        self._wait("gradients before the host reads them", self._event.synchronize)


class Gradients:
    """The gradients of one step.

    Args:
        units: all units, with their storage.
        sums: dtype in which micro-batches are added up.
        travel: dtype in which they go down.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        streams: StreamsLike,
        device: torch.device,
        sums: torch.dtype,
        travel: torch.dtype,
        wait: Wait,
    ) -> None:
        self._streams, self._wait, self._device = streams, wait, device
        self._download = streams.stream("download")
        self._narrow = sums != travel
        names = sorted(spec.name for unit in units for spec in unit.trainable)
        order = {name: place for place, name in enumerate(names)}
        self.squares = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._places = {
            unit: torch.tensor([order[s.name] for s in unit.trainable], dtype=torch.long, device=device)
            for unit in units
        }
        blocks = [u for u in units if u.block is not None and u.place is not Place.DEVICE and u.trained]
        size = max((unit.trained for unit in blocks), default=0)
        shared = torch.zeros(size, dtype=sums, device=device) if self._narrow and blocks else None
        self._boxes = [self._box(size, sums, travel, shared) for _ in blocks[:2]]
        self._own = {
            unit: Box(unit.storage.grads, None, streams)
            if unit.place is Place.DEVICE
            else self._box(unit.trained, sums, travel, None)
            for unit in units
            if unit.trained and unit not in blocks
        }
        self.landed = {unit: streams.event() for unit in units}
        self._filling: dict[Unit, Box] = {}
        self._touched: dict[Unit, set[str]] = {}
        self._stale: set[Unit] = set()  # units whose gradient buffers are not all zero
        self._turn = 0

    def _box(self, size: int, sums: torch.dtype, travel: torch.dtype, shared: Tensor | None) -> Box:
        parcel = torch.zeros(size, dtype=travel, device=self._device)
        if not self._narrow:
            return Box(parcel, parcel, self._streams)
        own = torch.zeros(size, dtype=sums, device=self._device) if shared is None else shared
        return Box(own, parcel, self._streams)

    def begin(self) -> None:
        """Start a step."""
        self.squares.zero_()
        self._filling, self._touched = {}, {}

    def add(self, unit: Unit, spec: ParameterSpec, grad: Tensor) -> None:
        """Add a micro-batch's gradient of a parameter."""
        box = self._filling.get(unit) or self._open(unit)
        span = unit.layout.span(box.sums, spec).view(spec.shape)
        if spec.name in self._touched[unit]:
            span.add_(grad)
        else:
            span.copy_(grad)
            self._touched[unit].add(spec.name)

    def _open(self, unit: Unit) -> Box:
        box = self._own.get(unit)
        if box is None:
            box = self._boxes[self._turn % len(self._boxes)]
            self._turn += 1
        if box.parcel is not None and not self._narrow:
            self._wait("gradients on their way before their box is filled again", box.sent.wait)
        self._filling[unit], self._touched[unit] = box, set()
        return box

    def finish(self, unit: Unit, sink: Sink) -> None:
        """A unit's gradients are final: measure them, send them down, tell the sink."""
        box = self._filling.pop(unit, None)
        if box is None:
            return
        self._stale.add(unit)
        touched = self._touched[unit]
        spans = [unit.layout.span(box.sums, spec) for spec in unit.trainable]
        for spec, span in zip(unit.trainable, spans, strict=True):
            if spec.name not in touched:
                span.zero_()
        self.squares[self._places[unit]] = squared_norms(spans)
        ready = self._send(unit, box)
        for spec in unit.trainable:
            if spec.name in touched:
                sink(spec.extent, ready)

    def _send(self, unit: Unit, box: Box) -> Landed | None:
        if box.parcel is None:
            return None
        if self._narrow:
            self._wait("gradients on their way before their box is filled again", box.sent.wait)
            box.parcel[: unit.trained].copy_(box.sums[: unit.trained])
        box.computed.record()
        self._wait("gradients before they go down", lambda: self._download.wait(box.computed))
        self._streams.copy(unit.storage.grads, box.parcel[: unit.trained], self._download)
        box.sent.record(self._download)
        self.landed[unit].record(self._download)
        return Landed(self.landed[unit], self._wait)

    def end(self, units: Sequence[Unit], sink: Sink) -> None:
        """Finish what is left (what is no block, blocks that something passed by), and zero what got nothing."""
        for unit in reversed(units):
            if unit in self._filling:
                self.finish(unit, sink)
            elif unit not in self._touched and unit in self._stale:
                self._wait("a block's update before its gradients are zeroed", unit.settle)
                self._wait("gradients before the host reads them", self.landed[unit].synchronize)
                unit.storage.grads.zero_()
                self._stale.discard(unit)
