"""Evaluation over the validation split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainforge.seeding import derive_seed, preserved, seed_everything

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainforge.live import Run
    from trainforge.stages import Batch


def evaluate(run: Run) -> float | None:
    """Mean cross-entropy over the validation split, or None when there is none. Leaves no trace in the run."""
    run.doing = ("memory", f"evaluating after step {run.state.step}")
    run.stages.memory.drain()
    supervised = 0

    def counted() -> Iterator[Batch]:
        nonlocal supervised
        for batch in run.stages.data.validation():
            supervised += batch.supervised
            yield batch

    with preserved(run.ctx.device):
        seed_everything(derive_seed(run.seed, "validation", run.ctx.rank))
        losses = run.stages.memory.evaluate(counted())
    total = run.stages.comm.sum_ranks(losses.double().sum())
    (tokens,) = run.stages.comm.control([supervised])
    return float(total) / tokens if tokens else None
