"""Builds the data stage on text made for a test."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.context import make_context

from trainforge.context import Batching, Context
from trainforge.stages import Comm
from trainforge_plugins.text import TextSection, build
from trainforge_plugins.text.data import TextData


def context(
    folder: Path,
    *,
    rank: int = 0,
    world: int = 1,
    micro: int = 1,
    accumulate: int = 1,
    seed: int = 0,
    vocab_size: int = 300,
    max_positions: int | None = 4096,
    hf: str | None = None,
) -> Context:
    model = SimpleNamespace(vocab_size=vocab_size, max_positions=max_positions)
    ctx = make_context(
        rank=rank, world=world, run_dir=folder, built={"model": model, "comm": Comm()}, run={"seed": seed}
    )
    batching = Batching(micro * accumulate * world, micro, accumulate)
    return dataclasses.replace(ctx, batching=batching, model_config=SimpleNamespace(hf=hf))


def text_data(folder: Path, path: Any, *, section: dict[str, Any] | None = None, **facts: Any) -> TextData:
    options = {"path": path, "max_len": 8, "validation": None, **(section or {})}
    data = build(context(folder, **facts), TextSection(**options))
    assert isinstance(data, TextData)
    return data


def rows_of_text(folder: Path, count: int, length: int = 8) -> Path:
    """A text whose byte tokens and end token fill exactly `count` rows of `length`."""
    path = folder / "rows.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(count * length - 1)))
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """A row that is a string is written as it stands, anything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path
