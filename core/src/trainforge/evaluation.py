"""Evaluation over the validation split; a run that is asked to stop leaves it within a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainforge.seeding import derive_seed, preserved, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainforge.live import Run
    from trainforge.stages import Batch


class EvaluationCut(Exception):
    """A rank was asked to stop: the evaluation was left on all ranks, and there is no figure."""


def evaluate(run: Run, stop_requested: Callable[[], bool]) -> float | None:
    """Mean cross-entropy over the validation split, or None when there is none. Leaves no trace in the run.

    Raises:
        EvaluationCut: a rank was asked to stop. The ranks agree on it before each batch.
    """
    run.doing = ("memory", f"evaluating after step {run.state.step}")
    run.stages.memory.drain()
    comm, supervised, cut = run.stages.comm, 0, False

    def counted() -> Iterator[Batch]:
        nonlocal supervised, cut
        for batch in run.stages.data.validation():
            (stops,) = comm.control([float(stop_requested())])
            if stops > 0:
                cut = True
                return
            supervised += batch.supervised
            yield batch

    with preserved(run.ctx.device):
        seed_everything(derive_seed(run.seed, "validation", run.ctx.rank))
        losses = run.stages.memory.evaluate(counted())
    if cut:
        raise EvaluationCut
    total = comm.sum_ranks(losses.double().sum())
    (tokens,) = comm.control([supervised])
    return float(total) / tokens if tokens else None
