"""How the micro-batches of a step walk through the model side by side, block by block.

The model keeps its own forward: a block's call is intercepted. Each micro-batch is a thread that runs that forward and
its backward; one runs at a time, and the baton goes to the one that is furthest behind, so all of them pass a block
while its weights are on the device. (That all micro-batches visit a resident block is the idea of RoundPipe and of
MegaTrain; the baton is ours.) A block keeps its inputs only and runs again in backward, through PyTorch's non-reentrant
checkpointing: what leaves a block by another way than its output (a router's logits) keeps its gradient.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from trainforge.errors import IncompatibleError
from trainforge.toolbox.streams import StreamsLike
from trainforge_megatrain.stream.offload import Offload
from trainforge_megatrain.stream.units import Place, Unit


class Stopped(Exception):
    """Another micro-batch has failed."""


def micro_batch_threads(count: int) -> list[ThreadPoolExecutor]:
    """A thread for each of a step's micro-batches; none where there is only one.

    They live as long as the run: cuDNN's plans are kept per thread, and a new thread's first attention takes 60 ms.
    """
    return [ThreadPoolExecutor(1, f"micro-batch {index}") for index in range(count if count > 1 else 0)]


class Walk:
    """One step.

    Args:
        count: micro-batches.
        blocks: repeated blocks of the model.
        enter: `enter(unit, direction)` readies a block's weights; forward is 1, backward -1.
        ended: `ended(unit)` is called when the last micro-batch has left the block's backward.
        threads: one for each micro-batch (see `micro_batch_threads`); a single one needs none.
        offload: takes the inputs of recomputed blocks to host RAM; None keeps them on the device.
    """

    def __init__(
        self,
        count: int,
        blocks: int,
        streams: StreamsLike,
        device: torch.device,
        enter: Callable[[Unit, int], None],
        ended: Callable[[Unit], None],
        threads: Sequence[Executor] = (),
        offload: Offload | None = None,
    ) -> None:
        self._count, self._blocks, self._device = count, blocks, device
        self._threads = threads
        self._enter, self._ended, self._offload = enter, ended, offload
        self._streams, self._compute = streams, streams.current()
        self._positions: list[float] = [-1.0] * count
        self._turn = 0
        lock = threading.Lock()
        self._ended_one = threading.Condition(lock)
        self._batons = [
            threading.Condition(lock) for _ in range(count)
        ]  # one each: only who has the turn wakes up
        self._here = threading.local()
        self._error: BaseException | None = None
        self._visits: dict[Unit, int] = {}
        self._visited: set[tuple[int, Unit]] = set()
        self._anchor = torch.ones((), device=device, requires_grad=True)

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """Do `work(i)`, forward and backward, for every micro-batch; gives what each returned.

        Raises:
            Exception: the first that one of them raised.
        """
        try:
            return self._run(work)
        finally:
            if self._offload is not None:
                self._offload.end()

    def _run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        if self._count == 1:
            self._here.index = 0
            with torch.autograd.set_multithreading_enabled(False):
                return [work(0)]
        results: list[Tensor | None] = [None] * self._count
        started = 0
        try:
            for index in range(self._count):
                self._threads[index].submit(self._thread, index, work, results)
                started += 1
            self._await_all()
        except BaseException as error:  # Ctrl-C: they must have ended before anybody gives their memory back
            self._fail(error)
            self._positions[started:] = [math.inf] * (self._count - started)
            self._await_all()
        if self._error is not None:
            raise self._error
        return [result for result in results if result is not None]

    def _thread(self, index: int, work: Callable[[int], Tensor], results: list[Tensor | None]) -> None:
        self._here.index = index
        try:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device)
            with self._streams.on(self._compute), torch.autograd.set_multithreading_enabled(False):
                with self._batons[index]:
                    self._await_turn()
                results[index] = work(index)
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._fail(error)
        finally:
            with self._batons[index]:
                self._pass_on(math.inf)
                self._ended_one.notify()

    def _await_all(self) -> None:
        """Wait for the end of every micro-batch."""
        with self._ended_one:
            self._ended_one.wait_for(lambda: all(position == math.inf for position in self._positions))

    def _fail(self, error: BaseException) -> None:
        """Have every micro-batch stop at its next block."""
        with self._batons[0]:
            self._error = self._error or error
            for baton in self._batons:
                baton.notify_all()

    def block(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any, *, frozen: bool) -> Any:
        """A block in forward: wait for the others, run it, and see to it that backward comes this way.

        Where neither the block (`frozen`) nor what it is given needs a gradient, backward has no business here.
        """
        assert unit.block is not None
        if frozen and not any(_needs_gradient(leaf) for leaf in tree_leaves((args, kwargs))):
            self._arrive(unit.block)
            self._enter(unit, 1)
            return forward(*args, **kwargs)
        visit = (self._here.index, unit)
        if visit in self._visited:
            raise IncompatibleError(
                f"{unit.name} is called twice in one forward, and a streamed block's gradients would be incomplete "
                "after the first: choose memory resident for this model"
            )
        self._visited.add(visit)
        self._visits[unit] = self._visits.get(unit, 0) + 1
        self._arrive(unit.block)
        self._enter(unit, 1)
        args, kwargs, inputs = self._marked(unit, args, kwargs)
        if not unit.recomputed:
            return forward(*args, **kwargs)
        passage = _Passage(self, unit, forward)
        if self._offload is None:
            return checkpoint(passage, *args, use_reentrant=False, **kwargs)
        with self._offload.around(unit.block, self._here.index, inputs):
            return checkpoint(passage, *args, use_reentrant=False, **kwargs)

    def again(self, unit: Unit) -> None:
        """A block in backward, about to run again."""
        assert unit.block is not None
        self._arrive(2 * self._blocks - unit.block)
        self._enter(unit, -1)

    def left(self, unit: Unit) -> None:
        """A micro-batch's backward has left a block."""
        assert unit.block is not None
        self._visits[unit] -= 1
        if self._visits[unit] == 0:
            self._ended(unit)
        if not unit.recomputed and unit.place is not Place.DEVICE:
            # Its gradients lie in a box that the block after the next will fill, and no recomputation waits there.
            self._arrive(2 * self._blocks - unit.block + 0.5)

    def _marked(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
        """The arguments, behind a mark that tells when backward has left the block; and the tensors that are marked.

        A mark's backward runs after everything that was recorded later (autograd's queue is ordered so), that is
        after all gradients of the block's own parameters. Where no argument needs a gradient, the first tensor of
        floating point gets one, or nothing would tell.
        """
        leaves, tree = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        if not places:
            places = [
                i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ][:1]
        marked = _Mark.apply(self, unit, self._anchor, *(leaves[i] for i in places))
        for place, tensor in zip(places, marked, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, tree)
        return args, kwargs, list(marked)

    def _arrive(self, position: float) -> None:
        """Let those that are further behind come as far as this, and go on with this micro-batch's own generators."""
        if self._count == 1:
            return
        state = _random_state(self._device)
        with self._batons[self._here.index]:
            self._pass_on(position)
            self._await_turn()
        _set_random_state(self._device, state)

    def _pass_on(self, position: float) -> None:
        """Say how far this micro-batch is and wake the one whose turn it is; the lock is held."""
        self._positions[self._here.index] = position
        self._turn = min(range(self._count), key=lambda index: (self._positions[index], index))
        self._batons[self._turn].notify()

    def _await_turn(self) -> None:
        """Wait for it; the lock is held."""
        index = self._here.index
        self._batons[index].wait_for(lambda: self._error is not None or self._turn == index)
        if self._error is not None:
            raise Stopped


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Passage:
    """A block's forward; every call after the first is a recomputation."""

    def __init__(self, walk: Walk, unit: Unit, forward: Callable[..., Any]) -> None:
        self._walk, self._unit, self._forward = walk, unit, forward
        self._done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._done:
            self._walk.again(self._unit)
        self._done = True
        return self._forward(*args, **kwargs)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, unit: Unit, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.walk, ctx.unit = walk, unit
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.walk.left(ctx.unit)
        return (None, None, None, *grads)


RandomState = tuple[Tensor, Tensor | None]


def _random_state(device: torch.device) -> RandomState:
    """PyTorch's generators; those of Python and NumPy are for data, and a forward does not draw from them."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)
