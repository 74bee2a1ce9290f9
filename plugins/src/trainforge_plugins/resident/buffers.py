"""The flat buffers of `resident`: working copies, masters, gradients, optimizer state, and how they are filled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainforge.context import Task
from trainforge.stages import Extent, FlatBuffer, ModelSpec, NamedTensor, Optimizer, ParameterSpec, Slot
from trainforge.toolbox.loading import initial_values
from trainforge.toolbox.parameters import aligned, bind, flat_layout, round_to_bf16


class Buffers:
    """All storage of a resident model.

    Trainable parameters lie in reverse execution order, so that gradients become final from the front to the back,
    and at the same places in gradients and working copies. In fp32 the owned spans of the working copies are the
    masters; in bf16 masters are a buffer of their own, which holds only the extents that this rank owns.

    Attributes:
        working: working copies of trainable parameters, flat.
        gradient: the flat fp32 gradient buffer, with padding between parameters that is always zero.
        slots: what the optimizer updates, in execution order.
        published: the working copy of every trainable parameter, whole and 1-D, by name.
        parameters: what the module computes with, by name.
    """

    def __init__(
        self,
        model: ModelSpec,
        optimizer: Optimizer,
        owned: list[Extent],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.trainable = [spec for spec in model.parameters if spec.trainable]
        self.frozen = [spec for spec in model.parameters if not spec.trainable]
        self.layout = flat_layout(self.trainable[::-1])
        self.frozen_layout = flat_layout(self.frozen)
        self.working = torch.zeros(self.layout.length, dtype=dtype, device=device)
        self.frozen_working = torch.zeros(self.frozen_layout.length, dtype=dtype, device=device)
        self.gradient = torch.zeros(self.layout.length, device=device)
        self.parameters = self._bind()
        self._place_masters(owned)
        self.slots = self._slots(optimizer)
        self.published = {spec.name: self.layout.span(self.working, spec) for spec in self.trainable}

    def _bind(self) -> dict[str, torch.nn.Parameter]:
        """Put views of the working copies into the module."""
        bound = {}
        for specs, layout, buffer in (
            (self.trainable, self.layout, self.working),
            (self.frozen, self.frozen_layout, self.frozen_working),
        ):
            for spec in specs:
                tensor = layout.span(buffer, spec).view(spec.shape)
                bound[spec.name] = bind(
                    self.model.module, spec.name, tensor, spec.aliases, trainable=spec.trainable
                )
        return bound

    def _place_masters(self, owned: list[Extent]) -> None:
        """Decide where each owned extent's master lies.

        Neighbours stay neighbours, so that rounding takes few kernels: `runs` holds (start among masters, start
        among working copies, length) of each stretch without a hole that another rank owns.
        """
        self.owned: dict[str, list[Extent]] = {}
        self.master_starts: dict[Extent, int] = {}
        self.runs: list[tuple[int, int, int]] = []
        neighbour = -1  # where the next extent must start to continue the last run
        places = [
            (self.layout.starts[extent.name] + extent.offset, extent.length, extent) for extent in owned
        ]
        for start, length, extent in sorted(
            places, key=lambda place: place[:2]
        ):  # empty ones share their start
            self.owned.setdefault(extent.name, []).append(extent)
            if start != neighbour:
                self.runs.append((aligned(sum(self.runs[-1][::2])) if self.runs else 0, start, 0))
            first, working, _ = self.runs[-1]
            self.master_starts[extent] = start if self.dtype == torch.float32 else first + start - working
            end = start + length
            self.runs[-1] = (first, working, end - working)
            complete = extent.offset + extent.length == math.prod(extent.global_shape)
            neighbour = aligned(end) if complete else end
        if self.dtype == torch.float32:
            self.masters = self.working
        else:
            self.masters = torch.zeros(sum(self.runs[-1][::2]) if self.runs else 0, device=self.device)

    def _slots(self, optimizer: Optimizer) -> list[Slot]:
        """Allocate optimizer state for every owned extent."""
        slots = []
        for spec in self.trainable:
            for extent in self.owned.get(spec.name, ()):
                state = {
                    name: torch.zeros(
                        extent.length if wanted.per_element else (),
                        dtype=getattr(torch, wanted.dtype),
                        device=self.device,
                    )
                    for name, wanted in optimizer.state(spec).items()
                }
                grad = self.layout.span(self.gradient, spec, extent.offset, extent.length)
                slots.append(Slot(spec, extent, self.master(extent), grad, state))
        return slots

    def master(self, extent: Extent) -> Tensor:
        """The fp32 master of an owned extent, a 1-D view."""
        start = self.master_starts[extent]
        return self.masters[start : start + extent.length]

    def flat_gradients(self) -> FlatBuffer:
        """The gradient buffer as comm sees it."""
        specs = self.layout.specs
        return FlatBuffer(
            self.gradient,
            tuple(spec.extent for spec in specs),
            tuple(self.layout.starts[spec.name] for spec in specs),
        )

    def round(self) -> None:
        """Round the working copies of all owned extents from their masters; unchanged masters give the same bits."""
        if self.dtype == torch.float32:
            return
        for first, working, length in self.runs:
            round_to_bf16(self.masters[first : first + length], self.working[working : working + length])

    def named_tensors(self) -> list[NamedTensor]:
        """Masters and optimizer state as checkpoints know them; a parameter's single numbers once."""
        named = []
        for slot in self.slots:
            named.append(NamedTensor("master", slot.extent, slot.master))
            first = slot.extent == self.owned[slot.extent.name][0]
            for key, tensor in slot.state.items():
                if tensor.dim():
                    named.append(NamedTensor(key, slot.extent, tensor))
                elif first:
                    named.append(NamedTensor(key, slot.extent.number, tensor.view(1)))
        return named

    def spread_numbers(self) -> None:
        """Give every extent of a parameter the single numbers that its first extent was restored with."""
        numbers: dict[tuple[str, str], Tensor] = {}
        for slot in self.slots:
            for key, tensor in slot.state.items():
                if not tensor.dim():
                    tensor.copy_(numbers.setdefault((slot.extent.name, key), tensor))

    def load_initial(self, task: Task) -> None:
        """Fill masters and working copies with the model's initial weights, a parameter at a time.

        `task` is told how many elements were loaded.

        Raises:
            ConfigError: a weight is not finite.
        """
        for spec in self.model.parameters:
            for offset, values in initial_values(self.model, spec):
                self._fill(spec, offset, values.to(self.device))
                task.advance(len(values))

    def _fill(self, spec: ParameterSpec, offset: int, values: Tensor) -> None:
        layout, buffer = (
            (self.layout, self.working) if spec.trainable else (self.frozen_layout, self.frozen_working)
        )
        target = layout.span(buffer, spec, offset, len(values))
        if self.dtype == torch.float32:
            target.copy_(values)
            return
        round_to_bf16(values, target)
        for extent in self.owned.get(spec.name, ()):
            first = max(offset, extent.offset)
            last = min(offset + len(values), extent.offset + extent.length)
            if first < last:
                part = values[first - offset : last - offset]
                self.master(extent)[first - extent.offset : last - extent.offset].copy_(part)
