"""How long a person waits: for `--help`, for a plan, for the first step of the quickstart (network denied)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import median, show

REPEATS = 5
FORGE = str(Path(sys.executable).with_name("forge"))
DENIED = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
CASES = {
    "forge --help": (["--help"], 0.3),
    "forge plugins": (["plugins"], 1.0),
    "forge plan": (["plan"], 8.0),
    "forge run --max-steps 1 (first step, save, exit)": (["run", "--fresh", "--max-steps", "1"], 15.0),
}


def main() -> None:
    """Time each command as a whole process, after one warm-up."""
    rows = []
    for label, (arguments, limit) in CASES.items():
        seconds = [timed(arguments) for _ in range(REPEATS + 1)][1:]
        rows.append((label, median(seconds), min(seconds), max(seconds), limit))
    show(
        "startup",
        f"Whole processes in an empty folder with a warm token cache, seconds, {REPEATS} runs after one warm-up.",
        ("command", "median s", "min s", "max s", "limit s"),
        rows,
    )


def timed(arguments: list[str]) -> float:
    """Seconds of one `forge` command in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [FORGE, *arguments], cwd=folder, env=os.environ | DENIED, check=True, capture_output=True
        )
        return time.perf_counter() - began
