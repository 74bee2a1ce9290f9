"""`ReferenceMemory`: what every memory must equal, as a plain loop over fp32 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainforge.seeding import preserved, seed_everything
from trainforge.stages import (
    IGNORED,
    Batch,
    Extent,
    FlatBuffer,
    Memory,
    NamedTensor,
    ParameterSpec,
    PartState,
    Sink,
    Slot,
    StateSpec,
    UpdateFunction,
)

if TYPE_CHECKING:
    from trainforge.context import Context


class ReferenceMemory(Memory):
    """One fp32 tensor per parameter, micro-batches one after another, whole logits, updates at once.

    No trick of any kind, so that its numbers can be trusted; also the yardstick for how short a memory can be.
    """

    def __init__(self, ctx: Context) -> None:
        self._model, self._comm, self._device = ctx.model, ctx.comm, ctx.device
        self._specs = {spec.name: spec for spec in ctx.model.parameters}
        self._parameters = {spec.name: self._bind(spec) for spec in ctx.model.parameters}
        ctx.model.module.to(ctx.device)  # buffers
        ctx.model.load_buffers()
        self._buffer = self._gradient_buffer()
        self.gradients = (self._buffer,)
        self._slots = [self._slot(e, ctx.optimizer.state(self._specs[e.name])) for e in self._owned()]

    def _bind(self, spec: ParameterSpec) -> nn.Parameter:
        values = torch.empty(spec.elements)
        self._model.load(spec.name, values, spec.extent)
        parameter = nn.Parameter(values.view(spec.shape).to(self._device), requires_grad=spec.trainable)
        for name in (spec.name, *spec.aliases):
            owner, _, attribute = name.rpartition(".")
            setattr(self._model.module.get_submodule(owner), attribute, parameter)
        return parameter

    def _gradient_buffer(self) -> FlatBuffer:
        extents = [spec.extent for spec in reversed(self._specs.values()) if spec.trainable]
        starts = [sum(e.length for e in extents[:i]) for i in range(len(extents))]
        total = torch.zeros(sum(e.length for e in extents), device=self._device)
        return FlatBuffer(total, tuple(extents), tuple(starts))

    def _owned(self) -> list[Extent]:
        return self._comm.partition(list(self._specs.values()))

    def _slot(self, extent: Extent, state: dict[str, StateSpec]) -> Slot:
        index = [whole.name for whole in self._buffer.extents].index(extent.name)
        tensors = {
            key: torch.zeros(
                (extent.length,) if s.per_element else (), dtype=getattr(torch, s.dtype), device=self._device
            )
            for key, s in state.items()
        }
        master = self._span(self._parameters[extent.name], extent).clone()
        return Slot(
            self._specs[extent.name], extent, master, self._span(self._buffer.span(index), extent), tensors
        )

    @staticmethod
    def _span(tensor: Tensor, extent: Extent) -> Tensor:
        return tensor.detach().view(-1)[extent.offset : extent.offset + extent.length]

    def forward_backward(self, batches: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        """Walk the micro-batches in order; tell the sink at the end, in reverse execution order."""
        self._model.module.train()
        total = torch.zeros((), device=self._device)
        for batch in batches:
            if batch.supervised:
                seed_everything(batch.seed)
                loss, auxiliary = self._loss(batch.to(self._device))
                total += loss.detach() * scale
                torch.autograd.backward(scale * (loss + batch.supervised * auxiliary))
        for index, extent in enumerate(self._buffer.extents):
            parameter, span = self._parameters[extent.name], self._buffer.span(index)
            if parameter.grad is None:
                span.zero_()
            else:
                span.copy_(parameter.grad.view(-1))
                sink(extent, None)
            parameter.grad = None
        return total

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor | float]:
        hidden, auxiliary = self._model.hidden(batch)
        logits = self._model.head(hidden.flatten(0, 1)).float()
        loss = functional.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, 0.0 if auxiliary is None else auxiliary

    def grad_norm(self) -> Tensor:
        """The norm of what this rank holds, added up over the shards."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for slot in sorted(self._slots, key=lambda slot: (slot.extent.name, slot.extent.offset)):
            total += slot.grad.double().pow(2).sum()
        return self._comm.sum_shards(total).sqrt()

    def apply(self, update: UpdateFunction, used: frozenset[str]) -> None:
        """Update at once."""
        update([slot for slot in self._slots if slot.extent.name in used])
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        for slot in self._slots:
            self._span(self._parameters[slot.extent.name], slot.extent).copy_(slot.master)
        trained = {n: p.detach().view(-1) for n, p in self._parameters.items() if p.requires_grad}
        if ready := self._comm.publish(trained):
            ready.wait()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Losses without dropout; the generators are given back as they were."""
        self._model.module.eval()
        with preserved(self._device):
            losses = [self._loss(batch.to(self._device))[0] for batch in batches]
        return torch.stack(losses) if losses else torch.zeros(0, device=self._device)

    def weights(self, name: str) -> Tensor:
        """A copy of the whole weight: in fp32 the working copy is the master."""
        return self._parameters[name].detach().cpu().clone()

    def state(self) -> PartState:
        """Masters and optimizer state."""
        tensors = [NamedTensor("master", slot.extent, slot.master) for slot in self._slots]
        for slot in self._slots:
            for key, tensor in slot.state.items():
                tensors.append(NamedTensor(key, slot.extent if tensor.dim() else slot.extent.number, tensor))
        return PartState(tensors=tuple(tensors))

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Copy the masters into the weights."""
        self._refresh()
