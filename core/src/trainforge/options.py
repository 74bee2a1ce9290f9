"""`RunOptions`: what the command line says about one start of a run, beside the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainforge.errors import ConfigError


@dataclass(frozen=True)
class RunOptions:
    """How to start, resume or stop this once. None of it changes what is trained, so none of it is in the recipe.

    Attributes:
        run_dir: the run's folder; None means runs/NAME.
        max_steps: stop after this many steps of this start, save, and leave the schedule as it was.
        resume: step of the checkpoint to resume from; None means the newest.
        fresh: start from step 0 and put what the folder holds aside.
        allow_change: dotted recipe keys that may differ from those of the run being resumed.
        strict: a failing observer ends the run instead of being muted.

    Raises:
        ConfigError: they contradict each other.
    """

    run_dir: Path | None = None
    max_steps: int | None = None
    resume: int | None = None
    fresh: bool = False
    allow_change: tuple[str, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if self.fresh and self.resume is not None:
            raise ConfigError(
                f"--fresh starts over and --resume {self.resume} goes on from a checkpoint: give only one of them"
            )
