"""What is written is the state as it was when `save` was called, whoever overtakes whom; and nobody waits for ever.

The scenarios take the module under test, so that the last tests can leave out, one after the other, every place
where somebody waits or is woken: each is needed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vault.store_toys import PlainStorage
from tests.vault.toys import Split, bits, keyed, slot_of, stage_in, step_path

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.layout import held_tensors, plan_chunks
from trainforge_loongforge.vault import hashing
from trainforge_loongforge.vault import snapshot as real
from trainforge_loongforge.vault.packs import CHUNK_BYTES
from trainforge_loongforge.vault.store import Store

PATIENCE_S = 20.0
NAMES = ("a", "b", "c")


class World:
    """Three parameters with masters (one in halves), moments and a number each, and a snapshot of them."""

    def __init__(self, module: Any = real, most_copies: int = 0, chunk_bytes: int = 64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            (key, name): torch.randn(100, generator=generator)
            for name in NAMES
            for key in ("master", "exp_avg")
            if (key, name) != ("master", "c")
        }
        self.tensors |= {("step", name): torch.tensor(1.0) for name in NAMES}
        self.split = Split("c", torch.randn(100, generator=generator), (30,))
        states = {"memory": keyed(self.tensors).state(), "halves": self.split.state()}
        table, held = held_tensors(states)
        self.snapshot = module.Snapshot(module.Buffers(), most_copies)
        for chunk in plan_chunks([table], chunk_bytes):
            self.snapshot.add_live(chunk, real.holder(held, chunk), None)
        self.truth = [self._now(piece) for piece in self.snapshot.pieces]

    def _now(self, piece: Any) -> bytes:
        out = torch.empty(piece.nbytes, dtype=torch.uint8)
        piece.read_into(out)
        return bits(out)

    def pieces_of(self, name: str) -> list[Any]:
        return [piece for piece in self.snapshot.pieces if piece.chunk.tensor.endswith(f"/{name}")]

    def change(self, name: str) -> None:
        """What an update does, once it has told of it."""
        for (_, owner), tensor in self.tensors.items():
            if owner == name:
                tensor.add_(1)
        if name == "c":
            self.split.fill(self.split.values() + 1)

    def update(self, name: str) -> None:
        self.snapshot.before_write({name})
        self.change(name)

    def write(self, pause: Callable[[], None] = lambda: None, ahead: int = 1) -> list[bytes]:
        """Read all pieces in order, as the store does: some are open together; each is looked at twice."""
        found, waiting = [], deque[tuple[ExitStack, memoryview, bytes]]()

        def finish_one() -> None:
            stack, data, first = waiting.popleft()
            assert bytes(data) == first, "it has changed while it was open"
            found.append(first)
            stack.close()

        for piece in self.snapshot.pieces:
            stack = ExitStack()
            data = stack.enter_context(piece.opened())
            first = bytes(data)
            waiting.append((stack, data, first))
            pause()
            if len(waiting) == ahead:
                finish_one()
        while waiting:
            finish_one()
        return found

    def written_as_it_was(self, found: list[bytes]) -> None:
        wrong = [
            piece.chunk.tensor
            for piece, now, then in zip(self.snapshot.pieces, found, self.truth, strict=True)
            if now != then
        ]
        assert not wrong, f"not as when it was saved: {wrong}"


class Running(threading.Thread):
    """A thread whose end and error are asked for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work, self.error, self.result = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def ended(self, patience_s: float = PATIENCE_S) -> Any:
        self.join(patience_s)
        assert not self.is_alive(), "it waits for ever"
        if self.error is not None:
            raise self.error
        return self.result

    def waits(self) -> bool:
        """Whether it is still there after a while in which it could have ended."""
        self.join(0.05)
        return self.is_alive()


class Gate:
    """Holds back whoever reads a piece, until it is opened."""

    def __init__(self, piece: Any) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        read = piece.read_into

        def held_back(out: Any) -> None:
            self.reached.set()
            self.open.wait(PATIENCE_S)
            read(out)

        piece.read_into = held_back


# --------------------------------------------------------------------------------------------------- any schedule


