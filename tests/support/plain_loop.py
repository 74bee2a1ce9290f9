"""Training as one would write it by hand: transformers' model and loss, torch's AdamW and clipping."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trainforge
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan

# with 1e-8, an element whose gradient is only rounding still takes a whole step of Adam, in a random direction
EPS = 1e-6


def initial_weights(recipe):
    """The model's initial weights, through the model stage alone."""
    spec, _ = describe_model(make_plan(recipe))
    weights = {}
    for parameter in spec.parameters:
        out = torch.empty(parameter.elements)
        spec.load(parameter.name, out, parameter.extent)
        weights[parameter.name] = out.view(parameter.shape)
    return weights


def batches_of(recipe):
    """What the data stage hands out, step by step; all that a hand-written loop takes from us but the weights."""
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
    return batches


def plain_loop(recipe, config, *, lr, clip=1.0, weight_decay=0.1, batches=None):
    """Losses of a hand-written loop, and the model it has trained.

    Args:
        config: the model's transformers configuration.
        batches: micro-batches by step; by default those that a run of the recipe takes.
    """
    batches = batches_of(recipe) if batches is None else batches
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).train()
    model.load_state_dict(initial_weights(recipe), strict=False)
    model.tie_weights()
    optimizer = torch.optim.AdamW(groups(model, weight_decay), lr=lr, betas=(0.9, 0.95), eps=EPS)
    losses = []
    for step in batches:
        tokens = sum(int((batch.labels != -100).sum()) for batch in step)
        total = 0.0
        for batch in step:
            for documents in pieces(batch):
                loss = model(**documents, num_items_in_batch=tokens).loss
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def groups(model, weight_decay):
    """Matrices decay; norms, biases (also those that are stacked over experts) and embeddings do not."""
    named = list(model.named_parameters())
    spared = [name for name, p in named if p.ndim == 1 or "bias" in name or "embed" in name]
    decayed = [p for name, p in named if name not in spared]
    rest = [p for name, p in named if name in spared]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def pieces(batch):
    """What the model is called with: the rows, or each document of a packed row alone."""
    if batch.document_ids is None:
        yield {"input_ids": batch.input_ids, "labels": batch.labels, "shift_labels": batch.labels}
        return
    for ids, labels, documents in zip(batch.input_ids, batch.labels, batch.document_ids, strict=True):
        for document in documents.unique().tolist():
            here = documents == document
            if document >= 0 and (labels[here] != -100).any():
                alone = labels[here][None]
                yield {"input_ids": ids[here][None], "labels": alone, "shift_labels": alone}
