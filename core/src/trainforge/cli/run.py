"""`forge run`: carry out a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainforge.cli.group import arguments, debug_option, exit_code
from trainforge.cli.shared import with_choices
from trainforge.errors import ConfigError
from trainforge.options import RunOptions

if TYPE_CHECKING:
    from trainforge.cli.shared import Choices
    from trainforge.planning import Plan


@click.command()
@with_choices
@click.option(
    "--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Run folder [default: runs/NAME]."
)
@click.option(
    "--max-steps", type=click.IntRange(min=1), help="Stop after this many steps, save, and exit with 0."
)
@click.option(
    "--resume", type=click.IntRange(min=0), metavar="STEP", help="Resume from the checkpoint of this step."
)
@click.option("--fresh", is_flag=True, help="Start over; what the run folder holds is moved aside.")
@click.option(
    "--allow-change", multiple=True, metavar="KEY", help="Let a recipe key differ from the run being resumed."
)
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Ranks to start on this host [default: one per device]."
)
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts that take part."
)
@click.option(
    "--node-rank", type=click.IntRange(min=0), default=0, show_default=True, help="Number of this host."
)
@click.option("--rdzv", metavar="HOST:PORT", help="Where the hosts meet: an address of host 0.")
@click.option("--devices", metavar="0,1,...", help="Cards to use, one rank each.")
@click.option("--strict", is_flag=True, help="A failing observer ends the run.")
@debug_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    choices: Choices,
    nproc: int | None,
    nnodes: int,
    node_rank: int,
    rdzv: str | None,
    devices: str | None,
    **start: Any,
) -> None:
    """Train. RECIPE is a YAML file; without it ./forge.yaml, else the data plugin's quickstart recipe.

    The same run folder resumes. Exit codes: 0 done, 1 the run failed, 2 you must change something, 3 stopped by a
    signal after saving, or before there was anything to save.
    """
    from trainforge.rank_process import started_by_launcher
    from trainforge.ranks import Ranks, limit_spinning

    limit_spinning()
    more = [] if devices is None else [f"run.devices={_devices(devices)}"]
    ranks = Ranks.from_environment()
    planned_world = ranks.world if ranks.world > 1 else (nproc or 1) * nnodes
    plan = choices.plan(more=more, world=planned_world)
    nproc = nproc or len(plan.recipe.run.devices or (0,))
    options = RunOptions(**start)
    if started_by_launcher() or ranks.world > 1 or nproc * nnodes == 1:
        ctx.exit(_one_rank(plan, options, speaks=ranks.rank == 0 and not started_by_launcher()))
    from trainforge.launcher import launch

    code = launch(arguments(ctx), nproc, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)
    if code == 1:
        click.echo(_outlook(plan, options), err=True)
    ctx.exit(code)


def _one_rank(plan: Plan, options: RunOptions, *, speaks: bool) -> int:
    from trainforge.runner import run_plan

    try:
        return run_plan(plan, options)
    except (Exception, KeyboardInterrupt) as error:
        if speaks and exit_code(error) == 1:
            error.add_note(_outlook(plan, options))
        raise


def _outlook(plan: Plan, options: RunOptions) -> str:
    from trainforge.outlook import outlook

    return outlook(options.run_dir or Path("runs") / plan.recipe.run.name)


def _devices(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            f"--devices {text}: must be different card numbers separated by commas, such as 0,1"
        )
    return [int(part) for part in parts]
