"""Threads: how many, that they change no bit, and that they leave Python alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from tests.cpu_adam.slots import bits, do, draw_gradients, make, make_slot, split
from tests.support.context import make_context

from trainforge.stages import ParameterSpec
from trainforge_megatrain.cpu_adam import forge_optimizer
from trainforge_megatrain.cpu_adam.threads import update_threads

LARGE = (  # several grains of 32768 elements, and slots between them that are smaller than one
    ParameterSpec("a", (100_003,)),
    ParameterSpec("b", (17,)),
    ParameterSpec("none", (0,)),
    ParameterSpec("c", (32_768,)),
    ParameterSpec("d", (65_537,)),
)


def alive() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def test_the_number_of_threads_changes_no_bit():
    found = []
    for threads in (1, 2, 3, 8):
        optimizer = make({"backend": "native", "threads": threads}, weight_decay=0.1)
        slots = [make_slot(optimizer, spec) for spec in LARGE]
        slots = [split(slot) if index % 2 else slot for index, slot in enumerate(slots)]
        for step in range(1, 6):
            draw_gradients(slots, step)
            optimizer.update(slots, do(step, scale=0.7))
        found.append(bits(slots))
        optimizer.close()
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize(
    ("cores", "ranks", "device", "run_threads", "wish", "threads"),
    [
        (16, 1, "cpu", None, "auto", 16),
        (16, 1, "cuda", None, "auto", 15),
        (16, 4, "cuda", None, "auto", 3),
        (2, 2, "cpu", None, "auto", 1),
        (2, 2, "cuda", None, "auto", 1),
        (2, 8, "cuda", None, "auto", 1),
        (16, 1, "cuda", 6, "auto", 5),
        (16, 1, "cuda", None, 12, 12),
    ],
)
def test_cores_are_shared_out(monkeypatch, cores, ranks, device, run_threads, wish, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = {} if run_threads is None else {"threads": run_threads}
    ctx = make_context(world=ranks, device=device, run=run)
    assert update_threads(ctx, wish, cores) == threads


def test_omp_num_threads_does_not_count_and_that_is_said(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    provider, ctx, before = forge_optimizer(), make_context(), alive()
    optimizer = provider.build(ctx, provider.config(threads=3))
    assert ctx.console.lines == [
        "cpu_adam: native update on 3 threads (OMP_NUM_THREADS=1 does not count here)"
    ]
    assert optimizer.metrics() == {"threads": 3.0}
    assert alive() == before + 2  # and the calling one
    optimizer.close()


def test_threads_end_with_the_optimizer():
    before = alive()
    optimizer = make({"backend": "native", "threads": 9})
    assert alive() == before + 8
    optimizer.close()
    assert alive() == before
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.update([make_slot(optimizer, ParameterSpec("w", (4,)))], do())


def test_python_goes_on_meanwhile():
    """The kernel runs without Python's lock: a thread that never gives it up by itself would stop this one."""
    optimizer = make({"backend": "native", "threads": 1})
    slot = make_slot(optimizer, ParameterSpec("w", (2**24,)))
    update, interval, turns = do(), sys.getswitchinterval(), 0
    sys.setswitchinterval(60)
    try:
        worker = threading.Thread(target=optimizer.update, args=([slot], update))
        worker.start()
        while worker.is_alive():
            turns += 1
            time.sleep(0.0005)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert slot.state["step"] == 1
    assert turns > 3


def test_updates_from_several_threads_at_once():
    optimizer = make({"backend": "native", "threads": 4})
    slots = [make_slot(optimizer, ParameterSpec(f"w{i}", (300_000,))) for i in range(4)]
    wanted = [make_slot(optimizer, slot.spec) for slot in slots]
    updates = [do(step) for step in range(1, 21)]
    for update in updates:
        optimizer.update(wanted, update)

    def walk(slot):
        for update in updates:
            optimizer.update([slot], update)

    workers = [threading.Thread(target=walk, args=(slot,), daemon=True) for slot in slots]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert bits(slots) == bits(wanted)
    optimizer.close()


FORK = """
import os, sys
from pathlib import Path
from tests.cpu_adam.slots import do, make, make_slot
from trainforge.stages import ParameterSpec
from trainforge_megatrain.cpu_adam import building, optimizer as module
module.load_kernel = lambda cache: building.load_kernel(Path(sys.argv[1]))
optimizer = make({"backend": "native", "threads": 2})
slot = make_slot(optimizer, ParameterSpec("w", (70_000,)))
optimizer.update([slot], do())
child = os.fork()
optimizer.update([slot], do(2))
if child == 0:
    optimizer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done", int(optimizer.metrics()["threads"]))
"""


def started(code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


@pytest.mark.slow
def test_a_forked_child_has_a_pool_of_its_own_and_exiting_needs_no_close(kernel_cache):
    process = started(FORK, str(kernel_cache))
    said, errors = process.communicate(timeout=60)
    assert said == "done 2\n", errors


RANK = """
import sys
from pathlib import Path
from tests.support.context import make_context
from tests.cpu_adam.slots import do, make_slot
from trainforge.stages import ParameterSpec
from trainforge_megatrain.cpu_adam import building, forge_optimizer, optimizer as module
module.load_kernel = lambda cache: building.load_kernel(Path(sys.argv[1]))
provider = forge_optimizer()
optimizer = provider.build(make_context(rank=int(sys.argv[2]), world=2), provider.config())
slot = make_slot(optimizer, ParameterSpec("w", (200_000,)))
optimizer.update([slot], do())
print(int(optimizer.metrics()["threads"]))
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_on_two_cores_have_one_thread_each(kernel_cache):
    """As torchrun starts them, with OMP_NUM_THREADS=1; the mask is what counts."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    pinned = f"import os; os.sched_setaffinity(0, {cores})\n" + RANK
    ranks = [started(pinned, str(kernel_cache), str(rank), OMP_NUM_THREADS="1") for rank in range(2)]
    threads = []
    for process in ranks:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        threads.append(int(said))
    assert sum(threads) <= max(2, len(cores))
