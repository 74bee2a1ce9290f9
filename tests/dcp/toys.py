"""Parts and stages for the tests of dcp: state that is only tensors and plain data."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.context import make_context
from torch import Tensor

from trainforge.stages import Comm, Extent, NamedTensor, PartState
from trainforge_plugins.dcp import DcpSection, build
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint


class Toy:
    """A part that holds the given spans of global tensors: `{(key, name): [(shape, offset, tensor), ...]}`."""

    def __init__(
        self, spans: dict[tuple[str, str], list[tuple[tuple[int, ...], int, Tensor]]], data: Any = None
    ):
        self.spans, self.data, self.loaded = spans, data or {}, None

    def state(self) -> PartState:
        return PartState(
            3,
            self.data,
            tuple(
                NamedTensor(key, Extent(name, shape, offset, tensor.numel()), tensor)
                for (key, name), spans in self.spans.items()
                for shape, offset, tensor in spans
            ),
        )

    def load(self, version: int, data: dict[str, Any]) -> None:
        self.loaded = (version, data)


def whole(**tensors: Tensor) -> Toy:
    """A part that holds whole tensors under the key `master`."""
    return Toy({("master", name): [(tuple(t.shape), 0, t)] for name, t in tensors.items()})


def varied(seed: int) -> dict[str, Tensor]:
    """Tensors of several dtypes and shapes, by name."""
    g = torch.Generator().manual_seed(seed)
    return {
        "layers.0.w": torch.randn(12, 7, generator=g),
        "half": torch.randn(33, generator=g).bfloat16(),
        "count": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 4),
        "ids": torch.randint(0, 2**40, (5,), generator=g),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.randint(0, 255, (3, 3), generator=g, dtype=torch.uint8),
    }


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def checkpoint(
    run_dir: Path,
    *,
    rank: int = 0,
    world: int = 1,
    comm: Comm | None = None,
    keep: int = 2,
    device: str = "cpu",
    reads: bool = False,
    **section: Any,
) -> DcpCheckpoint:
    """The stage as a run has it; with `reads`, as those have it who read or convert outside of one."""
    built: dict[str, Any] = {"comm": comm or Comm()}
    if not reads:
        built |= {"model": SimpleNamespace(parameters=()), "optimizer": None}
    ctx = make_context(
        run_dir=run_dir, rank=rank, world=world, plugin="dcp", keep=keep, built=built, device=device
    )
    stage = build(ctx, DcpSection(**section))
    assert isinstance(stage, DcpCheckpoint)
    return stage


class ThreadComm(Comm):
    """Ranks that are threads: `gather` by way of a shared list and a barrier."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(20)
        values = list(self._shared)
        self._barrier.wait(20)
        return values


def on_ranks(world: int, work: Any) -> list[BaseException | None]:
    """Run `work(rank, comm)` on that many ranks; gives what each raised."""
    shared, barrier = [None] * world, threading.Barrier(world)
    raised: list[BaseException | None] = [None] * world

    def one(rank: int) -> None:
        try:
            work(rank, ThreadComm(rank, shared, barrier))
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
