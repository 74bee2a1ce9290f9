"""A toy comm with sharded optimizer state (the idea of ZeRO stage 1): each rank holds masters and moments of its share.

All trainable elements in a row are cut into one uneven share per rank, in the middle of parameters. Gradients are
summed on every rank in `finish`; each rank updates its share, and `publish` sends the new weights to the others.

A plugin in one file: `forge run --plugins ./tests/toys/toy_shard.py --nproc 2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits
from trainforge.stages import Comm, Extent, FlatBuffer, ParameterSpec, Ready, Sink

if TYPE_CHECKING:
    from torch import Tensor

    from trainforge.context import Context
    from trainforge.toolbox.process_group import ProcessGroup


class ToyShardSection(Section):
    """How the shares are cut."""

    first_share: float = Field(
        0.4, gt=0, lt=1, description="rank 0's share; the others have equal parts of the rest"
    )


@hookimpl
def forge_comm() -> Provider:
    """Give the sharding comm."""
    return Provider(build=build, config=ToyShardSection, traits=Traits(shards_state=True))


def build(ctx: Context, config: ToyShardSection) -> Comm:
    """Meet the other ranks."""
    if ctx.world == 1:
        return Comm()
    from trainforge.toolbox.process_group import start_process_group

    return ToyShard(start_process_group(ctx, timeout_s=60.0), config.first_share)


class ToyShard(Comm):
    """Sharded state, whole gradients and working copies."""

    def __init__(self, group: ProcessGroup, first_share: float) -> None:
        self.rank, self.world, self._group = group.rank, group.world, group
        rest = (1 - first_share) / (self.world - 1)
        self._cuts = [0.0, *(first_share + rest * i for i in range(self.world - 1)), 1.0]
        self._shares: dict[
            str, list[tuple[int, int]]
        ] = {}  # of each parameter: first and last element by rank

    def partition(self, parameters: Sequence[ParameterSpec]) -> list[Extent]:
        """Cut the row of all trainable elements."""
        trainable = [spec for spec in parameters if spec.trainable]
        total = sum(spec.elements for spec in trainable)
        cuts = [round(total * cut) for cut in self._cuts]
        start, owned = 0, []
        for spec in trainable:
            clipped = [min(max(cut - start, 0), spec.elements) for cut in cuts]
            self._shares[spec.name] = list(pairwise(clipped))
            first, last = self._shares[spec.name][self.rank]
            if first < last:
                owned.append(Extent(spec.name, spec.shape, first, last - first, spec.extent.group))
            start += spec.elements
        return owned

    def watch(self, buffers: Sequence[FlatBuffer]) -> Sink:
        """Note what is used, and what must land before it is summed."""
        self._buffers, self._sunk, self._landing = buffers, set[str](), list[Ready]()

        def sink(extent: Extent, ready: Ready | None) -> None:
            self._sunk.add(extent.name)
            if ready is not None:
                self._landing.append(ready)

        return sink

    def finish(self) -> frozenset[str]:
        """Sum whole buffers at once: no overlap, this is a toy."""
        import torch
        import torch.distributed as dist

        while self._landing:
            self._landing.pop().wait()
        names = [extent.name for buffer in self._buffers for extent in buffer.extents]
        flags = torch.tensor([name in self._sunk for name in names], dtype=torch.uint8)
        used = self._group.any(flags, "agreeing on what was used").tolist()
        for buffer in self._buffers:
            with self._group.collective("summing gradients"):
                dist.all_reduce(buffer.tensor)
        self._sunk.clear()
        return frozenset(name for name, flag in zip(names, used, strict=True) if flag)

    def publish(self, weights: Mapping[str, Tensor]) -> Ready | None:
        """Every owner sends its span of every weight."""
        import torch.distributed as dist

        for name, weight in weights.items():
            for owner, (first, last) in enumerate(self._shares[name]):
                if first < last:
                    with self._group.collective("sending weights"):
                        dist.broadcast(weight[first:last], owner)
        return None

    def sum_shards(self, tensor: Tensor) -> Tensor:
        """Every element lies on one rank, so all ranks add up to one replica."""
        return self._sum(tensor)

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """Add over all ranks."""
        return self._sum(tensor)

    def _sum(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        with self._group.collective("adding up"):
            dist.all_reduce(tensor)
        return tensor

    def control(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers."""
        return self._group.sum(values)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return self._group.gather(value)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
