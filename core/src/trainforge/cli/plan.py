"""`forge plan`: who does what, with which configuration, and what it needs; nothing is trained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from trainforge.cli.group import debug_option
from trainforge.cli.shared import with_choices
from trainforge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from trainforge.cli.shared import Choices
    from trainforge.plan_sizes import PlanSizes
    from trainforge.planning import Plan


@click.command()
@with_choices
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks to plan for.")
@click.option("--no-sizes", is_flag=True, help="Only selection and configuration: at once, without torch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug_option
def plan(choices: Choices, nproc: int, no_sizes: bool, as_json: bool) -> None:
    """Show what a run would do.

    Who serves each stage and who chose it, the effective recipe, and what it needs: parameters and bytes per tier.
    """
    made = choices.plan(world=nproc)
    sizes = None if no_sizes else _sizes(made, nproc)
    if as_json:
        click.echo(json.dumps({**made.as_dict(), "sizes": sizes and sizes.as_dict()}, indent=2))
        _refuse(sizes)
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    _print_stages(console, made)
    _print_recipe(console, made)
    if sizes is not None:
        _print_sizes(console, sizes)
        _refuse(sizes)


def _refuse(sizes: PlanSizes | None) -> None:
    """End as the run would.

    Raises:
        ConfigError: a stage would refuse to start.
    """
    reasons = [e.refusal for e in sizes.estimates.values() if e.refusal] if sizes is not None else []
    if reasons:
        raise ConfigError("this run would be refused. " + " ".join(reasons))


def _sizes(made: Plan, world: int) -> PlanSizes:
    from trainforge.plan_sizes import measure

    return measure(made, world)


def _print_stages(console: Console, made: Plan) -> None:
    from rich.table import Table

    from trainforge.provider import STAGES

    table = Table("stage", "plugin", "distribution", "chosen by", box=None, pad_edge=False)
    for chosen in [*(made.chosen[stage] for stage in STAGES), *made.observers]:
        table.add_row(chosen.stage, chosen.plugin, f"{chosen.distribution} {chosen.version}", chosen.how)
    for name, _ in made.listeners:
        table.add_row("events", name)
    console.print(table)
    for note in made.notes:
        console.print(f"note: {note}", markup=False)


def _print_recipe(console: Console, made: Plan) -> None:
    from trainforge.recipe_file import dump_recipe

    console.print(f"\nEffective recipe ({made.origin}):", markup=False)
    for line in dump_recipe(made.recipe.effective()).splitlines():
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _print_sizes(console: Console, sizes: PlanSizes) -> None:
    from rich.table import Table

    from trainforge.units import format_bytes, format_seconds

    batching = sizes.batching
    console.print(
        f"\n{sizes.parameters:,} parameters ({sizes.trainable:,} trainable) in {sizes.blocks} blocks; each step "
        f"{batching.global_batch} samples = {batching.micro_batch} x {batching.accumulate} micro-batches x "
        f"{sizes.world} rank{'s' * (sizes.world > 1)}; device {sizes.device}"
    )
    table = Table("tier", "stage", "what", box=None, pad_edge=False)
    table.add_column("size", justify="right")
    for tier in ("device", "host", "disk"):
        rows = [(s, what, n) for s, e in sizes.estimates.items() for what, n in getattr(e, tier).items()]
        for stage, what, count in rows:
            table.add_row(tier, stage, what, format_bytes(count))
        if len(rows) > 1:
            table.add_row(tier, "", "together", format_bytes(sum(row[2] for row in rows)), style="bold")
    console.print(table)
    seconds: dict[str, Any] = {
        s: e.seconds_per_step for s, e in sizes.estimates.items() if e.seconds_per_step
    }
    for stage, predicted in seconds.items():
        console.print(f"{stage} adds about {format_seconds(predicted)} per step")
    for note in (note for estimate in sizes.estimates.values() for note in estimate.notes):
        console.print(note, markup=False)
