"""Building `stream` for a run: the budget, the placement, the report."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trainforge.context import Context
from trainforge.toolbox.streams import Streams
from trainforge.units import format_bytes
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.memory import Stream
from trainforge_megatrain.stream.placement import Sizes, place
from trainforge_megatrain.stream.units import Place, Unit

_FREE_SHARE = 0.94
"""Of the device's free memory that `auto` takes; the rest is for what others allocate beside PyTorch."""


def build(ctx: Context, section: StreamSection) -> Stream:
    """Build it on the device's own streams, within the budget.

    Raises:
        ConfigError: the budget, or host RAM, is too small.
    """
    budget = limit_device(ctx.device, section)

    def decide(units: Sequence[Unit]) -> None:
        if budget is None:
            return
        sizes = Sizes.of(ctx, ctx.optimizer, halves=section.master == "split")
        needs = place(units, budget, sizes, ctx.model, section.slots, recompute=ctx.train.recompute)
        ctx.console.note(report(units, needs, budget))
        ctx.console.log(
            "stream: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items())
        )

    return Stream(ctx, section, Streams(ctx.device), ThreadPoolExecutor(1, "update"), decide)


def limit_device(device: torch.device, section: StreamSection) -> int | None:
    """The budget in bytes, enforced by PyTorch's allocator; None on a CPU, where all blocks are streamed."""
    if device.type == "cpu":
        return None if section.gpu_budget == "auto" else section.gpu_budget
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    budget = round(free * _FREE_SHARE) if section.gpu_budget == "auto" else section.gpu_budget
    module.set_per_process_memory_fraction(min(1.0, budget / total), device)
    return budget


def report(units: Sequence[Unit], needs: dict[str, int], budget: int) -> str:
    """A line for the start report: what lives where."""
    blocks = [unit for unit in units if unit.block is not None]
    there = sum(unit.place is Place.DEVICE for unit in blocks)
    others = ", ".join(f"{unit.name} {unit.place.value}" for unit in units if unit.block is None)
    return (
        f"stream: {there} of {len(blocks)} blocks live on the device, {len(blocks) - there} pass through; {others}; "
        f"{format_bytes(sum(needs.values()))} of {format_bytes(budget)} planned"
    )
