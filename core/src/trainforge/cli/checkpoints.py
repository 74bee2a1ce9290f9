"""`forge checkpoints`: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainforge.cli.group import debug_option
from trainforge.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from trainforge.stages import CheckpointInfo


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("action", type=click.Choice(["list", "verify", "prune"]), default="list")
@click.option("--step", type=click.IntRange(min=0), help="verify: only the checkpoint of this step.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="prune: how many of the newest to keep.",
)
@click.option("--dry-run", is_flag=True, help="prune: only say what would be deleted.")
@debug_option
def checkpoints(run_dir: Path, action: str, step: int | None, keep: int, dry_run: bool) -> None:
    """Look after the checkpoints in the run folder RUN.

    list shows step, size, writer, date and validation loss, and marks the best; verify lets the plugin that wrote
    each one check it (exit code 1 when one is damaged); prune deletes all but the newest usable ones and those that
    train.keep_every and train.best of the run's recipe keep, once the newest is found sound.
    """
    from trainforge.checkpoints import checkpoints_folder, kept_by_recipe, list_checkpoints

    folder = checkpoints_folder(run_dir)
    found = list_checkpoints(folder)
    if not found:
        raise UserError(f"{run_dir} holds no committed checkpoint yet")
    if action == "list":
        _list(found)
    elif action == "verify":
        _verify([info for info in found if step in (None, info.step)], step, found)
    else:
        _prune(found, keep, *kept_by_recipe(folder), dry_run=dry_run)


def _list(found: list[CheckpointInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainforge.retention import best_of
    from trainforge.units import format_bytes

    best = best_of(found, "eval_loss")
    table = Table("step", "size", "writer", "saved", "eval loss", "", box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for info in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.saved_at))
        loss = f"{info.metrics['eval_loss']:.4f}" if "eval_loss" in info.metrics else ""
        mark = "best" if info is best else "" if info.finite else "NOT FINITE"
        table.add_row(
            str(info.step), format_bytes(info.bytes), info.writer, saved, loss, mark, str(info.path)
        )
    Console(highlight=False).print(table)


def _verify(chosen: list[CheckpointInfo], step: int | None, found: list[CheckpointInfo]) -> None:
    from trainforge.checkpoints import verify_checkpoint

    if not chosen:
        kept = ", ".join(str(info.step) for info in found)
        raise UserError(f"--step {step}: there is no such checkpoint; kept are {kept}")
    damaged = 0
    for info in chosen:
        problems = verify_checkpoint(info)
        click.echo(f"step {info.step}: {'sound' if not problems else 'DAMAGED'}")
        for problem in problems:
            click.echo(f"  {problem}")
        damaged += bool(problems)
    if damaged:
        raise CheckpointError(f"{damaged} of {len(chosen)} checkpoints are damaged")


def _prune(
    found: list[CheckpointInfo], keep: int, keep_every: int | None, best: str | None, *, dry_run: bool
) -> None:
    from trainforge.checkpoints import remove_checkpoint, verify_checkpoint
    from trainforge.retention import best_of, newest_usable, retention
    from trainforge.units import format_bytes

    old, newest = retention(found, keep, keep_every, best), newest_usable(found)
    if old and newest and (problems := verify_checkpoint(newest)):
        raise CheckpointError(
            f"nothing was deleted: the newest checkpoint, step {newest.step}, is damaged: {problems[0]}"
        )
    for info in old:
        if not dry_run:
            remove_checkpoint(info)
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
