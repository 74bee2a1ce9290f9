"""Learning-rate schedules: pure functions of the step, so that resuming cannot shift them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainforge.sections import TrainSection


def learning_rate(train: TrainSection, step: int, steps: int) -> float:
    """The learning rate of `step` (from 1) in a run of `steps` steps.

    Warm-up rises linearly and reaches `lr` at its last step. `wsd` (warmup-stable-decay, MiniCPM) stays at `lr`
    and falls linearly during the last `decay` steps.
    """
    warmup = _share(train.warmup, steps, below=1.0)
    if step <= warmup:
        return train.lr * step / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    match train.schedule:
        case "constant":
            fallen = 0.0
        case "linear":
            fallen = progress
        case "cosine":
            fallen = 0.5 * (1 - math.cos(math.pi * progress))
        case "wsd":
            decay = max(_share(train.decay, steps, below=1.0, inclusive=True), 1)
            fallen = min(max(step - (steps - decay), 0) / decay, 1.0)
    return train.lr * (1 - fallen) + train.lr_end * fallen


def _share(value: float, steps: int, *, below: float, inclusive: bool = False) -> int:
    """Steps of a value that is a share of the run when it is below 1 (or at most 1, when `inclusive`)."""
    is_share = value <= below if inclusive else value < below
    return round(value * steps) if is_share else round(value)
