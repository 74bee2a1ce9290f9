"""`resident` against plain PyTorch loops with torch.optim.AdamW on the same batches."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.context import make_context
from tests.support.toy_model import ToyConfig, ToyModel, plain_module, toy_batches

from trainforge.errors import ConfigError
from trainforge.seeding import seed_everything
from trainforge.stages import IGNORED, Batch, Comm, Extent, ModelSpec, Update
from trainforge_plugins.adamw import forge_optimizer
from trainforge_plugins.resident import forge_memory
from trainforge_plugins.resident.memory import Resident

LR = 1e-2
EPS = 1e-3  # with 1e-8 a gradient that is zero but for rounding moves a weight by the whole lr
# (seeds under which no token is routed by the last bit of a tie)
EVERYTHING = ToyConfig(
    layers=3, tied=True, dropout=0.1, experts=3, branch=True, unused=True, odd=True, bias=True, softcap=5.0
)


class Harness:
    """The loop's part: one step as core takes it."""

    def __init__(self, model: ModelSpec, comm: Comm | None = None, **train: Any) -> None:
        self.comm = comm or Comm()
        self.ctx = make_context(built={"model": model, "comm": self.comm}, **{"lr": LR, "eps": EPS, **train})
        self.optimizer = forge_optimizer().build(self.ctx, None)
        self.ctx.built["optimizer"] = self.optimizer
        self.memory: Resident = forge_memory().build(self.ctx, None)
        self.sink = self.comm.watch(self.memory.gradients)
        self.count = 0
        self.norms: list[float] = []

    def backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        scale = 1 / max(1, sum(batch.supervised for batch in batches))
        return self.memory.forward_backward(batches, scale, self.sink)

    def finish(self) -> frozenset[str]:
        used = self.comm.finish()
        norm = self.memory.grad_norm()
        self.norms.append(norm.item())
        clip = self.ctx.train.clip
        scale = (clip / (norm + 1e-6)).clamp(max=1) if clip else torch.ones(())
        found_inf = (~norm.isfinite()).float()
        self.count += 1
        update = Update(self.count, LR, torch.where(norm.isfinite(), scale, 1.0), found_inf)
        self.memory.apply(lambda slots: self.optimizer.update(slots, update), used)
        return used

    def step(self, batches: Sequence[Batch]) -> float:
        loss = self.backward(batches).item()
        self.finish()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        self.memory.drain()
        return {spec.name: self.memory.weights(spec.name) for spec in self.memory.model.parameters}


