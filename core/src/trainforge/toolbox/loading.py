"""Initial weights, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainforge.errors import ConfigError
from trainforge.stages import Extent, ModelSpec, ParameterSpec

LOAD_CHUNK = 2**28
"""Elements loaded at a time: 1 GiB of fp32, so that filling a huge tensor does not need it twice in host RAM."""


def initial_values(model: ModelSpec, spec: ParameterSpec) -> Iterator[tuple[int, Tensor]]:
    """The initial weights of a parameter, as (offset, fp32 `[n]` on the CPU).

    Raises:
        ConfigError: a weight is not finite.
    """
    for offset in range(0, max(spec.elements, 1), LOAD_CHUNK):
        length = min(LOAD_CHUNK, spec.elements - offset)
        values = torch.empty(length)
        model.load(spec.name, values, Extent(spec.name, spec.shape, offset, length, spec.extent.group))
        if not bool(torch.isfinite(values).all()):
            raise ConfigError(f"the initial weights of {spec.name} hold NaN or infinity; load sound weights")
        yield offset, values
