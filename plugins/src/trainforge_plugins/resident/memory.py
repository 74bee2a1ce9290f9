"""Memory `resident`: the whole model on the device, micro-batches one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainforge.context import Context
from trainforge.errors import CheckpointError, ConfigError
from trainforge.stages import (
    Batch,
    Memory,
    ParameterSpec,
    PartState,
    Ready,
    Sink,
    UpdateFunction,
)
from trainforge.toolbox.chunked_loss import chunked_cross_entropy
from trainforge.toolbox.compiling import check_compiler
from trainforge.toolbox.dtypes import working_dtype
from trainforge.toolbox.micro_batch import losses_of, train_micro_batch
from trainforge.toolbox.parameters import global_norm, move_buffers, persistent_buffers, squared_norms
from trainforge.toolbox.recompute import recompute_blocks
from trainforge.toolbox.sampling import sample
from trainforge_plugins.resident.buffers import Buffers
from trainforge_plugins.resident.gradients import Gradients


class Resident(Memory):
    """Masters, working copies, gradients, optimizer state and activations on one device.

    In fp32 the working copies are the masters. In bf16 the model computes with copies that are rounded from the
    masters after each update, and each micro-batch's gradient is added to an fp32 buffer as soon as it is complete.
    """

    def __init__(self, ctx: Context) -> None:
        self.model, self.comm, self.device = ctx.model, ctx.comm, ctx.device
        self.loss_chunk, self.compiled = ctx.train.loss_chunk, ctx.train.compile
        trainable = [spec for spec in self.model.parameters if spec.trainable]
        if not trainable:
            raise ConfigError(
                "every parameter is frozen, so there is nothing to train: let some have gradients"
            )
        owned = self.comm.partition(trainable)
        dtype = working_dtype(ctx.train, ctx.device)
        self.buffers = Buffers(self.model, ctx.optimizer, owned, dtype, ctx.device)
        self.module = self.model.module.train()
        self.model.load_buffers()
        move_buffers(self.module, ctx.device)
        elements = sum(spec.elements for spec in self.model.parameters)
        with ctx.console.task("loading weights", elements, "parameters") as task:
            self.buffers.load_initial(task)
        flat = self.buffers.flat_gradients()
        self.gradients = (flat,)
        self._accumulate = Gradients(flat, self.buffers.parameters, in_place=dtype == torch.float32)
        self._shape_blocks(ctx)
        order = {name: place for place, name in enumerate(sorted(spec.name for spec in trainable))}
        places = [order[slot.spec.name] for slot in self.buffers.slots]
        self._norm_places = torch.tensor(places, dtype=torch.long, device=ctx.device)
        self._published: Ready | None = None

    def _shape_blocks(self, ctx: Context) -> None:
        if ctx.train.recompute is True:
            recompute_blocks(self.module, self.model.blocks)
        if ctx.train.compile:
            check_compiler(ctx.device)
            for name in self.model.blocks:
                self.module.get_submodule(name).compile()

    def forward_backward(self, batches: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        """Take the micro-batches one after the other; those without a supervised token are left out."""
        self._use_weights()
        contributing = [batch for batch in batches if batch.supervised > 0]
        total = torch.zeros((), device=self.device)
        with self._accumulate.step(sink, len(contributing)) as next_micro_batch:
            for batch in contributing:
                next_micro_batch()
                total += self._micro_batch(batch, scale)
        return total

    def _micro_batch(self, batch: Batch, scale: float) -> Tensor:
        return train_micro_batch(self.model, batch, scale, self._loss, self.device)

    def _loss(self, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
        head_parameters = [self.buffers.parameters[name] for name in self.model.head_parameters]
        return chunked_cross_entropy(hidden, labels, self.model.head, head_parameters, self.loss_chunk, scale)

    def grad_norm(self) -> Tensor:
        """L2 norm of this step's gradients over all ranks that share a replica, 0-dim fp32."""
        squares = torch.zeros(len(self.buffers.trainable), dtype=torch.float64, device=self.device)
        if self.buffers.slots:
            squares.index_add_(
                0, self._norm_places, squared_norms([slot.grad for slot in self.buffers.slots])
            )
        return global_norm(self.comm.sum_shards(squares))

    def apply(self, update: UpdateFunction, used: frozenset[str]) -> None:
        """Update at once, round, publish."""
        slots = [slot for slot in self.buffers.slots if slot.extent.name in used]
        if slots:
            update(slots)
        self._refresh()

    def _refresh(self) -> None:
        self.buffers.round()
        self._published = self.comm.publish(self.buffers.published)

    def _use_weights(self) -> None:
        """Wait for the weights that other ranks sent, in stream order on a device."""
        if self._published is not None:
            self._published.wait()
            self._published = None

    def drain(self) -> None:
        """Leave nothing pending."""
        self._use_weights()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self._use_weights()
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Summed cross-entropy of each batch, without dropout."""
        with self._inference():
            return losses_of(self.model, batches, self._loss, self.device)

    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """Sample by running the model over the growing text (the last `max_positions` tokens of it)."""
        with self._inference():
            return sample(self.model, prompt, count, temperature, seed, self.device, compiled=self.compiled)

    def weights(self, name: str) -> Tensor:
        """The whole master on the CPU: exact bits, put together from the shards of a replica."""
        spec = self._spec(name)
        whole = torch.zeros(spec.elements)
        if not spec.trainable:
            self.model.load(name, whole, spec.extent)
            return whole.view(spec.shape)
        extents = [slot.extent for slot in self.buffers.slots if slot.extent.name == name]
        for extent in extents:
            whole[extent.offset : extent.offset + extent.length] = self.buffers.master(extent).cpu()
        if self.comm.world > 1:  # as integers, since adding zeros to a float could lose a sign
            bits = whole.view(torch.int32).to(self.device)
            whole = self.comm.sum_shards(bits).cpu().view(torch.float32)
        return whole.view(spec.shape)

    def _spec(self, name: str) -> ParameterSpec:
        return next(spec for spec in self.model.parameters if spec.name == name)

    def state(self) -> PartState:
        """Masters, optimizer state, and the module's persistent buffers."""
        return PartState(tensors=(*self.buffers.named_tensors(), *persistent_buffers(self.module)))

    def load(self, version: int, data: Mapping[str, Any]) -> None:
        """Round the working copies again, and fetch what other ranks own."""
        if version != 1:
            raise CheckpointError(f"the weights were saved in layout {version}; this version reads layout 1")
        self.buffers.spread_numbers()
        self._refresh()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._accumulate.close()
