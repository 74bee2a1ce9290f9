"""Buffers and the threads that fill them; masters that are not finite; threads that give way."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tests.support.context import make_context

from trainforge.errors import ConfigError
from trainforge.stages import Comm, Extent, NamedTensor, PartState
from trainforge.toolbox.checkpointing.finite import is_finite
from trainforge.toolbox.checkpointing.staging import Staging
from trainforge_loongforge.vault import VaultSection, build
from trainforge_loongforge.vault.copying import Helpers, copy_bytes
from trainforge_loongforge.vault.hashing import give_way
from trainforge_loongforge.vault.packs import CHUNK_BYTES
from trainforge_loongforge.vault.snapshot import SMALL_BYTES, Buffers


@pytest.fixture
def helpers():
    made = Helpers()
    yield made
    made.close()


def test_only_cores_that_the_process_may_use_have_helpers():
    cores, threads = os.sched_getaffinity(0), set()
    os.sched_setaffinity(0, {min(cores)})
    try:
        alone = Helpers()
    finally:
        os.sched_setaffinity(0, cores)

    def work(item):
        time.sleep(0.01)
        threads.add(threading.get_ident())

    alone.run(work, range(1, 9))
    alone.close()
    assert threads == {threading.get_ident()}


def test_every_item_is_worked_on_once(helpers):
    done = []
    helpers.run(done.append, range(1, 1001))
    assert sorted(done) == list(range(1, 1001))


def test_others_help():
    """Two items that wait for each other end only when two threads have them."""
    helpers, both = Helpers(), threading.Barrier(2)
    helpers._count = 1
    helpers.run(lambda _: both.wait(10), [1, 2])
    helpers.close()


@pytest.mark.parametrize("bad", [1, 500])
def test_what_one_item_raises_is_raised(helpers, bad):
    def work(item):
        if item == bad:
            raise ValueError(str(item))

    with pytest.raises(ValueError, match=str(bad)):
        helpers.run(work, range(1, 1001))


def test_after_closing_there_is_help_again(helpers):
    done = []
    helpers.run(done.append, [1])
    helpers.close()
    helpers.run(done.append, [2])
    assert done == [1, 2]


def test_bytes_are_copied():
    data, out = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    copy_bytes(out, data)
    assert torch.equal(out, data)


def test_no_two_who_take_share_memory():
    buffers = Buffers()
    taken = [buffers.take() for _ in range(40)]
    for number, buffer in enumerate(taken):
        buffer.fill_(number)
    assert [(len(buffer), int(buffer.min()), int(buffer.max())) for buffer in taken] == [
        (CHUNK_BYTES, number, number) for number in range(40)
    ]
    buffers.close()


def test_what_is_given_back_is_taken_again_and_reserved_ones_are_there():
    buffers = Buffers()
    buffers.reserve(20)
    assert buffers.made == 20
    for _ in range(3):
        taken = [buffers.take() for _ in range(20)]
        for buffer in taken:
            buffers.give_back(buffer)
    assert buffers.made == 20
    buffers.close()


def test_small_pieces_take_small_buffers():
    buffers = Buffers()
    small = buffers.take(SMALL_BYTES)
    buffers.give_back(small)
    assert (small.nbytes, buffers.made) == (SMALL_BYTES, 0)
    assert buffers.take(SMALL_BYTES + 1).nbytes == CHUNK_BYTES
    buffers.close()


def test_after_closing_nothing_is_reserved():
    buffers = Buffers()
    buffers.close()
    buffers.reserve(4)
    assert buffers.made == 0


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_master_that_is_not_finite_is_seen(dtype, bad, place):
    values = torch.ones(1000)
    values[place] = bad
    values = values.to(getattr(torch, dtype))
    expected = bool(values.double().isfinite().all())  # float8_e4m3fn has no infinity
    chunk = SimpleNamespace(tensor="memory/master/w", dtype=dtype)
    assert is_finite(values.view(torch.uint8), chunk) is expected
    assert is_finite(values.view(torch.uint8), SimpleNamespace(tensor="memory/exp_avg/w", dtype=dtype))


def test_no_master_at_all_is_finite():
    empty = torch.empty(0, dtype=torch.uint8)
    assert is_finite(empty, SimpleNamespace(tensor="memory/master/w", dtype="float32"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_only_the_thread_that_asks_gives_way():
    found = []

    def work():
        before = os.getpriority(os.PRIO_PROCESS, 0)
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] > 0
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_a_run_with_little_priority_still_comes_before_the_thread_that_gives_way():
    found = []

    def work():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 12)
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] > 12


def test_buffers_that_cannot_be_had_at_the_start_kill_no_thread(tmp_path, monkeypatch):
    """The save that needs them tells; a run may end without one."""
    died, asked = [], []

    def refuse(self, size):
        asked.append(size)
        raise ConfigError("it cannot be page-locked")

    monkeypatch.setattr(threading, "excepthook", died.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(Staging, "reserve", refuse)
    away = NamedTensor("master", Extent("w", (100,), 0, 100), torch.empty(100, device="meta"))
    built = {
        "comm": Comm(),
        "model": SimpleNamespace(parameters=()),
        "optimizer": SimpleNamespace(state=lambda spec: {}),
        "memory": SimpleNamespace(state=lambda: PartState(tensors=(away,))),
    }
    stage = build(make_context(run_dir=tmp_path, plugin="vault", built=built), VaultSection())
    stage.close()
    assert asked
    assert died == []