@settings(max_examples=60)
@given(
    most_copies=st.sampled_from([0, 1, 2, 5, 1000]),
    ahead=st.integers(1, 6),
    orders=st.lists(st.permutations(NAMES), min_size=1, max_size=2),
    begin_ms=st.floats(0, 3),
    pauses_ms=st.lists(st.floats(0, 0.4), min_size=1, max_size=7),
    chunk_bytes=st.sampled_from([16, 64, 1000]),
)
def test_any_schedule_writes_the_state_as_it_was(
    most_copies, ahead, orders, begin_ms, pauses_ms, chunk_bytes
):
    """One writer in order, one or two updaters in any order, any number of copies, sleeps in between."""
    world = World(most_copies=most_copies, chunk_bytes=chunk_bytes)
    guards = {name: threading.Lock() for name in NAMES}

    def pausing(shift: int) -> Callable[[], None]:
        count = iter(range(shift, 10**6))
        return lambda: time.sleep(pauses_ms[next(count) % len(pauses_ms)] / 1000)

    def updates(number: int, order: list[str]) -> None:
        pause = pausing(number)
        time.sleep(begin_ms / 1000)
        for name in order:
            with guards[name]:  # updates of one parameter follow one another
                world.update(name)
            pause()

    updaters = [Running(lambda n=n, order=order: updates(n, order)) for n, order in enumerate(orders)]
    writer = Running(lambda: world.write(pausing(3), ahead))
    found = writer.ended()
    for updater in updaters:
        updater.ended()
    world.written_as_it_was(found)
    assert world.snapshot._copies == 0
    assert all(piece.copy is None for piece in world.snapshot.pieces)


@pytest.mark.parametrize("most_copies", [0, 3, 1000])
def test_no_more_is_copied_than_there_is_room_for(most_copies):
    """Before anything is written, the update copies that much and no more; copies are used again."""
    world = World(most_copies=most_copies)
    taken, take = [], world.snapshot.buffers.take
    world.snapshot.buffers.take = lambda size: (taken.append(1), take(size))[1]
    updates = Running(lambda: [world.update(name) for name in NAMES])
    count = len(world.snapshot.pieces)
    assert updates.waits() is (most_copies < count)
    assert len(taken) == min(most_copies, count)
    found = Running(world.write).ended()
    updates.ended()
    world.written_as_it_was(found)
    assert len(world.snapshot.buffers._free) <= max(most_copies, 0) + 1  # and one for halves put together


def test_what_nobody_tells_of_is_not_waited_for():
    world = World()
    world.snapshot.before_write({"elsewhere"})
    assert world.snapshot.delayed_s == 0
    world.written_as_it_was(world.write())
    world.snapshot.before_write(set(NAMES))  # all is written
    assert world.snapshot.delayed_s == 0


# ------------------------------------------------------------------------------------------- one wait after another


def the_writer_waits_for_a_copy_in_the_making(module: Any, patience_s: float) -> None:
    """The update copies a piece when its turn comes: the copy is written, and the update goes on behind it."""
    world = World(module, most_copies=1000)
    piece = world.pieces_of("a")[0]
    gate = Gate(piece)
    updater = Running(lambda: world.update("a"))
    assert gate.reached.wait(patience_s)

    def open_slowly() -> bytes:
        with piece.opened() as data:
            updater.ended(patience_s)
            return bytes(data)

    writer = Running(open_slowly)
    early = not writer.waits()
    gate.open.set()
    found = writer.ended(3 * patience_s)
    assert not early
    assert found == world.truth[world.snapshot.pieces.index(piece)]


def the_writer_opens_nothing_while_an_update_copies(module: Any, patience_s: float) -> None:
    """Hashing would take the cores that the copies need; afterwards it goes on."""
    world = World(module, most_copies=1000)
    gate = Gate(world.pieces_of("a")[0])
    updater = Running(lambda: world.update("a"))
    assert gate.reached.wait(patience_s)
    other = world.pieces_of("b")[0]

    def open_other() -> bytes:
        with other.opened() as data:
            return bytes(data)

    writer = Running(open_other)
    early = not writer.waits()
    gate.open.set()
    updater.ended(patience_s)
    found = writer.ended(patience_s)
    assert not early
    assert found == world.truth[world.snapshot.pieces.index(other)]


