"""Where a run that has failed would go on."""

from __future__ import annotations

from pathlib import Path

from trainforge.checkpoints import list_checkpoints
from trainforge.errors import CheckpointError
from trainforge.retention import newest_usable


def outlook(run_dir: Path) -> str:
    """The last line that a person reads after a failure: from which step the run resumes, or that nothing was saved."""
    try:
        found = list_checkpoints(run_dir / "checkpoints", [])  # a resume passes over what it cannot read
    except (CheckpointError, OSError):
        return f"What was saved cannot be told: look into {run_dir / 'checkpoints'}."
    newest = newest_usable(found)
    if found and newest is None:
        return "No checkpoint has weights that are all finite: start over with --fresh."
    if newest is None:
        return "Nothing was saved: the next start begins at step 1."
    return f"Run again to resume from step {newest.step}, the newest checkpoint in {run_dir}."
