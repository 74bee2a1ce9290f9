"""Several processes give what one gives; a dead or stuck one ends the run quickly and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.text.helpers import text_data, write_jsonl

from trainforge_plugins.text.pool import WORKER, WorkerError, tokenise_all, worker_count
from trainforge_plugins.text.sources import Source, find_sources
from trainforge_plugins.text.tokenise import Piece, Reading
from trainforge_plugins.text.tokenizers import ByteTokenizer
from trainforge_plugins.text.units import Unit, cut_units

# A worker that does `what` when it comes to the unit of bytes 600 to 720.
BAD_WORKER = """
import os, sys, time
from multiprocessing.connection import Connection
from trainforge_plugins.text.tokenise import Tokeniser
from trainforge_plugins.text.worker import die_with_parent, serve
die_with_parent(int(sys.argv[2]))
connection = Connection(int(sys.argv[1]))
spec, field = connection.recv()
def work(unit):
    if unit.start == 600:
        {what}
    return Tokeniser(spec.make(), field).tokenise(unit)
serve(connection, work)
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line number {i:07d}\n" for i in range(100)))  # 20 bytes each
    return path


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before, shared = children(), set(os.listdir("/dev/shm"))
    yield
    assert children() <= before
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("psm_", "sem."))}


def tokenised(path: Path, workers: int, timeout_s: float = 60, **more: object) -> list[tuple[Unit, Piece]]:
    units = cut_units(find_sources(str(path), "auto"), 100)
    return list(tokenise_all(units, ByteTokenizer(), Reading("text"), workers, timeout_s, **more))  # type: ignore[arg-type]


@pytest.mark.ranks
def test_two_workers_give_what_one_process_gives(text: Path):
    alone, together = tokenised(text, 0), tokenised(text, 2)
    assert len(alone) == 17
    assert [unit for unit, _ in alone] == [unit for unit, _ in together]
    for (_, a), (_, b) in zip(alone, together, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert (a.rows, a.used, a.newlines, a.top) == (b.rows, b.used, b.newlines, b.top)


@pytest.mark.ranks
def test_the_cache_does_not_depend_on_workers(tmp_path: Path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": f"row {i}"} if i % 7 else "bad" for i in range(50_000)]
    )
    parts = [
        text_data(tmp_path, str(path), section={"workers": workers, "cache": tmp_path / f"cache{workers}"})
        for workers in (0, 2)
    ]
    assert parts[0].state() == parts[1].state()
    assert parts[0].ledger() == parts[1].ledger()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("os._exit(1)", ["ended with exit code 1"]),
        ("os.kill(os.getpid(), 9)", ["died of signal 9", "memory"]),
        ("raise ValueError('strange text')", ["failed", "ValueError: strange text"]),
    ],
)
def test_a_worker_that_dies_is_named(text: Path, what: str, words: list[str]):
    command = (sys.executable, "-c", BAD_WORKER.format(what=what))
    with pytest.raises(WorkerError) as caught:
        tokenised(text, 2, timeout_s=3600, command=command)
    for word in [*words, "worker ", f"{text} (bytes 600 to 720)"]:
        assert word in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.ranks
def test_a_stuck_worker_is_named_within_the_timeout(text: Path):
    command = (sys.executable, "-c", BAD_WORKER.format(what="time.sleep(3600)"))
    with pytest.raises(
        WorkerError, match=r"worker \d .*stuck on .*a\.txt \(bytes 600 to 720\).*worker_timeout"
    ):
        tokenised(text, 2, timeout_s=3, command=command)


@pytest.mark.ranks
def test_a_worker_that_never_starts_is_named(text: Path):
    with pytest.raises(WorkerError, match=r"worker \d .*exit code 3"):
        tokenised(text, 2, command=(sys.executable, "-c", "raise SystemExit(3)"))


@pytest.mark.ranks
def test_a_worker_that_nobody_waits_for_any_more_ends_without_a_word():
    """The main process was asked to stop while the worker was still importing."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        command = [*WORKER, str(theirs.fileno()), str(os.getpid())]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=100
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.ranks
def test_workers_die_with_a_killed_parent(tmp_path: Path, text: Path):
    code = (
        "import sys; from pathlib import Path; from tests.text import test_pool\n"
        f"command = (sys.executable, '-c', {BAD_WORKER.format(what='time.sleep(3600)')!r})\n"
        "test_pool.tokenised(Path(sys.argv[1]), 2, command=command)"
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code, str(text)], cwd=root)
    children: list[str] = []
    until = time.monotonic() + 100
    while len(children) < 2 and time.monotonic() < until:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        time.sleep(0.1)
    assert len(children) == 2
    time.sleep(2)  # one of them is asleep by now
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    until = time.monotonic() + 60
    while any(_alive(child) for child in children) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_alive(child) for child in children)


def _alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_file_that_vanishes(text: Path):
    units = cut_units(find_sources(str(text), "auto"), 100)
    results = tokenise_all(units, ByteTokenizer(), Reading("text"), 0, 60)
    next(results)
    text.unlink()
    with pytest.raises(WorkerError, match=r"cannot read .*a\.txt .*No such file"):
        list(results)


@pytest.mark.parametrize(
    ("wanted", "size", "format", "workers"),
    [(3, 10, "jsonl", 3), (0, 1 << 30, "jsonl", 0), ("auto", 10, "jsonl", 0), ("auto", 1 << 30, "text", 0)],
)
def test_how_many_workers(wanted: int | str, size: int, format: Literal["text", "jsonl"], workers: int):
    assert worker_count(wanted, [Source(Path("a"), format, size, 0)], ByteTokenizer()) == workers


def test_auto_uses_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch):
    source = Source(Path("a"), "jsonl", 1 << 30, 0)
    for cores, workers in [(1, 0), (3, 3), (64, 16)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert worker_count("auto", [source], ByteTokenizer()) == workers
