"""A large text through the data stage: how fast it is tokenised, and how much memory the run needs.

`SIZE_MB` (500) says how large a file is generated: sentences of random words, as plain text and as JSONL.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import show

SIZE_MB = int(os.environ.get("SIZE_MB", "500"))
FORGE = str(Path(sys.executable).with_name("forge"))


def main() -> None:
    """Run the quickstart's model for one step on each file, first without and then with a token cache."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("txt", "jsonl"):
            path = Path(folder) / f"text.{kind}"
            write(path)
            first, peak = one_step(path, Path(folder) / kind)
            again, peak_again = one_step(path, Path(folder) / kind)
            rows.append((kind, SIZE_MB, SIZE_MB / (first - again), peak / 1e6, peak_again / 1e6))
            path.unlink()
    show(
        "tokenise",
        "Bytes tokenizer. MB/s: the file's size over the difference of two whole runs of one step, without and with "
        "the token cache. Peak: the largest resident set of the main process, PyTorch and model included.",
        ("file", "MB", "MB/s", "peak MB, tokenising", "peak MB, from the cache"),
        rows,
    )


def write(path: Path) -> None:
    """A file of `SIZE_MB` megabytes."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 9))) for _ in range(5000)]
    lines = [" ".join(chance.choices(words, k=80)) for _ in range(2000)]
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": line}) for line in lines]
    block = ("\n".join(lines) + "\n").encode()
    with path.open("wb") as file:
        for _ in range(SIZE_MB * 1_000_000 // len(block)):
            file.write(block)


def one_step(path: Path, work: Path) -> tuple[float, float]:
    """Seconds of a run of one step, and its peak resident set in bytes."""
    options = ["--max-steps", "1", "--run-dir", work / "run", "--fresh"]
    settings = [f"text.path={path}", f"text.cache={work / 'cache'}", "run.sample=null"]
    command = [FORGE, "run", "examples/quickstart.yaml", *options]
    began = time.perf_counter()
    subprocess.run(
        [*command, *(part for s in settings for part in ("--set", s))], check=True, capture_output=True
    )
    seconds = time.perf_counter() - began
    return seconds, json.loads((work / "run/summary.json").read_text())["peak_host_bytes"]
