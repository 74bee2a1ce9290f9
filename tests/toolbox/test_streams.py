"""The fake streams catch every wait that is missing; the real ones do nothing on a CPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainforge.toolbox.fake_streams import FakeStreams, RaceError
from trainforge.toolbox.streams import Streams, StreamsLike

LAYERS, WIDTH = 5, 4
WAITS = [
    "upload waits until its slot is free",
    "compute waits for the upload",
    "download waits for the gradient",
    "compute waits until the download has left its slot",
    "host waits for the download",
]


def weights() -> Tensor:
    return torch.arange(1.0, 1 + LAYERS * WIDTH)


def pipeline(streams: StreamsLike, without: str | None = None) -> tuple[Tensor, Tensor]:
    """Stream layers through two slots; send what is computed back through two others; update on the host."""
    host = streams.host(LAYERS * WIDTH, torch.float32)
    host.copy_(weights())
    landing = streams.host(LAYERS * WIDTH, torch.float32)
    slots, grads = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
    upload, download = streams.stream("upload"), streams.stream("download", priority=-1)
    landed, free, ready, left = ([streams.event() for _ in range(2)] for _ in range(4))
    for event in free:
        event.record()  # the zeros that filled the slots

    def fetch(layer: int) -> None:
        if without != WAITS[0]:
            upload.wait(free[layer % 2])
        streams.copy(slots[layer % 2], host[layer * WIDTH : (layer + 1) * WIDTH], upload)
        landed[layer % 2].record(upload)

    x = torch.ones(WIDTH)
    fetch(0)
    for layer in range(LAYERS):
        slot = layer % 2
        if layer + 1 < LAYERS:
            fetch(layer + 1)
        if without != WAITS[1]:
            landed[slot].wait()
        x = x * 0.5 + slots[slot]
        free[slot].record()
        if without != WAITS[3]:
            left[slot].wait()
        torch.mul(x, 2.0, out=grads[slot])
        ready[slot].record()
        if without != WAITS[2]:
            download.wait(ready[slot])
        streams.copy(landing[layer * WIDTH : (layer + 1) * WIDTH], grads[slot], download)
        left[slot].record(download)
    if without != WAITS[4]:
        for event in left:
            event.synchronize()
    return x, landing + 0


def expected() -> tuple[Tensor, Tensor]:
    x, sent = torch.ones(WIDTH), []
    for layer in weights().view(LAYERS, WIDTH):
        x = x * 0.5 + layer
        sent.append(2 * x)
    return x, torch.cat(sent)


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_with_all_waits_every_legal_order_is_right(source):
    with FakeStreams(source) as streams:
        x, landing = pipeline(streams)
    assert torch.equal(x, expected()[0])
    assert torch.equal(landing, expected()[1])


@pytest.mark.parametrize("missing", WAITS)
@settings(deadline=None, max_examples=20)
@given(source=st.randoms(use_true_random=False))
def test_any_missing_wait_is_a_race_in_every_order(missing, source):
    with pytest.raises(RaceError), FakeStreams(source) as streams:
        pipeline(streams, without=missing)


@pytest.mark.parametrize("missing", [WAITS[1], WAITS[4]])
def test_a_copy_that_nobody_waited_for_leaves_old_bytes(missing):
    """Also without watching (no `with`), results are wrong in some legal order."""
    wrong = 0
    for seed in range(20):
        x, landing = pipeline(FakeStreams(random.Random(seed)), without=missing)
        wrong += not (torch.equal(x, expected()[0]) and torch.equal(landing, expected()[1]))
    assert wrong > 0


def test_copies_wait_for_their_event():
    class Never(random.Random):
        def random(self) -> float:
            return 1.0

    streams = FakeStreams(Never())
    dst, src, event = torch.zeros(2), torch.ones(2), streams.event()
    event.wait()  # never recorded: complete
    streams.copy(dst, src, streams.stream("a"))
    event.record(streams.stream("a"))
    assert not dst.any()
    src.fill_(7)  # too early: the copy takes what it finds
    event.wait()
    assert dst.tolist() == [7, 7]


def test_waits_are_transitive_over_streams():
    with FakeStreams(random.Random(3)) as streams:
        first, second = streams.stream("first"), streams.stream("second")
        source = streams.host(4, torch.float32)
        source.fill_(5.0)
        middle, last = torch.empty(4), torch.empty(4)
        here, there = streams.event(), streams.event()
        streams.copy(middle, source, first)
        here.record(first)
        second.wait(here)
        streams.copy(last, middle, second)
        there.record(second)
        there.wait()
        assert last.tolist() == middle.tolist() == [5.0] * 4
        with pytest.raises(RaceError, match="the host writes bytes that first reads"):
            source.zero_()  # the computing stream has waited, the host has not
        there.synchronize()
        source.zero_()


def test_two_streams_must_not_write_the_same_bytes_unordered():
    with FakeStreams(random.Random(0)) as streams:
        source, dst, other = streams.host(4, torch.float32), torch.empty(4), torch.empty(4)
        streams.copy(dst, source, streams.stream("a"))
        streams.copy(other, source, streams.stream("b"))  # both may read
        with pytest.raises(RaceError, match="b writes bytes that a writes"):
            streams.copy(dst[3:], source[3:], streams.stream("b"))


def test_memory_that_is_given_back_before_its_copy_is_waited_for():
    def send(streams: FakeStreams, wait: bool) -> None:
        landing, done = streams.host(4, torch.float32), streams.event()
        upload = streams.stream("a")
        for _ in range(20):
            source, computed = torch.ones(4), streams.event()
            computed.record()
            upload.wait(computed)
            streams.copy(landing, source, upload)
            done.record(upload)
            if wait:
                done.wait()
            del source

    with FakeStreams(random.Random(0)) as streams:
        send(streams, wait=True)
    with pytest.raises(RaceError, match="given back before a copy"), FakeStreams(random.Random(0)) as streams:
        send(streams, wait=False)


def test_backward_is_watched():
    with FakeStreams(random.Random(0)) as streams:
        slot, source = torch.ones(3).requires_grad_(), streams.host(3, torch.float32)
        event = streams.event()
        event.record()
        loss = (slot * slot).sum()
        upload = streams.stream("upload")
        upload.wait(event)
        with pytest.raises(RaceError, match="upload writes bytes that the computing stream reads"):
            streams.copy(slot.detach(), source, upload)
        loss.backward()
        event.record()
        upload.wait(event)
        streams.copy(slot.detach(), source, upload)
        with pytest.raises(RaceError):
            loss = (slot * 2).sum()


def test_on_a_cpu_everything_happens_at_once():
    streams = Streams(torch.device("cpu"))
    x, landing = pipeline(streams)
    assert torch.equal(x, expected()[0])
    assert torch.equal(landing, expected()[1])
    streams.current().wait(streams.event())