def the_update_waits_for_what_is_open(module: Any, patience_s: float) -> None:
    """However much may be copied: what is being written is not copied, and not changed either."""
    world = World(module, most_copies=1000)
    piece = world.pieces_of("a")[0]
    with piece.opened() as data:
        updater = Running(lambda: world.update("a"))
        early = not updater.waits()
        same = bytes(data) == world.truth[world.snapshot.pieces.index(piece)]
    updater.ended(patience_s)
    assert not early
    assert same


def the_update_waits_for_its_turn_without_copies(module: Any, patience_s: float) -> None:
    world = World(module, most_copies=0)
    updater = Running(lambda: world.update("b"))
    early = not updater.waits()
    found = world.write()
    updater.ended(patience_s)
    assert not early
    world.written_as_it_was(found)


def the_update_goes_on_when_its_own_pieces_are_written(module: Any, patience_s: float) -> None:
    """It is not kept until the whole save has ended."""
    world = World(module, most_copies=0)
    updater = Running(lambda: world.update("b"))
    assert updater.waits()
    for piece in world.pieces_of("b"):
        with piece.opened():
            pass
    updater.ended(patience_s)


def a_second_update_waits_for_the_copies_of_the_first(module: Any, patience_s: float) -> None:
    """Two threads that update spans of one parameter: neither may begin before the copies are whole."""
    world = World(module, most_copies=1000)
    gate = Gate(world.pieces_of("a")[0])
    first = Running(lambda: world.snapshot.before_write({"a"}))
    assert gate.reached.wait(patience_s)
    second = Running(lambda: world.snapshot.before_write({"a"}))
    early = not second.waits()
    gate.open.set()
    first.ended(patience_s)
    second.ended(patience_s)
    assert not early


def the_end_of_a_failed_save_lets_everybody_go(module: Any, patience_s: float) -> None:
    world = World(module, most_copies=2)
    updaters = [Running(lambda name=name: world.update(name)) for name in NAMES]
    assert all(updater.waits() for updater in updaters)
    world.snapshot.end()
    for updater in updaters:
        updater.ended(patience_s)
    world.update("a")


