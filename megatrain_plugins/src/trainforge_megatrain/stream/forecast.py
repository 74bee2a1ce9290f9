"""The step time that a placement gives, from the rates of this machine.

A step is played through unit by unit with one clock for each thing that works by itself: the host's update, uploads,
the device, downloads. What waits for what is what `rooms`, `gradients` and `updates` have wait. So a head or tail that
nothing hides counts by itself, and no phase is shorter than the longest of its own terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainforge.stages import ModelSpec
from trainforge_megatrain.stream.sizes import Sizes, hidden_bytes
from trainforge_megatrain.stream.units import Place, Unit

_BOXES = 2  # `gradients` has so many for blocks
_LEAVING = 2  # `offload` lets so many inputs be on their way down


@dataclass(frozen=True)
class Rates:
    """What this machine does.

    Attributes:
        compute: FLOP/s of the model's blocks, or of a plain matrix product where no block was run.
        upload, download: bytes/s, both at once.
        host_update, device_update: parameters/s that the optimizer updates there.
        overlaps: copies run beside the computation; on a CPU they take its time.
        of_a_block: `compute` was measured with a real block.
        head: tokens/s through the output head and the loss, forward and backward; None: as its FLOPs at `compute`.
    """

    compute: float
    upload: float
    download: float
    host_update: float
    device_update: float
    overlaps: bool = True
    of_a_block: bool = False
    head: float | None = None


@dataclass(frozen=True)
class Work:
    """Seconds that a unit takes per step: of the device, of each copy, of its update.

    Inputs that wait in host RAM go down in forward and come up in backward.
    """

    forward: float
    backward: float
    upload: float
    download: float
    update: float
    inputs_down: float = 0.0
    inputs_up: float = 0.0


@dataclass(frozen=True)
class Phase:
    """A part of the step: how long it lasts, and the seconds of everything that works in it."""

    seconds: float
    terms: Mapping[str, float]

    @property
    def binding(self) -> str:
        """What would have to be faster first."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True)
class Forecast:
    """A step in its steady state.

    `forward` begins when the gradient's norm is known, so the update belongs to it, and ends with the loss, whose
    gradient is taken chunk by chunk.
    """

    forward: Phase
    backward: Phase
    tokens: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward.seconds + self.backward.seconds

    @property
    def tokens_per_s(self) -> float:
        """The bound that a run can be held against."""
        return self.tokens / self.seconds


def forecast(units: Sequence[Unit], model: ModelSpec, sizes: Sizes, rates: Rates) -> Forecast:
    """How long a step takes with the units placed as they are."""
    works, loss = _works(units, model, sizes, rates), _loss_seconds(model, sizes, rates)
    landed = dict.fromkeys(units, 0.0)
    _, _, landed = _play(units, works, sizes.slots, landed, loss, overlaps=rates.overlaps)
    turn, end, _ = _play(units, works, sizes.slots, landed, loss, overlaps=rates.overlaps)
    host = [unit for unit in units if unit.place is not Place.DEVICE]
    there = [unit for unit in units if unit.place is Place.DEVICE]
    up = sum(works[unit].upload for unit in host)
    again = sum(works[unit].upload for unit in host if unit.place is Place.STREAMED)
    forward = {
        "compute": sum(w.forward for w in works.values()) + loss + sum(works[unit].update for unit in there),
        "upload": up,
        "host update": sum(works[unit].update for unit in host),
        "download": sum(work.inputs_down for work in works.values()),
    }
    backward = {
        "compute": sum(work.backward for work in works.values()),
        "upload": again + sum(work.inputs_up for work in works.values()),
        "download": sum(works[unit].download for unit in host),
    }
    return Forecast(Phase(turn, forward), Phase(end - turn, backward), sizes.step_tokens)


def _works(units: Sequence[Unit], model: ModelSpec, sizes: Sizes, rates: Rates) -> dict[Unit, Work]:
    flops = step_flops(units, model, sizes)
    inputs = hidden_bytes(sizes) * sizes.micro_batches if sizes.offload else 0
    works = {}
    for unit in units:
        again = unit.recomputed
        there = unit.place is Place.DEVICE
        works[unit] = Work(
            forward=flops[unit] / 3 / rates.compute,
            backward=flops[unit] * (3 if again else 2) / 3 / rates.compute,
            upload=0.0 if there else unit.layout.length * sizes.compute / rates.upload,
            download=0.0 if there else unit.trained * sizes.travel / rates.download,
            update=unit.trained / (rates.device_update if there else rates.host_update),
            inputs_down=inputs / rates.download if again else 0.0,
            inputs_up=inputs / rates.upload if again else 0.0,
        )
    return works


