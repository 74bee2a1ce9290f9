"""The process that tokenises: `python -m trainforge_plugins.text.worker FD`, a socket to the main process.

A process of its own rather than `multiprocessing`: it does not import the user's main module again, holds no shared
memory or semaphores that could be left behind, and ends with the socket.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """Answer each item that arrives with ("done", work(item)) or ("failed", reason), until the other side is gone."""
    while True:
        try:
            item = connection.recv()
            try:
                answer = ("done", work(item))
            except Exception as error:  # whatever it is, the main process words it
                answer = ("failed", f"{type(error).__name__}: {error}")
            connection.send(answer)
        except (EOFError, ConnectionError):
            return


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens; Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Take the tokenizer, then tokenise unit after unit."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from trainforge_plugins.text.tokenise import Tokeniser

    connection = Connection(descriptor)
    try:
        spec, reading = connection.recv()
    except (EOFError, ConnectionError):  # the main process gave up while this one was importing
        return
    serve(connection, Tokeniser(spec.make(), reading).tokenise)


if __name__ == "__main__":
    main()