SCENARIOS = (
    the_writer_opens_nothing_while_an_update_copies,
    the_writer_waits_for_a_copy_in_the_making,
    the_update_waits_for_what_is_open,
    the_update_waits_for_its_turn_without_copies,
    the_update_goes_on_when_its_own_pieces_are_written,
    a_second_update_waits_for_the_copies_of_the_first,
    the_end_of_a_failed_save_lets_everybody_go,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_who_waits_for_whom(scenario):
    scenario(real, PATIENCE_S)


def waits_of(source: str) -> Iterator[tuple[int, ast.AST]]:
    """Every place where somebody waits or is woken, by line."""
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("wait_for", "notify_all"):
            yield node.lineno, node


SOURCE = inspect.getsource(real)


def without(line: int) -> Any:
    """The module with the wait (or the waking) of that line left out."""

    class Leaving(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            named = isinstance(node.func, ast.Attribute) and node.func.attr in ("wait_for", "notify_all")
            return ast.Constant(True) if named and node.lineno == line else node

    tree = ast.fix_missing_locations(Leaving().visit(ast.parse(SOURCE)))
    module = ModuleType("snapshot_without_a_wait")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(tree, "snapshot.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("line", sorted({line for line, _ in waits_of(SOURCE)}))
def test_leaving_out_any_wait_is_noticed(line):
    module, noticed = without(line), []
    for scenario in SCENARIOS:
        try:
            scenario(module, 0.5)
        except (AssertionError, CheckpointError):
            noticed.append(scenario.__name__)
    assert noticed, f"nobody notices that line {line} is left out: {SOURCE.splitlines()[line - 1].strip()}"


def test_leaving_out_nothing_is_not_noticed():
    """What makes the test above mean something."""
    assert len(list(waits_of(SOURCE))) >= 5
    module = without(-1)
    for scenario in SCENARIOS:
        scenario(module, PATIENCE_S)


# ------------------------------------------------------------------------------------------------------- failures


def test_a_copy_that_fails_keeps_nobody():
    """The update fails; the writer reads the chunk where it lies, and the room for a copy is free again."""
    world = World(most_copies=1)
    piece = world.pieces_of("a")[0]
    read, failures = piece.read_into, iter([MemoryError("no memory for a copy")])

    def failing(out: Any) -> None:
        for error in failures:
            raise error
        read(out)

    piece.read_into = failing
    with pytest.raises(MemoryError):
        world.snapshot.before_write({"a"})
    assert world.snapshot._copies == 0
    updater = Running(lambda: world.update("a"))
    found = Running(world.write).ended()
    updater.ended()
    world.written_as_it_was(found)


@pytest.mark.parametrize("fails", [True, False])
def test_a_copy_that_is_being_made_while_the_save_ends(fails):
    """Whether it comes to be or not, nobody waits for it afterwards."""
    world = World(most_copies=1000)
    piece = world.pieces_of("a")[0]
    gate = Gate(piece)
    if fails:
        held_back = piece.read_into

        def failing(out: Any) -> None:
            held_back(out)
            raise MemoryError

        piece.read_into = failing
    first = Running(lambda: world.update("a"))
    assert gate.reached.wait(PATIENCE_S)
    world.snapshot.end()
    gate.open.set()
    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        first.ended()
    Running(lambda: world.update("a")).ended()
    assert world.snapshot._copies == 0 or not fails


def test_the_copies_of_a_save_that_fails_are_used_again():
    world = World(most_copies=1000, chunk_bytes=400)
    buffers, taken = world.snapshot.buffers, []
    take = buffers.take
    buffers.take = lambda size=0: taken.append(1) or take()
    given_back = []
    give_back = buffers.give_back
    buffers.give_back = lambda buffer: given_back.append(1) or give_back(buffer)
    world.update("a")
    assert taken
    assert not given_back
    world.snapshot.end()
    assert len(given_back) == len(taken)
    assert world.snapshot._copies == 0


def test_buffers_that_somebody_makes_meanwhile_are_not_made_twice():
    """An update takes some between the look at what is missing and the making."""
    buffers = real.Buffers()

    class Overtaken:
        def __enter__(self) -> None:
            if not buffers.made:
                buffers._make(5)

        def __exit__(self, *_: Any) -> None:
            pass

    buffers._lock = Overtaken()
    buffers.reserve(3)
    assert buffers.made == 5


def test_a_piece_that_cannot_be_read_fails_the_save_and_keeps_nobody(tmp_path):
    """As when a device is lost: the store's error is that of the piece, and every update goes on."""
    world = World(most_copies=2)
    world.split.low[1] = world.split.low[1][:3]
    broken = next(p for p in world.snapshot.pieces if p.held.named.low is not None and p.chunk.offset == 30)
    broken.read_into = lambda out: (_ for _ in ()).throw(RuntimeError("the device is lost"))
    updater = Running(lambda: [world.snapshot.before_write({name}) for name in ("a", "b")])
    store = Store(tmp_path, PlainStorage(), threads=2)

    def write() -> None:
        try:
            store.write("save", 0, world.snapshot.pieces)
        finally:
            world.snapshot.end()

    with pytest.raises(RuntimeError, match="the device is lost"):
        Running(write).ended()
    updater.ended()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_hangs_is_said_after_a_while(monkeypatch):
    monkeypatch.setattr(real, "_STUCK_S", 0.1)
    with pytest.raises(CheckpointError, match=r"the disk hangs, or is far too slow; save less often"):
        World().snapshot.before_write({"a"})


def test_a_disk_that_is_slow_but_writes_is_waited_for(monkeypatch):
    """However long it takes in all: what counts is that something was written lately."""
    monkeypatch.setattr(real, "_STUCK_S", 0.5)
    world = World(most_copies=0, chunk_bytes=1000)
    updater = Running(lambda: world.snapshot.before_write(set(NAMES)))
    began = time.monotonic()
    found = world.write(lambda: time.sleep(0.2))
    assert time.monotonic() - began > 1.5
    updater.ended()
    world.written_as_it_was(found)


# ------------------------------------------------------------------------------------------------- the whole stage


class SlowStorage(PlainStorage):
    """Writes a few bytes at a time, after a pause."""

    def __init__(self, pause_s: float, error: OSError | None = None) -> None:
        self.pause_s, self.error = pause_s, error

    def create(self, path: Any) -> Any:
        sink = super().create(path)
        append = sink.append

        def slowly(data: memoryview) -> int:
            time.sleep(self.pause_s)
            if self.error is not None and path.name.endswith(".pack") and memoryview(data).nbytes > 100:
                raise self.error
            return append(data)

        sink.append = slowly
        return sink


@pytest.mark.parametrize("copies", [0, 2, 1000])
def test_updates_that_overtake_a_slow_disk(tmp_path, monkeypatch, copies):
    """Ten saves with an update right behind each: every kept step is as it was, and the delay is told."""
    monkeypatch.setattr(
        hashing, "_LARGE_BYTES", 1
    )  # what is smaller is copied, and does not wait for the disk
    stage = stage_in(tmp_path, NAMES, keep=10, chunk_bytes=400)
    monkeypatch.setattr(stage, "_most_copies", lambda: copies)
    stage._store._storage = SlowStorage(0.001)
    tensors = {(key, name): torch.randn(500) for key in ("master", "exp_avg") for name in NAMES}
    truth = {}
    for step in range(1, 11):
        truth[step] = {place: bits(tensor) for place, tensor in tensors.items()}
        stage.save(step, {"memory": keyed(tensors)})
        for name in NAMES if step % 2 else reversed(NAMES):
            stage.before_write([slot_of(name)])
            for (_, owner), tensor in tensors.items():
                if owner == name:
                    tensor.add_(1)
    stage.wait()
    assert stage.metrics()["slowdown_ms"] > 0
    stage.close()
    reader = stage_in(tmp_path, reads=True)
    for step, wanted in truth.items():
        target = {place: torch.zeros(500) for place in wanted}
        reader.restore({"memory": keyed(target)}, step_path(tmp_path, step))
        assert {place: bits(tensor) for place, tensor in target.items()} == wanted, step


def test_a_disk_that_fails_lets_the_update_go_on(tmp_path):
    stage = stage_in(tmp_path, NAMES, copies=0.0, chunk_bytes=400)
    stage._store._storage = SlowStorage(0.05, OSError(5, "Input/output error"))
    tensors = {("master", name): torch.randn(500) for name in NAMES}
    stage.save(1, {"memory": keyed(tensors)})
    Running(lambda: stage.before_write([slot_of(name) for name in NAMES])).ended()
    with pytest.raises(CheckpointError, match="Input/output error"):
        stage.wait()
    assert not list((tmp_path / "checkpoints/packs").iterdir())
    stage._store._storage = PlainStorage()
    stage.save(2, {"memory": keyed(tensors)})
    stage.close()
    assert stage.verify(step_path(tmp_path, 2)) == []


def test_frozen_and_foreign_tensors_are_copied_before_save_returns(tmp_path):
    """Only what updates change, and tell of, is left where it lies."""
    stage = stage_in(tmp_path, {"a"})
    stage._store._storage = SlowStorage(0.05)
    tensors = {("master", "a"): torch.ones(100), ("value", "frozen"): torch.ones(100)}
    other = {("residual", "a"): torch.ones(100)}
    stage.save(1, {"memory": keyed(tensors), "comm": keyed(other)})
    tensors["value", "frozen"].zero_()
    other["residual", "a"].zero_()
    stage.before_write([slot_of("a")])
    tensors["master", "a"].zero_()
    stage.wait()
    back = [{place: torch.zeros(100) for place in part} for part in (tensors, other)]
    stage.restore({"memory": keyed(back[0]), "comm": keyed(back[1])}, step_path(tmp_path, 1))
    assert all(torch.equal(tensor, torch.ones(100)) for part in back for tensor in part.values())


def test_how_much_may_be_copied_follows_the_free_ram(tmp_path, monkeypatch):
    from trainforge_loongforge.vault import checkpoint as module

    free = SimpleNamespace(free=100 * CHUNK_BYTES, name="free RAM")
    monkeypatch.setattr(module, "host_limit", lambda wished: free)
    for copies, wanted in (("auto", 50), (0.25, 25), (0.0, 0)):
        stage = stage_in(tmp_path, {"a"}, copies=copies)
        assert stage._most_copies() == wanted
        stage.close()
