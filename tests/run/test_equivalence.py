"""A run equals a hand-written PyTorch loop, however its batch is cut."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.run.runs import MODEL, run, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

import trainforge
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan

STEPS = 8
# with 1e-8, an element whose gradient is only rounding still takes a whole step of Adam, in a random direction
EPS = 1e-6
# llama has no bias on its keys: that bias has a gradient of zero plus rounding, which Adam would blow up to full steps
NO_DROPOUT = {"config": MODEL | {"attention_dropout": 0.0, "model_type": "llama"}}


def initial_weights(recipe):
    """The model's initial weights, through the model stage alone."""
    spec, _ = describe_model(make_plan(recipe))
    weights = {}
    for parameter in spec.parameters:
        out = torch.empty(parameter.elements)
        spec.load(parameter.name, out, parameter.extent)
        weights[parameter.name] = out.view(parameter.shape)
    return weights


def plain_loop(recipe, lr, clip, weight_decay):
    """transformers' model, torch's AdamW and clipping on the batches of the data stage; none of our code after that."""
    from trainforge_plugins.text.data import TextData

    batches, take = [], TextData.take

    def recording(self, count):
        batches.append(take(self, count))
        return batches[-1]

    TextData.take = recording
    try:
        trainforge.run(recipe, run_dir=recipe.parent / "recording")
    finally:
        TextData.take = take
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**NO_DROPOUT["config"]), attn_implementation="sdpa"
    )
    model.load_state_dict(initial_weights(recipe), strict=False)
    model.tie_weights()
    no_decay = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    decay = [p for n, p in model.named_parameters() if not (p.ndim == 1 or "embed" in n)]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=EPS)
    losses = []
    for step in batches:
        tokens = sum(int((batch.labels != -100).sum()) for batch in step)
        total = 0.0
        for batch in step:
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
            loss = (
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
                )
                / tokens
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


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
    losses, model = plain_loop(recipe, lr=1e-3, clip=1.0, weight_decay=0.1)
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
