"""Streaming blocks through a small device is the same training, bit for bit, whatever the timing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainforge.stages import Comm
from trainforge.testing import (
    MemoryConformance,
    Stages,
    Walker,
    build_stages,
    load_plugin,
    tiny_context,
    tiny_run,
)
from trainforge.testing.bench import REFERENCE, build_stage
from trainforge.toolbox.fake_streams import FakeStreams, RaceError, _Watch

FILE = Path(__file__).with_name("toy_stream.py")
toy: Any = load_plugin(FILE).implementation


class TestRules(MemoryConformance):
    plugin = FILE


def walker(folder: Path, memory: Any, **model: Any) -> Walker:
    """The default optimizer and checkpoint with a memory; 3 micro-batches a step, clipped."""
    ctx = tiny_context(folder, model=model, train={"clip": 0.1})
    return Walker(build_stages(ctx, (memory, "adamw", "dcp")))


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_bit_equal_to_the_default_over_8_clipped_steps(tmp_path: Path, tied: bool):
    model = {"dropout": 0.2, "layers": 4, "tied": tied, "freeze": ("blocks.1.up.weight",)}
    ours, default = walker(tmp_path / "a", FILE, **model), walker(tmp_path / "b", "resident", **model)
    for _ in range(8):
        got, wanted = ours.take(), default.take()
        assert got == wanted
        assert wanted.norm > 0.1  # clipping takes part
    weights = default.weights()
    for name, weight in ours.weights().items():
        if tied:
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize(("writer", "reader"), [(FILE, "resident"), ("resident", FILE), (FILE, FILE)])
def test_its_checkpoints_and_those_of_the_default_are_one(tmp_path: Path, writer: Any, reader: Any):
    whole = walker(tmp_path / "whole", "resident", dropout=0.2)
    for _ in range(8):
        last = whole.take()
    first, second = (walker(tmp_path / "cut", memory, dropout=0.2) for memory in (writer, reader))
    for _ in range(5):
        first.take()
    second.restore(first.stages.checkpoint, first.save(), 5)
    for _ in range(3):
        got = second.take()
    assert got == last
    weights = whole.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in second.weights().items())


# ----------------------------------------------------------------------------------------------- adversarial timing


class LateWorker:
    """Runs queued work as late as it may: when somebody waits for it, and then everything before it first."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, function: Callable[..., None], *args: Any) -> LateWorker.Job:
        self.queue.append(lambda: function(*args))
        return LateWorker.Job(self, len(self.queue))

    def shutdown(self) -> None:
        pass

    class Job:
        def __init__(self, worker: LateWorker, position: int) -> None:
            self.worker, self.position = worker, position

        def result(self) -> None:
            while self.worker.done < self.position:
                self.worker.done += 1
                self.worker.queue[self.worker.done - 1]()


class ThreadWatch(_Watch):
    """What sees tensor operations is a matter of the thread: each of the toy's threads gets one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.watching = self.streams._mode.watching
        return super().__torch_dispatch__(func, types, args, kwargs)


class PatientComm(Comm):
    """Waits for gradients at the end of the step only, as a comm that works in the background does."""

    def watch(self, buffers):
        inner = super().watch(buffers)
        self.ready: list[Any] = []

        def sink(extent, ready):
            self.ready.append(ready)
            inner(extent, None)

        return sink

    def finish(self):
        while self.ready:
            self.ready.pop().wait()
        return super().finish()


def small(folder: Path) -> Any:
    model = {"layers": 3, "dropout": 0.2, "width": 8}
    return tiny_context(folder, model=model, train={"clip": 0.1}, accumulate=2)


def faked(folder: Path, source: random.Random, left_out: str | None = None) -> tuple[Walker, FakeStreams]:
    """The toy on adversarial streams, with one kind of wait left out."""

    class Careless(toy.ToyStream):
        def wait(self, place: str, wait: Callable[[], object]) -> None:
            if place != left_out:
                super().wait(place, wait)

    ctx = small(folder)
    ctx.built["comm"] = PatientComm()
    for stage in ("model", "data", "optimizer"):
        build_stage(ctx, load_plugin(REFERENCE), stage, {"silent_every": 0} if stage == "data" else {})
    streams = FakeStreams(source)
    ctx.built["memory"] = Careless(ctx, streams, LateWorker())
    build_stage(ctx, load_plugin(REFERENCE), "checkpoint", {})
    return Walker(Stages(ctx, **ctx.built)), streams


@pytest.fixture(autouse=True)
def watched_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy.Walk._micro_batch

    def micro_batch(walk: Any, index: int, batch: Any) -> None:
        if not isinstance(walk.memory.streams, FakeStreams):
            return plain(walk, index, batch)
        with ThreadWatch(walk.memory.streams):
            return plain(walk, index, batch)

    monkeypatch.setattr(toy.Walk, "_micro_batch", micro_batch)


def two_steps(walker: Walker, streams: FakeStreams) -> tuple[list[Any], dict[str, torch.Tensor]]:
    with streams:
        return [walker.take() for _ in range(2)], walker.weights()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("expected")
    ctx = small(folder)
    plain = Walker(build_stages(ctx, (FILE,), {"reference": {"silent_every": 0}}))
    return [plain.take() for _ in range(2)], plain.weights()


def same(one: tuple[list[Any], dict[str, Any]], other: tuple[list[Any], dict[str, Any]]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in other[1])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.randoms(use_true_random=False))
def test_any_legal_order_of_copies_gives_the_same(tmp_path: Path, expected: Any, source: random.Random):
    assert same(two_steps(*faked(tmp_path, source)), expected)


@pytest.mark.parametrize("place", toy.WAITS)
def test_leaving_out_any_wait_is_noticed(tmp_path: Path, expected: Any, place: str):
    for seed in range(4):
        walker, streams = faked(tmp_path, random.Random(seed), left_out=place)
        try:
            result = two_steps(walker, streams)
        except RaceError:
            return
        if not same(result, expected):
            return
    pytest.fail(f"without waiting for {place} everything went well")


def test_it_runs_under_the_loop_of_core(tmp_path: Path):
    model = {"dropout": 0.2}
    default = tiny_run(tmp_path / "default", ("resident", "adamw", "dcp"), model=model)
    tiny_run(tmp_path / "mixed", (FILE, "adamw", "dcp"), model=model, max_steps=3)
    tiny_run(tmp_path / "mixed", ("resident", "adamw", "dcp"), model=model, max_steps=2)
    mixed = tiny_run(tmp_path / "mixed", (FILE, "adamw", "dcp"), model=model)
    assert mixed.code == 0
    assert mixed.sample_ids == default.sample_ids
    assert mixed.learning_rates == default.learning_rates
    assert mixed.losses == default.losses
    assert mixed.digest == default.digest
    assert mixed.summary["eval_loss"] == default.summary["eval_loss"]
