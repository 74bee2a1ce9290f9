"""Memory `stream`: masters and optimizer state in host RAM; blocks pass through a few slots on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainforge.context import Context
from trainforge.errors import CheckpointError, ConfigError
from trainforge.seeding import preserved
from trainforge.stages import Batch, FlatBuffer, Memory, ParameterSpec, PartState, Sink, UpdateFunction
from trainforge.toolbox.chunked_loss import chunked_cross_entropy
from trainforge.toolbox.compiling import check_compiler
from trainforge.toolbox.dtypes import working_dtype
from trainforge.toolbox.loading import initial_values
from trainforge.toolbox.micro_batch import losses_of, train_micro_batch
from trainforge.toolbox.parameters import bind, global_norm, move_buffers, persistent_buffers
from trainforge.toolbox.sampling import sample
from trainforge.toolbox.streams import StreamsLike
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.gradients import Gradients
from trainforge_megatrain.stream.offload import Offload
from trainforge_megatrain.stream.rooms import Rooms
from trainforge_megatrain.stream.units import Place, Unit, allocate, divide
from trainforge_megatrain.stream.updates import Updates
from trainforge_megatrain.stream.walk import Walk, micro_batch_threads

WAITS = (
    "a block's update before its weights go up",
    "a block's update before its gradients are zeroed",
    "the readers of a room before it is overwritten",
    "a block's weights before it computes",
    "gradients on their way before their box is filled again",
    "gradients before they go down",
    "gradients before the host reads them",
    "gradients before the update reads them",
    "a block's inputs before they go down",
    "inputs on their way down before their memory is used again",
    "inputs that came back before they are read or forgotten",
    "the last use of memory before inputs come back into it",
    "inputs on their way down before they come back",
)
"""Every place where this memory waits. Leaving out any one of them is a race."""


class Stream(Memory):
    """Masters, moments and gradients in host RAM, as far as they do not fit on the device.

    Attributes:
        explained: `explained(doing)` is a context that words what goes wrong for lack of device memory.
        closing: what else is to be undone at the end.

    Args:
        ctx: the run.
        section: this plugin's part of the recipe.
        streams: of the device, or a fake.
        worker: does the updates in host RAM, one at a time and in order.
        place: sets each unit's place, and whether it runs again in backward; says whether the inputs of those that do
            go to host RAM.
    """

    def __init__(
        self,
        ctx: Context,
        section: StreamSection,
        streams: StreamsLike,
        worker: Executor,
        place: Callable[[Sequence[Unit]], bool],
    ) -> None:
        self.model, self.device, self.streams = ctx.model, ctx.device, streams
        self.loss_chunk, self.compiled = ctx.train.loss_chunk, ctx.train.compile
        self.units = divide(self.model)
        if not any(unit.trained for unit in self.units):
            raise ConfigError(
                "every parameter is frozen, so there is nothing to train: let some have gradients"
            )
        for unit in self.units:
            unit.again = ctx.train.recompute is True
        offload = place(self.units)
        self.dtype = working_dtype(ctx.train, ctx.device)
        sums = torch.float32 if ctx.batching.accumulate > 1 else self.dtype
        travel = torch.float32 if section.grads == "fp32" else self.dtype
        for unit in self.units:
            on_device = unit.place is Place.DEVICE
            take = self._on_device if on_device else functools.partial(self._on_host, section.pin)
            grads = sums if on_device else travel
            allocate(unit, ctx.optimizer, take, self.dtype, grads, halves=section.master == "split")
        self.rooms = Rooms(self.units, section.slots, streams, ctx.device, self.dtype, self.wait)
        self.grads = Gradients(self.units, streams, ctx.device, sums, travel, self.wait)
        self.offload = Offload(streams, ctx.device, self.wait, pin=section.pin) if offload else None
        self.updates = Updates(ctx.optimizer, streams, worker, self.wait)
        self.gradients = tuple(_flat_buffer(unit) for unit in reversed(self.units) if unit.trained)
        self.blocks = [unit for unit in self.units if unit.block is not None]
        self.others = [unit for unit in self.units if unit.block is None]
        self.head = [unit for unit in self.units[-1:] if self.blocks and unit.block is None]
        self.walk: Walk | None = None
        self._threads = micro_batch_threads(ctx.batching.accumulate)
        self.explained: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext()
        self.closing = ExitStack()
        self._steps = 0
        self._bind()
        self._intercept(ctx)
        self._load_initial(ctx)

    # ----------------------------------------------------------------------------------------------- building

    def _on_device(self, elements: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def _on_host(self, pin: bool, elements: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        return self.streams.host(elements, dtype, pinned=pinned and pin)

    def _bind(self) -> None:
        """Put parameters into the module that alias rooms, and collect their gradients."""
        self.parameters: dict[str, nn.Parameter] = {}
        self._owners: dict[Tensor, tuple[Unit, ParameterSpec]] = {}
        self._handles = []
        for unit in self.units:
            room = self.rooms.weights(unit)
            for spec in unit.specs:
                tensor = unit.layout.span(room, spec).view(spec.shape)
                parameter = bind(self.model.module, spec.name, tensor, spec.aliases, trainable=spec.trainable)
                self.parameters[spec.name] = parameter
                self._owners[parameter] = (unit, spec)
                if spec.trainable:
                    collect = functools.partial(self._collect, unit, spec)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(collect))

    def _collect(self, unit: Unit, spec: ParameterSpec, parameter: Tensor) -> None:
        if parameter.grad is not None:  # None: it was collected before it reached autograd
            self.grads.add(unit, spec, parameter.grad)
            parameter.grad = None

    def _intercept(self, ctx: Context) -> None:
        """Have every block's call go through `_call_block`."""
        if self.compiled:
            check_compiler(ctx.device)
        self.module = self.model.module.train()
        self._frozen: set[Unit] = set()  # blocks with no parameter that is trained, of their own or shared
        for unit in self.blocks:
            block = self.module.get_submodule(unit.name)
            if not any(parameter.requires_grad for parameter in block.parameters()):
                self._frozen.add(unit)
            forward = torch.compile(block.forward) if self.compiled else block.forward
            block.forward = functools.partial(self._call_block, unit, forward)
        for spec in [
            spec for unit in self.head for spec in unit.specs
        ]:  # also if the last block is passed by
            owner = self.module.get_submodule(spec.name.rpartition(".")[0])
            hook = owner.register_forward_pre_hook(lambda *_: self._hold(self.head))
            self._handles.append(hook)

    def _load_initial(self, ctx: Context) -> None:
        self.model.load_buffers()
        move_buffers(self.module, self.device)
        elements = sum(spec.elements for spec in self.model.parameters)
        with ctx.console.task("loading weights", elements, "parameters") as task:
            for unit in self.units:
                device = unit.storage.weights.device
                for spec in unit.specs:
                    for offset, values in initial_values(self.model, spec):
                        unit.fill(spec, offset, values.to(device))
                        task.advance(len(values))

    def wait(self, place: str, wait: Callable[[], object]) -> None:
        """Every wait goes through here, so that tests can leave one out."""
        assert place in WAITS
        wait()

    # ----------------------------------------------------------------------------------------------- one step

    def forward_backward(self, batches: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        """Take all micro-batches through the blocks side by side; those without a supervised token are left out."""
        with self.explained("running forward and backward"):
            return self._forward_backward([b for b in batches if b.supervised > 0], scale, sink)

    def _forward_backward(self, contributing: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        total = torch.zeros((), device=self.device)
        self.grads.begin()
        self._steps += 1
        if contributing:
            finish = functools.partial(self.grads.finish, sink=sink)
            self.walk = Walk(
                len(contributing),
                len(self.model.blocks),
                self.streams,
                self.device,
                self._enter,
                finish,
                self._threads,
                self.offload,
            )
            try:
                self._hold([unit for unit in self.others if unit not in self.head])
                for loss in self.walk.run(lambda index: self._micro_batch(contributing[index], scale)):
                    total += loss
            finally:
                self.walk = None
        self.grads.end(self.units, sink)
        self._release()
        return total

    def _micro_batch(self, batch: Batch, scale: float) -> Tensor:
        return train_micro_batch(self.model, batch, scale, self._loss, self.device)

    def _loss(self, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
        self._hold(self.head)
        head = [self.parameters[name] for name in self.model.head_parameters]
        return chunked_cross_entropy(
            hidden, labels, self.model.head, head, self.loss_chunk, scale, self._collect_head
        )

    def _collect_head(self, parameter: Tensor, grad: Tensor) -> None:
        """Add up a gradient of the output head at once: it is as large as the head, and backward would hold it."""
        unit, spec = self._owners[parameter]
        self.grads.add(unit, spec, grad.view(spec.shape))

    def _call_block(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the model calls instead of a block."""
        if self.walk is not None and torch.is_grad_enabled():
            return self.walk.block(unit, forward, args, kwargs, frozen=unit in self._frozen)
        self._enter(unit, 1)
        return forward(*args, **kwargs)

    def _enter(self, unit: Unit, direction: int) -> None:
        self.rooms.enter(unit, direction)
        if direction > 0 and unit is self.blocks[-1]:
            for (
                last
            ) in self.head:  # the last to be updated and the last to be needed: it goes up beside this block
                self.rooms.fetch_ahead(last)

    def _hold(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.rooms.hold(unit)

    def _release(self) -> None:
        self.rooms.leave()
        for unit in self.others:
            self.rooms.release(unit)

    def grad_norm(self) -> Tensor:
        """The norm of this step's gradients, each block's measured on the device before they went down."""
        return global_norm(self.grads.squares)

    def apply(self, update: UpdateFunction, used: frozenset[str]) -> None:
        """Update what lives on the device, and queue the rest in forward order."""
        self.rooms.forget()
        self.updates.apply(self.units, update, used, self.grads.landed.__getitem__)

    def drain(self) -> None:
        """Wait for every update."""
        for unit in self.units:
            unit.settle()

    # ------------------------------------------------------------------------------------------ the rest of a run

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.drain()
        self._hold(self.others)
        self.module.eval()
        try:
            with preserved(self.device), torch.no_grad():
                yield
        finally:
            self.module.train()
            self._release()

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Stream the blocks for each batch; summed cross-entropy of each, without dropout."""
        with self._inference():
            return losses_of(self.model, batches, self._loss, self.device)

    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """Sample by streaming the blocks once per token."""
        with self._inference():
            return sample(self.model, prompt, count, temperature, seed, self.device, compiled=self.compiled)

    def weights(self, name: str) -> Tensor:
        """A copy of a master: exact bits."""
        unit, spec = next((u, s) for u in self.units for s in u.specs if s.name == name)
        whole = torch.empty(spec.elements)
        if spec.trainable:
            unit.settle()
            unit.master(spec, whole)
        else:
            self.model.load(name, whole, spec.extent)
        return whole.view(spec.shape)

    def state(self) -> PartState:
        """Masters, optimizer state, and the module's persistent buffers."""
        named = [tensor for unit in self.units for tensor in unit.named_tensors()]
        return PartState(tensors=(*named, *persistent_buffers(self.module)))

    def load(self, version: int, data: Mapping[str, Any]) -> None:
        """Round again where masters are apart, and forget what is on the device."""
        if version != 1:
            raise CheckpointError(f"the weights were saved in layout {version}; this version reads layout 1")
        for unit in self.units:
            unit.round()
        self.rooms.forget()

    def metrics(self) -> dict[str, float]:
        """Milliseconds per step that launching waited for updates in host RAM, since the last reading."""
        steps, self._steps = max(1, self._steps), 0
        waited, self.rooms.waited_s = self.rooms.waited_s, 0.0
        return {"waited_for_update_ms": waited * 1000 / steps}

    def close(self) -> None:
        """End the threads and take the hooks off."""
        with self.closing:
            for thread in self._threads:
                thread.shutdown()
            for handle in self._handles:
                handle.remove()
            self.updates.close()
            if (
                self.device.type != "cpu"
            ):  # after an error copies may be under way, and their memory is given back
                torch.accelerator.synchronize(self.device)
            self.streams.close()


def _flat_buffer(unit: Unit) -> FlatBuffer:
    specs = unit.trainable
    starts = tuple(unit.layout.starts[spec.name] for spec in specs)
    return FlatBuffer(unit.storage.grads, tuple(spec.extent for spec in specs), starts)
