"""A large file through the data stage: how fast it is tokenised, and how much memory that needs.

    python -m benchmarks tokenise                                  # texts; SIZE_MB (500) says how large the files are
    python -m benchmarks.tokenise --rows instruction --gb 2        # conversations, alpaca and ShareGPT in turn

Texts: a run of one step. Instruction rows: `forge data inspect`, first without and then with a token cache, its memory
added up over all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import show

SIZE_MB = int(os.environ.get("SIZE_MB", "500"))
FORGE = str(Path(sys.executable).with_name("forge"))
EVERY_S = 0.1
"""How often memory is looked at."""


def main(arguments: Sequence[str] = ()) -> None:
    """Measure texts, or instruction rows with `--rows instruction`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenise", description=__doc__)
    parser.add_argument("--rows", choices=["text", "instruction"], default="text")
    parser.add_argument("--gb", type=float, default=SIZE_MB / 1000, help="size of a file in GB")
    parser.add_argument(
        "--tokenizer", choices=["bytes", "bpe"], action="append", help="of instruction rows: both"
    )
    parser.add_argument("--template", default="chatml", help="of instruction rows, as text.template takes it")
    options = parser.parse_args(arguments)
    if options.rows == "text":
        texts(int(options.gb * 1000))
    else:
        instructions(options.gb, options.tokenizer or ["bytes", "bpe"], options.template)


def instructions(size_gb: float, tokenizers: Sequence[str], template: str) -> None:
    """Inspect one file of instruction rows, first without and then with a token cache."""
    from benchmarks.instructions import write_rows

    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        count = write_rows(path, int(size_gb * 1e9))
        size_mb = path.stat().st_size / 1e6
        for kind in tokenizers:
            tokenizer = "bytes" if kind == "bytes" else str(train_bpe(path))
            cache = Path(folder) / kind
            first, again = (inspect(path, cache, tokenizer, template) for _ in range(2))
            seconds = first["seconds"] - again["seconds"]
            cache_mb = sum(file.stat().st_size for file in cache.rglob("*.bin")) / 1e6
            found.append(
                (
                    *(kind, size_mb, count, first["seconds"], count / seconds, size_mb / seconds),
                    *(first["peak_mb"], first["processes"], cache_mb, again["seconds"], again["peak_mb"]),
                )
            )
    show(
        "tokenise_instructions",
        f"forge data inspect, template {template}, max_len 2048. Rows/s and MB/s: over the difference of the two "
        f"starts. Peak: resident memory added up over all processes (pages that they share count for each), looked at "
        f"every {EVERY_S} s.",
        (
            *("tokenizer", "MB", "rows", "s", "rows/s", "MB/s", "peak MB", "processes", "cache MB"),
            *("again: s", "again: peak MB"),
        ),
        found,
    )


def inspect(path: Path, cache: Path, tokenizer: str, template: str) -> dict[str, float]:
    """Seconds of `forge data inspect`, and the peak of the memory of all its processes."""
    settings = [f"text.path={path}", f"text.cache={cache}", f"text.tokenizer={tokenizer}"]
    settings += [f"text.template={template}", "text.max_len=2048", "run.device=cpu"]
    settings += ["model.config.vocab_size=32768", "model.config.max_position_embeddings=2048"]
    command = [FORGE, "data", "inspect", "examples/quickstart.yaml"]
    command += [part for setting in settings for part in ("--set", setting)]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        peak = processes = 0
        while process.poll() is None:
            used, count = memory_of_tree(process.pid)
            peak, processes = max(peak, used), max(processes, count)
            time.sleep(EVERY_S)
        seconds = time.perf_counter() - began
        output.seek(0)
        if process.returncode:
            sys.exit(output.read().decode())
    return {"seconds": seconds, "peak_mb": peak / 1e6, "processes": processes}


def memory_of_tree(pid: int) -> tuple[int, int]:
    """Resident bytes of a process and all below it, and how many they are."""
    import psutil

    used = count = 0
    try:
        top: Any = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            try:
                used += process.memory_info().rss
                count += 1
            except psutil.Error:  # it has ended
                continue
    except psutil.Error:
        pass
    return used, count


def train_bpe(path: Path) -> Path:
    """A byte-level BPE of 32,000 tokens, learnt from the first rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with path.open(encoding="utf-8") as file:
        tokenizer.train_from_iterator((line for _, line in zip(range(5000), file, strict=False)), trainer)
    saved = path.with_name("tokenizer.json")
    tokenizer.save(str(saved))
    return saved


def texts(size_mb: int) -> None:
    """Run the quickstart's model for one step on each file, first without and then with a token cache."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("txt", "jsonl"):
            path = Path(folder) / f"text.{kind}"
            write(path, size_mb)
            first, peak = one_step(path, Path(folder) / kind)
            again, peak_again = one_step(path, Path(folder) / kind)
            rows.append((kind, size_mb, size_mb / (first - again), peak / 1e6, peak_again / 1e6))
            path.unlink()
    show(
        "tokenise",
        "Bytes tokenizer. MB/s: the file's size over the difference of two whole runs of one step, without and with "
        "the token cache. Peak: the largest resident set of the main process, PyTorch and model included.",
        ("file", "MB", "MB/s", "peak MB, tokenising", "peak MB, from the cache"),
        rows,
    )


def write(path: Path, size_mb: int) -> None:
    """A file of `size_mb` megabytes."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 9))) for _ in range(5000)]
    lines = [" ".join(chance.choices(words, k=80)) for _ in range(2000)]
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": line}) for line in lines]
    block = ("\n".join(lines) + "\n").encode()
    with path.open("wb") as file:
        for _ in range(size_mb * 1_000_000 // len(block)):
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


if __name__ == "__main__":
    main(sys.argv[1:])
