"""A run folder may come from somebody else: code that its recipe names is not run unless a person has allowed it.

What is installed counts as allowed, and so do plugin files that lie elsewhere on this machine and are named by their
whole path, as a run that took place here names them. All else that a stored recipe asks for is code that may have come
with it: files in the run folder, functions that are imported by name, what a model folder brings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.discovery import is_file
from trainforge.errors import UserError
from trainforge.recipe import recipe_plugins
from trainforge.recipe_file import read_recipe

if TYPE_CHECKING:
    from trainforge.planning import Plan
    from trainforge.provider import StageName


def may_have_come_along(reference: str, run_dir: Path) -> bool:
    """Whether a plugin that a run folder names is a file in that folder, or one that a relative path leads to."""
    if not is_file(reference):
        return False
    path = Path(reference)
    return not path.is_absolute() or path.resolve().is_relative_to(run_dir.resolve())


def plugins_to_leave_out(recipe: Path, needs: Sequence[StageName]) -> list[str]:
    """The plugins of a stored recipe that are not to be imported.

    Args:
        recipe: recipe.yaml of a run folder.
        needs: the stages that will be built.

    Raises:
        UserError: one of them serves such a stage, wraps others, or nothing says what it does.
    """
    found = [ref for ref in recipe_plugins(read_recipe(recipe)) if may_have_come_along(ref, recipe.parent)]
    spared = _not_needed(recipe.parent, needs) if found else set()
    _refuse(recipe.parent, [f"plugins: {ref}" for ref in found if ref not in spared])
    return found


def refuse_code(run_dir: Path, plan: Plan, needs: Sequence[StageName], allowed: Collection[str]) -> None:
    """Refuse a stored recipe whose sections have code run.

    Args:
        allowed: keys and values that are allowed, as `Section.runs_code` gives them.

    Raises:
        UserError: names them.
    """
    keys = [line for stage in needs for line in plan.chosen[stage].config.runs_code() if line not in allowed]
    _refuse(run_dir, keys)


def _refuse(run_dir: Path, keys: Sequence[str]) -> None:
    if keys:
        raise UserError(
            f"the recipe of {run_dir} has code run that is not installed: {', '.join(keys)}. It can do anything that "
            "you can: read it, then allow it with --trust-code (a run that starts from this one allows it by the same "
            "key in its own recipe)"
        )


def _not_needed(run_dir: Path, needs: Sequence[StageName]) -> set[str]:
    """Plugin files that only observe, or serve other stages; by plan.json, which is believed for no more than that."""
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
        serving = {
            *(record.get("reference") for record in plan["others"]),
            *(record.get("reference") for stage, record in plan["stages"].items() if stage in needs),
        }
        known = {record.get("reference") for record in [*plan["stages"].values(), *plan["observers"]]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return known - serving
