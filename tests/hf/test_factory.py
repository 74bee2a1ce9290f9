"""`model.factory`: a user's own module."""

from __future__ import annotations

import textwrap

import pytest
import torch
from tests.hf import tiny

from trainforge.errors import ConfigError
from trainforge_plugins.hf import ModelSection, build

_MODULE = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.mix = nn.Linear(width, width)

        def forward(self, x):
            return x + self.mix(self.norm(x))

    class Net(nn.Module):
        vocab_size, max_positions = 11, 9

        def __init__(self, width=8, tied=False):
            super().__init__()
            self.embed = nn.Embedding(self.vocab_size, width)
            self.layers = nn.ModuleList([Block(width) for _ in range(3)])
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.head_layer = nn.Linear(width, self.vocab_size, bias=False)
            self.head_modules = ("head_layer",)
            if tied:
                self.head_layer.weight = self.embed.weight

        def hidden(self, batch):
            x = self.embed(batch.input_ids)
            for layer in self.layers:
                x = layer(x)
            return x

        def head(self, hidden):
            return self.head_layer(hidden)

    def plain(ctx):
        return Net()

    def tied(ctx):
        return Net(tied=True)

    def uninitialised(ctx):
        net = Net()
        net.gain = nn.Parameter(torch.ones(3))
        return net

    def scaled(ctx):
        net = uninitialised(ctx)
        net.init_weights = lambda module: [p.fill_(2.0) for p in module.parameters(recurse=False) if not p.is_meta]
        return net

    def misnamed(ctx):
        net = Net()
        net.blocks = "blockz"
        return net

    def nothing(ctx):
        return 3

    def incomplete(ctx):
        return nn.Linear(2, 2)

    def broken(ctx):
        raise RuntimeError("no luck")
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "mynet.py").write_text(textwrap.dedent(_MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mynet", raising=False)
    return lambda name, **more: build(tiny.context(tmp_path), ModelSection(factory=f"mynet:{name}", **more))


def test_a_module_becomes_a_spec(make):
    spec = make("plain")
    assert all(parameter.is_meta for parameter in spec.module.parameters())
    assert torch.equal(spec.module.table, torch.arange(4.0))
    assert spec.blocks == ("layers.0", "layers.1", "layers.2")
    assert (spec.vocab_size, spec.max_positions) == (11, 9)
    assert spec.head_parameters == ("head_layer.weight",)
    assert spec.parameters[0].name == "embed.weight"
    state = tiny.initial(spec)
    assert torch.equal(state["layers.0.norm.weight"], torch.ones(8))
    assert state["layers.0.mix.weight"].abs().max() <= 8**-0.5
    assert torch.equal(tiny.initial(make("plain"))["layers.2.mix.bias"], state["layers.2.mix.bias"])
    spec.module.load_state_dict(state, assign=True)
    hidden, auxiliary = spec.hidden(tiny.batch(torch.ones(2, 4, dtype=torch.long)))
    assert auxiliary is None
    assert spec.head(hidden.flatten(0, 1)).shape == (8, 11)
    matrices = 3 * (64 + 8 + 16) + 88
    assert spec.flops_per_token(4) == 6 * matrices


def test_ties(make):
    spec = make("tied")
    assert spec.parameters[0].aliases == ("head_layer.weight",)
    assert spec.head_parameters == ("embed.weight",)


def test_own_initialisation(make):
    with pytest.raises(ConfigError, match="no initialisation for gain"):
        tiny.initial(make("uninitialised"))
    assert torch.equal(tiny.initial(make("scaled"))["gain"], torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "returned int"),
        ("incomplete", "needs hidden and head and vocab_size"),
        ("broken", "RuntimeError: no luck"),
        ("misnamed", "names 'blockz', and there is no such module"),
        ("absent", "has no function absent"),
    ],
)
def test_mistakes(make, name, message):
    with pytest.raises(ConfigError, match=message):
        make(name)


def test_module_that_cannot_be_imported(tmp_path):
    with pytest.raises(ConfigError, match="cannot import nowhere_at_all"):
        build(tiny.context(tmp_path), ModelSection(factory="nowhere_at_all:f"))


def test_keys_for_transformers_models_are_refused(make):
    with pytest.raises(ConfigError, match="decides itself"):
        make("plain", attn="sdpa")
