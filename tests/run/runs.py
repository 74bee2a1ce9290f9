"""Runs of the real standard plugins on a small model, in this process."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import trainforge

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}


@dataclass
class Outcome:
    """What a run (perhaps in several starts) left."""

    code: int
    folder: Path
    sample_ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, name: str) -> list[float]:
        return [entry[name] for entry in self.metrics]


def write_recipe(folder: Path, rows: int = 10, **sections: dict[str, Any]) -> Path:
    """A recipe over `rows` rows of 32 tokens: batches of 2, so 5 steps an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{i}: the whale number {i * i} swam by. " for i in range(200))
    (folder / "text.txt").write_text(text[: rows * 32 - 1])
    recipe: dict[str, Any] = {
        "run": {"name": "r", "device": "cpu", "threads": 1},
        "model": {"config": MODEL},
        "train": {
            "steps": 15,
            "global_batch": 2,
            "lr": 0.01,
            "schedule": "linear",
            "warmup": 3,
            "log_every": 1,
        },
        "text": {
            "path": str(folder / "text.txt"),
            "max_len": 32,
            "validation": 0,
            "cache": str(folder / "cache"),
        },
    }
    for name, values in sections.items():
        recipe[name] = recipe.get(name, {}) | values
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(recipe: Path, run_dir: Path, **options: Any) -> Outcome:
    """Carry out a recipe and keep the sample ids of every step."""
    with recorded_ids() as ids:
        code = trainforge.run(recipe, run_dir=run_dir, **options)
    return Outcome(code, run_dir, ids)


@contextmanager
def recorded_ids():
    from trainforge_plugins.text.data import TextData

    take, ids = TextData.take, []

    def recording(self, count):
        batches = take(self, count)
        ids.append(tuple(i for batch in batches for i in batch.sample_ids))
        return batches

    TextData.take = recording
    try:
        yield ids
    finally:
        TextData.take = take
