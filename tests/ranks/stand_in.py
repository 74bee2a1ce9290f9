"""Stands in for the command line in tests of the launcher: does what its first argument says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainforge.errors import ConfigError, RanksError
from trainforge.rank_process import report_error
from trainforge.signals import StopSignals

RANK = int(os.environ["RANK"])


def environment(folder: str) -> int:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    facts = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:], "pid": os.getpid()}
    Path(folder, f"{RANK}.json").write_text(json.dumps(facts))
    print(f"hello from rank {RANK}", flush=True)
    return 0


def mistake() -> int:
    error = ConfigError("train.lr must be above 0")
    report_error(error, str(error), 2)
    return 2


def crash(how: str) -> int:
    """Rank 1 ends badly; the others complain about it, and one of them never ends by itself."""
    if RANK == 1:
        time.sleep(0.3)
        if how == "raise":
            raise ZeroDivisionError("rank one divides by zero")
        print("last words of rank 1", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    with StopSignals():
        time.sleep(0.1)
        report_error(RanksError("rank 1 is gone"), "rank 1 is gone", 1)
        time.sleep(3600)
    return 1


def save(folder: str, seconds: str) -> int:
    """Waits for a signal, then takes a while to save; rank 0 is done long before the others."""
    with StopSignals() as stop:
        Path(folder, f"ready-{RANK}").write_text(str(os.getpid()))
        for _ in range(4000):
            if stop.name:
                time.sleep(float(seconds) if RANK else 0.0)
                Path(folder, f"saved-{RANK}").write_text(stop.name)
                return 3
            time.sleep(0.05)
    return 1


def orphan(folder: str) -> int:
    """Each rank starts a worker process and then sleeps (or rank 1 dies)."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(folder, f"pids-{RANK}").write_text(f"{os.getpid()} {worker.pid}")
    time.sleep(0.5)
    if RANK == 1 and len(sys.argv) > 3:
        os._exit(7)
    time.sleep(3600)
    return 0


sys.exit(globals()[sys.argv[1]](*sys.argv[2:3] if sys.argv[1] == "orphan" else sys.argv[2:]))
