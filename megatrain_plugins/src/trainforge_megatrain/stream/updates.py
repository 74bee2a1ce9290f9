"""Updates in host RAM, one unit after another on a thread of its own, while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from trainforge.stages import Optimizer, Slot, UpdateFunction
from trainforge.toolbox.halves import with_whole_masters
from trainforge.toolbox.streams import Event, StreamsLike
from trainforge_megatrain.stream.rooms import Wait
from trainforge_megatrain.stream.units import Place, Unit


class Updates:
    """Brings one step's update to units: at once where they live on the device, queued where they live on the host.

    The host's updates run in forward order, which is the order in which the next forward needs them; each unit is
    waited for just before its weights go up (`Unit.settle`).
    """

    def __init__(self, optimizer: Optimizer, streams: StreamsLike, worker: Executor, wait: Wait) -> None:
        self._optimizer, self._streams, self._worker, self._wait = optimizer, streams, worker, wait
        self._stream = streams.stream("update")
        self._norm_known: Event = streams.event()

    def apply(
        self,
        units: Sequence[Unit],
        update: UpdateFunction,
        used: frozenset[str],
        landed: Callable[[Unit], Event],
    ) -> None:
        """Update the slots of `units` whose parameters are in `used`.

        Args:
            units: in forward order.
            update: core's function.
            used: names of parameters that had a gradient.
            landed: the event after which a unit's gradients are in host RAM.
        """
        self._norm_known.record()
        slots = {unit: [slot for slot in unit.slots if slot.extent.name in used] for unit in units}
        changing = [unit for unit in units if slots[unit]]
        for unit in changing:  # first: the host begins while this thread launches the device's updates
            if unit.place is not Place.DEVICE:
                unit.pending = self._worker.submit(self._on_host, unit, slots[unit], update, landed(unit))
        for unit in changing:
            if unit.place is Place.DEVICE:
                self._update(unit, slots[unit], update)

    def _on_host(self, unit: Unit, slots: Sequence[Slot], update: UpdateFunction, landed: Event) -> None:
        with self._streams.on(
            self._stream
        ):  # what the optimizer asks of the device waits for nothing but the norm
            self._stream.wait(self._norm_known)
            self._wait("gradients before the update reads them", landed.synchronize)
            self._update(unit, slots, update)

    def _update(self, unit: Unit, slots: Sequence[Slot], update: UpdateFunction) -> None:
        if self._takes(slots[0]):
            update(slots)
        else:
            with_whole_masters(update, slots)
        unit.round()

    def _takes(self, slot: Slot) -> bool:
        """Whether the optimizer can work on such a slot as it is."""
        halves = slot.low is None or self._optimizer.takes_split_masters
        return halves and (slot.grad.element_size() == 4 or self._optimizer.takes_bf16_gradients)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()
