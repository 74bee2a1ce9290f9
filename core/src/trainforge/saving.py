"""How the loop saves: what is said and timed around `Checkpoint.save`, and what observers are told afterwards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainforge.live import Run


def save(run: Run) -> None:
    """Save a checkpoint of the step just done; returns once its state is snapshotted."""
    run.doing = ("checkpoint", f"saving step {run.state.step}")
    run.stages.memory.drain()
    began = time.perf_counter()
    run.stages.checkpoint.save(run.state.step, run.parts)
    run.save_blocked_ms.append((time.perf_counter() - began) * 1000)


def save_what_is_done(run: Run, saved: int) -> None:
    """Save the steps since the last checkpoint, that of step `saved`, and wait for it: none will follow."""
    if run.state.step > saved:
        save(run)
    run.stages.checkpoint.wait()
    tell_committed(run)


def tell_committed(run: Run) -> None:
    """Tell observers of the checkpoints that were committed since the last call, and people of one that is no good."""
    run.doing = ("checkpoint", "committing a checkpoint")
    for info in run.stages.checkpoint.committed():
        if not info.finite:
            run.console.warn(
                f"the weights of step {info.step} are not finite: its checkpoint takes no other's place and is not "
                "resumed from. Stop the run, lower train.lr or look at the rows before this step"
            )
        run.events.checkpoint_saved(run, info.step, info.path)
