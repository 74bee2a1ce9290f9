"""What this run may still take: page-locked memory, the device; and how a refusal is worded."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch

from trainforge.context import Context
from trainforge.units import format_bytes
from trainforge_megatrain.stream import StreamSection

_FREE_SHARE = 0.94
"""Of the device's free memory that `auto` takes; the rest is for what others allocate beside PyTorch."""


def locking_note(locked: int) -> str | None:
    """A line when the limit of page-locked memory is below what is to be locked.

    It is not a refusal: drivers that lock pages in the kernel do not count them, and one that does fails before
    anything is loaded, with an error that says so.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or locked <= soft:
        return None
    return (
        f"stream page-locks {format_bytes(locked)} and the limit is {format_bytes(soft)}: if the start fails for that, "
        "raise it (`ulimit -l unlimited`, or --ulimit memlock=-1 for a container), or set stream.pin to false"
    )


def budget_of(ctx: Context, section: StreamSection) -> int | None:
    """Bytes that the run may take on the device: what was asked for, else most of what is free; None on a CPU."""
    if section.gpu_budget != "auto":
        return section.gpu_budget
    if ctx.device.type == "cpu":
        return None
    free, _ = torch.get_device_module(ctx.device).mem_get_info(ctx.device)
    return round(free * _FREE_SHARE)


def refusal(needs: Mapping[str, int], there: int, limit: str, tier: str, ways: str) -> str | None:
    """Why it cannot start: the number missing and the breakdown; None when it fits.

    Args:
        needs: bytes by what holds them.
        there: bytes that can be had.
        limit: what limits them.
        tier: where that is, as the beginning of the sentence.
        ways: what to do, as the end of it.
    """
    whole = sum(needs.values())
    if whole <= there:
        return None
    largest = sorted(needs.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    return (
        f"{tier} needs {format_bytes(whole)} ({listed}) and {limit} leaves {format_bytes(there)}: "
        f"{format_bytes(whole - there)} are missing. {ways}; stream.oversubscribe: true starts anyway"
    )
