"""What a streaming memory moves and updates at a time: a repeated block, or what lies before, between or after."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from trainforge.errors import TrainForgeError
from trainforge.stages import ModelSpec, NamedTensor, Optimizer, ParameterSpec, Slot
from trainforge.toolbox.halves import join, split
from trainforge.toolbox.parameters import Layout, flat_layout, round_to_bf16

UPDATE_TIMEOUT_S = 600

Allocate = Callable[[int, torch.dtype, bool], Tensor]
"""`allocate(elements, dtype, pinned)` gives a zeroed 1-D tensor where a unit is to live."""


class Place(enum.Enum):
    """Where a unit's tensors live.

    STREAMED: everything in host RAM; its weights pass through a slot on the device.
    KEPT: its weights also have room of their own on the device, and are uploaded once per step.
    DEVICE: everything on the device; it is updated there.
    """

    STREAMED = "streamed"
    KEPT = "kept"
    DEVICE = "device"


@dataclass(frozen=True)
class Storage:
    """The tensors of a unit. All but `weights` cover the trainable parameters only, which lie first in the layout.

    Attributes:
        weights: what the model computes with, in its dtype. In fp32 these are the masters; with split masters, their
            upper halves.
        low: int16, the lower halves of split masters, or None.
        masters: fp32 masters of their own, or None.
        grads: in the dtype in which gradients travel.
        state: optimizer state that has one value per element, by key.
        numbers: optimizer state that is one number per parameter, by key: `[number of trainable parameters]`.
    """

    weights: Tensor
    low: Tensor | None
    masters: Tensor | None
    grads: Tensor
    state: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]


@dataclass(eq=False)
class Unit:
    """A unit: which parameters, where they lie in its buffers, where those live, and what the optimizer gets.

    Attributes:
        name: the block's name, or what it is otherwise (`"stem"`, `"head"`, ...).
        block: index of the repeated block, None for the others.
        layout: of all its parameters, trainable ones first.
        trained: elements of the layout that belong to trainable ones.
        again: a block that keeps its inputs only and runs again in backward; streamed ones do whatever it says.
        pending: the update that was queued for it and has not been waited for.
    """

    name: str
    block: int | None
    layout: Layout
    trained: int
    place: Place
    again: bool = False
    storage: Storage = field(init=False)
    slots: list[Slot] = field(default_factory=list)
    pending: Future[None] | None = None

    @property
    def recomputed(self) -> bool:
        """Whether this is a block that runs again in backward."""
        return self.block is not None and (self.again or self.place is Place.STREAMED)

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """All its parameters, trainable ones first."""
        return self.layout.specs

    @property
    def trainable(self) -> list[ParameterSpec]:
        """Those that are trained, in the order in which they lie."""
        return [spec for spec in self.layout.specs if spec.trainable]

    def settled(self) -> bool:
        """Whether no queued update is still under way."""
        return self.pending is None or self.pending.done()

    def settle(self) -> None:
        """Wait for the queued update; raises what went wrong in it."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            try:
                pending.result(UPDATE_TIMEOUT_S)
            except TimeoutError:
                raise TrainForgeError(
                    f"the update of {self.name} has not ended within {UPDATE_TIMEOUT_S} s: the host is overloaded or "
                    "a thread of the optimizer hangs"
                ) from None

    def master(self, spec: ParameterSpec, out: Tensor) -> None:
        """Write the exact fp32 master of a trainable parameter into `out` (fp32, 1-D)."""
        held, weights = self.storage, self.layout.span(self.storage.weights, spec)
        if held.masters is not None:
            out.copy_(self.layout.span(held.masters, spec))
        elif held.low is not None:
            join(weights, self.layout.span(held.low, spec), out)
        else:
            out.copy_(weights)

    def fill(self, spec: ParameterSpec, offset: int, values: Tensor) -> None:
        """Put initial values (fp32, 1-D, on the unit's device) at `offset` of a parameter."""
        held = self.storage
        weights = self.layout.span(held.weights, spec, offset, len(values))
        if weights.dtype == torch.float32:
            weights.copy_(values)
        elif spec.trainable and held.low is not None:
            split(values, weights, self.layout.span(held.low, spec, offset, len(values)))
        else:
            round_to_bf16(values, weights)
            if spec.trainable and held.masters is not None:
                self.layout.span(held.masters, spec, offset, len(values)).copy_(values)

    def round(self) -> None:
        """Round the weights from masters of their own."""
        if self.storage.masters is not None and self.trained:
            round_to_bf16(self.storage.masters, self.storage.weights[: self.trained])

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Masters and optimizer state as checkpoints know them."""
        for slot in self.slots:
            yield NamedTensor("master", slot.extent, slot.master, slot.low)
            for key, tensor in slot.state.items():
                if tensor.dim():
                    yield NamedTensor(key, slot.extent, tensor)
                else:
                    yield NamedTensor(key, slot.extent.number, tensor.view(1))


def divide(model: ModelSpec) -> list[Unit]:
    """The units of a model in forward order: each block, and each stretch of parameters between blocks.

    What a block shares with another module is no part of it: it is needed while other blocks lie in the slots.
    Blocks are streamed and the others kept, until somebody decides better.
    """
    units = []
    blocks_seen = 0
    for block, group in groupby(_in_order(model), key=lambda spec: _home(spec, model)):
        specs = sorted(group, key=lambda spec: not spec.trainable)
        trained = flat_layout([spec for spec in specs if spec.trainable]).length
        if block is not None:
            name = model.blocks[block]
            blocks_seen += 1
        else:
            name = (
                "stem"
                if not blocks_seen
                else "head"
                if blocks_seen == len(model.blocks)
                else f"before block {blocks_seen}"
            )
        place = Place.KEPT if block is None else Place.STREAMED
        units.append(Unit(name, block, flat_layout(specs), trained, place))
    return units


def _home(spec: ParameterSpec, model: ModelSpec) -> int | None:
    """The block that alone uses a parameter."""
    if spec.block is None:
        return None
    inside = model.blocks[spec.block] + "."
    return spec.block if all(alias.startswith(inside) for alias in spec.aliases) else None


def _in_order(model: ModelSpec) -> Iterator[ParameterSpec]:
    """The parameters in forward order, what a block shares before the rest of it."""
    for _, group in groupby(model.parameters, key=lambda spec: spec.block):
        yield from sorted(group, key=lambda spec: _home(spec, model) is not None)


def allocate(
    unit: Unit,
    optimizer: Optimizer,
    take: Allocate,
    compute: torch.dtype,
    grads: torch.dtype,
    *,
    halves: bool,
) -> None:
    """Give a unit its tensors, all zero, and the slots over them.

    Args:
        unit: what gets them.
        optimizer: says which state it keeps.
        take: where they live.
        compute: dtype of the weights.
        grads: dtype in which gradients reach the update.
        halves: split masters instead of fp32 ones beside bf16 weights.
    """
    whole = compute == torch.float32
    wanted = optimizer.state(unit.trainable[0]) if unit.trainable else {}
    unit.storage = Storage(
        weights=take(unit.layout.length, compute, True),
        low=take(unit.trained, torch.int16, False) if halves and not whole else None,
        masters=take(unit.trained, torch.float32, False) if not halves and not whole else None,
        grads=take(unit.trained, grads, True),
        state={
            key: take(unit.trained, getattr(torch, spec.dtype), False)
            for key, spec in wanted.items()
            if spec.per_element
        },
        numbers={
            key: take(len(unit.trainable), getattr(torch, spec.dtype), False)
            for key, spec in wanted.items()
            if not spec.per_element
        },
    )
    unit.slots = [_slot(unit, index, spec) for index, spec in enumerate(unit.trainable)]


def _slot(unit: Unit, index: int, spec: ParameterSpec) -> Slot:
    held, span = unit.storage, unit.layout.span
    state = {key: span(tensor, spec) for key, tensor in held.state.items()}
    state |= {key: tensor[index] for key, tensor in held.numbers.items()}
    master = span(held.weights if held.masters is None else held.masters, spec)
    low = None if held.low is None else span(held.low, spec)
    return Slot(spec, spec.extent, master, span(held.grads, spec), state, low)
