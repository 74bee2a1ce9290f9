"""Several ranks on this machine, for tests: processes that find each other as under `forge run --nproc`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(rank, world, *arguments)` in `world` fresh processes; gives what each returned, by rank.

    The variables of torchrun are set, so whatever starts torch.distributed finds them. Function, arguments and
    results must be picklable: a function at the top of a module.

    Raises:
        AssertionError: a rank failed (its traceback is in the message), died, or was not done after `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed", "trainforge.testing.tiny"]
    )  # imported once, not once per rank
    port = free_port()
    pipes, processes = {}, []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(theirs, function, rank, world, port, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _collect(pipes: dict[Connection, int], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(waiting, max(deadline - time.monotonic(), 0))
        late = [pipes[pipe] for pipe in waiting]
        assert ready, (
            f"ranks {late} were not done after {timeout:g} s: some call is made by one rank and not by others"
        )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                problem, results[pipes[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {pipes[pipe]} died") from None
            assert problem is None, f"rank {pipes[pipe]} failed:\n{problem}"
    return [results[rank] for rank in sorted(results)]


def _child(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    answer: tuple[str | None, Any]
    try:
        answer = (None, function(rank, world, *arguments))
    except BaseException:
        answer = (traceback.format_exc(), None)
    # Not `send`: that would share tensors' memory with a process that ends.
    pipe.send_bytes(pickle.dumps(answer))
