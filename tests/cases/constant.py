"""A model plugin: a parameter of ones whose gradient is 0.125 in every step, by way of an auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider
from trainforge.stages import Batch, Extent, ModelSpec, ParameterSpec

GRADIENT = 0.125


class Constant(ModelSpec):
    """`weight` is trained; the head is frozen and of no account. Keeps the working copy of every forward in `seen`."""

    vocab_size, max_positions, blocks, head_parameters = 61, None, (), ("head",)

    def __init__(self) -> None:
        with torch.device("meta"):
            self.module: Any = nn.Module()
            self.module.weight = nn.Parameter(torch.empty(8))
            self.module.head = nn.Parameter(torch.empty(61, 4), requires_grad=False)
        self.parameters = (ParameterSpec("weight", (8,)), ParameterSpec("head", (61, 4), trainable=False))
        self.seen: list[Tensor] = []

    def flops_per_token(self, tokens: int) -> float:
        return 1.0

    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        out.fill_(1.0)

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        weight = self.module.weight
        if self.module.training:
            self.seen.append(weight.detach().clone())
        # the hidden states depend on the weight only in form: their share of its gradient is exactly zero
        return (0 * weight[:4]).expand(*batch.input_ids.shape, 4), GRADIENT * weight.float().sum()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.module.head.t()


class Last:
    """Keeps what the test asks about."""

    @hookimpl
    def forge_step_ended(self, run: Any, step: int) -> None:
        found = {"master": run.stages.memory.weights("weight"), "seen": run.stages.model.seen}
        torch.save(found, run.path / "found.pt")


@hookimpl
def forge_model() -> Provider:
    return Provider(build=lambda ctx, config: Constant())


@hookimpl
def forge_observer() -> Provider:
    return Provider(build=lambda ctx, config: Last())
