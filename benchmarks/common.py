"""What every benchmark shares: the machine's description, a table, and the JSON beside it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(os.environ.get("TRAINFORGE_BENCH_DIR", "benchmarks/results"))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["gpus"] = torch.cuda.device_count()
    return facts


def show(name: str, counts: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], **more: Any) -> None:
    """Print the table and write `NAME.json`.

    Args:
        name: of the benchmark.
        counts: a sentence: what is counted and how often.
        columns: headings.
        rows: the cells.
        more: further values for the JSON (every single measurement, say).
    """
    rows = [list(row) for row in rows]
    facts = machine()
    console = Console(width=140, highlight=False)
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    console.print(counts)
    console.print(" · ".join(f"{key} {value}" for key, value in facts.items()))
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "name": name,
        "counts": counts,
        "machine": facts,
        "columns": list(columns),
        "rows": rows,
    } | more
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
