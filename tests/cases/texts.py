"""Runs of the `text` plugin over rows that are easy to count: row i of 32 tokens is sample i."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainforge.testing import TinyRun, tiny_run


def text_run(
    folder: Path,
    rows: int,
    *,
    ranks: int = 1,
    train: dict[str, Any],
    text: dict[str, Any] | None = None,
    max_steps: int | None = None,
    dropout: float = 0.0,
) -> TinyRun:
    """The standard plugins on the tiny model. A second call with the same folder resumes."""
    source = folder.parent / f"rows-{rows}.txt"
    source.write_text(
        "".join(f"{i}: the whale number {i * i} swam by. " for i in range(400))[: rows * 32 - 1]
    )
    section = {
        "path": str(source),
        "max_len": 32,
        "validation": 0,
        "cache": str(folder.parent / "cache"),
        **(text or {}),
    }
    comm = ("ddp",) if ranks > 1 else ()
    return tiny_run(
        folder,
        ("text", *comm, "resident", "adamw", "dcp"),
        model={"vocab": 264, "layers": 1, "dropout": dropout},
        train={"steps": None, "epochs": 3, "schedule": "linear", "lr": 1e-3, **train},
        sections={"text": section},
        ranks=ranks,
        max_steps=max_steps,
    )
