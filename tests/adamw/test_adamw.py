"""AdamW on slots against torch.optim.AdamW."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.context import make_context

from trainforge.stages import ParameterSpec, Slot, Update
from trainforge_plugins.adamw import forge_optimizer
from trainforge_plugins.adamw.optimizer import AdamW

SPECS = [
    ParameterSpec("embed.weight", (9, 4), "embedding"),
    ParameterSpec("blocks.0.weight", (4, 5), aliases=("tied.weight",)),
    ParameterSpec("blocks.0.norm", (7,), "norm"),
    ParameterSpec("empty", (0, 3)),
    ParameterSpec("gain", (), "bias"),
]


def make(**train) -> AdamW:
    ctx = make_context(**train)
    provider = forge_optimizer()
    return provider.build(ctx, provider.config())


def make_slots(optimizer: AdamW, seed: int = 0) -> list[Slot]:
    draw = torch.Generator().manual_seed(seed)
    slots = []
    for spec in SPECS:
        state = {
            name: torch.zeros(spec.elements if wanted.per_element else (), dtype=getattr(torch, wanted.dtype))
            for name, wanted in optimizer.state(spec).items()
        }
        master = torch.randn(spec.elements, generator=draw)
        slots.append(Slot(spec, spec.extent, master, torch.zeros(spec.elements), state))
    return slots


def update(step: int = 1, lr: float = 1e-2, scale: float = 1.0, found_inf: float = 0.0) -> Update:
    return Update(step, lr, torch.tensor(scale), torch.tensor(found_inf))


def snapshot(slots: list[Slot]) -> list[torch.Tensor]:
    return [t.clone() for slot in slots for t in (slot.master, *slot.state.values())]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(one, other, strict=True) if a.dim()
    )


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(1e-5, 0.5),
    decay=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([1.0, 0.37, 1e-3]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.999)]),
    seed=st.integers(0, 99),
)
def test_equals_torch_adamw(lr, decay, scale, betas, seed):
    optimizer = make(weight_decay=decay, betas=betas)
    slots = make_slots(optimizer, seed)
    leaves = [slot.master.clone().requires_grad_() for slot in slots]
    groups = [
        {"params": [leaf], "weight_decay": decay if slot.spec.kind == "matrix" else 0.0}
        for leaf, slot in zip(leaves, slots, strict=True)
    ]
    reference = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8)
    draw = torch.Generator().manual_seed(seed + 1)
    for step in range(1, 6):
        for slot, leaf in zip(slots, leaves, strict=True):
            slot.grad.copy_(torch.randn(slot.grad.shape, generator=draw))
            leaf.grad = slot.grad * scale
        optimizer.update(slots, update(step, lr, scale))
        reference.step()
    for slot, leaf in zip(slots, leaves, strict=True):
        assert torch.allclose(slot.master, leaf, rtol=1e-6, atol=1e-6 * lr + 1e-7)
        assert slot.state["step"].item() == 5


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("scale", [1.0, 0.0, float("nan")])
def test_found_inf_changes_no_bit(poison, scale):
    optimizer = make()
    slots = make_slots(optimizer)
    for slot in slots:
        slot.grad.fill_(0.5)
    optimizer.update(slots, update(1))
    before = snapshot(slots)
    for slot in slots:
        slot.grad.fill_(poison)
    optimizer.update(slots, update(2, scale=scale, found_inf=1.0))
    assert same_bits(before, snapshot(slots))
    assert [slot.state["step"].item() for slot in slots] == [1.0] * len(slots)


def test_a_skipped_step_is_as_if_it_had_not_been():
    optimizer = make()
    skipping, plain = make_slots(optimizer), make_slots(optimizer)
    for step, found_inf in enumerate([0.0, 1.0, 0.0], start=1):
        for one, other in zip(skipping, plain, strict=True):
            one.grad.fill_(float("inf") if found_inf else 0.1 * step)
            other.grad.fill_(0.1 * step)
        optimizer.update(skipping, update(step, found_inf=found_inf))
        if not found_inf:
            optimizer.update(plain, update(step))
    assert same_bits(snapshot(skipping), snapshot(plain))


def test_steps_are_counted_per_parameter():
    optimizer = make()
    slots = make_slots(optimizer)
    optimizer.update(slots, update(1))
    optimizer.update(slots[:2], update(2))
    assert [slot.state["step"].item() for slot in slots] == [2, 2, 1, 1, 1]
    optimizer.update([], update(3))


@pytest.mark.parametrize(
    ("exclude", "undecayed"),
    [
        (("norm", "bias", "embedding"), {"embed.weight", "blocks.0.norm", "gain"}),
        ((), set()),
        (("blocks.*",), {"blocks.0.weight", "blocks.0.norm"}),
        (("tied.*", "norm"), {"blocks.0.weight", "blocks.0.norm"}),
    ],
)
def test_decay_groups(exclude, undecayed):
    optimizer = make(decay_exclude=exclude, weight_decay=0.3)
    assert {spec.name for spec in SPECS if optimizer.decay(spec) == 0} == undecayed
    assert {optimizer.decay(spec) for spec in SPECS} <= {0.0, 0.3}


def test_pieces_of_a_parameter_are_updated_like_the_whole():
    optimizer = make(weight_decay=0.1)
    (_, whole, *_), (_, cut, *_) = make_slots(optimizer), make_slots(optimizer)
    whole.grad.copy_(torch.linspace(-1, 1, 20))
    cut.grad.copy_(whole.grad)
    parts = []
    for first, last in ((0, 7), (7, 20)):
        state = {name: (t[first:last] if t.dim() else t.clone()) for name, t in cut.state.items()}
        parts.append(Slot(cut.spec, cut.extent, cut.master[first:last], cut.grad[first:last], state))
    optimizer.update([whole], update(1, scale=0.5))
    optimizer.update(parts, update(1, scale=0.5))
    assert torch.allclose(whole.master, cut.master, rtol=1e-6)


def test_planning_does_not_import_torch():
    code = (
        "import sys; from trainforge_plugins import adamw, resident; "
        "adamw.forge_optimizer(); resident.forge_memory(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
