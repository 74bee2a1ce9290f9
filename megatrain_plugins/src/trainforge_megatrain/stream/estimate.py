"""What a streaming run needs and how fast it will be, for `forge plan`: nothing is built."""

from __future__ import annotations

from trainforge.context import Context
from trainforge.provider import Estimate
from trainforge.stages import ModelSpec
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.decision import decide, locking, phase_lines, placement_line, step_line
from trainforge_megatrain.stream.limits import budget_of
from trainforge_megatrain.stream.micro_batch import cuts, cuts_line
from trainforge_megatrain.stream.rates import NO_ROOM, if_there_is_room, rates_of_this_machine, told
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.units import divide


def estimate(ctx: Context, model: ModelSpec, section: StreamSection) -> Estimate:
    """Bytes per tier, the placement, the predicted step, and why it would be refused."""
    sizes = Sizes.of(ctx, model, ctx.optimizer, section)
    budget = budget_of(ctx, section)
    rates = if_there_is_room(lambda: rates_of_this_machine(ctx, model, ctx.optimizer, section, sizes))
    made = decide(ctx, model, ctx.optimizer, section, divide(model), budget, rates)
    notes = [placement_line(made)]
    if made.step is not None:
        notes += [step_line(made.step), *phase_lines(made.step)]
    if rates is not None:
        notes += [f"  measured here: {line}" for line in told(rates)]
    else:
        notes.append(NO_ROOM)
    if budget is not None:
        notes.append(cuts_line(cuts(ctx, model, ctx.optimizer, section, rates_of_this_machine)))
    lock = locking(made, ctx, section)
    return Estimate(
        device=made.device,
        host={**made.host, "the process itself, before anything is loaded": made.process},
        seconds_per_step=None if made.step is None else made.step.seconds,
        notes=(*notes, *([lock] if lock else [])),
        refusal=None if section.oversubscribe else made.refusal,
    )
