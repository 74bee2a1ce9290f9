"""Which parameters are decayed: one rule for every optimizer."""

from __future__ import annotations

from fnmatch import fnmatchcase

from trainforge.sections import TrainSection
from trainforge.stages import ParameterSpec


def weight_decay(spec: ParameterSpec, train: TrainSection) -> float:
    """`train.weight_decay`, or 0 when `train.decay_exclude` has the parameter's kind or matches one of its names."""
    excluded = any(
        spec.kind == pattern or any(fnmatchcase(name, pattern) for name in spec.names)
        for pattern in train.decay_exclude
    )
    return 0.0 if excluded else train.weight_decay
