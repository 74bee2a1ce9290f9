"""Which units live where: the device's memory is a tier, and the placement with the shortest step is chosen.

What must lie on the device comes first: slots, boxes for gradients, activations, logits. What the budget leaves can
hold whole units, in forward order (their update is the one that the next forward would wait for, and they neither
travel nor wait), or only weights of further blocks (an upload per step saved, for 2 bytes per parameter). Every number
of the former is tried, with as many of the latter as still fit, and `forecast` says which is fastest. What is left then
keeps the activations of blocks that need not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainforge_megatrain.stream.sizes import Sizes, on_device, on_host
from trainforge_megatrain.stream.units import Place, Unit

_ALIKE = 1.01  # a forecast does not tell times apart that differ by less


@dataclass(frozen=True)
class Room:
    """Bytes that there are: on the device (the budget) and in host RAM; None where nobody says."""

    device: int | None
    host: int | None


@dataclass(frozen=True)
class Placement:
    """Where each unit lives, and what follows.

    Attributes:
        places: of the units, in forward order.
        again: which of them run again in backward.
        offload: the inputs of recomputed blocks wait in host RAM.
        missing: bytes that the device, and that host RAM, lack for it.
        seconds: of a step; 0 when nobody knows.
        host: bytes in host RAM.
    """

    places: tuple[Place, ...]
    again: tuple[bool, ...]
    offload: bool
    missing: tuple[int, int]
    seconds: float
    host: int

    def apply(self, units: Sequence[Unit]) -> None:
        """Give the units these places."""
        for unit, its, again in zip(units, self.places, self.again, strict=True):
            unit.place, unit.again = its, again


def place(units: Sequence[Unit], sizes: Sizes, room: Room, seconds: Callable[[], float] | None) -> Placement:
    """Set the units' places, and say what comes of it.

    Args:
        units: in forward order.
        room: what there is. Where nothing fits, the placement that needs least of the device is left.
        seconds: of a step, with the units placed as they are; None fills the device in forward order.
    """
    as_streamed(units)
    _run_again(units, sizes)
    if room.device is None or not _fits(units, sizes, room.device):
        return _judged(units, sizes, room, seconds)
    tried = []
    for order in (units, [unit for unit in units if unit.block is not None]):
        as_streamed(units)
        for unit in (None, *order):
            if unit is not None and not _move(unit, units, sizes, room.device):
                continue
            streamed = [one for one in units if one.place is Place.STREAMED]
            _keep(streamed, units, sizes, room.device)
            _keep_activations(units, sizes, room.device)
            tried.append(_judged(units, sizes, room, seconds))
            _keep_last(streamed, 0)
            _run_again(units, sizes)
    best = better(tried)
    best.apply(units)
    return best


def better(tried: Sequence[Placement]) -> Placement:
    """The fastest that there is room for; of those that are as fast, as far as a forecast can tell, the least host RAM.

    Where there is room for none, the one that lacks least.
    """
    lacking = min(one.missing for one in tried)
    possible = [one for one in tried if one.missing == lacking]
    fastest = min(one.seconds for one in possible)
    return min((one for one in possible if one.seconds <= fastest * _ALIKE), key=lambda one: one.host)


def as_streamed(units: Sequence[Unit]) -> None:
    """Nothing lives on the device: blocks pass through, and what is no block keeps its weights there."""
    for unit in units:
        unit.place = Place.KEPT if unit.block is None else Place.STREAMED


def _judged(
    units: Sequence[Unit], sizes: Sizes, room: Room, seconds: Callable[[], float] | None
) -> Placement:
    """The placement that the units have now."""
    device, host = sum(on_device(units, sizes).values()), sum(on_host(units, sizes).values())
    missing = (
        0 if room.device is None else max(0, device - room.device),
        0 if room.host is None else max(0, host - room.host),
    )
    places = tuple(unit.place for unit in units)
    again = tuple(unit.again for unit in units)
    return Placement(places, again, sizes.offload, missing, 0.0 if seconds is None else seconds(), host)


def _fits(units: Sequence[Unit], sizes: Sizes, budget: int) -> bool:
    return sum(on_device(units, sizes).values()) <= budget


def _move(unit: Unit, units: Sequence[Unit], sizes: Sizes, budget: int) -> bool:
    """Have a unit live on the device if it fits."""
    before, unit.place = unit.place, Place.DEVICE
    if _fits(units, sizes, budget):
        return True
    unit.place = before
    return False


def _keep(streamed: Sequence[Unit], units: Sequence[Unit], sizes: Sizes, budget: int) -> None:
    """Keep the weights of as many of the last streamed blocks as fit."""
    low, high = 0, len(streamed)
    while low < high:
        middle = (low + high + 1) // 2
        _keep_last(streamed, middle)
        low, high = (middle, high) if _fits(units, sizes, budget) else (low, middle - 1)
    _keep_last(streamed, low)


def _keep_last(streamed: Sequence[Unit], count: int) -> None:
    first = len(streamed) - count
    for index, unit in enumerate(streamed):
        unit.place = Place.KEPT if index >= first else Place.STREAMED


def _run_again(units: Sequence[Unit], sizes: Sizes) -> None:
    for unit in units:
        unit.again = sizes.recompute is not False


def _keep_activations(units: Sequence[Unit], sizes: Sizes, budget: int) -> None:
    """Where the choice is left: have as many blocks as fit keep their activations, the last ones first."""
    if sizes.recompute != "auto":
        return
    for unit in reversed([one for one in units if one.block is not None and one.place is not Place.STREAMED]):
        unit.again = False
        if not _fits(units, sizes, budget):
            unit.again = True
            return
