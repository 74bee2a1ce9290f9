"""An adversarial fake of device streams: every copy comes as late as it may, and unordered accesses are races.

On a CPU nothing is asynchronous, so a wait that was forgotten does no harm there. With this fake it does:

- A copy is queued, and runs only when somebody waits for an event behind it, or at a moment that the given random
  source picks. What reads too early reads old bytes; what overwrites the source too early changes what arrives.
- It does not keep the memory of a queued copy alive. Where nobody else does either, the copy raises `RaceError` when
  its turn comes: an allocator would have given that memory to somebody else.
- Inside `with fake:` every tensor operation counts as work of the computing stream, and vector clocks tell which
  work is ordered by events (happens-before, Lamport 1978). An access to the same bytes that is not ordered raises
  `RaceError`, also where this machine happened to do things in a harmless order: compute has finished here before
  the next copy is even asked for, on a device it has not.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainforge.toolbox.streams import Event, Stream

Clock = dict[str, int]
COMPUTE, HOST = "the computing stream", "the host"


class RaceError(AssertionError):
    """Two accesses to the same bytes, at least one of them a write, that no event orders."""


class FakeStreams:
    """The interface of `trainforge.toolbox.streams.Streams`, with the worst legal timing.

    Use it as a context manager around the code under test; what is still queued at the end is then done.

    Args:
        source: decides when queued copies run although nobody waits for them; `random.Random(0)`, or what
            hypothesis's `st.randoms()` gives.
    """

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._streams: dict[str, FakeStream] = {}
        self._compute = FakeStream(self, COMPUTE)
        self._host_clock: Clock = {}
        self._host: list[Span] = []
        self._held: list[Tensor] = []  # kept alive, so that no other tensor gets their addresses
        self._accesses = _Accesses()
        self._mode = _Watch(self)

    def __enter__(self) -> FakeStreams:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for stream in self._streams.values() if kind is None else ():
            stream.run_until(len(stream.queue))

    def stream(self, name: str, priority: int = 0) -> FakeStream:
        """The stream of that name."""
        return self._streams.setdefault(name, FakeStream(self, name))

    def event(self) -> FakeEvent:
        """A new event."""
        return FakeEvent(self)

    def current(self) -> FakeStream:
        """The computing stream; what it is given is done at once."""
        return self._compute

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Nothing to do: work on host memory is the host's, whichever thread does it."""
        return nullcontext()

    def host(self, elements: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """Zeroed host memory: tensor operations on it are the host's work, not the computing stream's."""
        tensor = torch.zeros(elements, dtype=dtype)
        self.host_memory(tensor)
        return tensor

    def host_memory(self, *tensors: Tensor) -> None:
        """Declare that tensors made otherwise lie in host memory; real streams know by themselves."""
        self._host.extend(map(_span, tensors))
        self._held.extend(tensors)
        for tensor in tensors:
            self._accesses.forget_compute(_span(tensor))  # what lay at this address before is gone

    def copy(self, dst: Tensor, src: Tensor, stream: Stream) -> None:
        """Queue a copy.

        Raises:
            RaceError: something that no event orders before this copy still uses these bytes.
        """
        assert isinstance(stream, FakeStream)
        if stream is self._compute:
            dst.copy_(src)
            return
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self._accesses.copied(stream.name, _joined(stream.clock, self._host_clock), dst, src)
        to, of = _Place(dst), _Place(src)
        stream.queue.append(lambda: self._do_copy(to, of))
        self.run_some()

    def close(self) -> None:
        """Nothing to give back."""

    def _do_copy(self, dst: _Place, src: _Place) -> None:
        with self._mode.unwatched():
            dst.tensor().copy_(src.tensor())

    def run_some(self) -> None:
        """Let some queued work happen, in an order of its own."""
        streams = [s for s in self._streams.values() if s.done < len(s.queue)]
        while streams and self._random.random() < 0.4:
            stream = self._random.choice(streams)
            stream.run_until(stream.done + 1)
            streams = [s for s in self._streams.values() if s.done < len(s.queue)]

    def touched(self, tensor: Tensor, write: bool) -> None:
        """Take note of a tensor operation's access."""
        span = _span(tensor)
        if any(held[0] < span[1] and span[0] < held[1] for held in self._host):
            self._accesses.check(HOST, self._host_clock, span, write, copies_only=True)
            return
        clock = self._compute.clock
        clock[COMPUTE] = clock.get(COMPUTE, 0) + 1
        self._accesses.computed(_joined(clock, self._host_clock), span, write)

    def host_waited(self, clock: Clock) -> None:
        """The host has waited for everything in `clock`; what it asks for from now on comes after."""
        self._host_clock = _joined(self._host_clock, clock)


class FakeStream:
    """A queue of copies. `clock` is what its latest work is ordered after."""

    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams, self.name = streams, name
        self.clock: Clock = {}
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def wait(self, event: Event) -> None:
        """Order later work of this stream after the event's latest mark."""
        assert isinstance(event, FakeEvent)
        if event.mark is None:
            return
        marked, position, clock = event.mark
        self.clock = _joined(self.clock, clock)
        if self is self.streams.current():
            marked.run_until(position)
        else:
            self.queue.append(lambda: marked.run_until(position))
        self.streams.run_some()

    def run_until(self, position: int) -> None:
        """Do the first `position` entries of the queue, with what they wait for."""
        while self.done < position:
            self.done += 1
            self.queue[self.done - 1]()


class FakeEvent:
    """A mark in a stream: (stream, length of its queue, its clock)."""

    def __init__(self, streams: FakeStreams) -> None:
        self.streams = streams
        self.mark: tuple[FakeStream, int, Clock] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark what the stream was given so far."""
        marked = self.streams.current() if stream is None else stream
        assert isinstance(marked, FakeStream)
        self.mark = (marked, len(marked.queue), dict(marked.clock))
        self.streams.run_some()

    def wait(self) -> None:
        """Make the computing stream wait."""
        self.streams.current().wait(self)

    def synchronize(self) -> None:
        """Make the host wait."""
        if self.mark is not None:
            marked, position, clock = self.mark
            marked.run_until(position)
            self.streams.host_waited(clock)


Span = tuple[int, int]


class _Place:
    """Where a tensor lies, without keeping its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """A tensor over the same bytes."""
        storage = self._storage()
        if storage is None:
            raise RaceError("memory was given back before a copy that uses it was waited for")
        return torch.empty(0, dtype=self._dtype).set_(storage, self._offset, self._shape, self._strides)


class _Accesses:
    """Who touched which bytes last, and whether that is ordered before the next access."""

    def __init__(self) -> None:
        self._compute: dict[Span, dict[tuple[str, bool], int]] = {}
        self._copies: dict[Span, dict[tuple[str, bool], int]] = {}

    def computed(self, clock: Clock, span: Span, write: bool) -> None:
        self.check(COMPUTE, clock, span, write, copies_only=True)
        self._compute.setdefault(span, {})[COMPUTE, write] = clock[COMPUTE]

    def copied(self, stream: str, clock: Clock, dst: Tensor, src: Tensor) -> None:
        for tensor, write in ((src, False), (dst, True)):
            self.check(stream, clock, _span(tensor), write, copies_only=False)
            self._copies.setdefault(_span(tensor), {})[stream, write] = clock[stream]

    def forget_compute(self, span: Span) -> None:
        self._compute = {other: held for other, held in self._compute.items() if not _overlap(span, other)}

    def check(self, who: str, clock: Clock, span: Span, write: bool, *, copies_only: bool) -> None:
        """Raise when an earlier access to these bytes is not in `clock`."""
        for other, accesses in self._candidates(copies_only):
            if not _overlap(span, other):
                continue
            for (owner, wrote), time in accesses.items():
                if owner != who and (write or wrote) and time > clock.get(owner, 0):
                    raise RaceError(
                        f"{who} {'writes' if write else 'reads'} bytes that {owner} {'writes' if wrote else 'reads'}, "
                        "and no event orders the two"
                    )

    def _candidates(self, copies_only: bool) -> Iterator[tuple[Span, dict[tuple[str, bool], int]]]:
        yield from self._copies.items()
        if not copies_only:
            yield from self._compute.items()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor operation, also those of backward."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams, self.watching = streams, True

    def unwatched(self) -> _Pause:
        return _Pause(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching or _is_view(func):
            return func(*args, **kwargs)
        for argument, value in _arguments(func, args, kwargs):
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self.streams.touched(tensor, argument.is_write)
        result = func(*args, **kwargs)
        if "empty" not in func.name():  # allocating writes nothing
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.streams.touched(tensor, True)
        return result


class _Pause:
    def __init__(self, watch: _Watch) -> None:
        self.watch = watch

    def __enter__(self) -> None:
        self.watch.watching = False

    def __exit__(self, *_: object) -> None:
        self.watch.watching = True


def _is_view(func: Any) -> bool:
    return any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each argument's schema with its value."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument, value
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _span(tensor: Tensor) -> Span:
    """The first byte of a tensor, and the one after its last."""
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _joined(one: Clock, other: Clock) -> Clock:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}
