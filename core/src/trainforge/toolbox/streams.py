"""Device streams and events behind one small interface; on a CPU everything happens at once.

    streams = Streams(device)
    upload, landed, free = streams.stream("upload"), streams.event(), streams.event()
    upload.wait(free)                          # the slot's last reader has finished
    streams.copy(slot, weights, upload)
    landed.record(upload)
    landed.wait()                              # compute may read the slot from here on
    ...
    free.record()                              # on the current stream

`trainforge.toolbox.fake_streams.FakeStreams` has the same interface and delays every copy, to provoke races.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from trainforge.toolbox.host_memory import HostMemory


class Event(Protocol):
    """A point in a stream's work. One that was never recorded is complete."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that `stream` (by default the current one) was given so far; forgets an earlier mark."""

    def wait(self) -> None:
        """Make the current stream wait for the mark. The host goes on."""

    def synchronize(self) -> None:
        """Make the host wait for the mark, before it reads or overwrites host memory that a copy uses."""


class Stream(Protocol):
    """A queue of copies, done in order, at any time unless events say otherwise."""

    def wait(self, event: Event) -> None:
        """Make what is given to this stream from now on wait for the event's latest mark."""


class StreamsLike(Protocol):
    """What `Streams` and its fake have in common."""

    def stream(self, name: str, priority: int = 0) -> Stream:
        """The stream of that name, made on first use. A lower `priority` number is served first."""

    def event(self) -> Event:
        """A new event."""

    def current(self) -> Stream:
        """The stream that computes."""

    def host(self, elements: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """A zeroed 1-D tensor in host memory; `pinned` when copies are to reach it without blocking (page-locked)."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Within it, what this thread asks of the device is work of `stream`; for threads that compute on the host."""

    def copy(self, dst: Tensor, src: Tensor, stream: Stream) -> None:
        """Copy on `stream`, some time. Both tensors must live, unchanged, until an event after it is waited for."""

    def close(self) -> None:
        """Unlock host memory; tensors that `host` gave must not be used afterwards."""


class Streams:
    """Streams and events of a device, through torch's accelerator-agnostic classes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._named: dict[str, _DeviceStream] = {}
        self._memory = HostMemory(device)

    def stream(self, name: str, priority: int = 0) -> Stream:
        """The stream of that name, made on first use."""
        if self.device.type == "cpu":
            return _NoStream()
        if name not in self._named:
            self._named[name] = _DeviceStream(torch.Stream(device=self.device, priority=priority))
        return self._named[name]

    def event(self) -> Event:
        """A new event."""
        return _NoEvent() if self.device.type == "cpu" else _DeviceEvent(self.device)

    def current(self) -> Stream:
        """The stream that computes."""
        if self.device.type == "cpu":
            return _NoStream()
        return _DeviceStream(torch.accelerator.current_stream(self.device))

    def host(self, elements: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """A zeroed 1-D tensor in host memory, page-locked when `pinned` (never when the device is a CPU)."""
        return self._memory.tensor(elements, dtype, pinned=pinned)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` this thread's current stream for a while."""
        return stream.torch_stream if isinstance(stream, _DeviceStream) else nullcontext()  # type: ignore[return-value]

    def close(self) -> None:
        """Unlock host memory; tensors that `host` gave must not be used afterwards."""
        self._memory.close()

    def copy(self, dst: Tensor, src: Tensor, stream: Stream) -> None:
        """Copy on `stream`, asynchronously when host memory is page-locked."""
        if isinstance(stream, _DeviceStream):
            with stream.torch_stream:
                dst.copy_(src, non_blocking=True)
        else:
            dst.copy_(src)


class _DeviceStream:
    def __init__(self, stream: torch.Stream) -> None:
        self.torch_stream = stream

    def wait(self, event: Event) -> None:
        assert isinstance(event, _DeviceEvent)
        if event.recorded:
            self.torch_stream.wait_event(event.torch_event)


class _DeviceEvent:
    def __init__(self, device: torch.device) -> None:
        self.device, self.torch_event, self.recorded = device, torch.Event(device), False

    def record(self, stream: Stream | None = None) -> None:
        target = torch.accelerator.current_stream(self.device)
        if stream is not None:
            assert isinstance(stream, _DeviceStream)
            target = stream.torch_stream
        self.torch_event.record(target)
        self.recorded = True

    def wait(self) -> None:
        if self.recorded:
            torch.accelerator.current_stream(self.device).wait_event(self.torch_event)

    def synchronize(self) -> None:
        if self.recorded:
            self.torch_event.synchronize()


class _NoStream:
    def wait(self, event: Event) -> None:
        pass


class _NoEvent:
    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass
