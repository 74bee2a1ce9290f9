"""The examples of instruction data: they run, they learn, their rows are full, and what their comments say is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.text.helpers import context

from trainforge_plugins.text import TextSection, build
from trainforge_plugins.text.data import TextData

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("finetune_alpaca", "chat_sharegpt")


def recipe(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_rows_hold_at_least_98_percent_real_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    data = build(context(tmp_path, vocab_size=1024), TextSection(**recipe(name)["text"], cache=tmp_path))
    assert isinstance(data, TextData)
    batches = [batch for _ in range(data.steps_per_epoch) for batch in data.take(1)]
    batches += list(data.validation())
    assert len(batches) == data.ledger()["packed_rows"]
    real = sum(
        int(batch.labels.numel() if batch.document_ids is None else (batch.document_ids >= 0).sum())
        for batch in batches
    )
    assert real == data.ledger()["tokens"]
    assert real / sum(batch.input_ids.numel() for batch in batches) >= 0.98
    assert data.ledger()["used"] == data.ledger()["seen"]


@pytest.mark.parametrize(("name", "file"), [("finetune_alpaca", "alpaca"), ("chat_sharegpt", "sharegpt")])
def test_the_sample_asks_a_question_of_the_data(name: str, file: str):
    prompt = recipe(name)["run"]["sample"]
    (question,) = re.findall(r"^[A-Z].*\?", prompt, re.MULTILINE)
    text = (ROOT / f"examples/data/{file}.jsonl").read_text()
    answer = (ROOT / f"examples/{name}.yaml").read_text().split("question below: ")[1].split("\n")[0]
    assert question in text
    assert json.dumps(answer) in text


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_an_example_learns(name: str, tmp_path: Path):
    command = [sys.executable, "-m", "trainforge.cli", "run", f"examples/{name}.yaml", "--max-steps", "40"]
    settings = [f"text.cache={tmp_path}", "train.eval_every=null", "train.log_every=10", "run.device=cpu"]
    done = subprocess.run(
        [*command, "--run-dir", tmp_path / "run", *(part for s in settings for part in ("--set", s))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[0] > 4  # as good as guessing among 1,024 tokens would be 6.9
    assert losses[-1] < 2.5
    assert losses == sorted(losses, reverse=True)
    assert "sample      " in done.stdout + done.stderr
