"""The same as the command line, from Python: `trainforge.plan(...)` and `trainforge.run(...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainforge.options import RunOptions
from trainforge.planning import Plan, make_plan

plan = make_plan


def run(
    recipe: Plan | Path | str | None = None,
    *,
    run_dir: Path | str | None = None,
    max_steps: int | None = None,
    resume: int | None = None,
    fresh: bool = False,
    allow_change: tuple[str, ...] = (),
    strict: bool = False,
    **choices: Any,
) -> int:
    """Carry out a recipe (or a plan made before) in this process, as one rank of those the environment names.

    Args:
        recipe: a plan, a recipe's file, or None for ./forge.yaml or the quickstart recipe.
        run_dir, max_steps, resume, fresh, allow_change, strict: as the options of `forge run`.
        choices: what `trainforge.plan` takes: plugins, only, without, stages, overrides.

    Returns:
        0 when the run did what it was asked to do, 3 when a signal stopped it after saving.

    Raises:
        TrainForgeError: the run cannot start (a `UserError`) or failed.
    """
    from trainforge.ranks import Ranks
    from trainforge.runner import run_plan

    if isinstance(recipe, Plan):
        if choices:
            raise TypeError(f"the plan is made already, so it cannot take {', '.join(sorted(choices))}")
        made = recipe
    else:
        made = make_plan(recipe, world=Ranks.from_environment().world, **choices)
    folder = None if run_dir is None else Path(run_dir)
    return run_plan(made, RunOptions(folder, max_steps, resume, fresh, tuple(allow_change), strict))
