"""The update against AdamW written out in NumPy, against torch's, and against itself in other forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu_adam.slots import (
    SPECS,
    bits,
    bytes_of,
    cut,
    do,
    draw_gradients,
    joined,
    make,
    make_slot,
    make_slots,
    split,
)

from trainforge.stages import ParameterSpec, Update
from trainforge_megatrain.cpu_adam import backends

BACKENDS = ["native", "torch"]
STEPS, LR, DECAY, BETAS, EPS = 50, 1e-2, 0.1, (0.9, 0.95), 1e-8


class NumpyAdamW:
    """AdamW as in the paper, in float64; or in fp32, in the order that the kernel documents."""

    def __init__(self, master: torch.Tensor, dtype: type) -> None:
        self.master = master.numpy().astype(dtype)
        self.exp_avg = np.zeros_like(self.master)
        self.exp_avg_sq = np.zeros_like(self.master)
        self.count = 0
        self.dtype = dtype

    def step(self, grad: torch.Tensor, scale: float, lr: float, decay: float) -> None:
        number = self.dtype
        self.count += 1
        beta1, beta2 = BETAS
        g = grad.float().numpy().astype(number) * number(np.float32(scale))
        self.exp_avg = self.exp_avg * number(beta1) + g * number(1 - beta1)
        self.exp_avg_sq = self.exp_avg_sq * number(beta2) + (g * number(1 - beta2)) * g
        rate = number(lr / (1 - beta1**self.count))
        inverse = number(1 / np.sqrt(1 - beta2**self.count))
        change = (self.exp_avg * rate) / (np.sqrt(self.exp_avg_sq) * inverse + number(EPS))
        self.master = self.master * number(1 - lr * decay) - change


def decay_of(spec: ParameterSpec, decay: float = DECAY) -> float:
    return decay if spec.kind == "matrix" else 0.0  # the default of train.decay_exclude


@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_steps_are_those_of_the_paper_in_float64(backend):
    optimizer = make({"backend": backend}, weight_decay=DECAY, betas=BETAS)
    slots = make_slots(optimizer)
    reference = [NumpyAdamW(slot.master, np.float64) for slot in slots]
    for step in range(1, STEPS + 1):
        draw_gradients(slots, step)
        for slot, wanted in zip(slots, reference, strict=True):
            wanted.step(slot.grad, 0.37, LR * slot.spec.lr_scale, decay_of(slot.spec))
        optimizer.update(slots, do(step, LR, 0.37))
    for slot, wanted in zip(slots, reference, strict=True):
        np.testing.assert_allclose(slot.master.numpy(), wanted.master, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(slot.state["exp_avg"].numpy(), wanted.exp_avg, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(slot.state["exp_avg_sq"].numpy(), wanted.exp_avg_sq, rtol=1e-5, atol=1e-9)
        assert slot.state["step"].item() == STEPS


@pytest.mark.parametrize("narrow", [False, True])
def test_the_kernel_rounds_each_operation_as_ieee_754_says(narrow):
    """Bit-equal to NumPy in fp32: no contraction, no approximate division or root, in the documented order."""
    optimizer = make({"backend": "native"}, weight_decay=DECAY, betas=BETAS)
    slots = make_slots(optimizer)
    reference = [NumpyAdamW(slot.master, np.float32) for slot in slots]
    if narrow:
        slots = [split(slot) for slot in slots]
    for step in range(1, STEPS + 1):
        draw_gradients(slots, step)
        for slot, wanted in zip(slots, reference, strict=True):
            wanted.step(slot.grad, 0.37, LR * slot.spec.lr_scale, decay_of(slot.spec))
        optimizer.update(slots, do(step, LR, 0.37))
    for slot, wanted in zip(slots, reference, strict=True):
        assert bytes_of(joined(slot)) == wanted.master.tobytes(), slot.spec.name
        assert bytes_of(slot.state["exp_avg"]) == wanted.exp_avg.tobytes()
        assert bytes_of(slot.state["exp_avg_sq"]) == wanted.exp_avg_sq.tobytes()


@settings(max_examples=20, deadline=None)
@given(
    lr=st.floats(1e-5, 0.5),
    decay=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([1.0, 0.37, 1e-3]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.999)]),
    seed=st.integers(0, 99),
    backend=st.sampled_from(BACKENDS),
)
def test_equals_torch_adamw(lr, decay, scale, betas, seed, backend):
    optimizer = make({"backend": backend, "threads": 1}, weight_decay=decay, betas=betas)
    slots = make_slots(optimizer, seed)
    leaves = [slot.master.clone().requires_grad_() for slot in slots]
    groups = [
        {"params": [leaf], "weight_decay": decay_of(slot.spec, decay), "lr": lr * slot.spec.lr_scale}
        for leaf, slot in zip(leaves, slots, strict=True)
    ]
    reference = torch.optim.AdamW(groups, betas=betas, eps=1e-8)
    for step in range(1, 6):
        draw_gradients(slots, seed + step)
        for slot, leaf in zip(slots, leaves, strict=True):
            leaf.grad = slot.grad * scale
        optimizer.update(slots, do(step, lr, scale))
        reference.step()
    for slot, leaf in zip(slots, leaves, strict=True):
        assert torch.allclose(slot.master, leaf, rtol=1e-6, atol=2e-6 * lr + 1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_masters_are_whole_ones_bit_for_bit(backend):
    """Fifty steps with decay, two rates, a clip scale that changes, and steps that are skipped."""
    optimizer = make({"backend": backend}, weight_decay=DECAY)
    whole, halved = make_slots(optimizer), [split(slot) for slot in make_slots(optimizer)]
    for step in range(1, STEPS + 1):
        draw_gradients(halved, step)
        for one, other in zip(whole, halved, strict=True):
            one.grad.copy_(other.grad)
        update = do(step, LR / step, 1 / (1 + step % 3), float(step % 7 == 0))
        optimizer.update(whole, update)
        optimizer.update(halved, update)
    for one, other in zip(whole, halved, strict=True):
        assert bytes_of(one.master) == bytes_of(joined(other))
        assert [bytes_of(t) for t in one.state.values()] == [bytes_of(t) for t in other.state.values()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["whole", "split", "bf16 moments"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_found_inf_changes_no_bit(backend, form, poison):
    optimizer = make({"backend": backend, "moments": "bf16" if form == "bf16 moments" else "fp32"})
    slots = make_slots(optimizer)
    if form == "split":
        slots = [split(slot) for slot in slots]
    optimizer.update(slots, do(1))
    before = bits(slots)
    for slot in slots:
        slot.grad.fill_(poison)
    for scale in (1.0, 0.0, float("nan")):
        optimizer.update(slots, do(2, scale=scale, found_inf=1.0))
    assert bits(slots) == before
    assert [slot.state["step"].item() for slot in slots] == [1.0] * len(slots)


@pytest.mark.parametrize("split_them", [False, True])
def test_the_device_path_keeps_every_bit_without_asking_found_inf(split_them):
    """What runs for slots on a device, here on the CPU: `found_inf` stays a tensor."""
    optimizer = make({"backend": "torch"})
    slots = [split(slot) if split_them else slot for slot in make_slots(optimizer)]
    optimizer.update(slots, do(1))
    before = bits(slots)
    works = [backends.Work(slot, LR, DECAY) for slot in slots]
    for slot in slots:
        slot.grad.fill_(float("inf"))
    optimizer._device.update_on(torch.device("cpu"), works, torch.tensor(1.0), torch.tensor(1.0))
    assert bits(slots) == before
    for slot in slots:
        slot.grad.fill_(1.0)
    optimizer._device.update_on(torch.device("cpu"), works, torch.tensor(1.0), torch.tensor(0.0))
    assert [slot.state["step"].item() for slot in slots] == [2.0] * len(slots)


def test_steps_are_counted_per_parameter():
    optimizer = make()
    slots = make_slots(optimizer)
    optimizer.update(slots, do(1))
    optimizer.update(slots[:2], do(2))
    assert [slot.state["step"].item() for slot in slots] == [2, 2, 1, 1, 1]
    optimizer.update([], do(3))


def test_numbers_are_read_once_per_update():
    class Counting(torch.Tensor):
        reads = 0

        def __float__(self):
            type(self).reads += 1
            return super().__float__()

    optimizer = make({"backend": "native"})
    slots = make_slots(optimizer)
    first, second = (
        Update(step, LR, torch.tensor(scale).as_subclass(Counting), torch.tensor(0.0).as_subclass(Counting))
        for step, scale in ((1, 1.0), (2, 0.5))
    )
    for slot in slots:
        optimizer.update([slot], first)
    assert Counting.reads == 2
    optimizer.update(slots[:1], second)
    assert Counting.reads == 4


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 1000])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_length_at_any_address_and_nothing_around_it(length, offset):
    """Views whose addresses are no multiples of a vector, between guards that must not change."""
    optimizer = make({"backend": "native"}, weight_decay=DECAY, betas=BETAS)
    slot = make_slot(optimizer, ParameterSpec("w", (length,)))
    for form in (slot, split(slot)):
        buffers: list[torch.Tensor] = []

        def inside(tensor: torch.Tensor, buffers=buffers) -> torch.Tensor:
            buffers.append(torch.full((length + 40,), 7, dtype=tensor.dtype))
            return buffers[-1][offset : offset + length].copy_(tensor)

        state = {key: inside(t) if t.dim() else t.clone() for key, t in form.state.items()}
        low = None if form.low is None else inside(form.low)
        moved = replace(form, master=inside(form.master), grad=inside(form.grad), state=state, low=low)
        optimizer.update([moved], do(1, LR, 0.5))
        for buffer in buffers:
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + length :] == 7).all()
        wanted = NumpyAdamW(joined(form), np.float32)
        wanted.step(form.grad, 0.5, LR, DECAY)
        assert bytes_of(joined(moved)) == wanted.master.tobytes()


def test_bf16_moments_are_rounded_to_the_nearest_even():
    optimizer = make({"backend": "native", "moments": "bf16"}, weight_decay=DECAY, betas=BETAS)
    slot = make_slot(optimizer, SPECS[1])
    wanted = NumpyAdamW(slot.master, np.float32)
    for step in range(1, 6):
        draw_gradients([slot], step)
        wanted.step(slot.grad, 1.0, LR, DECAY)
        optimizer.update([slot], do(step, LR))
        for key in ("exp_avg", "exp_avg_sq"):  # torch's own conversion rounds so
            rounded = torch.from_numpy(getattr(wanted, key)).bfloat16()
            assert torch.equal(slot.state[key], rounded)
            setattr(wanted, key, rounded.float().numpy())
        assert torch.equal(slot.master, torch.from_numpy(wanted.master))


def test_ties_of_bf16_moments_go_to_the_even_neighbour():
    optimizer = make(
        {"backend": "native", "moments": "bf16"}, betas=(0.0, 0.0)
    )  # then a moment is the gradient
    slot = make_slot(optimizer, ParameterSpec("w", (4,)))
    slot.grad.view(torch.int32).copy_(torch.tensor([0x3F808000, 0x3F818000, 0x3F818001, 0x3F817FFF]))
    optimizer.update([slot], do(1))
    assert slot.state["exp_avg"].view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F82, 0x3F81]


def test_bf16_moments_keep_nan():
    optimizer = make({"backend": "native", "moments": "bf16"})
    slot = make_slot(optimizer, SPECS[1])
    slot.grad.view(torch.int32).fill_(0x7FFFFFFF)  # a NaN that rounding the bits would make -0
    optimizer.update([slot], do(1))
    assert slot.state["exp_avg"].isnan().all()
    assert slot.state["exp_avg_sq"].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_of_a_parameter_are_updated_like_the_whole(backend):
    optimizer = make({"backend": backend}, weight_decay=DECAY)
    whole, other = (split(make_slot(optimizer, SPECS[1])) for _ in range(2))
    parts = [cut(other, first, last) for first, last in ((0, 7), (7, 500), (500, 1000))]
    optimizer.update([whole], do(1, LR, 0.5))
    optimizer.update(parts, do(1, LR, 0.5))
    assert bytes_of(joined(whole)) == bytes_of(joined(other))


def test_long_slots_through_torch_go_in_pieces(monkeypatch):
    optimizer = make({"backend": "torch"}, weight_decay=DECAY)
    one, other = (split(make_slot(optimizer, SPECS[1])) for _ in range(2))
    optimizer.update([one], do(1))
    monkeypatch.setattr(backends, "_PIECE", 300)
    make({"backend": "torch"}, weight_decay=DECAY).update([other], do(1))
    assert bits([one]) == bits([other])


def test_small_steps_move_masters_that_bf16_weights_would_not():
    """lr 6e-4 on weights of 1.0: half of bf16's last bit is 2e-3, so without a master nothing would ever move."""
    optimizer = make({"backend": "native"}, weight_decay=0.01, betas=BETAS)
    spec = ParameterSpec("w", (64,))
    slot = split(replace(make_slot(optimizer, spec), master=torch.ones(64)))
    reference = NumpyAdamW(torch.ones(64), np.float64)
    for step in range(1, 101):
        slot.grad.fill_(1.0)
        optimizer.update([slot], do(step, 6e-4))
        reference.step(slot.grad, 1.0, 6e-4, 0.01)
    np.testing.assert_allclose(joined(slot).numpy(), reference.master, rtol=1e-5)
    assert reference.master[0] < 0.95
    assert (slot.master - joined(slot)).abs().max() <= 2**-9
