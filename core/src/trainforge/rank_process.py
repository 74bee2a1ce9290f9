"""The first code of every process that our launcher starts: `python -m trainforge.rank_process MODULE ARGUMENT...`.

It makes the process die with the launcher and leaves a report of how it ended, so that the launcher can show the
first error of all ranks first, and only once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

REPORTS = "TRAINFORGE_RANK_REPORTS"
"""Environment variable: the folder where ranks leave their reports. Set by the launcher, and only there."""

LAUNCHER_PID = "TRAINFORGE_LAUNCHER_PID"
"""Environment variable: the process that ranks die with."""

STOPPED = 3
"""Exit code of a run that was stopped by a signal and has saved, or had nothing to save yet."""


@dataclass(frozen=True)
class RankReport:
    """How a rank ended.

    Attributes:
        exit_code: as the command line means it: 0, 1, 2 or 3.
        error: class name of the exception, or empty.
        text: what a person should read; empty when there is nothing to say.
        at: Unix time of the failure, which tells whose error was the first.
    """

    rank: int
    exit_code: int
    error: str = ""
    text: str = ""
    at: float = 0.0


def started_by_launcher() -> bool:
    """Whether this process is a rank that `forge run --nproc` started: then it must not start ranks again."""
    return REPORTS in os.environ


def report_error(error: BaseException, text: str, exit_code: int) -> bool:
    """Leave an error for the launcher, which shows it after the last rank has ended.

    Returns:
        False when no launcher of ours is there to show it: then the caller shows it.
    """
    if not started_by_launcher():
        return False
    _write(RankReport(_rank(), exit_code, type(error).__name__, text.rstrip(), time.time()))
    return True


def read_reports(folder: Path) -> dict[int, RankReport]:
    """The reports left so far, by rank."""
    found = {}
    for path in folder.glob("rank-*.json"):
        report = RankReport(**json.loads(path.read_text("utf-8")))
        found[report.rank] = report
    return found


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux).

    Args:
        parent: process id of the parent; when it has ended before this call, so does this process.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run a module as `python -m` would, and leave a report.

    Returns:
        The exit code; 0 also when the run was stopped by a signal after saving, because the launcher must not
        end the other ranks in the middle of their save.
    """
    if LAUNCHER_PID in os.environ:
        die_with_parent(int(os.environ[LAUNCHER_PID]))
    code = _run(arguments)
    if started_by_launcher() and _rank() not in read_reports(Path(os.environ[REPORTS])):
        _write(RankReport(_rank(), code, at=time.time()))
    return 0 if code == STOPPED else code


def _run(arguments: list[str]) -> int:
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            report_error(end, end.code, 1)
            return 1
        return end.code or 0
    except KeyboardInterrupt as error:
        report_error(error, "stopped at once by a second Ctrl-C", 1)
        return 1
    except BaseException as error:
        report_error(error, _own_traceback(error), 1)
        return 1
    return 0


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames of this file and of runpy, which say nothing about the error."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _write(report: RankReport) -> None:
    """The first report of a rank stands; written aside and renamed, so that a reader never sees half of it."""
    folder = Path(os.environ[REPORTS])
    path = folder / f"rank-{report.rank}.json"
    if path.exists():
        return
    aside = folder / f".rank-{report.rank}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the launcher's folder is gone: there is nobody left to read it
        aside.write_text(json.dumps(asdict(report)), "utf-8")
        aside.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
