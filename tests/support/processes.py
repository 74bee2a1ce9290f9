"""The processes and shared memory of a run, seen from outside."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

WORKER = "text.worker"
PATIENCE_S = 200
"""How long a process of ours may take on a slow, busy machine. What must not be waited for takes longer by far: a test
gives it hours, and the feature is broken when the process has not ended within this time."""


def forge_run(recipe, run_dir, *options):
    """The command line of `forge run`; options may be numbers."""
    words = [sys.executable, "-m", "trainforge.cli", "run", recipe, "--run-dir", run_dir, *options]
    return [str(word) for word in words]


def start_forge_run(recipe, run_dir, *options):
    """Start `forge run` with its output caught."""
    command = forge_run(recipe, run_dir, *options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def cpu_seconds(*arguments):
    """CPU time of a Python process with these arguments, the best of three; and what it printed."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times), done.stdout


def python_starts():
    """CPU time of a Python process that does nothing: 15 ms on a machine that is neither slow nor busy."""
    return cpu_seconds("-c", "pass")[0]


def ended(process):
    """Wait for a process; gives what it printed and its errors. One that does not end is killed, and the test fails."""
    try:
        return process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        for pid in [*below(process.pid), process.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"it did not end within {PATIENCE_S} s\n{out}{err}") from None


def steps_logged(run_dir):
    """Lines in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def below(process):
    """Process ids of all descendants."""
    found, ahead = [], [process]
    while ahead:
        tasks = Path(f"/proc/{ahead.pop()}/task")
        try:
            children = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        except OSError:
            children = []
        ahead += [int(pid) for pid in children]
        found += [int(pid) for pid in children]
    return found


def command_line(pid):
    """Arguments of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def workers_of(process):
    """Process ids of the tokenising workers below a process."""
    return [pid for pid in below(process) if WORKER in command_line(pid)]


def has_open(pid, path):
    """Whether a process has a file open."""
    try:
        return any(os.path.realpath(entry) == str(path) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def gone(pids, seconds=60):
    """Whether all processes end within some seconds."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def shared_memory():
    """Names of the segments in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def wait_until(condition, process, seconds=PATIENCE_S):
    """Wait for something that a process does while it runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
