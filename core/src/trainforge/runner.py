"""Carrying out a plan: one process per rank. Puts the run together, trains, and leaves a summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.assembly import cache_dir, start
from trainforge.batching import resolve_batching
from trainforge.console import TerminalConsole
from trainforge.context import Batching, Context
from trainforge.errors import DataExhausted, ProviderError, TrainForgeError
from trainforge.live import BUILD_ORDER, Run, Stages
from trainforge.loop import train
from trainforge.ranks import Ranks, default_threads, device_note, pick_device
from trainforge.runfolder import RunFolder
from trainforge.signals import StopSignals
from trainforge.summary import show_summary, summarise

if TYPE_CHECKING:
    from trainforge.options import RunOptions
    from trainforge.planning import Plan
    from trainforge.sections import TrainSection

__all__ = ["Run", "Stages", "carry_out", "run_plan"]

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3


def run_plan(plan: Plan, options: RunOptions) -> int:
    """Carry out a plan on this rank.

    Returns:
        0 when the run did what it was asked to do, 3 when a signal stopped it after saving.

    Raises:
        TrainForgeError: the run cannot start (a `UserError`) or failed.
    """
    ranks = Ranks.from_environment()
    console = TerminalConsole(silent=ranks.rank != 0)
    device = pick_device(plan.recipe.run, ranks)
    threads = default_threads(plan.recipe.run, ranks)
    plan.check(device.type, ranks.world)
    folder = RunFolder(options.run_dir or Path("runs") / plan.recipe.run.name)
    with contextlib.ExitStack() as closing, StopSignals() as stop:
        saved: dict[str, Any] | None = None
        if ranks.rank == 0:
            moved = folder.open(fresh=options.fresh)
            closing.callback(folder.close)
            console.log_to(folder.path / "log.txt")
            if moved:
                console.note(f"--fresh: what an earlier run left was moved to {moved}")
        if folder.path.exists():
            saved = folder.saved_recipe() if not options.fresh else None
        batching = _batching(plan.recipe.train, ranks.world, saved)
        ctx = Context(
            run=plan.recipe.run,
            train=plan.recipe.train,
            model_config=plan.recipe.model,
            device=device,
            rank=ranks.rank,
            world=ranks.world,
            local_rank=ranks.local_rank,
            local_world=ranks.local_world,
            batching=batching,
            run_dir=folder.path,
            cache_dir=cache_dir(),
            console=console,
        )
        for note in (*plan.notes, device_note(plan.recipe.run, ranks)):
            if note:
                console.note(note)
        run = start(plan, options, ctx, folder, closing)
        console.note(
            f"{device} · {ranks.world} rank{'s' * (ranks.world > 1)} · {threads} CPU threads per rank"
        )
        return carry_out(run, lambda: stop.name is not None)


def carry_out(run: Run, stop_requested: Callable[[], bool]) -> int:
    """Train, write the summary and tell observers how it ended."""
    if run.state.step >= run.steps:
        run.console.note(
            f"this run is finished: {run.state.step} of {run.steps} steps. Raise train.steps to train on, or start "
            f"over with --fresh. Everything lies in {run.path}"
        )
        return EXIT_DONE
    _start_report(run)
    try:
        run.events.run_started(run, run.plan)
        with blaming(run):
            status = train(run, stop_requested)
            summary = summarise(run, status)
    except BaseException as error:
        _end(run, summarise(run, "failed", error), error)
        raise
    _end(run, summary, None)
    show_summary(run, summary)
    return EXIT_STOPPED if status == "stopped" else EXIT_DONE


def _end(run: Run, summary: dict[str, Any], error: BaseException | None) -> None:
    if run.ctx.rank == 0:
        run.folder.write_json("summary.json", summary)
    run.events.run_ended(run, error)


@contextlib.contextmanager
def blaming(run: Run) -> Iterator[None]:
    """Turn a plugin's unexpected exception into one that names the plugin, its stage and what it was doing."""
    try:
        yield
    except (TrainForgeError, KeyboardInterrupt, SystemExit):
        raise
    except DataExhausted as error:
        raise TrainForgeError(
            f"the data ended after {run.state.step} of {run.steps} steps: lower train.steps, or give more data"
        ) from error
    except Exception as error:
        stage, doing = run.doing
        raise ProviderError(run.plan.chosen[stage].plugin, stage, doing, error) from error


def _batching(train: TrainSection, world: int, saved: dict[str, Any] | None) -> Batching:
    """How a step is cut, given the effective recipe of the run that this folder holds."""
    before = (saved or {}).get("train", {})
    total = before.get("global_batch")
    return resolve_batching(
        train,
        world,
        total if isinstance(total, int) else None,
        cut_as_saved=all(before.get(key) == getattr(train, key) for key in ("micro_batch", "accumulate")),
    )


def _start_report(run: Run) -> None:
    """Say what is about to happen, before the first step."""
    parameters = run.stages.model.parameters
    total = sum(spec.elements for spec in parameters)
    trainable = sum(spec.elements for spec in parameters if spec.trainable)
    note = run.console.note
    chosen = ", ".join(f"{name} {run.plan.chosen[name].plugin}" for name in BUILD_ORDER)
    note(f"{run.ctx.run.name}: {total:,} parameters ({trainable:,} trainable) · {chosen}")
    for line in (*run.stages.model.start_report(), *run.stages.data.start_report()):
        note(line)
    batching = run.ctx.batching
    note(
        f"steps {run.state.step + 1} to {run.last_step} of {run.steps} · {batching.global_batch} samples per step = "
        f"{batching.micro_batch} x {batching.accumulate} micro-batches x {run.ctx.world} ranks · folder {run.path}"
    )
