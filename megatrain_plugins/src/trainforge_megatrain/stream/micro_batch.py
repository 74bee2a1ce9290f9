"""What `train.micro_batch: auto` takes: every one that divides a rank's samples is planned, and the fastest chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from trainforge.batching import LARGEST_AUTO_MICRO_BATCH
from trainforge.context import Batching, Context
from trainforge.stages import ModelSpec, Optimizer
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.building import lift_limit, limit_device
from trainforge_megatrain.stream.decision import Decision, decide
from trainforge_megatrain.stream.forecast import Rates
from trainforge_megatrain.stream.limits import budget_of
from trainforge_megatrain.stream.rates import rates_of_this_machine
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.units import divide

_ALIKE = 1.01  # a forecast does not tell times apart that differ by less

Measure = Callable[[Context, ModelSpec, Optimizer, StreamSection, Sizes], Rates]


def micro_batch(ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection) -> int | None:
    """The fastest that fits; None on a CPU without a budget, where nothing limits it."""
    budget = budget_of(ctx, section)
    if budget is None:
        return None
    limit_device(ctx.device, budget)
    try:
        planned = cuts(ctx, model, optimizer, section, rates_of_this_machine)
    finally:
        lift_limit(ctx.device)
    ctx.console.note(cuts_line(planned))
    return fastest(planned)


def cuts(
    ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection, rates: Measure
) -> dict[int, Decision]:
    """What a run would look like with each micro-batch that divides a rank's samples of a step.

    Args:
        rates: of this machine, asked for those that fit: a block's speed depends on the tokens that it is given.
    """
    share = ctx.batching.global_batch // ctx.world
    return {
        micro: _planned(
            replace(ctx, batching=Batching(ctx.batching.global_batch, micro, share // micro)),
            model,
            optimizer,
            section,
            rates,
        )
        for micro in range(1, share + 1)
        if share % micro == 0
    }


def _planned(
    ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection, rates: Measure
) -> Decision:
    def decided(measured: Rates | None) -> Decision:
        return decide(ctx, model, optimizer, section, divide(model), budget_of(ctx, section), measured)

    unmeasured = decided(None)
    if unmeasured.refusal is not None:
        return unmeasured
    try:
        measured = rates(ctx, model, optimizer, section, Sizes.of(ctx, model, optimizer, section))
    except torch.OutOfMemoryError:
        return unmeasured
    return decided(measured)  # against what is free after the measurement, as the run will find it


def fastest(planned: Mapping[int, Decision]) -> int:
    """Of those that fit; the smallest of those that are as fast, as far as a forecast can tell.

    Where none fits it is the smallest, whose refusal lacks least. A speed taken from a matrix product is no rival for
    one measured with a block. Where there are only such it is core's rule that chooses among those that are as fast,
    because a product's speed does not tell what a larger micro-batch gains.
    """
    fit = [micro for micro, made in planned.items() if made.refusal is None]
    if not fit:
        return min(planned)
    of_a_block = [micro for micro in fit if (rates := planned[micro].rates) and rates.of_a_block]
    seconds = {micro: _seconds(planned[micro]) for micro in of_a_block or fit}
    shortest = min(seconds.values())
    alike = [micro for micro, its in seconds.items() if its <= shortest * _ALIKE]
    if of_a_block:
        return min(alike)
    return max((micro for micro in alike if micro <= LARGEST_AUTO_MICRO_BATCH), default=min(alike))


def _seconds(made: Decision) -> float:
    return float("inf") if made.step is None else made.step.seconds


def cuts_line(planned: Mapping[int, Decision]) -> str:
    """The largest that fits and the fastest."""
    fit = [micro for micro, made in planned.items() if made.refusal is None]
    of = f"of the micro-batches that divide {max(planned)} samples"
    if not fit:
        return f"stream: {of} none fits"
    return f"stream: {of} the largest that fits is {max(fit)}, and train.micro_batch: auto takes {fastest(planned)}"
