"""Which units live where: the device's memory is a tier, filled as far as the budget goes.

What must lie on the device is counted first: slots, boxes for gradients, activations, logits. What is left takes whole
units, in forward order: the first units are those whose update the next forward would wait for, and one that lives on
the device neither travels nor waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainforge.context import Context
from trainforge.errors import ConfigError
from trainforge.stages import ModelSpec, Optimizer, ParameterSpec
from trainforge.toolbox.dtypes import working_dtype
from trainforge.units import format_bytes
from trainforge_megatrain.stream.units import Place, Unit

_GUESSED_ROW_TOKENS = 4096
_RESERVE = 512 * 2**20
"""For what libraries take for themselves (cuBLAS workspaces) and for what the allocator cannot use of its blocks."""


@dataclass(frozen=True)
class Sizes:
    """Bytes per element and tokens, from which everything else follows.

    Attributes:
        compute: of a weight.
        sums: of a gradient as it is added up on the device.
        travel: of a gradient on its way down.
        state: of master remainder and optimizer state, for a trained parameter that lives on the device.
        tokens: of one micro-batch.
        micro_batches: per step.
        chunk: tokens per chunk of the loss.
    """

    compute: int
    sums: int
    travel: int
    state: int
    tokens: int
    micro_batches: int
    chunk: int

    @classmethod
    def of(cls, ctx: Context, optimizer: Optimizer, *, halves: bool) -> Sizes:
        """From the recipe."""
        model, dtype = ctx.model, working_dtype(ctx.train, ctx.device)
        row = ctx.row_tokens or min(model.max_positions or _GUESSED_ROW_TOKENS, _GUESSED_ROW_TOKENS)
        tokens = ctx.batching.micro_batch * row
        compute, accumulate = dtype.itemsize, ctx.batching.accumulate
        trained = next(spec for spec in model.parameters if spec.trainable)
        state = state_bytes(optimizer, trained)
        if dtype != torch.float32:
            state += 2 if halves else 4
        sums = 4 if accumulate > 1 else compute
        return cls(compute, sums, compute, state, tokens, accumulate, min(ctx.train.loss_chunk, tokens))


def state_bytes(optimizer: Optimizer, spec: ParameterSpec) -> int:
    """Bytes of optimizer state per element."""
    wanted = optimizer.state(spec).values()
    return sum(getattr(torch, state.dtype).itemsize for state in wanted if state.per_element)


def on_device(
    units: Sequence[Unit], sizes: Sizes, model: ModelSpec, slots: int, *, recompute: bool
) -> dict[str, int]:
    """Bytes on the device by what holds them, for units placed as they are."""
    streamed = [unit for unit in units if unit.place is Place.STREAMED]
    kept = [unit for unit in units if unit.place is Place.KEPT]
    there = [unit for unit in units if unit.place is Place.DEVICE]
    boxes = [unit for unit in units if unit.block is not None and unit.place is not Place.DEVICE]
    largest = max((unit.trained for unit in boxes), default=0)
    own = sum(unit.trained for unit in kept if unit.block is None)
    narrow = sizes.sums != sizes.travel
    needs = {
        "weights that stay": sum(unit.layout.length for unit in kept + there) * sizes.compute,
        "masters and optimizer state": sum(unit.trained for unit in there) * sizes.state,
        "gradients": sum(unit.trained for unit in there) * sizes.sums
        + (own + min(2, len(boxes)) * largest) * sizes.travel
        + ((own + largest) * sizes.sums if narrow else 0),
        "slots": min(slots, len(streamed))
        * max((u.layout.length for u in streamed), default=0)
        * sizes.compute,
    }
    return needs | _activations(units, sizes, model, recompute=recompute)


def _activations(units: Sequence[Unit], sizes: Sizes, model: ModelSpec, *, recompute: bool) -> dict[str, int]:
    """What a step holds beside weights: block inputs of all micro-batches, one block at work, logits of one chunk."""
    blocks = [unit for unit in units if unit.block is not None]
    width = _width(model)
    again = [unit for unit in blocks if recompute or unit.place is Place.STREAMED]
    inside = [_inside(unit, sizes, width) for unit in blocks]
    graphs = sum(_inside(unit, sizes, width) for unit in blocks if unit not in again)
    inputs = len(again) * sizes.tokens * width * sizes.compute
    return {
        "block inputs": sizes.micro_batches * inputs,
        "activations": sizes.micro_batches * graphs + round(1.5 * max(inside, default=0)),
        "hidden states": 6 * sizes.micro_batches * sizes.tokens * width * sizes.compute,
        "logits of one chunk": sizes.chunk * model.vocab_size * (2 * sizes.compute + 4),
        "reserve": _RESERVE,
    }


def _inside(unit: Unit, sizes: Sizes, width: int) -> int:
    """Bytes that autograd keeps of one block: every matrix product's input and output, norms and residuals."""
    outputs = sum(spec.shape[0] for spec in unit.specs if len(spec.shape) == 2)
    return sizes.tokens * (2 * outputs + 12 * width) * sizes.compute


def _width(model: ModelSpec) -> int:
    return max((spec.shape[-1] for spec in model.parameters if spec.kind == "norm" and spec.shape), default=1)


def place(
    units: Sequence[Unit], budget: int, sizes: Sizes, model: ModelSpec, slots: int, *, recompute: bool
) -> dict[str, int]:
    """Move units to the device, in forward order, while the budget holds; gives the bytes of the result.

    Raises:
        ConfigError: the budget is too small for what cannot be in host RAM; the message has the numbers.
    """
    needs = on_device(units, sizes, model, slots, recompute=recompute)
    if sum(needs.values()) > budget:
        largest = max(needs, key=lambda name: needs[name])
        raise ConfigError(
            f"the device needs at least {format_bytes(sum(needs.values()))} and stream.gpu_budget leaves "
            f"{format_bytes(budget)}; most of it is {largest} ({format_bytes(needs[largest])}). A smaller "
            "train.micro_batch or text.max_len frees activations, a smaller train.loss_chunk frees logits"
        )
    for unit in units:
        before = unit.place
        unit.place = Place.DEVICE
        moved = on_device(units, sizes, model, slots, recompute=recompute)
        if sum(moved.values()) > budget:
            unit.place = before
        else:
            needs = moved
    return needs
