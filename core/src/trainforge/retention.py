"""Which checkpoints stay. Every checkpoint plugin asks `retention` what to delete: `train` holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainforge.stages import CheckpointInfo, PartState


def retention(
    infos: Sequence[CheckpointInfo], keep: int, keep_every: int | None = None, best: str | None = None
) -> list[CheckpointInfo]:
    """The checkpoints to delete.

    Args:
        infos: the committed checkpoints, in any order. One with weights that are not finite (or, to a plugin that has
            looked, a damaged one: `finite` false) takes nobody's place.
        keep: the newest that stay; `train.keep`.
        keep_every: those of every so many steps stay for ever; `train.keep_every`.
        best: the one with the lowest such metric stays; `train.best`.

    Returns:
        A part of `infos`, oldest step first. Without a usable checkpoint, nothing. Of the others the newest stays as
        long as it is newer than the oldest of the `keep`: a person may want to look at it.
    """
    usable = sorted((info for info in infos if info.finite), key=lambda info: info.step)
    if not usable:
        return []
    newest, lowest = usable[-keep:], best_of(usable, best)
    others = [info.step for info in infos if not info.finite]
    doomed = []
    for info in infos:
        if info.finite:
            stays = info in newest or info is lowest or (keep_every and info.step % keep_every == 0)
        else:
            stays = info.step == max(others) and info.step > newest[0].step
        if not stays:
            doomed.append(info)
    return sorted(doomed, key=lambda info: info.step)


def best_of(infos: Sequence[CheckpointInfo], metric: str | None) -> CheckpointInfo | None:
    """The usable checkpoint with the lowest value of a metric, the earliest of equals; None when none has it."""
    if metric is None:
        return None
    measured = [info for info in infos if info.finite and metric in info.metrics]
    return min(measured, key=lambda info: (info.metrics[metric], info.step), default=None)


def newest_usable(infos: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """The checkpoint to go on from."""
    return max((info for info in infos if info.finite), key=lambda info: info.step, default=None)


def measured(states: Mapping[str, PartState]) -> dict[str, float]:
    """What was measured at the very step that is being saved: `metrics` in checkpoint.json, for `train.best`.

    Args:
        states: of all parts; the numbers come from the part `loop`.
    """
    counters = states["loop"].data.get("counters", {}) if "loop" in states else {}
    value = counters.get("eval_loss")
    if value is None or counters.get("eval_step") != counters.get("step") or not math.isfinite(value):
        return {}
    return {"eval_loss": float(value)}
