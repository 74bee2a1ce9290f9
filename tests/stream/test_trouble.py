"""When something fails, and what is small, odd or asked for at an unusual time."""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stream.pairs import STREAM, pair, train_alike, walker
from tests.stream.plans import described
from tests.stream.racing import LateWorker, build

from trainforge.errors import ConfigError, IncompatibleError
from trainforge.testing import Walker, tiny_run
from trainforge.testing.conformance.memory import spoiled
from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream import StreamSection, building
from trainforge_megatrain.stream.offload import Offload
from trainforge_megatrain.stream.units import Place

MODEL = {"layers": 3, "dropout": 0.2}
HALVES = {"dtype": "bf16"}


def late(folder: Path, **facts: Any) -> Walker:
    """Updates happen when somebody waits for them, and not before."""
    return build(folder, Streams(torch.device("cpu")), LateWorker(random.Random(0), 0), {}, **facts)


def in_resident(folder: Path, **facts: Any) -> Walker:
    return build(folder, None, None, {}, **facts)


def test_an_error_in_the_update_thread_ends_the_next_step_with_its_traceback(tmp_path: Path):
    """C17, §8: nobody waits for ever."""
    ours = walker(tmp_path, STREAM, model=MODEL)
    ours.take()
    ours.stages.memory.drain()

    def breaking(slots: Any, update: Any) -> None:
        raise ZeroDivisionError("on purpose")

    ours.stages.optimizer.update = breaking  # type: ignore[method-assign]
    ours.take()
    began = time.perf_counter()
    with pytest.raises(ZeroDivisionError, match="on purpose") as raised:
        ours.take()
    assert time.perf_counter() - began < 5
    assert "breaking" in "".join(traceback.format_tb(raised.value.__traceback__))
    ours.stages.memory.close()


