"""A run: builds the stages of a plan, resumes, trains, and leaves a summary. One process per rank."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.batching import resolve_batching
from trainforge.checkpoints import list_checkpoints
from trainforge.console import TerminalConsole
from trainforge.context import Context
from trainforge.errors import (
    CheckpointError,
    ConfigError,
    DataExhausted,
    ProviderError,
    RanksError,
    TrainForgeError,
)
from trainforge.events import Events
from trainforge.ledger import Ledger
from trainforge.loop import train
from trainforge.provider import StageName
from trainforge.run_state import RunState
from trainforge.runfolder import RunFolder
from trainforge.summary import show_summary, summarise
from trainforge.units import format_seconds

if TYPE_CHECKING:
    from trainforge.context import Console
    from trainforge.options import RunOptions
    from trainforge.planning import Plan
    from trainforge.sections import TrainSection
    from trainforge.stages import (
        Checkpoint,
        CheckpointInfo,
        Comm,
        Data,
        Memory,
        ModelSpec,
        Optimizer,
        Part,
        Sink,
        Stage,
    )

BUILD_ORDER: tuple[StageName, ...] = ("comm", "model", "data", "optimizer", "memory", "checkpoint")
"""The optimizer comes before memory, which allocates the state that the optimizer asks for."""

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3


@dataclass
class Stages:
    """The built stages of a run."""

    comm: Comm
    model: ModelSpec
    data: Data
    optimizer: Optimizer
    memory: Memory
    checkpoint: Checkpoint

    def named(self) -> list[tuple[StageName, Stage]]:
        """The stages with their names, in build order."""
        return [(name, getattr(self, name)) for name in BUILD_ORDER]


@dataclass
class Run:
    """A plan being carried out, and its folder. What observers get to see.

    Attributes:
        plan, options: what was asked for.
        ctx: the facts that stages were built with.
        folder: the run folder (on every rank; only rank 0 writes to it).
        stages: the built stages.
        events: tells observers.
        steps: steps of the whole run; the schedule is laid over them.
        last_step: the step after which this start ends (differs from `steps` under `--max-steps`).
        state: step, token counts and losses so far; part of every checkpoint.
        ledger: where the time went.
        doing: (stage, what it is doing), for the message when it fails.
        resumed_from: step of the checkpoint that this start went on from, or None.
        save_blocked_ms: how long each save kept training waiting.
        row_tokens: the longest padded row so far, in tokens.
        tokens_measured, seconds_measured: real tokens and wall time of the logged intervals of this start.
        began: `time.perf_counter` at the start.
    """

    plan: Plan
    options: RunOptions
    ctx: Context
    folder: RunFolder
    stages: Stages
    events: Events
    steps: int
    last_step: int
    sink: Sink
    ledger: Ledger
    state: RunState = field(default_factory=RunState)
    doing: tuple[StageName, str] = ("memory", "starting")
    resumed_from: int | None = None
    save_blocked_ms: list[float] = field(default_factory=list)
    row_tokens: int = 0
    tokens_measured: int = 0
    seconds_measured: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def train(self) -> TrainSection:
        """The recipe's `train` section."""
        return self.ctx.train

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.ctx.run.seed

    @property
    def console(self) -> Console:
        """For lines to the person at the terminal."""
        return self.ctx.console

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def parts(self) -> dict[str, Part]:
        """Everything with state that belongs in a checkpoint."""
        return {
            "loop": self.state,
            "data": self.stages.data,
            "memory": self.stages.memory,
            "comm": self.stages.comm,
        }


def run_plan(plan: Plan, options: RunOptions) -> int:
    """Carry out a plan on this rank.

    Returns:
        0 when the run did what it was asked to do, 3 when a signal stopped it after saving.

    Raises:
        TrainForgeError: the run cannot start (a `UserError`) or failed.
    """
    from trainforge.ranks import Ranks, default_threads, device_note, pick_device
    from trainforge.signals import StopSignals

    ranks = Ranks.from_environment()
    console = TerminalConsole(silent=ranks.rank != 0)
    device = pick_device(plan.recipe.run, ranks)
    threads = default_threads(plan.recipe.run, ranks)
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
        batching = resolve_batching(plan.recipe.train, ranks.world, _saved_global_batch(saved))
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
        if note := device_note(plan.recipe.run, ranks):
            console.note(note)
        run = start(plan, options, ctx, folder, closing)
        console.note(
            f"{device} · {ranks.world} rank{'s' * (ranks.world > 1)} · {threads} CPU threads per rank"
        )
        return carry_out(run, lambda: stop.name is not None)


def start(
    plan: Plan, options: RunOptions, ctx: Context, folder: RunFolder, closing: contextlib.ExitStack
) -> Run:
    """Build every stage, check that the ranks agree, and resume from a checkpoint when there is one.

    Args:
        closing: closes the stages, in reverse, when it is closed.
    """
    recipe = effective_recipe(plan, ctx)
    build_stages(plan, ctx, BUILD_ORDER[:1], closing)
    _check_agreement(plan, ctx)
    resume_step, resume_path = _find_checkpoint(ctx, folder, options)
    if resume_path is not None and ctx.rank == 0:
        folder.check_resumable(recipe, options.allow_change)
    build_stages(plan, ctx, BUILD_ORDER[1:], closing)
    stages = Stages(**{name: ctx.built[name] for name in BUILD_ORDER})
    observers = [(chosen.plugin, _build(chosen, ctx, "observer")) for chosen in plan.observers]
    if ctx.rank != 0:
        observers = []
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
    if resume_path is not None:
        _resume(run, resume_step, resume_path)
    run.last_step = min(steps, run.state.step + options.max_steps) if options.max_steps else steps
    if ctx.rank == 0:
        folder.write_recipe(recipe)
        folder.write_json("plan.json", plan.as_dict())
        folder.write_json("rows.json", stages.data.ledger())
    return run


