"""Learning-rate schedules: pure functions of the step, so that resuming cannot shift them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainforge.errors import ConfigError
from trainforge.wording import did_you_mean

if TYPE_CHECKING:
    from trainforge.sections import TrainSection
    from trainforge.values import ParameterSpec


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


def with_rates(parameters: Sequence[ParameterSpec], train: TrainSection) -> tuple[ParameterSpec, ...]:
    """The parameters with `lr_scale` set from `train.lr_groups`; of several groups that match, the last counts.

    Raises:
        ConfigError: a group that changes no parameter's rate.
    """
    chosen: dict[str, int] = {}
    for index, group in enumerate(train.lr_groups):
        matched = [spec for spec in parameters if any(fnmatchcase(name, group.match) for name in spec.names)]
        if not matched:
            meant = did_you_mean(group.match, (name for spec in parameters for name in spec.names))
            raise ConfigError(f"train.lr_groups: {group.match} matches no parameter{meant}")
        chosen |= {spec.name: index for spec in matched if spec.trainable}
    for index, group in enumerate(train.lr_groups):
        if index not in chosen.values():
            raise ConfigError(
                f"train.lr_groups: {group.match} has no effect, because all that it matches is frozen or matched by "
                "a later group: leave it out, or move it to the end"
            )
    scales = [group.scale or (group.lr or 0.0) / train.lr for group in train.lr_groups]
    return tuple(
        replace(spec, lr_scale=scales[chosen[spec.name]]) if spec.name in chosen else spec
        for spec in parameters
    )
