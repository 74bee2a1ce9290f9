"""A run equals a hand-written PyTorch loop, however its batch is cut."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.run.runs import MODEL, run, write_recipe
from tests.support.plain_loop import EPS, plain_loop

STEPS = 8
# llama has no bias on its keys: that bias has a gradient of zero plus rounding, which Adam would blow up to full steps
NO_DROPOUT = {"config": MODEL | {"attention_dropout": 0.0, "model_type": "llama"}}


def test_the_same_losses_and_weights_as_plain_pytorch(tmp_path):
    train = {
        "steps": STEPS,
        "global_batch": 4,
        "micro_batch": 2,
        "lr": 1e-3,
        "eps": EPS,
        "schedule": "constant",
        "warmup": 0,
    }
    recipe = write_recipe(tmp_path, 20, train=train, model=NO_DROPOUT)
    losses, model = plain_loop(recipe, NO_DROPOUT["config"], lr=1e-3)
    outcome = run(recipe, tmp_path / "run")
    assert outcome.series("loss") == pytest.approx(losses, rel=1e-6)
    final = weights_of(outcome.folder)
    for name, parameter in model.named_parameters():
        assert (final[name] - parameter).abs().max() < 1e-6, name


def weights_of(folder):
    """Masters of the newest checkpoint, read by safetensors alone."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    pieces = {name: piece for file in newest.glob("*.safetensors") for name, piece in load_file(file).items()}
    weights = {}
    for tensor in json.loads((newest / "checkpoint.json").read_text())["parts"]["memory"]["tensors"]:
        if tensor["key"] == "master":
            spans = [f"[{span['offset']}:{span['offset'] + span['length']}]" for span in tensor["spans"]]
            flat = torch.cat([pieces[f"memory/master/{tensor['name']}{span}"].flatten() for span in spans])
            weights[tensor["name"]] = flat.view(tensor["shape"])
    return weights


@pytest.mark.parametrize(
    "cut", [{"micro_batch": 4}, {"micro_batch": 1}, {"loss_chunk": 7}, {"recompute": True}]
)
def test_how_a_step_is_cut_changes_nothing(tmp_path, cut):
    train = {"steps": STEPS, "global_batch": 4, "micro_batch": 2}
    whole = run(write_recipe(tmp_path, 20, train=train, model=NO_DROPOUT), tmp_path / "whole")
    cut_run = run(write_recipe(tmp_path, 20, train=train | cut, model=NO_DROPOUT), tmp_path / "cut")
    assert cut_run.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
    assert [sorted(ids) for ids in cut_run.sample_ids] == [sorted(ids) for ids in whole.sample_ids]


def test_dropout_is_the_same_with_recomputation(tmp_path):
    train = {"steps": 4, "global_batch": 4, "micro_batch": 2}
    kept = run(write_recipe(tmp_path, 20, train=train), tmp_path / "kept")
    recomputed = run(write_recipe(tmp_path, 20, train=train | {"recompute": True}), tmp_path / "recomputed")
    assert recomputed.series("loss") == kept.series("loss")
    assert recomputed.summary["weights_digest"] == kept.summary["weights_digest"]


def test_the_short_last_step_of_an_epoch_counts_its_own_tokens(tmp_path):
    """10 rows in batches of 4: steps of 4, 4 and 2 rows in every epoch; the last has a micro-batch without a token."""
    train = {"steps": 6, "global_batch": 4, "micro_batch": 2}
    outcome = run(write_recipe(tmp_path, 10, train=train), tmp_path / "run")
    assert [len(ids) for ids in outcome.sample_ids] == [4, 4, 2] * 2
    assert outcome.summary["tokens"] == 2 * 10 * 32
