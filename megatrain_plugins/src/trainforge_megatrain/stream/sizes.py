"""How many bytes a run takes, by tier and by what holds them. Counted from the description; nothing is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainforge.context import Context
from trainforge.stages import ModelSpec, Optimizer, ParameterSpec
from trainforge.toolbox.dtypes import working_dtype
from trainforge.toolbox.loading import LOAD_CHUNK
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.units import Place, Unit

_GUESSED_ROW_TOKENS = 4096
_RESERVE = 512 * 2**20
"""For what libraries take for themselves and for small tensors."""
_WORKSPACE = 32 * 2**20
"""What cuBLAS takes for each thread that multiplies: on Hopper, elsewhere less. Every micro-batch has its thread."""
_SPLINTERS = 64
"""The allocator leaves about one byte in so many unused between its blocks (2 % of 110 GiB on an H200)."""
_SPLIT_CHUNK = 2**24  # elements that `toolbox.halves` takes at a time
LOADING = "weights as they are loaded, piece by piece"
_INPUTS_ON_THEIR_WAY = 4
"""Of those that wait in host RAM: two that leave, one in use, one that comes back early."""
_BACKWARD = 1.25
"""A block at work in backward, as a multiple of what autograd keeps of it: gradients of its widest part live too."""


@dataclass(frozen=True)
class Sizes:
    """Bytes per element, and tokens, from which everything else follows.

    Attributes:
        compute: of a weight.
        sums: of a gradient as it is added up on the device.
        travel: of a gradient on its way down, and in host RAM.
        master: of what a master has beside the weight: 2 for the lower half, 4 for a whole one, 0 in fp32.
        state: of optimizer state.
        row: tokens of a row.
        tokens: of one micro-batch.
        micro_batches: per step.
        chunk: tokens per chunk of the loss.
        width: of the hidden states.
        vocab: columns of the logits.
        head: trained elements of the output head, whose gradients are added up in fp32.
        active: the share of experts that a token is sent to.
        slots: blocks that have room on the device at the same time.
        recompute: blocks run again in backward; "auto" is for those that there is no room for. Streamed ones always do.
        offload: the inputs of recomputed blocks wait in host RAM.
    """

    compute: int
    sums: int
    travel: int
    master: int
    state: int
    row: int
    tokens: int
    micro_batches: int
    chunk: int
    width: int
    vocab: int
    head: int
    active: float
    slots: int
    recompute: bool | Literal["auto"]
    offload: bool = False

    @classmethod
    def of(cls, ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection) -> Sizes:
        """From the recipe and the model's description."""
        dtype = working_dtype(ctx.train, ctx.device)
        row = ctx.row_tokens or min(model.max_positions or _GUESSED_ROW_TOKENS, _GUESSED_ROW_TOKENS)
        tokens = ctx.batching.micro_batch * row
        compute, accumulate = dtype.itemsize, ctx.batching.accumulate
        beside = {"split": 2, "fp32": 4}[section.master]
        return cls(
            compute=compute,
            sums=4 if accumulate > 1 else compute,
            travel=4 if section.grads == "fp32" else compute,
            master=0 if dtype == torch.float32 else beside,
            state=_state_bytes(optimizer, model),
            row=row,
            tokens=tokens,
            micro_batches=accumulate,
            chunk=min(ctx.train.loss_chunk, tokens),
            width=_width(model),
            vocab=model.vocab_size,
            head=sum(s.elements for s in model.parameters if s.trainable and s.name in model.head_parameters),
            active=active_share(model),
            slots=section.slots,
            recompute=ctx.train.recompute,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.tokens * self.micro_batches


def _state_bytes(optimizer: Optimizer, model: ModelSpec) -> int:
    trained = next((spec for spec in model.parameters if spec.trainable), None)
    wanted = () if trained is None else optimizer.state(trained).values()
    return sum(getattr(torch, state.dtype).itemsize for state in wanted if state.per_element)


def _width(model: ModelSpec) -> int:
    return max((spec.shape[-1] for spec in model.parameters if spec.kind == "norm" and spec.shape), default=1)


def active_share(model: ModelSpec) -> float:
    """The share of its experts that a token is multiplied with, solved from the model's own count of FLOPs."""

    def flops(experts: bool) -> float:
        counted = (
            s for s in model.parameters if s.kind != "embedding" or s.name in model.head_parameters
        )  # a look-up multiplies nothing
        return sum((6 if s.trainable else 4) * s.elements for s in counted if bool(s.experts) == experts)

    of_experts = flops(True)
    if not of_experts:
        return 1.0
    return min(1.0, max(0.0, (model.flops_per_token(1) - flops(False)) / of_experts))


def on_host(units: Sequence[Unit], sizes: Sizes) -> dict[str, int]:
    """Bytes in host RAM by what holds them, for units placed as they are. Nothing is rounded up."""
    here = [unit for unit in units if unit.place is not Place.DEVICE]
    trained = sum(unit.trained for unit in here)
    inputs = (
        sizes.micro_batches * sum(unit.recomputed for unit in units) * hidden_bytes(sizes)
        if sizes.offload
        else 0
    )
    masters = "fp32 masters" if sizes.master == 4 else "lower halves of masters"
    needs = {
        "weights" if sizes.master else "weights (the fp32 masters)": sizes.compute
        * sum(unit.layout.length for unit in here),
        masters: trained * sizes.master,
        "optimizer state": trained * sizes.state,
        "gradients": trained * sizes.travel,
        "block inputs": inputs,
        LOADING: _loading(units),
    }
    return {name: size for name, size in needs.items() if size}


def _loading(units: Sequence[Unit]) -> int:
    """A piece of a parameter in fp32 while it is loaded, and two temporaries while it is split in halves."""
    largest = max((spec.elements for unit in units for spec in unit.specs), default=0)
    return 4 * min(largest, LOAD_CHUNK) + 2 * 4 * min(largest, _SPLIT_CHUNK)


def page_locked(units: Sequence[Unit], sizes: Sizes) -> int:
    """Bytes of it that the device copies from and to."""
    here = [unit for unit in units if unit.place is not Place.DEVICE]
    inputs = on_host(units, sizes).get("block inputs", 0)
    return inputs + sum(unit.layout.length * sizes.compute + unit.trained * sizes.travel for unit in here)


def hidden_bytes(sizes: Sizes) -> int:
    """Of one micro-batch's hidden states."""
    return sizes.tokens * sizes.width * sizes.compute


def on_device(units: Sequence[Unit], sizes: Sizes) -> dict[str, int]:
    """Bytes on the device by what holds them, for units placed as they are."""
    streamed = [unit for unit in units if unit.place is Place.STREAMED]
    kept = [unit for unit in units if unit.place is Place.KEPT]
    there = [unit for unit in units if unit.place is Place.DEVICE]
    boxes = [u for u in units if u.block is not None and u.place is not Place.DEVICE and u.trained]
    largest = max((unit.trained for unit in boxes), default=0)
    own = sum(unit.trained for unit in kept if unit.block is None)
    narrow = sizes.sums != sizes.travel
    needs = {
        "weights that stay": sum(unit.layout.length for unit in kept + there) * sizes.compute,
        "masters and optimizer state": sum(unit.trained for unit in there) * (sizes.master + sizes.state),
        "gradients": sum(unit.trained for unit in there) * sizes.sums
        + (own + min(2, len(boxes)) * largest) * sizes.travel
        + ((own + largest) * sizes.sums if narrow else 0),
        "slots": min(sizes.slots, len(streamed))
        * max((unit.layout.length for unit in streamed), default=0)
        * sizes.compute,
    }
    needs |= _activations(units, sizes)
    workspaces = (sizes.micro_batches - 1) * _WORKSPACE
    needs["reserve"] = _RESERVE + workspaces + sum(needs.values()) // _SPLINTERS
    return {name: size for name, size in needs.items() if size}


def _activations(units: Sequence[Unit], sizes: Sizes) -> dict[str, int]:
    """What a step holds beside weights. A block at work and the loss are not there together: the larger counts."""
    blocks = [unit for unit in units if unit.block is not None]
    inside = {unit: kept_by_autograd(unit, sizes) for unit in blocks}
    hidden = hidden_bytes(sizes)
    inputs = sizes.micro_batches * sum(unit.recomputed for unit in units)
    block = round(_BACKWARD * max(inside.values(), default=0))
    loss = _loss(sizes)
    work = "one block at work" if block >= loss else "logits of one chunk, and the head's gradient"
    return {
        "block inputs": hidden * (min(inputs, _INPUTS_ON_THEIR_WAY) if sizes.offload else inputs),
        "activations kept": sizes.micro_batches * sum(inside[u] for u in blocks if not u.recomputed),
        "hidden states": 6 * sizes.micro_batches * hidden,
        work: max(block, loss),
    }


def _loss(sizes: Sizes) -> int:
    """`chunked_loss`: logits, and what the softmax or the head's products have beside them; and the head's gradient.

    Softmax in fp32 of narrower logits copies them first; afterwards the log-probabilities meet the logits' gradient.
    """
    logits = sizes.chunk * sizes.vocab
    copied = 4 if sizes.compute < 4 else 0
    softmax = logits * (sizes.compute + 4 + max(copied, sizes.compute))
    head = logits * 2 * sizes.compute + sizes.head * sizes.compute
    return max(softmax, head) + 4 * sizes.head


def kept_by_autograd(unit: Unit, sizes: Sizes) -> int:
    """Bytes that autograd keeps of one block: every matrix product's input and output, norms and residuals."""
    channels = 12.0 * sizes.width + sum(_channels(spec, sizes) for spec in unit.specs)
    return round(sizes.tokens * channels * sizes.compute)


def _channels(spec: ParameterSpec, sizes: Sizes) -> float:
    """Per token: what goes into and comes out of a matrix, for each expert that the token is sent to."""
    if spec.experts and len(spec.shape) == 3:
        return sizes.active * spec.experts * sum(spec.shape[1:])
    return 2.0 * spec.shape[0] if len(spec.shape) == 2 else 0.0
