"""When device memory runs out in a step: which tier is the largest, and which key frees how much of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainforge.errors import OutOfMemory
from trainforge.units import format_bytes
from trainforge_megatrain.stream.sizes import Sizes

_PER_TOKEN = ("block inputs", "activations kept", "hidden states", "one block at work")
_LOGITS = "logits of one chunk, and the head's gradient"


@contextmanager
def explained_memory(needs: Mapping[str, int], sizes: Sizes, doing: str) -> Iterator[None]:
    """Name the largest tier of what was planned, and what frees how much.

    Args:
        needs: planned bytes on the device by what holds them.
        sizes: of the run.
        doing: what happens inside, as in "training a step".

    Raises:
        OutOfMemory: the device has no memory left.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("stream", "memory", doing, error, advice(needs, sizes)) from error


def advice(needs: Mapping[str, int], sizes: Sizes) -> str:
    """Which tier is the largest, and which key frees how much."""
    largest = max(needs, key=lambda name: needs[name])
    ways = []
    rows = sizes.tokens // sizes.row
    if rows > 1:
        freed = sum(needs.get(name, 0) for name in _PER_TOKEN) * (rows - rows // 2) // rows
        ways.append((freed, f"train.micro_batch {rows // 2} (now {rows})"))
    if needs.get("activations kept"):
        ways.append((needs["activations kept"], "train.recompute: true"))
    if needs.get(_LOGITS) and sizes.chunk > 1:
        logits = sizes.chunk * sizes.vocab * (2 * sizes.compute + 4)
        ways.append((logits // 2, f"train.loss_chunk {sizes.chunk // 2} (now {sizes.chunk})"))
    if needs.get("slots") and sizes.slots > 2:
        ways.append((needs["slots"] * (sizes.slots - 2) // sizes.slots, "stream.slots 2"))
    listed = ", ".join(
        f"{key} frees about {format_bytes(freed)}" for freed, key in sorted(ways, reverse=True)
    )
    most = f"most of the {format_bytes(sum(needs.values()))} planned is {largest} ({format_bytes(needs[largest])})"
    return f"{most}; {listed or 'shorter rows (text.max_len) or a larger stream.gpu_budget are what is left'}"
