"""Image-text-to-text models: a run equals a hand-written loop over transformers' own model, with images and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.hf import seeing, tiny
from tests.run.runs import Outcome, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.image_rows import rows_of
from tests.support.plain_loop import EPS, batches_of, pieces
from torch import nn
from torch.nn.functional import cross_entropy

import trainforge
from trainforge_plugins.hf import ModelSection, build

FAMILIES = ["qwen2_5_vl", "llava", "qwen3_vl_moe"]
ROWS = str(Path(__file__).parents[1] / "support/image_rows.py")
TRAIN = {
    "steps": 5,
    "global_batch": 6,
    "micro_batch": 3,
    "lr": 1e-3,
    "eps": EPS,
    "schedule": "constant",
    "warmup": 0,
    "log_every": 1,
}


def run_on_rows(folder, family, images=True, **train):
    """A run of the standard plugins on rows with images."""
    recipe = {
        "run": {"name": "r", "device": "cpu", "threads": 1},
        "model": {"config": seeing.values(family)},
        "train": TRAIN | train,
        "image_rows": {"family": family, "images": images},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code = trainforge.run(folder / "recipe.yaml", run_dir=folder / "run", plugins=[ROWS])
    return Outcome(code, folder / "run")


def fresh_model(folder, family, vocab_size=tiny.VOCAB):
    """transformers' model with the weights that a run starts from, and torch's AdamW on it."""
    section = ModelSection(config=seeing.values(family, vocab_size))
    model = seeing.same_weights(build(tiny.context(folder), section), family, vocab_size=vocab_size).train()
    kinds = {
        f"{name}.{leaf}".lstrip("."): parameter.ndim > 1
        and not isinstance(module, nn.Embedding)
        and leaf != "bias"
        for name, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
    }
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if kinds[name] is decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    return model, torch.optim.AdamW(groups, lr=TRAIN["lr"], betas=(0.9, 0.95), eps=EPS)


def loop_on_rows(folder, family, images=True):
    """Losses of a hand-written loop, its model, and the gradients of the first step."""
    model, optimizer = fresh_model(folder, family)
    losses, first = [], {}
    for step in range(TRAIN["steps"]):
        batches = [seeing.batch(*rows_of(family, step, index, images)) for index in range(2)]
        tokens, total = sum(batch.supervised for batch in batches), 0.0
        for batch in batches:
            ids, mask = batch.input_ids, (batch.document_ids >= 0).long()
            types = seeing.token_types(family, ids) if batch.inputs else {}
            logits = model(input_ids=ids, attention_mask=mask, **batch.inputs, **types).logits
            loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        if not step:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model, first


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_with_images_equal_a_hand_written_loop(tmp_path, family):
    """Steps with images, a step without, and one in which half of the micro-batches have some."""
    losses, model, first = loop_on_rows(tmp_path, family)
    outcome = run_on_rows(tmp_path, family)
    assert outcome.series("loss") == pytest.approx(losses, rel=1e-6)
    final = weights_of(outcome.folder)
    for name, parameter in model.named_parameters():
        if "bias" not in name:  # that of keys has no gradient but rounding, which Adam makes steps of
            assert (final[name] - parameter).abs().max() < 2e-6, name
    without, _, _ = loop_on_rows(tmp_path, family, images=False)
    assert abs(losses[0] - without[0]) > 1e-4, "the images change no loss"
    reached = [name for name in first if "vision" in name or "visual" in name]
    assert reached
    assert all(first[name].abs().max() > 0 for name in reached), "no gradient reaches the vision tower"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_recomputed_blocks_and_smaller_pieces_change_nothing(tmp_path, family):
    whole = run_on_rows(tmp_path / "whole", family, steps=2)
    cut = run_on_rows(tmp_path / "cut", family, steps=2, recompute=True, loss_chunk=7)
    assert cut.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
    assert cut.series("grad_norm") == pytest.approx(whole.series("grad_norm"), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_text_equals_each_document_alone_and_leaves_the_tower_as_it_was(tmp_path, family):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "whale " * (i % 5 + 1) + str(i)}) + "\n" for i in range(60)))
    values = seeing.values(family, 264)
    values["image_token_id" if family in seeing.AXES else "image_token_index"] = 262
    recipe = write_recipe(
        tmp_path, train=TRAIN, model={"config": values}, text={"path": str(rows), "validation": 0}
    )
    batches = batches_of(recipe)
    assert any(len(row.unique()) > 2 for step in batches for batch in step for row in batch.document_ids)
    model, optimizer = fresh_model(tmp_path, family, 264)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for step in batches:
        tokens, total = sum(int((batch.labels != -100).sum()) for batch in step), 0.0
        for document in (document for batch in step for document in pieces(batch)):
            logits = model(input_ids=document["input_ids"]).logits
            loss = cross_entropy(logits[0], document["labels"][0], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    outcome = run(recipe, tmp_path / "run")
    assert outcome.series("loss") == pytest.approx(losses, rel=1e-6)
    final = weights_of(outcome.folder)
    for name, value in final.items():
        seen = any(part in name for part in ("vision", "visual", "projector"))
        assert torch.equal(value, before[name]) is seen, name


@pytest.mark.ranks
def test_one_rank_may_have_images_while_the_other_has_none(tmp_path):
    one = run_on_rows(tmp_path, "qwen2_5_vl")
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "trainforge.cli", "run", str(tmp_path / "recipe.yaml")),
            *("--run-dir", str(tmp_path / "two"), "--nproc", "2", "--plugins", ROWS),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    both = Outcome(0, tmp_path / "two")
    assert both.summary["world"] == 2
    assert both.series("loss") == pytest.approx(one.series("loss"), rel=1e-6)
    assert both.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-5)
