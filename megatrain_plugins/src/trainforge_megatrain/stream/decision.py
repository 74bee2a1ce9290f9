"""What a run of `stream` will look like: who lives where, what that takes, how fast it is, whether it can start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainforge.context import Context
from trainforge.stages import ModelSpec, Optimizer
from trainforge.toolbox.host_limits import host_limit, resident_set
from trainforge.units import format_bytes, format_seconds
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.forecast import Forecast, Phase, Rates, forecast
from trainforge_megatrain.stream.limits import locking_note, refusal
from trainforge_megatrain.stream.placement import Placement, Room, better, place
from trainforge_megatrain.stream.sizes import Sizes, on_device, on_host, page_locked
from trainforge_megatrain.stream.units import Place, Unit

_ON_DEVICE = (
    "A smaller train.micro_batch or text.max_len frees activations and block inputs, train.recompute: true activations "
    "that are kept, a smaller train.loss_chunk logits"
)
_ON_HOST = (
    "Bytes per parameter fall with a larger stream.gpu_budget (what lives on the device is not in host RAM), "
    "stream.master: split, stream.grads: bf16, or an optimizer that keeps less"
)


@dataclass(frozen=True)
class Decision:
    """All that is known before anything is allocated.

    Attributes:
        units: with their places set.
        sizes: from which the bytes follow.
        device, host: bytes by what holds them.
        budget: of the device, None on a CPU without one.
        process: bytes of RAM that the process has already.
        rates, step: what this machine does, and the step that follows; None when nobody measured.
        refusal: why the run cannot start, or None.
    """

    units: Sequence[Unit]
    sizes: Sizes
    device: Mapping[str, int]
    host: Mapping[str, int]
    budget: int | None
    process: int
    rates: Rates | None
    step: Forecast | None
    refusal: str | None


def decide(
    ctx: Context,
    model: ModelSpec,
    optimizer: Optimizer,
    section: StreamSection,
    units: Sequence[Unit],
    budget: int | None,
    rates: Rates | None,
) -> Decision:
    """Place the units and count.

    Args:
        budget: bytes of the device, from `limits.budget_of`: asked before anything is measured there.
        rates: of this machine; None fills the device in forward order.
    """
    counted = Sizes.of(ctx, model, optimizer, section)
    limit = host_limit(None if ctx.run.host_memory == "auto" else ctx.run.host_memory)
    room = Room(budget, None if limit is None else limit.free)
    sizes = _place(units, model, counted, section, room, rates)
    device, host = on_device(units, sizes), on_host(units, sizes)
    reasons = []
    if budget is not None:
        asked = "what is free" if section.gpu_budget == "auto" else "stream.gpu_budget"
        reasons.append(refusal(device, budget, asked, "The device", _ON_DEVICE))
    if limit is not None:
        all_of_it = host if ctx.device.type != "cpu" else _together(host, device)
        reasons.append(refusal(all_of_it, limit.free, limit.name, "Host RAM", _ON_HOST))
    return Decision(
        units=units,
        sizes=sizes,
        device=device,
        host=host,
        budget=budget,
        process=resident_set(),
        rates=rates,
        step=None if rates is None else forecast(units, model, sizes, rates),
        refusal=" ".join(reason for reason in reasons if reason) or None,
    )


def _place(
    units: Sequence[Unit],
    model: ModelSpec,
    sizes: Sizes,
    section: StreamSection,
    room: Room,
    rates: Rates | None,
) -> Sizes:
    """Set the places, with the inputs of recomputed blocks on the device and in host RAM as far as the recipe lets."""
    choices = {"device": [False], "host": [True], "auto": [False, True]}[section.inputs]
    if section.inputs == "auto" and room.device is None:
        choices = [False]  # nothing is gained
    tried: list[Placement] = []
    for offload in choices:
        these = replace(sizes, offload=offload)
        tried.append(place(units, these, room, _timed(units, model, these, rates)))
    best = better(tried)
    best.apply(units)
    return replace(sizes, offload=best.offload)


def _timed(
    units: Sequence[Unit], model: ModelSpec, sizes: Sizes, rates: Rates | None
) -> Callable[[], float] | None:
    return None if rates is None else lambda: forecast(units, model, sizes, rates).seconds


def _together(host: Mapping[str, int], device: Mapping[str, int]) -> dict[str, int]:
    """On a CPU both tiers are the same RAM."""
    return {**{f"{name} of the device": size for name, size in device.items()}, **host}


def placement_line(made: Decision) -> str:
    """What lives where."""
    blocks = [unit for unit in made.units if unit.block is not None]
    counts = {place: sum(unit.place is place for unit in blocks) for place in Place}
    others = ", ".join(f"{unit.name} {unit.place.value}" for unit in made.units if unit.block is None)
    waiting = made.sizes.offload and any(unit.recomputed for unit in made.units)
    inputs = ", inputs of recomputed blocks wait in host RAM" if waiting else ""
    kept = f", {counts[Place.KEPT]} keep their weights there" if counts[Place.KEPT] else ""
    of = "" if made.budget is None else f" of {format_bytes(made.budget)}"
    return (
        f"stream: {counts[Place.DEVICE]} of {len(blocks)} blocks live on the device{kept}, {counts[Place.STREAMED]} "
        f"pass through{inputs}; {others}; {format_bytes(sum(made.device.values()))}{of} planned there, "
        f"{format_bytes(sum(made.host.values()))} in host RAM"
    )


def step_line(step: Forecast) -> str:
    """How long a step takes, and why."""
    return (
        f"stream: a step should take {format_seconds(step.seconds)} ({step.tokens_per_s:,.0f} tokens/s): "
        f"forward {format_seconds(step.forward.seconds)}, longest {_binding(step.forward)}; backward "
        f"{format_seconds(step.backward.seconds)}, longest {_binding(step.backward)}"
    )


def _binding(phase: Phase) -> str:
    return f"{phase.binding} ({format_seconds(phase.terms[phase.binding])})"


def phase_lines(step: Forecast) -> list[str]:
    """Every term of both phases, for `forge plan`."""
    return [
        f"  {name}: "
        + ", ".join(f"{term} {format_seconds(seconds)}" for term, seconds in phase.terms.items() if seconds)
        for name, phase in (("forward", step.forward), ("backward", step.backward))
    ]


def locking(made: Decision, ctx: Context, section: StreamSection) -> str | None:
    """A line about page-locked memory, where one is due."""
    if ctx.device.type == "cpu" or not section.pin:
        return None
    return locking_note(page_locked(made.units, made.sizes))
