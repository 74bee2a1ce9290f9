"""`forge checkpoints`: look after the checkpoints of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from trainforge.cli.export import export
from trainforge.cli.group import debug_option
from trainforge.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from trainforge.checkpoints import Unreadable
    from trainforge.describing import Description
    from trainforge.stages import CheckpointInfo

_ACTIONS = ["list", "verify", "prune", "diff", "merge", "convert"]
_MORE = {"diff": "two steps: diff 10 20", "merge": "a step and a folder: merge 20 OUT"}
_SHOWN_PROBLEMS = 10  # of one checkpoint: a lost file is a problem of each of its tensors
_OPTIONS = {"step": ("verify", "convert"), "keep": ("prune",), "dry_run": ("prune",)}


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("action", type=click.Choice(_ACTIONS), default="list")
@click.argument("more", metavar="[A B | STEP OUT]", nargs=-1)
@click.option("--step", type=click.IntRange(min=0), help="verify, convert: the checkpoint of this step.")
@click.option("--to", metavar="PLUGIN", help="convert: the checkpoint plugin that is to write it.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="prune: how many of the newest to keep.",
)
@click.option("--dry-run", is_flag=True, help="prune: only say what would be deleted.")
@debug_option
@click.pass_context
def checkpoints(
    ctx: click.Context,
    run_dir: Path,
    action: str,
    more: tuple[str, ...],
    step: int | None,
    to: str | None,
    keep: int,
    dry_run: bool,
) -> None:
    """Look after the checkpoints in the run folder RUN.

    list shows step, size, writer, date and validation loss, and marks the best; where the plugin that wrote them shares
    data between steps, also what each save added to the disk. verify lets that plugin check each one (exit code 1 when
    one is damaged). prune deletes all but the newest usable ones and those that train.keep_every and train.best of the
    run's recipe keep, once the newest is found sound. diff A B says which tensors changed from step A to step B
    (only of the weights, which are read, where the plugin keeps no digests).
    merge STEP OUT writes the model of that step into the folder OUT: forge export, which has more options.
    convert --to PLUGIN writes the newest usable checkpoint (or that of --step) again with another checkpoint plugin, in
    the place of the old one; no other is deleted.
    """
    from trainforge.checkpoints import checkpoints_folder, kept_by_recipe, list_checkpoints

    if len(more) != (2 if action in _MORE else 0):
        raise click.UsageError(f"{action} takes {_MORE.get(action, 'nothing but options')}")
    if (to is None) == (action == "convert"):
        raise click.UsageError("convert and --to belong together: convert --to PLUGIN")
    for name, actions in _OPTIONS.items():
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and action not in actions:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for {' and '.join(actions)}, not for {action}")
    if to is not None:
        _convert(run_dir, step, to)
        return
    folder = checkpoints_folder(run_dir)
    unreadable: list[Unreadable] = []
    found = list_checkpoints(folder, unreadable if action in ("list", "verify") else None)
    if not found and not unreadable:
        raise UserError(f"{run_dir} holds no committed checkpoint yet")
    if action == "list":
        _list(folder, found, unreadable)
    elif action == "verify":
        _verify(found, unreadable, step)
    elif action == "diff":
        _diff(run_dir, *(_of_step(found, _step(text)) for text in more))
    elif action == "merge":
        ctx.invoke(export, run_dir=run_dir, out=Path(more[1]), step=_of_step(found, _step(more[0])).step)
    else:
        _prune(found, keep, *kept_by_recipe(folder), dry_run=dry_run)


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(f"{text} is no step, such as 1000")
    return int(text)


def _of_step(found: list[CheckpointInfo], step: int, asked: str = "step ") -> CheckpointInfo:
    for info in found:
        if info.step == step:
            return info
    kept = ", ".join(str(info.step) for info in found)
    raise UserError(f"{asked}{step}: there is no such checkpoint; kept are {kept}")


def _list(folder: Path, found: list[CheckpointInfo], unreadable: list[Unreadable]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainforge.describing import describe_sizes
    from trainforge.retention import best_of
    from trainforge.toolbox.checkpointing.folders import ASIDE
    from trainforge.units import format_bytes

    # One that a run has deleted while the plugins were asked is not there any more, and no problem.
    about = [one for one in describe_sizes(found) if not one.problem or one.info.path.exists()]
    found = [one.info for one in about]
    best = best_of(found, "eval_loss")
    shared = any(one.new_bytes is not None for one in about)
    more = ("new", "ratio") if shared else ()
    table = Table(box=None, pad_edge=False)
    for header in ("step", "size", *more, "writer", "saved", "eval loss", ""):
        table.add_column(header, no_wrap=header != "saved")
    for info, one in zip(found, about, strict=True):
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.saved_at))
        loss = f"{info.metrics['eval_loss']:.4f}" if "eval_loss" in info.metrics else ""
        mark = "best" if info is best else "" if info.finite else "NOT FINITE"
        new = _new(one) if shared else ()
        table.add_row(str(info.step), format_bytes(one.bytes), *new, info.writer, saved, loss, mark)
    if found:
        Console(highlight=False).print(table)
        click.echo(f"the newest is {found[-1].path}")
    if aside := len(list(folder.glob(f"{ASIDE}*"))):
        click.echo(f"{aside} more set aside by a run: {folder / ASIDE}*; delete them when you like")
    problems = [one.problem for one in about if one.problem]
    problems += [f"{one.about}: move it out of this folder" for one in unreadable]
    for problem in dict.fromkeys(problems):
        click.echo(problem, err=True)


def _new(one: Description) -> tuple[str, str]:
    """What its save added to the disk, and how many times less that is than all of it."""
    from trainforge.units import format_bytes

    if one.new_bytes is None:
        return "", ""
    return format_bytes(one.new_bytes), f"{one.bytes / one.new_bytes:.1f}" if one.new_bytes else ""


def _diff(run_dir: Path, a: CheckpointInfo, b: CheckpointInfo) -> None:
    from trainforge.console import TerminalConsole
    from trainforge.describing import comparable, compare
    from trainforge.units import format_bytes

    before, after, left_out = comparable(run_dir, a, b, TerminalConsole())
    found = compare(before, after)

    def counted(names: Sequence[str], one: Description) -> str:
        known = [one.tensor_bytes[name] for name in names if name in one.tensor_bytes]
        size = f" ({format_bytes(sum(known))})" if len(known) == len(names) and known else ""
        return f"{len(names)}{size}"

    for word, names in (("changed", found.changed), ("gone", found.gone), ("added", found.added)):
        for name in names:
            click.echo(f"{word}  {name}")
    totals = [
        f"{counted(found.changed, after)} of {counted(list(after.tensors or ()), after)} tensors changed"
    ]
    totals += [f"{counted(found.gone, before)} gone"] if found.gone else []
    totals += [f"{counted(found.added, after)} added"] if found.added else []
    click.echo(f"step {a.step} to step {b.step}: {', '.join(totals)}, {found.same} are the same")
    if left_out:
        click.echo(left_out)
    if after.new_bytes is not None:
        click.echo(f"the save of step {b.step} added {format_bytes(after.new_bytes)} to the disk")


def _convert(run_dir: Path, step: int | None, to: str) -> None:
    from trainforge.console import TerminalConsole
    from trainforge.converting import convert_checkpoint
    from trainforge.units import format_bytes

    new = convert_checkpoint(run_dir, step, to, TerminalConsole())
    click.echo(f"step {new.step} is now a checkpoint of {new.writer} ({format_bytes(new.bytes)}): {new.path}")


def _verify(found: list[CheckpointInfo], unreadable: list[Unreadable], step: int | None) -> None:
    """Say of each checkpoint, or of the one of `step`, whether it is sound, and what is wrong with it."""
    from trainforge.checkpoints import verify_checkpoint
    from trainforge.stages import is_checkpoint_name

    broken = {is_checkpoint_name(one.path.name): one.about for one in unreadable}
    if step is not None and step not in broken:
        found = [_of_step(found, step, "--step ")]
    by_step = {info.step: info for info in found}
    chosen = sorted([*by_step, *(known for known in broken if known is not None)]) if step is None else [step]
    damaged = 0
    for known in chosen:
        problems = [broken[known]] if known in broken else verify_checkpoint(by_step[known])
        if problems and known in by_step and not by_step[known].path.exists():
            click.echo(f"step {known}: gone meanwhile, as when a run that saves here keeps newer ones")
            continue
        click.echo(f"step {known}: {'sound' if not problems else 'DAMAGED'}")
        for problem in problems[:_SHOWN_PROBLEMS]:
            click.echo(f"  {problem}")
        if len(problems) > _SHOWN_PROBLEMS:
            click.echo(f"  and {len(problems) - _SHOWN_PROBLEMS:,} problems more")
        damaged += bool(problems)
    if damaged:
        sound = damaged < len(chosen)
        way = "; a run resumes from the newest that is sound" if sound and step is None else ""
        of = f"{damaged} of {len(chosen)} checkpoints" if len(chosen) > 1 else f"step {chosen[0]}"
        click.echo(f"damaged: {of}{way}", err=True)
        raise click.exceptions.Exit(1)


def _prune(
    found: list[CheckpointInfo], keep: int, keep_every: int | None, best: str | None, *, dry_run: bool
) -> None:
    from trainforge.checkpoints import remove_checkpoints, verify_checkpoint
    from trainforge.retention import best_of, newest_usable, retention
    from trainforge.units import format_bytes

    old, newest = retention(found, keep, keep_every, best), newest_usable(found)
    if old and newest and (problems := verify_checkpoint(newest)):
        if not newest.path.exists():
            raise CheckpointError(
                f"nothing was deleted: step {newest.step} has gone meanwhile, as when a run is saving here. A run "
                "deletes by train.keep itself; prune again when it has ended"
            )
        raise CheckpointError(
            f"nothing was deleted, as the newest checkpoint is damaged: {problems[0]}. Should the older ones make room "
            f"all the same, move {newest.path} out of the run folder first"
        )
    try:
        freed = 0 if dry_run else remove_checkpoints(old)
    except OSError as error:
        raise CheckpointError(
            f"{found[0].path.parent} does not let checkpoints be deleted: {error.strerror or error}. Those that are "
            "left are whole"
        ) from error
    for info in old:
        click.echo(
            f"{'would delete' if dry_run else 'deleted'} step {info.step} ({format_bytes(info.bytes)})"
        )
    lowest = best_of(found, best)
    for info in found:
        if info not in old:
            rules = {
                "train.best": info is lowest,
                "train.keep_every": keep_every and not info.step % keep_every,
            }
            why = " and ".join(rule for rule, holds in rules.items() if holds)
            click.echo(f"kept step {info.step}{why and f' ({why})'}")
    if old and not dry_run:
        click.echo(f"freed {format_bytes(freed)}")