def carry_out(run: Run, stop_requested: Callable[[], bool]) -> int:
    """Train, write the summary and tell observers how it ended."""
    if run.state.step >= run.steps:
        run.console.note(
            f"this run is finished: {run.state.step} of {run.steps} steps. Raise train.steps to train on, or start "
            f"over with --fresh. Everything lies in {run.path}"
        )
        return EXIT_DONE
    _start_report(run)
    error: BaseException | None = None
    status = "failed"
    try:
        run.events.run_started(run, run.plan)
        with blaming(run):
            status = train(run, stop_requested)
        return EXIT_STOPPED if status == "stopped" else EXIT_DONE
    except BaseException as caught:
        error = caught
        raise
    finally:
        # a failed rank must not wait in a collective for the others, so a failure is summarised without the digest
        summary = summarise(run, status, error)
        if run.ctx.rank == 0:
            run.folder.write_json("summary.json", summary)
        run.events.run_ended(run, error)
        if error is None:
            show_summary(run, summary)


def build_stages(
    plan: Plan, ctx: Context, names: tuple[StageName, ...], closing: contextlib.ExitStack
) -> None:
    """Build stages in order into `ctx.built`; `closing` closes each, also after an error."""
    for name in names:
        chosen = plan.chosen[name]
        ctx.built[name] = _build(chosen, ctx, name)
        closing.callback(_close, ctx.built[name], chosen.plugin, ctx.console)


def effective_recipe(plan: Plan, ctx: Context) -> dict[str, Any]:
    """The recipe with every default filled in and the global batch that this run really uses."""
    recipe: dict[str, Any] = plan.recipe.effective()
    recipe["train"] = recipe["train"] | {"global_batch": ctx.batching.global_batch}
    return recipe


def cache_dir() -> Path:
    """Where derived data (tokenised text) is kept between runs: $XDG_CACHE_HOME/trainforge or ~/.cache/trainforge."""
    import os

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainforge"


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


def _build(chosen: Any, ctx: Context, stage: str) -> Any:
    ctx.plugin = chosen.plugin
    try:
        return chosen.provider.build(ctx, _config(chosen, ctx))
    except TrainForgeError:
        raise
    except Exception as error:
        raise ProviderError(chosen.plugin, stage, "starting", error) from error


def _config(chosen: Any, ctx: Context) -> Any:
    return chosen.config


def _close(stage: Stage, plugin: str, console: Console) -> None:
    try:
        stage.close()
    except Exception as error:  # every stage must be closed, so one failure is only told
        console.warn(f"{plugin} failed while closing: {type(error).__name__}: {error}")


def _saved_global_batch(saved: dict[str, Any] | None) -> int | None:
    value = (saved or {}).get("train", {}).get("global_batch")
    return value if isinstance(value, int) else None


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


def _find_checkpoint(ctx: Context, folder: RunFolder, options: RunOptions) -> tuple[int, Path | None]:
    """The checkpoint to resume from: rank 0 looks, the others follow."""
    found: CheckpointInfo | None = None
    if ctx.rank == 0:
        existing = list_checkpoints(folder.checkpoints)
        found = existing[-1] if existing else None
        if options.resume is not None:
            found = next((info for info in existing if info.step == options.resume), None)
            if found is None:
                kept = ", ".join(str(info.step) for info in existing) or "none"
                raise ConfigError(
                    f"--resume {options.resume}: no checkpoint of that step in {folder.path}; kept: {kept}"
                )
    step, path = ctx.comm.gather([found.step, str(found.path)] if found else [0, None])[0]
    return step, Path(path) if path else None


def _total_steps(ctx: Context) -> int:
    if ctx.train.steps is not None:
        return ctx.train.steps
    assert ctx.train.epochs is not None, "TrainSection demands one of steps and epochs"
    return max(1, math.ceil(ctx.train.epochs * ctx.data.steps_per_epoch))


def _resume(run: Run, step: int, path: Path) -> None:
    """Fill every part from the checkpoint, read by the plugin that wrote it."""
    reader = reader_of(run, path)
    began = time.perf_counter()
    try:
        reader.restore(run.parts, path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    assert run.state.step == step, "a checkpoint's folder name says its step"
    run.resumed_from = step
    run.console.note(
        f"resumed from step {step} of {run.steps} in {format_seconds(time.perf_counter() - began)}: {path}"
    )


def reader_of(run: Run, path: Path) -> Checkpoint:
    """The checkpoint stage that can read `path`: the chosen one, or one built from the plugin that wrote it."""
    from trainforge.checkpoints import read_writer
    from trainforge.discovery import load_provider

    writer = read_writer(path)
    if writer == run.plan.chosen["checkpoint"].plugin:
        return run.stages.checkpoint
    provider = load_provider(writer, "checkpoint")
    run.ctx.plugin = writer
    reader: Checkpoint = provider.build(run.ctx, provider.config())
    return reader


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