def step_flops(units: Sequence[Unit], model: ModelSpec, sizes: Sizes) -> dict[Unit, float]:
    """FLOPs of forward and backward per step, without recomputation and output head (`head_flops`).

    The model's own count is shared out by weights; attention is counted with the blocks. A look-up multiplies nothing.
    """
    weights = {
        unit: sum(
            spec.elements * (sizes.active if spec.experts else 1.0)
            for spec in unit.specs
            if spec.kind != "embedding" and spec.name not in model.head_parameters
        )
        for unit in units
    }
    whole = model.flops_per_token(sizes.row) * sizes.step_tokens - head_flops(model, sizes)
    outside = {u: 6 * weights[u] * sizes.step_tokens for u in units if u.block is None}
    inside = sum(weights[unit] for unit in units if unit.block is not None)
    if not inside:
        return {unit: whole * weights[unit] / max(1.0, sum(weights.values())) for unit in units}
    rest = max(0.0, whole - sum(outside.values()))
    return {u: outside[u] if u.block is None else rest * weights[u] / inside for u in units}


def head_flops(model: ModelSpec, sizes: Sizes) -> float:
    """FLOPs of the output head's products per step."""
    head = sum(spec.elements for spec in model.parameters if spec.name in model.head_parameters)
    return 6.0 * head * sizes.step_tokens


def _loss_seconds(model: ModelSpec, sizes: Sizes, rates: Rates) -> float:
    if rates.head is not None:
        return sizes.step_tokens / rates.head
    return head_flops(model, sizes) / rates.compute


def _play(
    units: Sequence[Unit],
    works: Mapping[Unit, Work],
    slots: int,
    landed: Mapping[Unit, float],
    loss: float,
    *,
    overlaps: bool,
) -> tuple[float, float, dict[Unit, float]]:
    """One step from the moment when the norm is known.

    Args:
        landed: when the last step's gradients of each unit are in host RAM, on this step's clock.
        loss: seconds of the output head and the loss.

    Returns:
        The moment when forward ends; when the next norm is known; and `landed` for the next step.
    """
    updated, host = {}, 0.0
    for unit in units:
        if unit.place is not Place.DEVICE:
            host = updated[unit] = max(host, landed[unit]) + works[unit].update
    device = sum(works[unit].update for unit in units if unit.place is Place.DEVICE)
    upload = download = 0.0
    left = [0.0] * _LEAVING
    streamed = [unit for unit in units if unit.place is Place.STREAMED]
    slot = {unit: index % slots for index, unit in enumerate(streamed)}
    read = [0.0] * slots
    holds: dict[int, Unit] = {}

    def fetch(unit: Unit, not_before: float) -> None:
        nonlocal upload, device
        begin = max(upload, not_before, 0.0 if overlaps else device)
        if unit in slot:
            begin = max(begin, read[slot[unit]])
            holds[slot[unit]] = unit
        upload = begin + works[unit].upload
        device = max(device, upload)

    for unit in units:
        if unit.place is not Place.DEVICE:
            fetch(unit, updated[unit])
        if works[unit].inputs_down:
            download = max(download, device) + works[unit].inputs_down
            device = max(device, left[-_LEAVING]) if overlaps else download
            left.append(download)
        device += works[unit].forward
        if unit in slot:
            read[slot[unit]] = device
    turn = device = device + loss
    upload = max(upload, turn)  # what comes up again is asked for in backward
    sent = [0.0] * _BOXES
    arrived, boxed = dict.fromkeys(units, 0.0), 0
    for unit in reversed(units):
        if unit in slot and holds[slot[unit]] is not unit:
            fetch(unit, 0.0)
        if works[unit].inputs_up:
            upload = (upload if overlaps else max(upload, device)) + works[unit].inputs_up
            device = max(device, upload)
        box = None
        if unit.block is not None and unit.place is not Place.DEVICE:
            box, boxed = boxed % _BOXES, boxed + 1
            device = max(device, sent[box])
        device += works[unit].backward
        if unit in slot:
            read[slot[unit]] = device
        if works[unit].download:
            download = max(download, device) + works[unit].download
            device = device if overlaps else download
            arrived[unit] = download
            if box is not None:
                sent[box] = download
    return turn, device, {unit: max(0.0, moment - device) for unit, moment in arrived.items()}
