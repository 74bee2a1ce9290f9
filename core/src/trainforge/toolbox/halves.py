"""Split masters: a true fp32 master kept as the bf16 weight that is computed with, and the 16 bits that it lacks.

`high = (bits + 0x8000) >> 16` is the working copy, nearest with ties away from zero; `low` is the rest of the bits as a
signed number, so that `(high << 16) + low` gives every fp32 bit back. (Round-to-nearest-even is not invertible with 16
bits: a tie loses an ulp.) Two bytes per parameter more than the working copy, no second copy, and no pass that rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainforge.stages import Slot

_CHUNK = 2**24  # bounds the int32 temporaries to 64 MiB each


def split(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the halves of fp32 masters.

    Args:
        master: fp32, 1-D, contiguous.
        high: bf16, as long; afterwards the rounded working copy.
        low: int16, as long; afterwards the bits that `high` lacks.
    """
    pieces = zip(*(torch.split(part, _CHUNK) for part in (master, high, low)), strict=True)
    for bits, upper, lower in pieces:
        bits = bits.view(torch.int32)
        upper.view(torch.int16).copy_((bits + 0x8000) >> 16)
        lower.copy_(bits)  # the narrowing keeps the low 16 bits, and those are what (high << 16) lacks


def join(high: Tensor, low: Tensor, out: Tensor) -> None:
    """Write the exact fp32 bits that `split` was given into `out` (fp32, 1-D, as long as the halves).

    They are put together where the halves live, so that `out` on another device costs one copy of 4 bytes.
    """
    pieces = zip(*(torch.split(part, _CHUNK) for part in (high, low, out)), strict=True)
    for upper, lower, whole in pieces:
        whole.view(torch.int32).copy_((upper.view(torch.int16).int() << 16) + lower)


def with_whole_masters(update: Callable[[Sequence[Slot]], None], slots: Sequence[Slot]) -> None:
    """Run `update` on slots with split masters as if they were whole, for an optimizer that knows fp32 only.

    Each slot's master and gradient are joined or widened into fp32 scratch, one slot at a time, and split again.
    """
    for slot in slots:
        grad = slot.grad.float()
        if slot.low is None:
            update([replace(slot, grad=grad)])
            continue
        master = torch.empty(slot.master.numel(), dtype=torch.float32, device=slot.master.device)
        join(slot.master, slot.low, master)
        update([replace(slot, master=master, low=None, grad=grad)])
        split(master, slot.master, slot.low)
