"""Building `stream` for a run: the budget, the placement, the report."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from trainforge.context import Context
from trainforge.errors import ConfigError
from trainforge.toolbox.streams import Streams
from trainforge.units import format_bytes
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.decision import Decision, decide, locking, placement_line, step_line
from trainforge_megatrain.stream.forecast import Rates
from trainforge_megatrain.stream.limits import budget_of
from trainforge_megatrain.stream.memory import Stream
from trainforge_megatrain.stream.oom import explained_memory
from trainforge_megatrain.stream.rates import NO_ROOM, if_there_is_room, rates_of_this_machine
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.units import Unit

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user sets up PyTorch's allocator, by its name since torch 2.10 and the older one: that is left as it is."""


def build(ctx: Context, section: StreamSection) -> Stream:
    """Build it on the device's own streams, within the budget.

    Raises:
        ConfigError: the budget, or host RAM, is too small; nothing has been loaded.
    """
    decided: list[Decision] = []

    def place(units: Sequence[Unit]) -> bool:
        budget = budget_of(ctx, section)
        limit_device(ctx.device, budget)
        made = decide(ctx, ctx.model, ctx.optimizer, section, units, budget, None)
        if made.refusal is None and budget is not None:  # else there is nothing to choose
            made = decide(ctx, ctx.model, ctx.optimizer, section, units, budget, _rates(ctx, section))
        if made.refusal is not None:
            if not section.oversubscribe:
                raise ConfigError(made.refusal)
            ctx.console.warn(f"stream.oversubscribe: starting although {made.refusal}")
        _report(ctx, section, made)
        decided.append(made)
        return made.sizes.offload

    streams = Streams(ctx.device)
    with ExitStack() as undoing:  # whoever cannot be built is not closed by anybody else
        undoing.callback(lift_limit, ctx.device)
        undoing.callback(streams.close)
        memory = Stream(ctx, section, streams, ThreadPoolExecutor(1, "update"), place)
        undoing.pop_all()
    memory.explained = functools.partial(explained_memory, decided[0].device, decided[0].sizes)
    memory.closing.callback(lift_limit, ctx.device)
    return memory


def _rates(ctx: Context, section: StreamSection) -> Rates | None:
    """Rates of this machine; None where the budget leaves no room to measure them."""
    sizes = Sizes.of(ctx, ctx.model, ctx.optimizer, section)
    rates = if_there_is_room(lambda: rates_of_this_machine(ctx, ctx.model, ctx.optimizer, section, sizes))
    if rates is None:
        ctx.console.warn(NO_ROOM)
    return rates


def limit_device(device: torch.device, budget: int | None) -> None:
    """Have PyTorch's allocator enforce the budget."""
    if budget is None or device.type == "cpu":
        return
    module = torch.get_device_module(device)
    _, total = module.mem_get_info(device)
    if device.type == "cuda" and not any(name in os.environ for name in _ALLOCATOR):
        # Segments that grow leave little unused between blocks of many sizes; without them 12 % of 15 GiB went so.
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # its name since torch 2.11
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    module.set_per_process_memory_fraction(min(1.0, budget / total), device)


def lift_limit(device: torch.device) -> None:
    """The budget is the run's, not the process's."""
    if device.type != "cpu":
        torch.get_device_module(device).set_per_process_memory_fraction(1.0, device)


def _report(ctx: Context, section: StreamSection, made: Decision) -> None:
    """Lines for the start report and, in full, for the log."""
    if made.budget is not None:
        ctx.console.note(placement_line(made))
    if made.step is not None:
        ctx.console.note(step_line(made.step))
    lock = locking(made, ctx, section)
    if lock is not None:
        ctx.console.log(lock)
    for tier, needs in (("device", made.device), ("host", made.host)):
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items())
        ctx.console.log(f"stream: {tier}: {listed}")
