"""`resident` under a comm that shards optimizer state: two ranks, here two threads, equal one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from tests.resident.test_resident import Harness
from tests.support.toy_model import ToyConfig, ToyModel, toy_batches
from torch import Tensor

from trainforge.stages import Comm, Extent, ParameterSpec

CONFIG = ToyConfig(layers=2, tied=True, odd=True, unused=True, bias=True)


class Meeting:
    """Where the threads exchange tensors."""

    def __init__(self, world: int) -> None:
        self.barrier, self.held = threading.Barrier(world, timeout=60), [None] * world

    def exchange(self, rank: int, value):
        self.held[rank] = value
        self.barrier.wait()
        everything = list(self.held)
        self.barrier.wait()
        return everything


class Sharded(Comm):
    """Every rank sees the same batches, and owns an interleaved part of every parameter's state."""

    world = 2

    def __init__(self, rank: int, meeting: Meeting, cuts: Sequence[float]) -> None:
        self.rank, self.meeting, self.cuts = rank, meeting, cuts

    def partition(self, parameters: Sequence[ParameterSpec]) -> list[Extent]:
        owned = []
        for spec in parameters:
            edges = [0, *(int(cut * spec.elements) for cut in self.cuts), spec.elements]
            for piece, (first, last) in enumerate(pairwise(edges)):
                if piece % 2 == self.rank and (last > first or spec.elements == 0):
                    owned.append(Extent(spec.name, spec.shape, first, last - first))
        return owned

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        specs = [ParameterSpec(name, (len(tensor),)) for name, tensor in weights.items()]
        mine = [(e, weights[e.name][e.offset : e.offset + e.length].clone()) for e in self.partition(specs)]
        for rank, theirs in enumerate(self.meeting.exchange(self.rank, mine)):
            for extent, values in theirs if rank != self.rank else ():
                weights[extent.name][extent.offset : extent.offset + extent.length].copy_(values)

    def sum_shards(self, tensor: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.rank, tensor.clone())
        return tensor.copy_(torch.stack(parts).sum(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", [(0.5,), (0.3, 0.31, 0.9)])
def test_two_shards_train_like_one_rank(dtype, cuts):
    batches = [toy_batches(CONFIG, 2, step=step) for step in range(1, 6)]
    # in bf16 the last bit of a norm could flip the rounding of a working copy, which moves the loss by 1e-3
    clip = 0.3 if dtype == "fp32" else None
    alone = Harness(ToyModel(CONFIG), dtype=dtype, clip=clip)
    expected = [alone.step(b) for b in batches]
    meeting = Meeting(2)

    def work(rank: int):
        harness = Harness(ToyModel(CONFIG), Sharded(rank, meeting, cuts), dtype=dtype, clip=clip)
        return [harness.step(b) for b in batches], harness.weights(), harness.memory

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    owned = sum(slot.extent.length for _, _, memory in results for slot in memory.buffers.slots)
    assert owned == sum(spec.elements for spec in alone.memory.model.parameters)
    for losses, weights, memory in results:
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, tensor in alone.weights().items():
            assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-6), name
        if dtype == "bf16":  # masters for the owned share only, but for alignment
            slots = memory.buffers.slots
            assert memory.buffers.masters.numel() <= sum(s.extent.length for s in slots) + 64 * len(slots)
    for name, tensor in results[0][1].items():
        assert torch.equal(tensor, results[1][1][name])
