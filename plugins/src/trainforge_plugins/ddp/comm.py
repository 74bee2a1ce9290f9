"""Bucketed, overlapped all-reduce of gradients. The idea of buckets in reverse order is PyTorch's DDP's.

Buckets are launched strictly by index, so that every rank issues the same collectives in the same order whatever
parameters it used: a bucket that is not complete holds back those after it until `finish`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainforge.context import Console
from trainforge.stages import Comm, Extent, FlatBuffer, Ready, Sink
from trainforge.toolbox.process_group import ProcessGroup

_NAMED = 20  # unused parameters that a warning names


@dataclass
class Bucket:
    """A contiguous span of a gradient buffer that is reduced by one collective.

    Attributes:
        tensor: 1-D view of the buffer.
        names: the parameters in it.
        waiting: how many of them are not final yet in this step.
        arrivals: what the reduction must come after: events, or the streams that were current at the sink's call.
    """

    tensor: Tensor
    names: tuple[str, ...]
    waiting: int = 0
    arrivals: list[Any] = field(default_factory=list)

    def reset(self) -> None:
        """Expect every parameter again."""
        self.waiting = len(self.names)
        self.arrivals.clear()


class DdpComm(Comm):
    """Comm over data-parallel ranks that all hold every parameter.

    Args:
        group: the ranks, met.
        device: where this rank computes.
        bucket_bytes: how many bytes of gradients to reduce at a time; a larger parameter has its own bucket.
        console: told, once per parameter, which got no gradient anywhere.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, bucket_bytes: int, console: Console
    ) -> None:
        self.rank, self.world = group.rank, group.world
        self._group, self._console, self._bucket_bytes = group, console, bucket_bytes
        # Reductions start from a stream of their own: what they wait for never holds up the stream that computes.
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._buckets: list[Bucket] = []
        self._names: list[str] = []
        self._bucket_of: dict[str, Bucket] = {}
        self._sunk: set[str] = set()
        self._works: list[dist.Work] = []
        self._unused: set[str] = set()
        self._bytes = 0
        self._waited_s, self._steps = 0.0, 0

    def watch(self, buffers: Sequence[FlatBuffer]) -> Sink:
        """Cut the buffers into buckets; those of several buffers are ordered by how far into backward they end."""
        placed = [
            (end / max(1, len(buffer.extents)), bucket)
            for buffer in buffers
            for end, bucket in cut_into_buckets(buffer, self._bucket_bytes)
        ]
        self._buckets = [bucket for _, bucket in sorted(placed, key=lambda pair: pair[0])]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._names = list(self._bucket_of)
        self._bytes = sum(bucket.tensor.numel() * bucket.tensor.element_size() for bucket in self._buckets)
        for bucket in self._buckets:
            bucket.reset()
        return self._sink

    def finish(self) -> frozenset[str]:
        """Reduce what backward left incomplete, wait for all of it, and say which parameters were used on any rank.

        A parameter without gradient here contributes the zeros that memory keeps in its span. Of device gradients
        only the current stream waits; the host waits for the other ranks' flags.
        """
        for bucket in self._buckets[len(self._works) :]:
            self._launch(bucket)
        flags = torch.tensor([name in self._sunk for name in self._names], dtype=torch.uint8)
        begun = time.perf_counter()
        used = self._group.any(flags, "reducing gradients").tolist()
        with self._group.collective("reducing gradients"):
            for work in self._works:
                work.wait()
        self._waited_s += time.perf_counter() - begun
        self._next_step()
        names = frozenset(name for name, flag in zip(self._names, used, strict=True) if flag)
        self._tell_unused(names)
        return names

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place, in the order of the current stream."""
        with self._group.collective("adding up losses"):
            dist.all_reduce(tensor)
        return tensor

    def control(self, values: Sequence[float]) -> list[float]:
        """Sums of host numbers over all ranks, one packed float64 reduction that touches no device."""
        return self._group.sum(values)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank."""
        return self._group.gather(value)

    def metrics(self) -> dict[str, float]:
        """Buckets, megabytes reduced per step, and how long the host waited per step since the last call."""
        steps, waited_s = max(1, self._steps), self._waited_s
        self._waited_s, self._steps = 0.0, 0
        return {
            "buckets": float(len(self._buckets)),
            "reduced_mb": self._bytes / 1e6,
            "host_wait_ms": waited_s / steps * 1e3,
        }

    def close(self) -> None:
        """Leave the group; in the middle of a step without waiting for reductions that others may never join."""
        self._group.failed = self._group.failed or bool(self._works)
        self._group.close()

    def _sink(self, extent: Extent, ready: Ready | None) -> None:
        bucket = self._bucket_of[extent.name]
        assert extent.name not in self._sunk, f"the gradient of {extent.name} was final twice in one step"
        self._sunk.add(extent.name)
        if ready is not None:
            bucket.arrivals.append(ready)
        elif bucket.tensor.device.type != "cpu":
            bucket.arrivals.append(torch.accelerator.current_stream(bucket.tensor.device))
        bucket.waiting -= 1
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].waiting == 0:
            self._launch(self._buckets[len(self._works)])

    def _launch(self, bucket: Bucket) -> None:
        if bucket.waiting and bucket.tensor.device.type != "cpu":
            # The zeros of parameters that are not used were written on the stream that computes.
            bucket.arrivals.append(torch.accelerator.current_stream(bucket.tensor.device))
        with self._after(bucket), self._group.collective("reducing gradients"):
            work = dist.all_reduce(bucket.tensor, async_op=True)
        assert work is not None
        self._works.append(work)

    @contextlib.contextmanager
    def _after(self, bucket: Bucket) -> Iterator[None]:
        """What is issued inside comes after all arrivals: by the device, or for host gradients by the host."""
        on_device = self._stream is not None and bucket.tensor.device.type != "cpu"
        with self._stream if self._stream is not None and on_device else contextlib.nullcontext():
            streams = {arrival for arrival in bucket.arrivals if isinstance(arrival, torch.Stream)}
            for stream in streams:
                assert self._stream is not None
                self._stream.wait_stream(stream)
            for arrival in bucket.arrivals:
                if not isinstance(arrival, torch.Stream):
                    arrival.wait()
            yield

    def _next_step(self) -> None:
        self._works.clear()
        self._sunk.clear()
        for bucket in self._buckets:
            bucket.reset()
        self._steps += 1
        self._group.step += 1

    def _tell_unused(self, used: frozenset[str]) -> None:
        fresh = [name for name in self._names if name not in used and name not in self._unused]
        if fresh:
            self._unused.update(fresh)
            more = f" and {len(fresh) - _NAMED} more" if len(fresh) > _NAMED else ""
            self._console.warn(
                f"no rank has a gradient for {', '.join(fresh[:_NAMED])}{more}: unused parameters stay as they are"
            )


def cut_into_buckets(buffer: FlatBuffer, bucket_bytes: int) -> Iterator[tuple[int, Bucket]]:
    """Cut a gradient buffer into contiguous buckets in its order, each with the index where its extents end."""
    size = buffer.tensor.element_size()
    first, held = 0, 0
    for index, extent in enumerate(buffer.extents):
        if held and held + extent.length * size > bucket_bytes:
            yield index, _bucket(buffer, first, index)
            first, held = index, 0
        held += extent.length * size
    if first < len(buffer.extents):
        yield len(buffer.extents), _bucket(buffer, first, len(buffer.extents))


def _bucket(buffer: FlatBuffer, first: int, end: int) -> Bucket:
    stop = buffer.starts[end - 1] + buffer.extents[end - 1].length
    names = tuple(extent.name for extent in buffer.extents[first:end])
    return Bucket(buffer.tensor[buffer.starts[first] : stop], names)
