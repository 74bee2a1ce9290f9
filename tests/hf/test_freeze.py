"""`model.freeze`, also over whole runs (C34)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.hf import tiny
from tests.run.runs import MODEL, run, write_recipe
from tests.run.test_equivalence import weights_of
from tests.support.plain_loop import initial_weights
from torch import nn

from trainforge.errors import ConfigError
from trainforge_plugins.hf import ModelSection, build
from trainforge_plugins.resident.buffers import Buffers
from trainforge_plugins.text.data import TextData

FACTORY = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.unused = nn.Linear(3, 5)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
class Net(nn.Module):
    vocab_size, blocks = 264, "layers"
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(264, 16), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 264, bias=False)
    def hidden(self, batch):
        x = self.embed(batch.input_ids)
        for layer in self.layers:
            x = layer(x)
        return x
    def forward(self, batch):
        return self.head(self.hidden(batch))
def make(ctx=None):
    return Net()
"""
FROZEN = ["layers.0.*", "layers.1.up.bias"]
TRAIN = {"steps": 10, "global_batch": 4, "micro_batch": 2, "lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}
TRAIN |= {"schedule": "constant", "warmup": 0, "clip": 0.5}


def is_frozen(name: str) -> bool:
    return name.startswith("layers.0.") or name == "layers.1.up.bias"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "frozen_net.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"config": None, "factory": "frozen_net:make", "freeze": FROZEN}
    return write_recipe(tmp_path, 20, train=TRAIN, model=model)


@pytest.fixture
def seen(monkeypatch):
    """Batches of every step, and the buffers of every run."""
    batches, buffers = [], []
    take, made = TextData.take, Buffers.__init__

    def recording(self, count):
        batches.append(take(self, count))
        return batches[-1]

    def noted(self, *arguments):
        made(self, *arguments)
        buffers.append(self)

    monkeypatch.setattr(TextData, "take", recording)
    monkeypatch.setattr(Buffers, "__init__", noted)
    return batches, buffers


def plain(initial, batches):
    """The same run in plain PyTorch: (losses, norms, model)."""
    import frozen_net

    model = frozen_net.make()
    model.load_state_dict(initial)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for n, p in trained.items() if p.ndim == 2 and not n.startswith("embed")]
    others = [p for n, p in trained.items() if not (p.ndim == 2 and not n.startswith("embed"))]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    losses, norms = [], []
    for step in batches:
        tokens = sum(int((batch.labels != -100).sum()) for batch in step)
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            logits = model(batch).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(list(trained.values()), 0.5)))
        optimizer.step()
    return losses, norms, model


def test_ten_steps_equal_plain_pytorch_and_frozen_bytes_stay(tmp_path, recipe, seen):
    batches, buffers = seen
    initial = initial_weights(recipe)
    outcome = run(recipe, tmp_path / "run")
    losses, norms, model = plain(initial, batches)
    assert outcome.series("loss") == pytest.approx(losses, rel=1e-6)
    assert outcome.series("grad_norm") == pytest.approx(norms, rel=1e-5)
    final = weights_of(outcome.folder)
    for name, parameter in model.named_parameters():
        if is_frozen(name):
            assert buffers[0].parameters[name].view(torch.uint8).equal(initial[name].view(torch.uint8)), name
            assert not buffers[0].parameters[name].requires_grad
        else:
            assert (final[name] - parameter).abs().max() < 1e-6, name
        if "unused" in name:
            assert parameter.equal(initial[name]), name
    assert "trainable" in (outcome.folder / "log.txt").read_text()


def test_no_moment_and_no_byte_of_the_checkpoint_is_for_frozen_parameters(tmp_path, recipe, seen):
    outcome = run(recipe, tmp_path / "run", max_steps=1)
    assert not any(is_frozen(slot.spec.name) for slot in seen[1][0].slots)
    newest = next((outcome.folder / "checkpoints").glob("step-*"))
    about = json.loads((newest / "checkpoint.json").read_text())
    names = {tensor["name"] for tensor in about["parts"]["memory"]["tensors"]}
    assert "layers.1.up.weight" in names
    assert not any(is_frozen(name) for name in names)


def test_resumed_and_uninterrupted_are_the_same(tmp_path, recipe):
    whole = run(recipe, tmp_path / "whole").summary["weights_digest"]
    run(recipe, tmp_path / "parts", max_steps=4)
    assert run(recipe, tmp_path / "parts").summary["weights_digest"] == whole


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["*", "!*.bias"], lambda name: name.endswith(".bias")),
        (
            ["*layers.[01].*", "!*layers.1.*norm*"],
            lambda n: ".layers." not in n or (".1." in n and "norm" in n),
        ),
        (["lm_head.weight"], lambda name: name != "model.embed_tokens.weight"),
    ],
    ids=["all but biases", "two blocks but a norm", "the tied head"],
)
def test_patterns_go_in_order(tmp_path, patterns, trained):
    spec = build(tiny.context(tmp_path), ModelSection(config=MODEL, freeze=patterns))
    for parameter in spec.parameters:
        assert parameter.trainable == trained(parameter.name), parameter.name
        assert spec.module.get_parameter(parameter.name).requires_grad == parameter.trainable


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["model.layer.0.*"], "model.layer.0.* matches no parameter"),
        (["model.embed_token.weight"], "did you mean model.embed_tokens.weight?"),
        (["*norm*", "!lm_head*"], "!lm_head* takes back nothing"),
        (["*"], "nothing to train"),
        (["*layers*", "*embed*", "model.norm.weight"], "nothing to train"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(tmp_path, patterns, says):
    with pytest.raises(ConfigError) as error:
        build(tiny.context(tmp_path), ModelSection(config=MODEL, freeze=patterns))
    assert says in str(error.value)


def test_a_frozen_parameter_costs_less(tmp_path):
    whole = tiny.model(tmp_path)
    part = build(tiny.context(tmp_path), ModelSection(config=tiny.values("llama"), freeze=["*mlp*"]))
    elements = sum(spec.elements for spec in part.parameters if not spec.trainable)
    assert elements > 0
    assert whole.flops_per_token(8) - part.flops_per_token(8) == 2 * elements


def test_routers_below_everything_trained_need_no_gradient(tmp_path):
    """The auxiliary loss of frozen routers steers nothing, which is no mistake."""
    config = tiny.values("qwen3_moe", output_router_logits=True)
    section = ModelSection(config=config, freeze=["*", "!lm_head*", "!model.norm*"])
    spec = tiny.filled(build(tiny.context(tmp_path), section))
    spec.module.train()
    hidden, auxiliary = spec.hidden(tiny.batch(torch.ones(1, 4, dtype=torch.long)))
    assert not auxiliary.requires_grad
    (spec.head(hidden.flatten(0, 1)).sum() + auxiliary).backward()


def test_frozen_runs_learn_the_same_on_recomputed_blocks(tmp_path, recipe):
    digests = [
        run(_with(recipe, Path(tmp_path / name), **train), tmp_path / name / "run").series("loss")
        for name, train in (("kept", {}), ("recomputed", {"recompute": True}))
    ]
    assert digests[0] == digests[1]


def _with(recipe: Path, folder: Path, **train):
    import yaml

    values = yaml.safe_load(recipe.read_text())
    values["train"] |= train
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"
