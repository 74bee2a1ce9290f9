"""`stream` on adversarial device streams: copies and updates as late as they may be, in any legal order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.stream.pairs import STREAM

from trainforge.stages import Comm, FlatBuffer, Sink
from trainforge.testing import Walker, load_plugin, tiny_context
from trainforge.testing.bench import REFERENCE, Stages, build_stage
from trainforge.toolbox.fake_streams import FakeStreams, _Watch
from trainforge.toolbox.streams import StreamsLike
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.memory import Stream
from trainforge_megatrain.stream.units import Place, Unit
from trainforge_megatrain.stream.walk import Walk

Places = Mapping[str, Place]


class LateWorker:
    """Does queued work in order: when somebody waits for it, or at a moment that the random source picks."""

    def __init__(self, source: random.Random, eager: float = 0.3) -> None:
        self.source, self.eager = source, eager
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, function: Callable[..., None], *args: Any) -> Job:
        self.queue.append(lambda: function(*args))
        return Job(self, len(self.queue))

    def shutdown(self) -> None:
        pass

    def run_until(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.queue[self.done - 1]()


class Job:
    """The future of a piece of queued work."""

    def __init__(self, worker: LateWorker, position: int) -> None:
        self.worker, self.position = worker, position

    def done(self) -> bool:
        if self.worker.done < len(self.worker.queue) and self.worker.source.random() < self.worker.eager:
            self.worker.run_until(self.worker.done + 1)
        return self.worker.done >= self.position

    def result(self, timeout: float | None = None) -> None:
        self.worker.run_until(self.position)


class ReadingComm(Comm):
    """Reads every gradient in host RAM once it has landed, as a comm does that sends it."""

    def watch(self, buffers: Sequence[FlatBuffer]) -> Sink:
        inner = super().watch(buffers)
        places = {extent.name: (b, i) for b in buffers for i, extent in enumerate(b.extents)}

        def sink(extent: Any, ready: Any) -> None:
            if ready is not None:
                ready.wait()
            buffer, index = places[extent.name]
            self.seen.append(float(buffer.span(index).double().sum()))
            inner(extent, ready)

        self.seen: list[float] = []
        return sink


class ThreadWatch(_Watch):
    """What sees tensor operations belongs to a thread: each micro-batch's thread gets one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.watching = self.streams._mode.watching
        return super().__torch_dispatch__(func, types, args, kwargs)


def watch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """See what the micro-batches' threads do."""
    plain = Walk._thread

    def thread(walk: Walk, *args: Any) -> None:
        if not isinstance(walk._streams, FakeStreams):
            return plain(walk, *args)
        with ThreadWatch(walk._streams):
            return plain(walk, *args)

    monkeypatch.setattr(Walk, "_thread", thread)


def build(
    folder: Path,
    streams: StreamsLike | None,
    worker: Any,
    places: Places,
    *,
    comm: Comm | None = None,
    left_out: str | None = None,
    offload: bool = False,
    accumulate: int = 2,
    model: Mapping[str, Any] | None = None,
    change: Callable[[Any], None] = lambda model: None,
    train: Mapping[str, Any] | None = None,
    **section: Any,
) -> Walker:
    """The plugin with units at `places` (others as they come), and one kind of wait left out.

    Without streams it is `resident`. `change` is done to the model before the memory gets it.
    """

    class Careless(Stream):
        def wait(self, place: str, wait: Callable[[], object]) -> None:
            if place != left_out:
                super().wait(place, wait)

    def decide(units: Sequence[Unit]) -> bool:
        for unit in units:
            unit.place = places.get(unit.name, unit.place)
        return offload

    numbers = {"clip": 0.1, **(train or {})}
    sizes = {"layers": 4, "dropout": 0.2, "width": 8, **(model or {})}
    ctx = tiny_context(folder, model=sizes, train=numbers, accumulate=accumulate)
    ctx.built["comm"] = comm or Comm()
    for stage in ("model", "data", "optimizer"):
        given = {"silent_every": 0, "validation": 2} if stage == "data" else {}
        build_stage(ctx, load_plugin(REFERENCE), stage, given)
    change(ctx.built["model"])
    if streams is None:
        build_stage(ctx, load_plugin("resident"), "memory", {})
    else:
        ctx.plugin = load_plugin(STREAM).name
        ctx.built["memory"] = Careless(ctx, StreamSection(**section), streams, worker, decide)
    build_stage(ctx, load_plugin(REFERENCE), "checkpoint", {})
    return Walker(Stages(ctx, **ctx.built))