class Plain:
    """The same training written by hand."""

    def __init__(self, config: ToyConfig, clip: float | None = 1.0, weight_decay: float = 0.1) -> None:
        self.module, self.clip = plain_module(config), clip
        undecayed = lambda n: "norm" in n or n.endswith("bias") or n.startswith("embed")  # noqa: E731
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.trainable = [p for _, p in named]
        groups = [
            {"params": [p for n, p in named if undecayed(n)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not undecayed(n)], "weight_decay": weight_decay},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
        self.norms: list[float] = []

    def step(self, batches: Sequence[Batch]) -> float:
        tokens = sum(batch.supervised for batch in batches)
        total = 0.0
        for batch in batches:
            if batch.supervised:
                seed_everything(batch.seed)
                hidden, aux = self.module(batch)
                logits = self.module.logits(hidden).flatten(0, 1)
                loss = (
                    F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
                    / tokens
                )
                total += loss.item()
                (loss if aux is None else loss + aux * batch.supervised / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.clip or float("inf"))
        self.norms.append(norm.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def same_weights(harness: Harness, plain: Plain, tolerance: float = 1e-6):
    expected = dict(plain.module.named_parameters())
    for name, tensor in harness.weights().items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize(
    ("config", "train"),
    [
        (ToyConfig(), {}),
        (ToyConfig(tied=True), {"clip": 0.05}),
        (ToyConfig(dropout=0.2), {"clip": None, "loss_chunk": 5}),
        (ToyConfig(experts=3, branch=True, seed=1), {"weight_decay": 0.5}),
        (ToyConfig(odd=True, bias=True), {"loss_chunk": 3}),
        (ToyConfig(frozen=("blocks.0.*", "blocks.1.out.bias"), unused=True), {"clip": 0.1}),
        (ToyConfig(tied=True, frozen=("embed.*",)), {}),
        (EVERYTHING, {"clip": 0.5, "loss_chunk": 7}),
        (EVERYTHING, {"recompute": True}),
    ],
)
def test_equals_a_plain_loop(config, train):
    harness = Harness(ToyModel(config), **train)
    plain = Plain(config, train.get("clip", 1.0), train.get("weight_decay", 0.1))
    for step in range(1, 7):
        batches = toy_batches(config, 3, step=step, supervised=[16, 3, 9], packed=step % 2 == 0)
        if step % 3 == 0:
            batches[0].input_ids[0, 0] = 1  # through the branch, in the first micro-batch only
        assert harness.step(batches) == pytest.approx(plain.step(batches), rel=1e-6)
    assert harness.norms == pytest.approx(plain.norms, rel=2e-6)
    same_weights(harness, plain)


def test_uneven_micro_batches_equal_one_batch():
    """3, 97, 10 and 0 supervised tokens in four micro-batches = 110 in one."""
    config = ToyConfig(max_positions=128)
    parts = toy_batches(config, 4, rows=1, tokens=100, supervised=[3, 97, 10, 0])
    whole = Batch(
        torch.cat([part.input_ids for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.position_ids for part in parts]),
        None,
        supervised=110,
        real=400,
    )
    split, single = Harness(ToyModel(config)), Harness(ToyModel(config))
    assert split.backward(parts).item() == pytest.approx(single.backward([whole]).item(), rel=1e-6)
    one, other = split.memory.gradients[0].tensor, single.memory.gradients[0].tensor
    assert (one - other).norm() <= 1e-6 * other.norm()


def test_a_step_without_supervised_tokens_calls_no_sink():
    harness = Harness(ToyModel(EVERYTHING))
    harness.step(toy_batches(EVERYTHING, 2))
    before = harness.weights()
    loss = harness.backward(toy_batches(EVERYTHING, 2, supervised=[0, 0]))
    assert loss.item() == 0
    assert not harness.memory.gradients[0].tensor.any()
    assert harness.finish() == frozenset()
    assert all(torch.equal(before[name], tensor) for name, tensor in harness.weights().items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sink_is_called_once_per_parameter_and_only_when_final(dtype):
    """A parameter used last in an early micro-batch, one used by all, a tied one, one never used."""
    harness = Harness(ToyModel(EVERYTHING), dtype=dtype)
    calls: list[tuple[Extent, torch.Tensor]] = []
    flat = harness.memory.gradients[0]

    def sink(extent: Extent, ready: object) -> None:
        calls.append((extent, flat.span(flat.extents.index(extent)).clone()))

    for step in (1, 2):
        batches = toy_batches(EVERYTHING, 3, step=step, supervised=[16, 5, 0])
        for batch in batches:
            batch.input_ids[0, 0] = 0
        batches[0].input_ids[0, 0] = 1
        calls.clear()
        harness.memory.forward_backward(batches, 1 / 21, sink)
        counts = Counter(extent.name for extent, _ in calls)
        assert set(counts) == {spec.name for spec in harness.memory.model.parameters} - {"unused.weight"}
        assert set(counts.values()) == {1}
        for extent, seen in calls:
            assert torch.equal(seen, flat.span(flat.extents.index(extent))), extent.name
        # the branch comes last: only the end of the step can tell that it was not used again
        assert {extent.name for extent, _ in calls[-3:]} == {f"blocks.{i}.branch.weight" for i in range(3)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_gradient_is_left_from_the_step_before(dtype):
    config = ToyConfig(branch=True)
    harness = Harness(ToyModel(config), dtype=dtype)
    batches = toy_batches(config, 1)
    flat = harness.memory.gradients[0]
    index = [extent.name for extent in flat.extents].index("blocks.0.branch.weight")
    batches[0].input_ids[0, 0] = 1
    harness.step(batches)
    assert flat.span(index).any()
    batches[0].input_ids[0, 0] = 2
    for _ in range(3):
        harness.backward(batches)
        assert not flat.span(index).any()
        assert "blocks.0.branch.weight" not in harness.finish()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_gradient_is_left_that_another_rank_gave(dtype):
    config = ToyConfig(branch=True)
    harness = Harness(ToyModel(config), dtype=dtype)
    batches = toy_batches(config, 1)
    batches[0].input_ids[0, 0] = 2  # this rank never goes through the branch
    flat = harness.memory.gradients[0]
    span = flat.span([extent.name for extent in flat.extents].index("blocks.0.branch.weight"))
    for _ in range(2):
        harness.backward(batches)
        assert not span.any()
        span.fill_(3.0)  # what a reduction over ranks leaves in place
        harness.finish()


def test_unused_parameter_is_untouched():
    config = ToyConfig(unused=True)
    harness = Harness(ToyModel(config), weight_decay=0.5)
    before = harness.memory.weights("unused.weight")
    for step in range(1, 4):
        harness.step(toy_batches(config, 2, step=step))
    assert torch.equal(before, harness.memory.weights("unused.weight"))
    state = {(t.key, t.extent.name): t.tensor for t in harness.memory.state().tensors}
    assert state["step", "unused.weight"].item() == 0
    assert not state["exp_avg", "unused.weight"].any()
    assert state["step", "embed.weight"].item() == 3


def test_frozen_parameters_have_no_gradient_no_moments_and_no_say():
    config = ToyConfig(frozen=("blocks.0.*",))
    harness = Harness(ToyModel(config))
    before = {n: t for n, t in harness.weights().items() if n.startswith("blocks.0.")}
    harness.step(toy_batches(config, 2))
    assert all(torch.equal(t, harness.memory.weights(n)) for n, t in before.items())
    assert not any(t.extent.name.startswith("blocks.0.") for t in harness.memory.state().tensors)
    assert not any(e.name.startswith("blocks.0.") for e in harness.memory.gradients[0].extents)


def test_all_frozen_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        Harness(ToyModel(ToyConfig(frozen=("*",))))


def test_weights_that_are_not_finite_are_refused():
    class Broken(ToyModel):
        def load(self, name, out, extent):
            super().load(name, out, extent)
            if name == "norm.weight":
                out[3] = float("nan")

    with pytest.raises(ConfigError, match=r"norm\.weight"):
        Harness(Broken())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_changes_no_bit(dtype):
    kept, again = (Harness(ToyModel(EVERYTHING), dtype=dtype, recompute=r) for r in (False, True))
    for step in range(1, 4):
        batches = toy_batches(EVERYTHING, 2, step=step)
        assert kept.step(batches) == again.step(batches)
    other = again.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in kept.weights().items())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_no_bit(poison, dtype):
    harness = Harness(ToyModel(EVERYTHING), dtype=dtype)
    batches = toy_batches(EVERYTHING, 2)
    harness.step(batches)
    before = [t.tensor.clone() for t in harness.memory.state().tensors]
    copies = harness.memory.buffers.working.clone()
    harness.backward(batches)
    harness.memory.gradients[0].span(2)[0] = poison
    harness.finish()
    after = [t.tensor for t in harness.memory.state().tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(copies, harness.memory.buffers.working)


def test_bf16_masters_move_where_bf16_weights_would_stand_still():
    """Weights 1.0, a constant gradient, lr 6e-4, decay 0.01, 100 steps: as fp32 does, rounded only in the copy."""

    class Ones(ToyModel):
        def load(self, name, out, extent):
            out.fill_(1.0)

    harness = Harness(Ones(ToyConfig(layers=1)), dtype="bf16", weight_decay=0.01, clip=None, decay_exclude=())
    reference = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([reference], lr=6e-4, betas=(0.9, 0.95), eps=EPS, weight_decay=0.01)
    for step in range(1, 101):
        harness.memory.gradients[0].tensor.fill_(0.1)
        update = Update(step, 6e-4, torch.ones(()), torch.zeros(()))
        names = frozenset(spec.name for spec in harness.memory.model.parameters)
        harness.memory.apply(lambda slots, update=update: harness.optimizer.update(slots, update), names)
        reference.grad = torch.tensor(0.1)
        optimizer.step()
    assert reference.item() < 0.95
    for name, tensor in harness.weights().items():
        assert torch.allclose(tensor, reference.detach().expand_as(tensor), atol=1e-6), name
        copy = harness.memory.buffers.parameters[name]
        assert copy.dtype == torch.bfloat16
        assert torch.allclose(copy.float(), reference.detach().expand_as(tensor), rtol=2**-8)


def test_bf16_follows_the_fp32_curve():
    config = ToyConfig(tied=True)
    half, full = Harness(ToyModel(config), dtype="bf16"), Harness(ToyModel(config))
    batches = toy_batches(config, 3)
    losses = [(half.step(batches), full.step(batches)) for _ in range(12)]
    assert losses[-1][1] < losses[0][1] - 0.3
    for one, other in losses:
        assert one == pytest.approx(other, rel=2e-2)


def test_bf16_gradients_of_micro_batches_add_up_in_fp32():
    config = ToyConfig(layers=1)
    harness = Harness(ToyModel(config), dtype="bf16")
    (batch,) = toy_batches(config, 1)
    harness.backward([batch])
    once = harness.memory.gradients[0].tensor.clone()
    scale = 1 / batch.supervised
    harness.memory.forward_backward([batch] * 300, scale, harness.sink)
    assert torch.allclose(harness.memory.gradients[0].tensor, 300 * once, rtol=1e-5)


def test_dropout_depends_on_the_seed_of_the_micro_batch_only():
    config = ToyConfig(dropout=0.3)
    harness = Harness(ToyModel(config))
    one, two = toy_batches(config, 2)
    alone = harness.backward([two]).item()
    torch.rand(17)
    assert harness.backward([two]).item() == alone
    both = harness.memory.forward_backward([one, two], 1 / 16, harness.sink).item()
    assert both == pytest.approx(harness.backward([one]).item() + alone, rel=1e-6)
    assert harness.backward([dataclasses.replace(two, seed=5)]).item() != alone


def test_evaluate_has_no_dropout_and_leaves_training_alone():
    config = ToyConfig(dropout=0.5, experts=2)
    harness = Harness(ToyModel(config))
    batches = toy_batches(config, 3, supervised=[16, 0, 5])
    module = plain_module(config).eval()
    expected = [
        F.cross_entropy(module.logits(module(b)[0]).flatten(0, 1), b.labels.flatten(), reduction="sum").item()
        for b in batches
    ]
    losses = harness.memory.evaluate(iter(batches))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    assert harness.memory.evaluate([]).shape == (0,)
    assert harness.memory.module.training
    assert not harness.memory.gradients[0].tensor.any()


def test_state_resumes_exactly():
    batches = [toy_batches(EVERYTHING, 2, step=step) for step in range(1, 7)]
    for dtype in ("fp32", "bf16"):
        straight, first, second = (Harness(ToyModel(EVERYTHING), dtype=dtype) for _ in range(3))
        losses = [straight.step(b) for b in batches]
        for b in batches[:3]:
            first.step(b)
        saved = {(t.key, t.extent): t.tensor.clone() for t in first.memory.state().tensors}
        for target in second.memory.state().tensors:
            assert target.tensor.shape == (target.extent.length,)
            target.tensor.copy_(saved[target.key, target.extent])
        second.memory.load(1, {})
        assert [second.step(b) for b in batches[3:]] == losses[3:]
        other = second.weights()
        assert all(torch.equal(t, other[n]) for n, t in straight.weights().items())


def test_loading_reads_each_parameter_once_and_tied_weights_share_storage():
    model = ToyModel(EVERYTHING)
    Harness(model)
    assert set(model.loaded.values()) == {1}
    assert set(model.loaded) == {spec.name for spec in model.parameters}
    assert model.module.head.weight is model.module.embed.weight


def test_huge_parameters_are_loaded_in_pieces(monkeypatch):
    monkeypatch.setattr("trainforge.toolbox.loading.LOAD_CHUNK", 7)
    for dtype in ("fp32", "bf16"):
        pieces = Harness(ToyModel(EVERYTHING), dtype=dtype).weights()
        expected = dict(plain_module(EVERYTHING).named_parameters())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in pieces.items())


def test_generate_samples_from_the_model():
    config = ToyConfig(max_positions=6, dropout=0.5)
    harness = Harness(ToyModel(config))
    state = torch.get_rng_state()
    text = harness.memory.generate([3, 4], 9, seed=1)
    assert len(text) == 9
    assert all(0 <= token < config.vocab for token in text)
    assert text == harness.memory.generate([3, 4], 9, seed=1)
    assert text != harness.memory.generate([3, 4], 9, seed=2)
    assert torch.equal(state, torch.get_rng_state())
    module = plain_module(config).eval()
    ids = [5]
    for _ in range(4):
        batch = Batch(torch.tensor([ids]), torch.tensor([ids]), torch.arange(len(ids))[None], None, 0, 0)
        ids.append(module.logits(module(batch)[0])[0, -1].argmax().item())
    assert harness.memory.generate([5], 4, temperature=0) == ids[1:]
    assert harness.memory.generate([], 2, temperature=0)


def test_compile_without_a_compiler_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.compile"):
        Harness(ToyModel(), compile=True)


def test_estimate_counts_every_tier():
    model = ToyModel(ToyConfig(frozen=("embed.*",)))
    trainable = sum(spec.elements for spec in model.parameters if spec.trainable)
    everything = sum(spec.elements for spec in model.parameters)
    provider = forge_memory()

    def context(**train):
        ctx = make_context(**train)
        ctx.built |= {"comm": Comm(), "optimizer": forge_optimizer().build(ctx, None)}
        return ctx

    planned = provider.estimate(context(dtype="bf16"), model, provider.config())
    assert planned.device["masters"] == 4 * trainable
    assert planned.device["working copies"] == 2 * everything
    assert planned.device["gradients"] == 4 * trainable
    assert planned.device["optimizer state"] == 8 * trainable
    full = provider.estimate(context(dtype="fp32"), model, provider.config())
    assert "masters" not in full.device  # the working copies are the masters
    assert full.device["working copies"] == 4 * everything
    short = context(dtype="bf16")
    short.row_tokens = 8  # as the data stage estimates it
    rough = provider.estimate(short, model, provider.config()).device
    assert rough["activations (roughly, at 8 tokens per row)"] == 34 * 16 * len(model.blocks) * 2 * 8
    assert rough["logits of one chunk"] == 2 * 8 * model.vocab_size * 12  # 2 rows of 8 do not fill a chunk


def test_persistent_buffers_are_saved_and_restored():
    class Counting(ToyModel):
        def __init__(self):
            super().__init__()
            self.module.blocks[1].register_buffer("balance", torch.tensor([1.0, 2.0]))

        def load_buffers(self):
            self.module.blocks[1].balance.add_(1)

    first, second = Harness(Counting()), Harness(Counting())
    (saved,) = [t for t in first.memory.state().tensors if t.key == "buffer"]
    assert (saved.extent.name, saved.tensor.tolist()) == ("blocks.1.balance", [2.0, 3.0])
    first.memory.module.blocks[1].balance.fill_(7)
    (target,) = [t for t in second.memory.state().tensors if t.key == "buffer"]
    target.tensor.copy_(saved.tensor)
    assert second.memory.module.blocks[1].balance.tolist() == [7.0, 7.0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_train_the_same(recompute):
    config = ToyConfig(layers=2, tied=True)
    plain, compiled = Harness(ToyModel(config)), Harness(ToyModel(config), compile=True, recompute=recompute)
    for step in range(1, 4):
        batches = toy_batches(config, 2, step=step)
        assert compiled.step(batches) == pytest.approx(plain.step(batches), rel=1e-5)
    other = compiled.weights()
    assert all(torch.allclose(tensor, other[name], atol=1e-5) for name, tensor in plain.weights().items())
