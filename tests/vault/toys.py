"""Stages of vault over state that is only tensors, and spans of it as a snapshot sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.dcp.toys import Toy
from tests.support.context import make_context
from torch import Tensor

from trainforge.stages import Comm, Extent, NamedTensor, ParameterSpec, PartState, Slot
from trainforge.toolbox.halves import join, split
from trainforge_loongforge.vault import VaultSection, build
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint

Place = tuple[str, str]


class Split:
    """A part whose master `name` is fp32, kept in halves, in one span or several."""

    def __init__(self, name: str, values: Tensor, edges: Iterable[int] | None = None) -> None:
        self.name, self.shape = name, tuple(values.shape)
        flat = values.reshape(-1)
        self.edges = [0, *(edges or ()), flat.numel()]
        self.high = [torch.empty(b - a, dtype=torch.bfloat16) for a, b in self._spans()]
        self.low = [torch.empty(b - a, dtype=torch.int16) for a, b in self._spans()]
        self.fill(flat)

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.edges, self.edges[1:], strict=False))

    def fill(self, values: Tensor) -> None:
        for (begin, end), high, low in zip(self._spans(), self.high, self.low, strict=True):
            split(values[begin:end].contiguous(), high, low)

    def values(self) -> Tensor:
        out = torch.empty(self.edges[-1])
        for (begin, end), high, low in zip(self._spans(), self.high, self.low, strict=True):
            join(high, low, out[begin:end])
        return out

    def state(self) -> PartState:
        spans = zip(self._spans(), self.high, self.low, strict=True)
        return PartState(
            tensors=tuple(
                NamedTensor("master", Extent(self.name, self.shape, begin, end - begin), high, low)
                for (begin, end), high, low in spans
            )
        )

    def load(self, version: int, data: dict[str, Any]) -> None:
        pass


def stage_in(
    run_dir: Path,
    trainable: Iterable[str] = (),
    *,
    rank: int = 0,
    world: int = 1,
    comm: Comm | None = None,
    keep: int = 2,
    reads: bool = False,
    chunk_bytes: int | None = None,
    **section: Any,
) -> VaultCheckpoint:
    """The stage as a run has it whose updates change the parameters `trainable`; with `reads`, as readers have it."""
    built: dict[str, Any] = {"comm": comm or Comm()}
    if not reads:
        parameters = tuple(ParameterSpec(name, (1,)) for name in trainable)
        optimizer = SimpleNamespace(state=lambda spec: {})
        built |= {"model": SimpleNamespace(parameters=parameters), "optimizer": optimizer}
    ctx = make_context(run_dir=run_dir, rank=rank, world=world, plugin="vault", keep=keep, built=built)
    stage = build(ctx, VaultSection(**section))
    assert isinstance(stage, VaultCheckpoint)
    if chunk_bytes is not None:
        stage.chunk_bytes = chunk_bytes
    return stage


def step_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def keyed(tensors: Mapping[Place, Tensor], data: Any = None) -> Toy:
    """A part of whole tensors by key and name."""
    return Toy({place: [(tuple(t.shape), 0, t)] for place, t in tensors.items()}, data)


def bits(tensor: Tensor) -> bytes:
    """Its elements' bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(tensors: Mapping[Any, Tensor]) -> dict[Any, bytes]:
    return {place: bits(tensor) for place, tensor in tensors.items()}


def other_bits(tensors: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Tensors like these, contiguous, in which every byte is different; booleans are turned."""
    found = {}
    for place, tensor in tensors.items():
        copy = tensor.detach().contiguous().clone()
        content = copy.view(-1).view(torch.uint8)
        content.bitwise_xor_(1 if copy.dtype is torch.bool else 255)
        found[place] = copy
    return found


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bytes at all: infinities, every kind of NaN, denormal numbers. Booleans are 0 or 1."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * kind.itemsize
    content = torch.randint(0, 2 if dtype == "bool" else 256, (size,), generator=generator, dtype=torch.uint8)
    return content.view(kind).reshape(shape)


def slot_of(name: str) -> Slot:
    """A slot as an update gets it, as far as a checkpoint stage looks at it."""
    spec, nothing = ParameterSpec(name, (1,)), torch.zeros(1)
    return Slot(spec, spec.extent, nothing, nothing, {})
