"""Tokenises units in several processes and gives the results in order. A dead or stuck worker ends the run."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from trainforge.errors import TrainForgeError
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.tokenise import Piece, Reading, Tokeniser
from trainforge_plugins.text.tokenizers import ByteTokenizer, Tokenizer
from trainforge_plugins.text.units import Unit

WORKER = (sys.executable, "-m", "trainforge_plugins.text.worker")
UNITS_IN_FLIGHT = 3
"""Units per worker that may be done and wait for an earlier one: bounds the memory of the main process."""

IMAGE_WORK = 300
"""How much longer a row takes, by its bytes, when it has images: tens of ms."""


class WorkerError(TrainForgeError):
    """A tokenising process died, got stuck or could not read its file."""


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen
    connection: Connection
    index: int = -1
    unit: Unit | None = None
    deadline: float = 0.0


def tokenise_all(
    units: Iterator[Unit],
    tokenizer: Tokenizer,
    reading: Reading,
    workers: int,
    timeout_s: float,
    command: Sequence[str] = WORKER,
) -> Iterator[tuple[Unit, Piece]]:
    """Give each unit with its tokens, in order. With 0 workers this process does the work.

    Raises:
        WorkerError: a worker died, or was silent for `timeout_s`; names it and what it was reading.
    """
    spec = tokenizer.spec()
    if workers == 0 or spec is None:
        tokeniser = Tokeniser(tokenizer, reading)
        for unit in units:
            try:
                yield unit, tokeniser.tokenise(unit)
            except OSError as error:
                raise WorkerError(f"cannot read {unit}: {error.strerror}") from None
        return
    team = []
    try:
        for number in range(workers):
            team.append(_start(number, command, timeout_s))
            _send(team[-1], (spec, reading))
        yield from _in_order(team, enumerate(units), timeout_s)
    finally:
        for worker in team:
            _end(worker)


def _start(number: int, command: Sequence[str], timeout_s: float) -> _Worker:
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # nor may half a message hold us up for ever
        ours.setsockopt(socket.SOL_SOCKET, option, limit)
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return _Worker(number, process, Connection(ours.detach()))


def _end(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.wait()


def _in_order(
    team: list[_Worker], units: Iterator[tuple[int, Unit]], timeout_s: float
) -> Iterator[tuple[Unit, Piece]]:
    finished: dict[int, tuple[Unit, Piece]] = {}
    due, given, more = 0, 0, True
    while True:
        for worker in team:
            if worker.unit is None and more and given - due < UNITS_IN_FLIGHT * len(team):
                item = next(units, None)
                if item is None:
                    more = False
                else:
                    _give(worker, item, timeout_s)
                    given += 1
        busy = [worker for worker in team if worker.unit is not None]
        if not busy:
            assert not finished
            return
        for worker in _wait(busy):
            assert worker.unit is not None
            finished[worker.index] = (worker.unit, _receive(worker))
            worker.unit = None
        while due in finished:
            yield finished.pop(due)
            due += 1


def _give(worker: _Worker, item: tuple[int, Unit], timeout_s: float) -> None:
    worker.index, worker.unit = item
    worker.deadline = time.monotonic() + timeout_s
    _send(worker, worker.unit)


def _send(worker: _Worker, item: Any) -> None:
    try:
        worker.connection.send(item)
    except OSError:
        raise _death(worker) from None


def _wait(busy: list[_Worker]) -> list[_Worker]:
    """The workers that have something to say, after waiting for the first.

    Raises:
        WorkerError: one has been silent for too long.
    """
    first = min(busy, key=lambda worker: worker.deadline)
    ready = wait([worker.connection for worker in busy], max(0.0, first.deadline - time.monotonic()))
    if not ready:
        raise WorkerError(
            f"tokenising worker {first.number} (process {first.process.pid}) has been stuck on {first.unit} for too "
            "long: look at that part of the file, raise text.worker_timeout, or set text.workers: 0"
        )
    return [worker for worker in busy if worker.connection in ready]


def _receive(worker: _Worker) -> Piece:
    try:
        kind, answer = worker.connection.recv()
    except (EOFError, OSError):
        raise _death(worker) from None
    if kind == "failed":
        raise WorkerError(f"tokenising worker {worker.number} failed on {worker.unit}: {answer}")
    assert isinstance(answer, Piece)
    return answer


def _death(worker: _Worker) -> WorkerError:
    try:
        code = worker.process.wait(5)
        how = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        how = "does not answer"
    doing = f"while it worked on {worker.unit}" if worker.unit else "while it started"
    return WorkerError(
        f"tokenising worker {worker.number} (process {worker.process.pid}) {how} {doing}: "
        "memory may have run out; free some, or set text.workers: 0 to see its own error"
    )


def worker_count(wanted: int | str, sources: Sequence[Source], tokenizer: Tokenizer) -> int:
    """Processes to tokenise with. `auto`: none below 32 MiB of work, else one per core of this process, at most 16.

    Plain text in bytes is no work: passing it between processes would take longer than copying it.
    """
    if isinstance(wanted, int):
        return wanted
    copied = isinstance(tokenizer, ByteTokenizer)
    work_bytes = sum(
        source.size * (IMAGE_WORK if source.has_images else 1)
        for source in sources
        if not (copied and source.format == "text")
    )
    cores = len(os.sched_getaffinity(0))
    return 0 if work_bytes < 32 << 20 or cores == 1 else min(16, cores)