def test_an_error_of_one_micro_batch_ends_the_others(tmp_path: Path):
    ours = walker(tmp_path, STREAM, model=MODEL)
    block = ours.stages.model.module.blocks[1]
    calls, forward = [], block.norm2.forward

    def breaking(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("on purpose")
        return forward(*args)

    block.norm2.forward = breaking
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        ours.take()
    assert len(calls) == 2
    block.norm2.forward = forward
    ours.take()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_that_is_not_finite_changes_no_bit(tmp_path: Path, accumulate: int):
    """C29, §8: a finite loss with a gradient that is NaN; halves, moments and counts stay, and training goes on."""
    ours = walker(tmp_path, STREAM, model=MODEL, train=HALVES, accumulate=accumulate)
    ours.take()
    ours.stages.memory.drain()
    before = bits(ours)
    hidden = ours.stages.model.hidden
    ours.stages.model.hidden = spoiled(hidden)  # type: ignore[method-assign]
    got = ours.take()
    assert got.loss == got.loss
    assert got.norm != got.norm
    ours.stages.memory.drain()
    after = bits(ours)
    assert all(torch.equal(tensor, after[place]) for place, tensor in before.items())
    ours.stages.model.hidden = hidden  # type: ignore[method-assign]
    assert ours.take().norm > 0
    ours.stages.memory.drain()
    assert any(not torch.equal(tensor, before[place]) for place, tensor in bits(ours).items())


def bits(ours: Walker) -> dict[Any, torch.Tensor]:
    """Copies of all that a checkpoint holds, halves apart."""
    found = {}
    for named in ours.stages.memory.state().tensors:
        found[named.key, named.extent.name] = named.tensor.clone()
        if named.low is not None:
            found["low", named.extent.name] = named.low.clone()
    assert any(key == "low" for key, _ in found)
    return found


def test_who_reads_weights_waits_for_the_updates(tmp_path: Path):
    """Evaluation, export (`weights`), samples and checkpoints."""
    default = in_resident(tmp_path / "default")
    default.take()
    validation = list(default.stages.data.validation())
    losses = default.stages.memory.evaluate(validation)
    weights = default.weights()
    text = default.stages.memory.generate([1, 2, 3], 8, seed=4)
    ours = late(tmp_path / "a")
    ours.take()
    assert torch.equal(ours.stages.memory.evaluate(validation), losses)
    ours = late(tmp_path / "b")
    ours.take()
    assert all(torch.equal(ours.stages.memory.weights(name), weight) for name, weight in weights.items())
    ours = late(tmp_path / "c")
    ours.take()
    assert ours.stages.memory.generate([1, 2, 3], 8, seed=4) == text
    assert text
    ours = late(tmp_path / "d")
    ours.take()
    path = ours.save()
    default.restore(ours.stages.checkpoint, path, 1)
    assert all(torch.equal(weight, weights[name]) for name, weight in default.weights().items())


def test_evaluation_leaves_training_alone_and_may_come_first(tmp_path: Path):
    ours, default = pair(tmp_path, model=MODEL)
    validation = list(default.stages.data.validation())
    for _ in range(3):
        got = ours.stages.memory.evaluate(validation)
        assert torch.equal(got, default.stages.memory.evaluate(validation))
        assert len(got)
        train_alike(ours, default, 1)
    assert ours.stages.memory.module.training  # type: ignore[attr-defined]


def test_a_block_that_is_called_twice_is_refused(tmp_path: Path):
    def twice(model: Any) -> None:
        plain = model.module.blocks
        module = type(plain)
        again = type("Again", (module,), {"__iter__": lambda self: iter([*self._modules.values()] * 2)})
        model.module.blocks = again(plain)

    ours = build(tmp_path, Streams(torch.device("cpu")), LateWorker(random.Random(0)), {}, change=twice)
    with pytest.raises(IncompatibleError, match=r"blocks\.0 is called twice.*choose memory resident"):
        ours.take()


def test_all_frozen_is_refused(tmp_path: Path):
    def frozen(model: Any) -> None:
        model.parameters = tuple(replace(spec, trainable=False) for spec in model.parameters)

    with pytest.raises(ConfigError, match="every parameter is frozen"):
        late(tmp_path, change=frozen)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(
    "section", [{"slots": 2}, {"slots": 3, "pin": False}, {"slots": 4, "inputs": "host"}]
)
def test_few_blocks_and_many_slots(tmp_path: Path, layers: int, section: dict[str, Any]):
    train_alike(*pair(tmp_path, model={**MODEL, "layers": layers}, section=section, accumulate=2), 3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_without_blocks(tmp_path: Path, accumulate: int):
    """What nobody names as a block is kept whole."""

    def nameless(model: Any) -> None:
        model.blocks = ()
        model.parameters = tuple(replace(spec, block=None) for spec in model.parameters)

    ours = late(tmp_path / "a", change=nameless, accumulate=accumulate)
    train_alike(ours, in_resident(tmp_path / "b", change=nameless, accumulate=accumulate), 3)


def test_a_model_whose_last_parameters_are_those_of_a_block(tmp_path: Path):
    """What stands before the blocks is there from the start, also when nothing stands behind them."""

    def no_head(model: Any) -> None:
        model.parameters = tuple(
            sorted(model.parameters, key=lambda spec: (spec.block is not None, spec.block))
        )

    facts: dict[str, Any] = {"change": no_head, "model": {"tied": True}, "accumulate": 1}
    train_alike(late(tmp_path / "a", **facts), in_resident(tmp_path / "b", **facts), 3)


def test_closing_twice(tmp_path: Path):
    ours = walker(tmp_path, STREAM, model=MODEL)
    ours.take()
    ours.stages.memory.close()
    ours.stages.memory.close()


def test_a_run_goes_on_in_the_other_memory(tmp_path: Path):
    """Under the loop of core, with split masters, evaluation and checkpoints."""
    facts: dict[str, Any] = {"model": {"dropout": 0.2}, "train": HALVES}
    default = tiny_run(tmp_path / "default", ("resident", "adamw", "dcp"), **facts)
    tiny_run(tmp_path / "mixed", (STREAM, "adamw", "dcp"), max_steps=3, **facts)
    tiny_run(tmp_path / "mixed", ("resident", "adamw", "dcp"), max_steps=2, **facts)
    mixed = tiny_run(tmp_path / "mixed", (STREAM, "adamw", "dcp"), **facts)
    assert mixed.code == 0
    assert mixed.sample_ids == default.sample_ids
    assert len(mixed.losses) == len(default.losses)
    for got, wanted in zip(mixed.losses, default.losses, strict=True):
        assert got == pytest.approx(wanted, rel=5e-3)  # sums of micro-batches go down in bf16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_kept_blocks_that_do_not_run_again(tmp_path: Path, accumulate: int):
    """No recomputation holds a micro-batch up there, and the boxes for gradients have room for two blocks."""
    facts: dict[str, Any] = {"accumulate": accumulate, "train": {"recompute": False, "clip": 0.5}}
    places = {f"blocks.{index}": Place.KEPT for index in (0, 1, 2, 3)}
    ours = build(tmp_path / "a", Streams(torch.device("cpu")), LateWorker(random.Random(0)), places, **facts)
    assert not any(unit.recomputed for unit in ours.stages.memory.units)  # type: ignore[attr-defined]
    train_alike(ours, in_resident(tmp_path / "b", **facts), 3)


def test_an_interruption_ends_the_micro_batches_before_memory_is_given_back(tmp_path: Path):
    """Ctrl-C reaches the thread that waits for them; none may go on with weights that are no longer there."""
    ours = walker(tmp_path, STREAM, model=MODEL)
    block = ours.stages.model.module.blocks[1]
    calls, ended, forward = [], [], block.norm2.forward

    def slow(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
        ended.append(1)
        return forward(*args)

    block.norm2.forward = slow
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ours.take()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(calls), len(ended)) == (1, 1)


def test_the_head_goes_up_beside_the_last_block_which_does_not_wait_for_it(tmp_path: Path):
    ours = walker(tmp_path, STREAM, model=MODEL, accumulate=1)
    memory: Any = ours.stages.memory
    (head,), rooms = memory.head, memory.rooms
    ours.take()
    memory.drain()
    seen, hold = [], rooms.hold
    rooms.hold = lambda unit: (seen.append(unit), hold(unit))
    last = ours.stages.model.module.blocks[-1].norm2
    forward = last.forward

    def reached(*args: Any) -> Any:
        if memory.blocks[-1] in seen and head not in seen:
            seen.append((rooms._of[head].holds is head, "at the last block"))
        return forward(*args)

    last.forward = reached
    ours.take()
    assert (True, "at the last block") in seen
    assert head in seen


def test_two_inputs_of_a_block_that_begin_at_the_same_element():
    """Each comes back from host RAM as it was."""
    cpu = torch.device("cpu")
    offload = Offload(Streams(cpu), cpu, lambda _place, wait: wait(), pin=False)
    whole = torch.arange(12.0).view(3, 4).requires_grad_()
    part = whole[:, :2]
    with offload.around(0, 0, [whole, part]):
        product = (whole * whole).sum() + (part * part * part).sum()
    (grad,) = torch.autograd.grad(product, whole)
    wanted = 2 * whole.detach()
    wanted[:, :2] += 3 * part.detach() ** 2
    assert torch.equal(grad, wanted)


def test_what_was_taken_is_given_back_when_it_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Page-locked memory, and the bound of the device's allocator: the process may go on with another run."""
    ctx = described(tmp_path)
    undone: list[str] = []

    class Watched(Streams):
        def close(self) -> None:
            undone.append("host memory")
            super().close()

    def broken(_model: Any, _name: str, out: torch.Tensor, _extent: Any) -> None:
        out.fill_(float("nan"))

    monkeypatch.setattr(building, "Streams", Watched)
    monkeypatch.setattr(building, "lift_limit", lambda _device: undone.append("limit"))
    monkeypatch.setattr(type(ctx.model), "load", broken)
    with pytest.raises(ConfigError, match="NaN"):
        building.build(ctx, StreamSection())
    assert undone == ["host memory", "limit"]


def share(model: Any) -> None:
    """Tie a matrix of the last block to the second block's."""
    first, last = "blocks.1.up.weight", "blocks.3.up.weight"
    model.module.blocks[3].up.weight = model.module.blocks[1].up.weight
    model.parameters = tuple(
        replace(spec, aliases=(last,)) if spec.name == first else spec
        for spec in model.parameters
        if spec.name != last
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_that_two_blocks_share_stays_on_the_device(tmp_path: Path, accumulate: int):
    """In a slot it would be overwritten between them."""
    ours = late(tmp_path / "a", change=share, accumulate=accumulate)
    units = ours.stages.memory.units  # type: ignore[attr-defined]
    assert [[s.name for s in unit.specs] for unit in units if unit.block is None][1] == ["blocks.1.up.weight"]
    train_alike(ours, in_resident(tmp_path / "b", change=share, accumulate=accumulate), 4)


def test_the_hosts_updates_are_queued_before_the_devices_are_launched(tmp_path: Path):
    places = {"stem": Place.DEVICE, "blocks.0": Place.DEVICE}
    ours = build(tmp_path, Streams(torch.device("cpu")), LateWorker(random.Random(0), 0), places)
    updates, queued = ours.stages.memory.updates, []  # type: ignore[attr-defined]
    at_once = updates._update

    def update(unit: Any, *args: Any) -> None:
        queued.append((unit.place, len(updates._worker.queue)))
        at_once(unit, *args)

    updates._update = update
    ours.take()
    assert queued == [(Place.DEVICE, 4)] * 2  # three other blocks and the head


def test_a_thread_that_cannot_be_started_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = walker(tmp_path, STREAM, model=MODEL)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "micro-batch 2_0":
            time.sleep(0.3)  # the first one waits at its first block by now
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="start new thread"):
            ours.take()
    first = ours.stages.memory._threads[0]  # type: ignore[attr-defined]
    first.submit(int).result(5)  # it has left the step that failed
    ours.take()


def test_micro_batches_keep_their_threads_as_long_as_the_run(tmp_path: Path):
    """cuDNN's plans are kept per thread: with new ones every step, a quarter of the time on an H200 was lost."""
    ours = walker(tmp_path, STREAM, model=MODEL)
    memory, at_work = ours.stages.memory, []
    loss = memory._loss  # type: ignore[attr-defined]
    memory._loss = lambda *args: at_work.append(threading.get_ident()) or loss(*args)  # type: ignore[attr-defined]
    ours.take()
    first, at_work[:] = list(at_work), []
    ours.take()
    assert len(set(first)) == 3
    assert at_work == first
    memory.close()
    alive = {thread.ident for thread in threading.enumerate()}
    assert alive.isdisjoint(first)
