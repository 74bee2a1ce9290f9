"""Optimizers, slots and updates for the tests of `cpu_adam`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.support.context import make_context

from trainforge.stages import Extent, ParameterSpec, Slot, Update
from trainforge.toolbox import halves
from trainforge_megatrain.cpu_adam import forge_optimizer
from trainforge_megatrain.cpu_adam.optimizer import CpuAdam

SPECS = (
    ParameterSpec("embed.weight", (9, 4), "embedding"),
    ParameterSpec("blocks.0.weight", (40, 25), aliases=("tied.weight",)),
    ParameterSpec("blocks.0.norm", (7,), "norm", lr_scale=0.5),
    ParameterSpec("empty", (0, 3)),
    ParameterSpec("gain", (), "bias"),
)


def make(config: dict | None = None, **train) -> CpuAdam:
    provider = forge_optimizer()
    ctx = make_context(run_dir=Path("unused"), **train)
    return provider.build(ctx, provider.config.model_validate(config or {}))


def make_slot(optimizer: CpuAdam, spec: ParameterSpec, seed: int = 0) -> Slot:
    draw = torch.Generator().manual_seed(seed + spec.elements)
    state = {
        name: torch.zeros(spec.elements if wanted.per_element else (), dtype=getattr(torch, wanted.dtype))
        for name, wanted in optimizer.state(spec).items()
    }
    master = torch.randn(spec.elements, generator=draw)
    return Slot(spec, spec.extent, master, torch.randn(spec.elements, generator=draw), state)


def make_slots(optimizer: CpuAdam, seed: int = 0, specs=SPECS) -> list[Slot]:
    return [make_slot(optimizer, spec, seed) for spec in specs]


def do(step: int = 1, lr: float = 1e-2, scale: float = 1.0, found_inf: float = 0.0) -> Update:
    return Update(step, lr, torch.tensor(scale), torch.tensor(found_inf))


def draw_gradients(slots: list[Slot], seed: int) -> None:
    for slot in slots:
        draw = torch.Generator().manual_seed(1000 * seed + slot.spec.elements)
        slot.grad.copy_(torch.randn(slot.grad.shape, generator=draw))


def split(slot: Slot) -> Slot:
    """The slot with split masters and a bf16 gradient."""
    high = torch.empty(slot.master.numel(), dtype=torch.bfloat16)
    low = torch.empty(slot.master.numel(), dtype=torch.int16)
    halves.split(slot.master, high, low)
    return replace(slot, master=high, low=low, grad=slot.grad.bfloat16())


def joined(slot: Slot) -> torch.Tensor:
    if slot.low is None:
        return slot.master
    master = torch.empty(slot.master.numel())
    halves.join(slot.master, slot.low, master)
    return master


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(slots: list[Slot]) -> list[bytes]:
    """Every byte of masters and state."""
    return [
        bytes_of(t) for slot in slots for t in (slot.master, slot.low, *slot.state.values()) if t is not None
    ]


def cut(slot: Slot, first: int, last: int) -> Slot:
    extent = Extent(slot.spec.name, slot.spec.shape, first, last - first)
    state = {
        key: tensor[first:last] if tensor.dim() else tensor.clone() for key, tensor in slot.state.items()
    }
    low = None if slot.low is None else slot.low[first:last]
    return Slot(slot.spec, extent, slot.master[first:last], slot.grad[first:last], state, low)
