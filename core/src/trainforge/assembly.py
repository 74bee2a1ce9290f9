"""Putting a run together: builds the stages of a plan in order and closes them in reverse."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.batching import choose_micro_batch, leaves_micro_batch_open
from trainforge.blame import STARTING, blaming
from trainforge.errors import RanksError
from trainforge.events import Events
from trainforge.hooks import check_hooks
from trainforge.ledger import Ledger
from trainforge.live import BUILD_ORDER, Run, Stages
from trainforge.restored import leave_out_initial_weights
from trainforge.resuming import find_checkpoint, resume
from trainforge.schedule import with_rates
from trainforge.seeding import derive_seed, seed_everything
from trainforge.wishes import check_wishes

if TYPE_CHECKING:
    from trainforge.context import Console, Context
    from trainforge.options import RunOptions
    from trainforge.planning import Plan
    from trainforge.provider import StageName
    from trainforge.runfolder import RunFolder
    from trainforge.selection import Chosen
    from trainforge.stages import Stage


def start(
    plan: Plan, options: RunOptions, ctx: Context, folder: RunFolder, closing: contextlib.ExitStack
) -> Run:
    """Check that the ranks agree, build the other stages, and resume from a checkpoint when there is one.

    Args:
        ctx: with comm built already. From then on a rank that fails ends the others, which find it gone.
        closing: closes the stages, in reverse, when it is closed.
    """
    observers = _observers(plan, ctx) if ctx.rank == 0 else []
    _check_agreement(plan, ctx)
    found = find_checkpoint(ctx, folder, options)
    if found is not None and ctx.rank == 0:
        folder.check_resumable(effective_recipe(plan, ctx), options.allow_change)
    ctx.restored = found is not None
    build_stages(plan, ctx, ("model",), closing)
    if ctx.restored:
        leave_out_initial_weights(ctx.model)
    ctx.model.parameters = with_rates(ctx.model.parameters, ctx.train)
    _settle_micro_batch(plan, ctx, closing)
    build_stages(plan, ctx, ("data",), closing)
    check_wishes(ctx)
    build_stages(plan, ctx, ("optimizer", "memory", "checkpoint"), closing)
    stages = Stages(**{name: ctx.built[name] for name in BUILD_ORDER})
    steps = _total_steps(ctx)
    run = Run(
        plan=plan,
        options=options,
        ctx=ctx,
        folder=folder,
        stages=stages,
        events=Events(observers, ctx.console, strict=options.strict),
        steps=steps,
        last_step=steps,
        sink=stages.comm.watch(stages.memory.gradients),
        ledger=Ledger(ctx.device),
    )
    if found is not None:
        resume(run, found)
    if options.max_steps is not None:
        run.last_step = min(steps, run.state.step + options.max_steps)
    if ctx.rank == 0:
        folder.write_recipe(effective_recipe(plan, ctx))
        folder.write_json("plan.json", plan.as_dict())
        folder.write_json("rows.json", stages.data.ledger())
    return run


def _observers(plan: Plan, ctx: Context) -> list[tuple[str, object]]:
    """The built observers, then the plugins that implement events themselves. Their hooks are checked first of all."""
    built: list[tuple[str, object]] = []
    for chosen in plan.observers:
        observer = _build(chosen, ctx)
        check_hooks(observer, chosen.source)
        built.append((chosen.plugin, observer))
    return [*built, *plan.listeners]


def build_stages(
    plan: Plan, ctx: Context, names: tuple[StageName, ...], closing: contextlib.ExitStack
) -> None:
    """Build stages in order into `ctx.built`; `closing` closes each, also after an error.

    One that is there already stays. The random generators are seeded for each, the same on every rank.
    """
    for name in names:
        if name in ctx.built:
            continue
        chosen = plan.chosen[name]
        seed_everything(derive_seed(ctx.run.seed, "build", name))
        ctx.built[name] = _build(chosen, ctx)
        closing.callback(_close, ctx.built[name], chosen.plugin, ctx.console)
        if name == "data":
            ctx.row_tokens = ctx.data.row_tokens


def effective_recipe(plan: Plan, ctx: Context) -> dict[str, Any]:
    """The recipe with every default filled in, the global batch that this run really uses, and a chosen micro-batch."""
    recipe: dict[str, Any] = plan.recipe.effective()
    cut = {"global_batch": ctx.batching.global_batch, "micro_batch": ctx.train.micro_batch}
    recipe["train"] = recipe["train"] | cut
    return recipe


def _settle_micro_batch(plan: Plan, ctx: Context, closing: contextlib.ExitStack) -> None:
    """Keep the micro-batch of the run being resumed, or let the memory plugin choose where the recipe does not."""
    if ctx.train.micro_batch != plan.recipe.train.micro_batch:
        ctx.console.note(
            f"train.micro_batch: auto stays at {ctx.train.micro_batch}, as before; a number changes it"
        )
    elif plan.chosen["memory"].provider.micro_batch is not None and leaves_micro_batch_open(ctx.train):
        build_stages(
            plan, ctx, ("optimizer",), closing
        )  # early: the answer depends on the state that it keeps
        choose_micro_batch(plan, ctx)


def cache_dir() -> Path:
    """Where derived data (tokenised text) is kept between runs: $XDG_CACHE_HOME/trainforge or ~/.cache/trainforge."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainforge"


def _build(chosen: Chosen, ctx: Context) -> Any:
    with blaming(ctx, chosen.plugin, chosen.stage, STARTING):
        return chosen.provider.build(ctx, chosen.config)


def _close(stage: Stage, plugin: str, console: Console) -> None:
    try:
        stage.close()
    except Exception as error:  # every stage must be closed, so one failure is only told
        console.warn(f"{plugin} failed while closing: {type(error).__name__}: {error}")


def _check_agreement(plan: Plan, ctx: Context) -> None:
    """Every rank must carry out the same plan: compared before the first collective of training.

    Raises:
        RanksError: they differ.
    """
    hashes = ctx.comm.gather(plan.hash)
    different = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if different:
        raise RanksError(
            f"rank {different[0]} has another plan than rank 0: give every rank the same recipe, plugins and versions"
        )


def _total_steps(ctx: Context) -> int:
    if ctx.train.steps is not None:
        return ctx.train.steps
    assert ctx.train.epochs is not None, "TrainSection demands one of steps and epochs"
    # rounded first: 1.1 x 10 is 11.000000000000002
    return max(1, math.ceil(round(ctx.train.epochs * ctx.data.steps_per_epoch, 6)))
