"""State that is saved and restored by the rules of the checkpoint stage, and comparing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainforge.stages import Extent, NamedTensor, PartState, Slot
from trainforge.testing.bench import Stages
from trainforge.toolbox.halves import split


class Box:
    """A part of a run for tests: any data, any tensors; `low` are lower halves of those that are kept split."""

    def __init__(
        self,
        data: Mapping[str, Any],
        tensors: Mapping[tuple[str, Extent], Tensor],
        version: int = 1,
        low: Mapping[tuple[str, Extent], Tensor] | None = None,
    ) -> None:
        self.data, self.tensors, self.version, self.low = dict(data), dict(tensors), version, dict(low or {})
        self.loaded: tuple[int, dict[str, Any]] | None = None

    def state(self) -> PartState:
        """The live tensors."""
        named = (NamedTensor(*place, t, self.low.get(place)) for place, t in self.tensors.items())
        return PartState(self.version, self.data, tuple(named))

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Keep what was given."""
        self.loaded = (version, data)

    def emptied(self) -> Box:
        """A box of the same shape with other bits in it."""
        return Box({}, {place: torch.full_like(t, 1) for place, t in self.tensors.items()}, self.version)


def halves(masters: Mapping[tuple[str, Extent], Tensor]) -> Box:
    """A box that keeps fp32 masters split."""
    high = {place: torch.empty(len(t), dtype=torch.bfloat16) for place, t in masters.items()}
    low = {place: torch.empty(len(t), dtype=torch.int16) for place, t in masters.items()}
    for place, master in masters.items():
        split(master, high[place], low[place])
    return Box({}, high, low=low)


def slots_of(stages: Stages) -> list[Slot]:
    """A slot for each extent of the memory's masters, as an update gets them; the gradients are zero."""
    specs = {spec.name: spec for spec in stages.model.parameters}
    named = stages.memory.state().tensors
    return [
        Slot(
            specs[master.extent.name],
            master.extent,
            master.tensor,
            torch.zeros(master.extent.length, device=master.tensor.device),
            {
                one.key: one.tensor
                for one in named
                if one.key != "master" and one.extent in (master.extent, master.extent.number)
            },
            master.low,
        )
        for master in named
        if master.key == "master"
    ]


def values_of(state: PartState) -> dict[tuple[str, str], Tensor]:
    """Copies of the values of a part, by key and name."""
    found = {}
    for named in state.tensors:
        found[named.key, named.extent.name] = torch.empty(named.extent.length, dtype=named.dtype)
        named.read(0, found[named.key, named.extent.name])
    return found


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaN equals NaN, 0.0 is not -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
