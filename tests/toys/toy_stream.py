"""A toy memory for models that do not fit on the device: masters stay in host RAM and blocks pass through two slots.

All micro-batches of a step go through a block while it is loaded, forward and backward; gradients come down to the
host block by block; updates are queued in forward order and waited for just before a block's next load. Each
micro-batch is a thread that runs the model's own forward; one runs at a time, and the baton is passed at every block.

A plugin in one file: `forge run --plugins ./tests/toys/toy_stream.py`. It computes in fp32, to be bit-equal to a
memory that holds everything. (That all micro-batches visit a block in turn is the idea of RoundPipe and of MegaTrain.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainforge.errors import ConfigError
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits
from trainforge.stages import (
    Batch,
    FlatBuffer,
    Memory,
    NamedTensor,
    ParameterSpec,
    PartState,
    Sink,
    Slot,
    UpdateFunction,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainforge.context import Context
    from trainforge.toolbox.parameters import Layout
    from trainforge.toolbox.streams import Event, StreamsLike

WAITS = (
    "the update of a block before its load",
    "the readers of a slot before it is overwritten",
    "a block's upload before it computes",
    "a gradient's download before its slot is overwritten",
    "backward of a block before its gradients go down",
    "a gradient's download before the host reads it",
)
"""Every place where this memory waits. Leaving out any one of them is a race."""


class ToyStreamSection(Section):
    """Nothing to choose."""


@hookimpl
def forge_memory() -> Provider:
    """Give the streaming memory."""
    return Provider(
        build=build, config=ToyStreamSection, traits=Traits(gradients_on="host", holds_shards=False)
    )


def build(ctx: Context, config: ToyStreamSection) -> ToyStream:
    """Build it on the device's own streams."""
    from trainforge.toolbox.streams import Streams

    return ToyStream(ctx, Streams(ctx.device), ThreadPoolExecutor(1, "update"))


@dataclass
class Unit:
    """What is uploaded and updated at a time: a block; or all that is outside of the blocks, which stays loaded."""

    specs: list[ParameterSpec]
    layout: Layout
    master: Tensor  # flat, in host RAM
    slots: list[Slot] = field(default_factory=list)
    update: Callable[[], object] = lambda: None  # waits for the queued update


@dataclass
class Room:
    """Room on the device for one unit's weights and gradients, and the events that guard it."""

    weights: Tensor
    grads: Tensor
    uploaded: Event
    read: Event
    computed: Event
    downloaded: Event
    holds: Unit | None = None


