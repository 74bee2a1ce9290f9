"""Families of models: a run equals a hand-written loop over transformers' own model and loss."""

import json

import pytest
from tests.hf.tiny import values
from tests.run.runs import run, write_recipe
from tests.support.plain_loop import EPS, batches_of, plain_loop

TRAIN = {
    "steps": 5,
    "global_batch": 4,
    "micro_batch": 4,
    "lr": 1e-3,
    "eps": EPS,
    "schedule": "constant",
    "warmup": 0,
}
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
]


def compare(tmp_path, recipe, config, batches):
    losses, _ = plain_loop(recipe, config, lr=TRAIN["lr"], batches=batches)
    assert run(recipe, tmp_path / "run").series("loss") == pytest.approx(losses, rel=1e-6)
    assert max(losses) - min(losses) > 1e-3, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_equal_a_hand_written_loop(tmp_path, family):
    config = values(family, vocab_size=264)
    recipe = write_recipe(tmp_path, 20, train=TRAIN, model={"config": config})
    compare(tmp_path, recipe, config, batches_of(recipe))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_packed_rows_equal_each_document_alone(tmp_path, family):
    config = values(family, vocab_size=264)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "whale " * (i % 5 + 1) + str(i)}) + "\n" for i in range(60)))
    recipe = write_recipe(tmp_path, train=TRAIN, model={"config": config}, text={"path": str(rows)})
    batches = batches_of(recipe)
    assert any(len(row.unique()) > 1 for step in batches for batch in step for row in batch.document_ids)
    compare(tmp_path, recipe, config, batches)
