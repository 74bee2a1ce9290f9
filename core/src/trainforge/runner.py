"""Carrying out a plan: one process per rank. Puts the run together, trains, and leaves a summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainforge.assembly import build_stages, cache_dir, start
from trainforge.batching import cut_as_before, resolve_batching
from trainforge.blame import explained
from trainforge.console import TerminalConsole
from trainforge.context import Batching, Context
from trainforge.errors import DataExhausted, RanksError, TrainForgeError, UserError
from trainforge.evaluation import EvaluationCut, evaluate
from trainforge.live import Run, Stages
from trainforge.loop import train
from trainforge.patience import judge, stops_early, why_early
from trainforge.provider import STAGES
from trainforge.ranks import Ranks, default_threads, device_note, pick_device
from trainforge.runfolder import RunFolder
from trainforge.saving import tell_committed
from trainforge.signals import Stopped, StopSignals
from trainforge.summary import show_summary, summarise
from trainforge.wording import counted

if TYPE_CHECKING:
    from trainforge.options import RunOptions
    from trainforge.planning import Plan
    from trainforge.sections import TrainSection

__all__ = ["Run", "Stages", "carry_out", "run_plan"]

EXIT_DONE, EXIT_FAILED, EXIT_STOPPED = 0, 1, 3

_HEARSAY_S = 2.0  # a rank that waits for how a save ends looks four times a second


def run_plan(plan: Plan, options: RunOptions) -> int:
    """Carry out a plan on this rank.

    Returns:
        0 when the run did what it was asked to do, 3 when a signal stopped it after saving, or before there was
        anything to save.

    Raises:
        TrainForgeError: the run cannot start (a `UserError`) or failed.
    """
    ranks = Ranks.from_environment()
    console = TerminalConsole(silent=ranks.rank != 0)
    folder = RunFolder(options.run_dir or Path("runs") / plan.recipe.run.name)
    console.note(f"{plan.recipe.run.name}: {plan.origin} · folder {folder.path}")  # before torch is imported
    try:
        with contextlib.ExitStack() as closing:
            closing.push(_logging_errors(console))
            return _run_on_this_rank(plan, options, ranks, folder, console, closing)
    except Stopped as signal:
        console.note(f"{signal}: stopped before the first step of this start, so nothing had to be saved")
        return EXIT_STOPPED


def _run_on_this_rank(
    plan: Plan,
    options: RunOptions,
    ranks: Ranks,
    folder: RunFolder,
    console: TerminalConsole,
    closing: contextlib.ExitStack,
) -> int:
    stop = StopSignals(at_once=True)
    if ranks.world == 1:
        closing.enter_context(stop)
    threads = default_threads(plan.recipe.run, ranks)
    ctx = _context(plan, options, ranks, folder, console)
    # First of all the ranks meet: while one waits for another no Python runs, so until then a signal just ends the
    # process; from then on they notice when one of them gives up.
    build_stages(plan, ctx, ("comm",), closing)
    if ranks.world > 1:
        closing.enter_context(stop)
    if ranks.rank == 0:
        _open(folder, console, options, closing)
    for note in (*plan.notes, device_note(plan.recipe.run, ranks)):
        if note:
            console.note(note)
    run = start(plan, options, ctx, folder, closing)
    console.note(f"{ctx.device} · {counted(ranks.world, 'rank')} · {counted(threads, 'CPU thread')} per rank")
    _from_now_on_save(stop, run)
    return carry_out(run, _stop_requested(stop, console))


def _from_now_on_save(stop: StopSignals, run: Run) -> None:
    """Have signals wait for the end of a step; one that came to any rank before ends the start on all of them.

    Raises:
        Stopped: one came.
    """
    stop.at_once = False
    try:
        (stops,) = run.stages.comm.control([float(stop.name is not None)])
    except RanksError:  # another rank has stopped already
        if stop.name is None:
            raise
        stops = 1
    if stops:
        raise Stopped(stop.name or "a signal to another rank")


def _context(
    plan: Plan, options: RunOptions, ranks: Ranks, folder: RunFolder, console: TerminalConsole
) -> Context:
    device = pick_device(plan.recipe.run, ranks)
    plan.check(device.type, ranks.world)
    saved = {} if options.fresh else folder.resumable_recipe() or {}
    train = cut_as_before(plan.recipe.train, ranks.world, saved.get("train") or {})
    return Context(
        run=plan.recipe.run,
        train=train,
        model_config=plan.recipe.model,
        device=device,
        rank=ranks.rank,
        world=ranks.world,
        local_rank=ranks.local_rank,
        local_world=ranks.local_world,
        batching=_batching(train, ranks.world, saved),
        run_dir=folder.path,
        cache_dir=cache_dir(),
        console=console,
    )


def carry_out(run: Run, stop_requested: Callable[[], bool]) -> int:
    """Train, write the summary and tell observers how it ended."""
    if run.state.step >= run.steps or stops_early(run.state, run.train):
        return _finished_before(run, stop_requested)
    try:
        with _blaming_who_works(run):
            _start_report(run)
            run.events.run_started(run, run.plan)
            status = train(run, stop_requested)
            summary = summarise(run, status)
    except BaseException as error:
        try:
            _end(run, summarise(run, "failed", error), error)
        except Exception as problem:  # what ended the run is what a person must read
            run.console.warn(f"the end of this run could not be recorded: {problem}")
        raise
    _end(run, summary, None)
    show_summary(run, summary)
    return EXIT_STOPPED if status == "stopped" else EXIT_DONE


def _cadence(every: int | str | None) -> str:
    if every is None:
        return "at the end only (train.save_every)"
    if every == "auto":
        return "as often as pays (train.save_every: auto)"
    if every == 1:
        return "after every step"
    return f"every {every} steps" if isinstance(every, int) else f"every {every}"


def _stop_requested(stop: StopSignals, console: TerminalConsole) -> Callable[[], bool]:
    """Whether a signal has come; the first time that one has, a person reads what follows."""
    told = False

    def requested() -> bool:
        nonlocal told
        if stop.name is None:
            return False
        if not told:
            told = True
            again = "; a second Ctrl-C stops at once, without saving" if stop.name == "SIGINT" else ""
            console.note(f"{stop.name}: stopping after this step and saving{again}")
        return True

    return requested


def _logging_errors(console: TerminalConsole) -> Callable[..., None]:
    """A callback for `ExitStack.push`: what ends the run is kept in its log (the command line shows it)."""

    def log(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Stopped):
            return
        if isinstance(error, TrainForgeError):
            console.log(f"error: {error}")
        elif error is not None:
            console.log(f"error: {type(error).__name__}: {error}".rstrip(": "))

    return log


def _open(
    folder: RunFolder, console: TerminalConsole, options: RunOptions, closing: contextlib.ExitStack
) -> None:
    moved = folder.open(fresh=options.fresh)
    closing.callback(folder.close)
    console.log_to(folder.path / "log.txt")
    if moved:
        console.note(f"--fresh: what an earlier run left was moved to {moved}")


def _finished_before(run: Run, stop_requested: Callable[[], bool]) -> int:
    """Nothing is left to train. What a run that ended after its last step had to leave out is made up for."""
    summary = run.folder.read_json("summary.json")
    here = isinstance(summary, dict) and summary.get("steps") == run.state.step
    status = run.stages.comm.gather(summary.get("status") if here else None)[0]
    if status == "stopped" and run.state.step >= run.steps:
        with _blaming_who_works(run):
            try:
                judge(run, evaluate(run, stop_requested))
            except EvaluationCut:
                return EXIT_STOPPED
    early = run.state.step < run.steps
    if status != ("early_stopped" if early else "finished"):
        _record(run, summarise(run, "early_stopped" if early else "finished"))
    if early:
        run.console.note(
            f"this run has ended early at step {run.state.step}: {why_early(run.state, run.train)}. Raise "
            f"train.early_stop.patience (or leave early_stop out) to train on. Everything lies in {run.path}"
        )
        return EXIT_DONE
    run.console.note(
        f"this run is finished: {run.state.step} steps are done and the recipe asks for {run.steps}. Raise "
        f"train.steps to train on, or start over with --fresh. Everything lies in {run.path}"
    )
    return EXIT_DONE


def _end(run: Run, summary: dict[str, Any], error: BaseException | None) -> None:
    try:
        _record(run, summary)
    finally:
        run.events.run_ended(run, error)


def _record(run: Run, summary: dict[str, Any]) -> None:
    if run.ctx.rank == 0:
        run.folder.write_json("summary.json", summary)


@contextlib.contextmanager
def _blaming_who_works(run: Run) -> Iterator[None]:
    """Name the plugin, its stage and what it was doing in an exception that is not worded for a person yet."""
    try:
        yield
    except UserError as error:
        error.exit_code = EXIT_FAILED  # what the user must change came to light after the run had begun
        raise
    except RanksError as error:
        _tell_of_a_failed_save(run, error)
        raise
    except TrainForgeError:
        raise
    except DataExhausted as error:
        raise TrainForgeError(
            f"the data ended after {run.state.step} of {run.steps} steps, which are saved: lower train.steps to "
            f"{run.state.step}, or start over with more data"
            if run.state.step
            else "the data ended before the first step: give more data"
        ) from error
    except Exception as error:
        stage, doing = run.doing
        raise explained(error, run.ctx, run.plan.chosen[stage].plugin, stage, doing) from error


def _tell_of_a_failed_save(run: Run, error: RanksError) -> None:
    """Another rank is gone: raise what went wrong with a save, if that is why.

    A save that fails on one rank fails on all, but in the background, and each rank hears of it in its own time. The
    first to hear ends; for the others that must not look like a rank that died.
    """
    deadline = time.monotonic() + _HEARSAY_S
    while time.monotonic() < deadline:
        try:
            tell_committed(run)
        except TrainForgeError as reason:
            raise reason from error
        time.sleep(0.05)


def _batching(train: TrainSection, world: int, saved: dict[str, Any] | None) -> Batching:
    """How a step is cut, given the effective recipe of the run that is resumed, if any."""
    before = (saved or {}).get("train") or {}
    total = before.get("global_batch")
    return resolve_batching(
        train,
        world,
        total if isinstance(total, int) else None,
        cut_as_saved=all(before.get(key) == getattr(train, key) for key in ("micro_batch", "accumulate")),
    )


def _start_report(run: Run) -> None:
    """Say what is about to happen, before the first step."""
    note = run.console.note
    note("plugins: " + ", ".join(f"{name} {run.plan.chosen[name].plugin}" for name in STAGES))
    run.doing = ("model", "reporting what it starts with")
    for line in run.stages.model.start_report():
        note(line)
    run.doing = ("data", "reporting what it starts with")
    for line in run.stages.data.start_report():
        note(line)
    batching = run.ctx.batching
    note(
        f"steps {run.state.step + 1} to {run.last_step} of {run.steps} · {batching.global_batch} samples per step = "
        f"{batching.micro_batch} x {counted(batching.accumulate, 'micro-batch', 'micro-batches')} x "
        f"{counted(run.ctx.world, 'rank')} · saved {_cadence(run.train.save_every)}"
    )