class ToyStream(Memory):
    """Masters, moments and gradients in host RAM; two blocks and the stem and head on the device."""

    def __init__(self, ctx: Context, streams: StreamsLike, worker: Executor) -> None:
        import torch

        from trainforge.toolbox.parameters import flat_layout, move_buffers

        if ctx.train.dtype == "bf16":
            raise ConfigError("toy_stream computes in fp32: set train.dtype to fp32")
        self.model, self.comm, self.device = ctx.model, ctx.comm, ctx.device
        self.loss_chunk, self.streams, self.worker = ctx.train.loss_chunk, streams, worker
        self.upload, self.download = streams.stream("upload"), streams.stream("download")
        self.trainable = [spec for spec in self.model.parameters if spec.trainable]
        layout = flat_layout(self.trainable[::-1])
        self.gradient = streams.host(layout.length, torch.float32)
        extents = tuple(spec.extent for spec in layout.specs)
        self.gradients = (FlatBuffer(self.gradient, extents, tuple(layout.starts[e.name] for e in extents)),)
        self.spans = {spec.name: layout.span(self.gradient, spec) for spec in layout.specs}
        self.stays, *self.blocks = [self._unit(b, ctx) for b in (None, *range(len(self.model.blocks)))]
        self.home = self._room(self.stays.layout.length)
        size = max((unit.layout.length for unit in self.blocks), default=0)
        self.rooms = [self._room(size), self._room(size)]
        self.parameters: dict[str, nn.Parameter] = {}
        self._bind(self.stays, self.home)
        for index, unit in enumerate(self.blocks):
            self._bind(unit, self.rooms[index % 2])
            block = self.model.module.get_submodule(self.model.blocks[index])
            block.forward = functools.partial(self._enter_block, index, block.forward)
        self.model.load_buffers()
        move_buffers(self.model.module, ctx.device)
        self.model.module.train()
        self.walk: Walk | None = None
        self.anchor = torch.ones((), device=ctx.device, requires_grad=True)

    # ------------------------------------------------------------------------------------------------ storage

    def _unit(self, block: int | None, ctx: Context) -> Unit:
        import torch

        from trainforge.toolbox.parameters import flat_layout

        specs = [spec for spec in self.model.parameters if spec.block == block]
        layout = flat_layout(specs)
        unit = Unit(specs, layout, self.streams.host(layout.length, torch.float32))
        for spec in specs:
            master = layout.span(unit.master, spec)
            self.model.load(spec.name, master, spec.extent)
            if spec.trainable:
                state = {
                    key: self.streams.host(spec.elements, getattr(torch, s.dtype))
                    if s.per_element
                    else self.streams.host(1, getattr(torch, s.dtype)).view(())
                    for key, s in ctx.optimizer.state(spec).items()
                }
                unit.slots.append(Slot(spec, spec.extent, master, self.spans[spec.name], state))
        return unit

    def _room(self, elements: int) -> Room:
        import torch

        weights, grads = (torch.zeros(elements, device=self.device) for _ in range(2))
        return Room(weights, grads, *(self.streams.event() for _ in range(4)))

    def _bind(self, unit: Unit, room: Room) -> None:
        from trainforge.toolbox.parameters import bind

        for spec in unit.specs:
            tensor = unit.layout.span(room.weights, spec).view(spec.shape)
            self.parameters[spec.name] = bind(
                self.model.module, spec.name, tensor, spec.aliases, trainable=spec.trainable
            )

    def wait(self, place: str, wait: Callable[[], object]) -> None:
        """Every wait goes through here, so that tests can leave one out."""
        assert place in WAITS
        wait()

    # --------------------------------------------------------------------------------------- loading, dropping

    def request(self, unit: Unit, room: Room) -> None:
        """Start to upload a unit into its room, unless it is there."""
        if room.holds is unit:
            return
        self.wait("the update of a block before its load", unit.update)
        self.wait("the readers of a slot before it is overwritten", lambda: self.upload.wait(room.read))
        self.streams.copy(room.weights[: unit.layout.length], unit.master, self.upload)
        room.uploaded.record(self.upload)
        room.holds = unit

    def load_block(self, index: int, following: int | None) -> None:
        """Have block `index` ready for the compute stream, and start to upload the one that comes next."""
        room = self.rooms[index % 2]
        self.request(self.blocks[index], room)
        self.wait("a block's upload before it computes", room.uploaded.wait)
        if following is not None and 0 <= following < len(self.blocks):
            self.request(self.blocks[following], self.rooms[following % 2])

    def drop(self, index: int) -> None:
        """Say that what was given to the compute stream so far is the last to read block `index`."""
        self.rooms[index % 2].read.record()

    def load_home(self) -> None:
        """Upload what stays, if it was updated."""
        self.request(self.stays, self.home)
        self.wait("a block's upload before it computes", self.home.uploaded.wait)

    # ------------------------------------------------------------------------------------------------ gradients

    def begin_gradients(self, room: Room) -> None:
        """Before gradients are written into a room: those of its last block must have left it."""
        self.wait("a gradient's download before its slot is overwritten", room.downloaded.wait)

    def add_gradient(self, unit: Unit, room: Room, spec: ParameterSpec, grad: Tensor | None) -> None:
        """Add one micro-batch's gradient of a parameter."""
        if grad is None:
            return
        span = unit.layout.span(room.grads, spec)
        if spec.name in self.used:
            span.add_(grad.reshape(-1))
        else:
            span.copy_(grad.reshape(-1))
            self.used.add(spec.name)

    def end_gradients(self, unit: Unit, room: Room) -> None:
        """Send a unit's gradients to the host and tell the sink, in reverse execution order."""
        room.computed.record()
        place = "backward of a block before its gradients go down"
        self.wait(place, lambda: self.download.wait(room.computed))
        finished = [slot for slot in reversed(unit.slots) if slot.spec.name in self.used]
        for slot in unit.slots:
            if slot.spec.name in self.used:
                self.streams.copy(slot.grad, unit.layout.span(room.grads, slot.spec), self.download)
            else:
                slot.grad.zero_()
        room.downloaded.record(self.download)
        for slot in finished:
            self.sink(slot.extent, Landed(self, room.downloaded))

    # --------------------------------------------------------------------------------------------------- steps

    def forward_backward(self, batches: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        """Take all micro-batches through each block in turn."""
        import torch

        self.sink, self.used = sink, set[str]()
        contributing = [batch for batch in batches if batch.supervised]
        self.load_home()
        total = torch.zeros((), device=self.device)
        if contributing:
            self.walk = Walk(self, contributing, scale)
            try:
                for loss in self.walk.run():
                    total += loss
            finally:
                self.walk = None
        self._collect_home()
        for unit in self.blocks if not contributing else ():
            for slot in unit.slots:
                slot.grad.zero_()
        return total

    def _collect_home(self) -> None:
        """Move what autograd accumulated for the stem and the head."""
        self.begin_gradients(self.home)
        for spec in self.stays.specs:
            self.add_gradient(self.stays, self.home, spec, self.parameters[spec.name].grad)
            self.parameters[spec.name].grad = None
        self.end_gradients(self.stays, self.home)
        self.home.read.record()

    def loss(self, batch: Batch, scale: float) -> tuple[Tensor, Tensor | None]:
        """The scaled loss of a micro-batch, and its auxiliary loss."""
        from trainforge.toolbox.chunked_loss import chunked_cross_entropy

        hidden, auxiliary = self.model.hidden(batch)
        head = [self.parameters[name] for name in self.model.head_parameters]
        loss = chunked_cross_entropy(hidden, batch.labels, self.model.head, head, self.loss_chunk, scale)
        return loss, auxiliary

    def grad_norm(self) -> Tensor:
        """The norm of the gradients in host RAM."""
        from trainforge.toolbox.parameters import global_norm, squared_norms

        squares = squared_norms([self.spans[name] for name in sorted(self.spans)])
        return global_norm(self.comm.sum_shards(squares))

    def apply(self, update: UpdateFunction, used: frozenset[str]) -> None:
        """Queue the updates in forward order."""
        for unit in (self.stays, *self.blocks):
            slots = [slot for slot in unit.slots if slot.spec.name in used]
            unit.update = self.worker.submit(self._update, unit, slots, update).result
        for room in (self.home, *self.rooms):
            room.holds = None

    def _update(self, unit: Unit, slots: list[Slot], update: UpdateFunction) -> None:
        if slots:
            update(slots)
        if ready := self.comm.publish({slot.spec.name: slot.master for slot in unit.slots}):
            ready.wait()

    def drain(self) -> None:
        """Wait for every update."""
        for unit in (self.stays, *self.blocks):
            unit.update()

    # ---------------------------------------------------------------------------------------- the rest of a run

    @contextmanager
    def _inference(self) -> Iterator[None]:
        import torch

        from trainforge.seeding import preserved

        self.drain()
        self.load_home()
        self.model.module.eval()
        with preserved(self.device), torch.no_grad():
            yield
        self.model.module.train()
        self.home.read.record()

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Stream the blocks for each batch."""
        import torch

        with self._inference():
            losses = [self.loss(batch.to(self.device), 1.0)[0] for batch in batches]
        return torch.stack(losses) if losses else torch.zeros(0, device=self.device)

    def weights(self, name: str) -> Tensor:
        """A copy of a master."""
        unit = next(u for u in (self.stays, *self.blocks) if name in u.layout.starts)
        spec = next(spec for spec in unit.specs if spec.name == name)
        unit.update()
        return unit.layout.span(unit.master, spec).view(spec.shape).clone()

    def state(self) -> PartState:
        """Masters and optimizer state."""
        named = []
        for slot in (slot for unit in (self.stays, *self.blocks) for slot in unit.slots):
            named.append(NamedTensor("master", slot.extent, slot.master))
            for key, tensor in slot.state.items():
                named.append(NamedTensor(key, slot.extent if tensor.dim() else slot.extent.number, tensor))
        return PartState(tensors=tuple(named))

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Forget what is on the device."""
        for room in (self.home, *self.rooms):
            room.holds = None

    def close(self) -> None:
        """End the worker."""
        self.worker.shutdown()

    def _enter_block(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the model calls instead of a block."""
        if self.walk is not None:
            run = functools.partial(forward, **kwargs)
            return block_function().apply(self.anchor, self.walk, index, run, *args)
        self.load_block(index, index + 1)
        output = forward(*args, **kwargs)
        self.drop(index)
        return output


class Landed:
    """The event of a download, as the sink gets it."""

    def __init__(self, memory: ToyStream, event: Event) -> None:
        self._memory, self._event = memory, event

    def wait(self) -> None:
        """Have the host wait: it reads the gradients."""
        self._memory.wait("a gradient's download before the host reads it", self._event.synchronize)


class Walk:
    """One step's micro-batches, a thread each; the baton goes round at every block, so they stay side by side."""

    def __init__(self, memory: ToyStream, batches: Sequence[Batch], scale: float) -> None:
        self.memory, self.batches, self.scale = memory, batches, scale
        self.losses: list[Tensor | None] = [None] * len(batches)
        self.random: list[Any] = [None] * len(batches)
        self.here = threading.local()
        self.baton, self.turn = threading.Condition(), 0
        self.error: BaseException | None = None

    def run(self) -> list[Tensor]:
        """Walk; gives each micro-batch's loss."""
        threads = [
            threading.Thread(target=self._micro_batch, args=(index, batch), daemon=True)
            for index, batch in enumerate(self.batches)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return [loss for loss in self.losses if loss is not None]

    def _micro_batch(self, index: int, batch: Batch) -> None:
        import torch

        from trainforge.seeding import seed_everything

        self.here.index = index
        try:
            self._await_turn()
            seed_everything(batch.seed)
            loss, auxiliary = self.memory.loss(batch.to(self.memory.device), self.scale)
            total = loss if auxiliary is None else loss + auxiliary * (batch.supervised * self.scale)
            with torch.autograd.set_multithreading_enabled(False):
                total.backward()
            self.losses[index] = loss.detach()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._pass_on()

    @property
    def first(self) -> bool:
        """Whether this thread's micro-batch is the first at every block."""
        return bool(self.here.index == 0)

    @property
    def last(self) -> bool:
        """Whether it is the last."""
        return bool(self.here.index == len(self.batches) - 1)

    def switch(self) -> None:
        """Let the others come as far as this, keeping this micro-batch's generators."""
        self.random[self.here.index] = random_state(self.memory.device)
        self._pass_on()
        self._await_turn()
        set_random_state(self.memory.device, self.random[self.here.index])

    def _await_turn(self) -> None:
        with self.baton:
            self.baton.wait_for(lambda: self.error is not None or self.turn == self.here.index)
        if self.error is not None:
            raise self.error

    def _pass_on(self) -> None:
        with self.baton:
            self.turn = (self.here.index + 1) % len(self.batches)
            self.baton.notify_all()


@functools.cache
def block_function() -> Any:
    """The autograd function of a block: no graph in forward, the block again in backward."""
    import torch

    class StreamedBlock(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: Tensor, walk: Walk, index: int, run: Any, *args: Any) -> Any:
            memory = walk.memory
            walk.switch()
            if walk.first:
                memory.load_block(index, index + 1)
            ctx.set_materialize_grads(False)
            ctx.walk, ctx.index, ctx.run, ctx.args = walk, index, run, args
            ctx.random = random_state(memory.device)
            output = run(*args)
            if walk.last:
                memory.drop(index)
            return output

        @staticmethod
        def backward(ctx: Any, *output_grads: Tensor | None) -> Any:
            walk, index, memory = ctx.walk, ctx.index, ctx.walk.memory
            unit, room = memory.blocks[index], memory.rooms[index % 2]
            walk.switch()
            if walk.first:
                memory.load_block(index, index - 1)
                memory.begin_gradients(room)
            set_random_state(memory.device, ctx.random)
            args = [a.detach().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in ctx.args]
            with torch.enable_grad():
                output = ctx.run(*args)
            outputs = output if isinstance(output, tuple) else (output,)
            pairs = [(o, g) for o, g in zip(outputs, output_grads, strict=True) if g is not None]
            inputs = [a for a in args if torch.is_tensor(a) and a.requires_grad]
            specs = [spec for spec in unit.specs if spec.trainable]
            wanted = [*inputs, *(memory.parameters[spec.name] for spec in specs)]
            reached, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(reached, wanted, grads, allow_unused=True)
            for spec, grad in zip(specs, found[len(inputs) :], strict=True):
                memory.add_gradient(unit, room, spec, grad)
            if walk.last:
                memory.drop(index)
                memory.end_gradients(unit, room)
            given = iter(found)
            back = [next(given) if torch.is_tensor(a) and a.requires_grad else None for a in args]
            return (None, None, None, None, *back)

    return StreamedBlock


def random_state(device: Any) -> tuple[Any, Any]:
    """The state of the generators that a block may draw from."""
    import torch

    module = None if device.type == "cpu" else torch.get_device_module(device)
    return torch.get_rng_state(), module and module.get_rng_state(device)


def set_random_state(device: Any, state: tuple[Any, Any]) -> None:
    """Put the generators back."""
    import torch

    torch.set_rng_state(state[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[1], device)
