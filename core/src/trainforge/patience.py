"""What an evaluation decides: whether its checkpoint is the best so far, and whether the run ends early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainforge.live import Run
    from trainforge.run_state import RunState
    from trainforge.sections import TrainSection


@dataclass(frozen=True)
class Verdict:
    """`save`: this step's checkpoint must be kept. `stop`: the run ends after it."""

    save: bool = False
    stop: bool = False


def judge(run: Run, loss: float | None) -> Verdict:
    """Take note of an evaluation. Every rank calls it; rank 0's number counts, so that all decide the same.

    Args:
        loss: of the evaluation just made; None when there was nothing to evaluate.
    """
    state, train = run.state, run.train
    if train.best or train.early_stop:
        loss = run.stages.comm.gather(loss)[0]
    state.eval_loss, state.eval_step = loss, state.step
    if loss is None:
        return Verdict()
    better = loss < _or_endless(state.eval_lowest)  # false for NaN
    if better:
        state.eval_lowest = loss
    least = train.early_stop.min_delta if train.early_stop else 0.0
    if loss < _or_endless(state.eval_to_beat) - least:
        state.eval_to_beat, state.evaluations_in_vain = loss, 0
    else:
        state.evaluations_in_vain += 1
    return Verdict(save=better and train.best is not None, stop=stops_early(state, train))


def stops_early(state: RunState, train: TrainSection) -> bool:
    """Whether `train.early_stop` ends (or has ended) the run."""
    return train.early_stop is not None and state.evaluations_in_vain >= train.early_stop.patience


def why_early(state: RunState, train: TrainSection) -> str:
    """What a person reads about it."""
    least = train.early_stop.min_delta if train.early_stop else 0.0
    by = f" by more than {least:g}" if least else ""
    lowest = "never a number" if state.eval_lowest is None else f"at best {state.eval_lowest:.4f}"
    times = state.evaluations_in_vain
    return f"the validation loss was {lowest} and did not fall{by} in {times} evaluation{'s' * (times != 1)}"


def _or_endless(value: float | None) -> float:
    return float("inf") if value is None else value
