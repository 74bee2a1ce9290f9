"""The rules of the optimizer stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainforge.stages import Extent, Optimizer, ParameterSpec, Slot, StateSpec, Update
from trainforge.testing.bench import build_stage, load_plugin, tiny_context
from trainforge.testing.conformance.base import PluginConformance, assert_same
from trainforge.toolbox import halves

SPECS = (
    ParameterSpec("blocks.0.weight", (8, 6), "matrix", block=0),
    ParameterSpec("blocks.0.norm.weight", (6,), "norm", block=0),
    ParameterSpec("blocks.0.bias", (5,), "bias", block=0),
)


class OptimizerConformance(PluginConformance):
    """Whether an optimizer is pure math on slots.

    Attributes:
        elementwise: False for an optimizer that looks at a whole matrix at once (Muon, Shampoo): then an extent
            may not be split, and the rule about splitting is left out.
    """

    stage = "optimizer"
    elementwise: ClassVar[bool] = True

    def optimizer(self, folder: Path, **train: Any) -> Optimizer:
        """A fresh optimizer; `train` are keys of the recipe's section of that name."""
        ctx = tiny_context(folder, train={**self.train, **train}, device=self.device)
        stage: Optimizer = build_stage(ctx, load_plugin(self.plugin), "optimizer", self.config)
        return stage

    def slots(
        self, optimizer: Optimizer, *, seed: int = 0, parts: int = 1, lr_scale: float = 1.0
    ) -> list[Slot]:
        """Slots with random masters and gradients, each tensor a view between guards; `parts` splits each."""
        slots = []
        for spec in (replace(spec, lr_scale=lr_scale) for spec in SPECS):
            generator = torch.Generator().manual_seed(seed + spec.elements)
            master = torch.randn(spec.elements, generator=generator)
            grad = torch.randn(spec.elements, generator=generator)
            cuts = [spec.elements * i // parts for i in range(parts + 1)]
            for first, last in pairwise(cuts):
                extent = Extent(spec.name, spec.shape, first, last - first)
                state = {k: self._zeros(s, extent) for k, s in optimizer.state(spec).items()}
                span = slice(first, last)
                slots.append(
                    Slot(spec, extent, self._guarded(master[span]), self._guarded(grad[span]), state)
                )
        return slots

    def _zeros(self, spec: StateSpec, extent: Extent) -> Tensor:
        shape = (extent.length,) if spec.per_element else ()
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def _guarded(self, values: Tensor) -> Tensor:
        whole = torch.full((len(values) + 8,), 7.0, device=self.device)
        whole[4:-4] = values
        return whole[4:-4]

    def do(self, step: int = 1, lr: float = 0.01, scale: float = 1.0, found_inf: float = 0.0) -> Update:
        """An update with these numbers on the device."""
        return Update(step, lr, *(torch.tensor(x, device=self.device) for x in (scale, found_inf)))

    def test_state_is_pure(self, tmp_path: Path) -> None:
        """`state(spec)` depends on the configuration and the parameter alone."""
        first, second = self.optimizer(tmp_path), self.optimizer(tmp_path)
        for spec in SPECS:
            given = first.state(spec)
            assert given == first.state(spec) == second.state(spec), (
                f"state({spec.name}) changes from call to call: it must be a pure function of the configuration"
            )
            for key, wanted in given.items():
                assert isinstance(wanted, StateSpec), f"state({spec.name})[{key!r}] must be a StateSpec"
                assert isinstance(getattr(torch, wanted.dtype, None), torch.dtype), (
                    f"state({spec.name})[{key!r}]: {wanted.dtype!r} is no dtype of torch"
                )

    def test_it_updates_masters_in_place(self, tmp_path: Path) -> None:
        """An update with gradients moves every master, in place, and keeps it finite."""
        optimizer = self.optimizer(tmp_path)
        slots = self.slots(optimizer)
        before = snapshot(slots)
        optimizer.update(slots, self.do())
        for name, tensor in snapshot(slots).items():
            assert torch.isfinite(tensor).all(), f"{name} is not finite after one update"
            moved = not name.endswith("master") or not torch.equal(tensor, before[name])
            assert moved, (
                f"{name} did not move: update `slot.master` in place (`copy_`, `add_`), do not rebind it"
            )

    def test_found_inf_changes_nothing(self, tmp_path: Path) -> None:
        """With `found_inf` every master and all state (the count of steps too) keep their bits."""
        optimizer = self.optimizer(tmp_path)
        slots = self.slots(optimizer)
        optimizer.update(slots, self.do())
        for spoiled in (float("nan"), float("inf")):
            refill(slots, 3)
            slots[0].grad[0] = spoiled
            before = snapshot(slots)
            optimizer.update(slots, self.do(2, found_inf=1.0))
            assert_same(snapshot(slots), before, f"an update with found_inf = 1 and a gradient of {spoiled}")

    def test_scale_is_honoured(self, tmp_path: Path) -> None:
        """Gradients times 0.5 with scale 1 give the same as gradients with scale 0.5 (clipping)."""
        scaled, halved = self.optimizer(tmp_path), self.optimizer(tmp_path)
        ours, wanted = self.slots(scaled), self.slots(halved)
        for step in (1, 2):
            for slot in wanted:
                slot.grad.mul_(0.5)
            scaled.update(ours, self.do(step, scale=0.5))
            halved.update(wanted, self.do(step))
            refill(ours, step)
            refill(wanted, step)
        assert_same(
            snapshot(ours), snapshot(wanted), "two updates with scale = 0.5: multiply gradients by it"
        )

    def test_the_learning_rate_is_honoured(self, tmp_path: Path) -> None:
        """With a learning rate of 0 no master moves; the rate of each call counts, not that of the recipe."""
        optimizer = self.optimizer(tmp_path)
        slots = self.slots(optimizer)
        before = {name: t for name, t in snapshot(slots).items() if name.endswith("master")}
        optimizer.update(slots, self.do(lr=0.0))
        after = {name: t for name, t in snapshot(slots).items() if name.endswith("master")}
        assert_same(after, before, "an update with lr = 0 (use `update.lr`)")

    def test_learning_rate_groups_are_honoured(self, tmp_path: Path) -> None:
        """A parameter with `lr_scale` 0.5 takes the step of half the learning rate; the others take a whole one."""
        scaled, halved = self.optimizer(tmp_path), self.optimizer(tmp_path)
        half, whole = self.slots(scaled, lr_scale=0.5), self.slots(scaled)
        ours, wanted = [half[0], *whole[1:]], self.slots(halved)
        for step in (1, 2):
            scaled.update(ours, self.do(step, lr=0.01))
            halved.update(wanted[:1], self.do(step, lr=0.005))
            halved.update(wanted[1:], self.do(step, lr=0.01))
        assert_same(
            snapshot(ours),
            snapshot(wanted),
            "two updates with lr_scale = 0.5 on one parameter: its rate is `update.lr * slot.spec.lr_scale`",
        )

    def test_weight_decay_is_honoured(self, tmp_path: Path) -> None:
        """`train.weight_decay` shrinks matrices and spares what `train.decay_exclude` names, by kind or pattern."""
        for exclude, spared in ((("norm", "bias"), SPECS[1:]), (("blocks.0.w*",), SPECS[:1])):
            optimizer = self.optimizer(tmp_path, weight_decay=0.5, decay_exclude=exclude)
            slots = self.slots(optimizer)
            before = snapshot(slots)
            for slot in slots:
                slot.grad.zero_()
            optimizer.update(slots, self.do())
            for slot in slots:
                name = f"{slot.extent.name} 0 master"
                if slot.spec in spared:
                    same = torch.equal(slot.master, before[name])
                    assert same, (
                        f"{slot.extent.name} decayed, although train.decay_exclude = {list(exclude)} names it"
                    )
                else:
                    assert (slot.master.abs() < before[name].abs()).all(), (
                        f"{slot.extent.name} did not shrink under train.weight_decay = 0.5 and a zero gradient"
                    )

    def test_split_extents_equal_whole_ones(self, tmp_path: Path) -> None:
        """Three extents of a parameter take the same steps as the whole (sharded state)."""
        if not self.elementwise:
            return
        optimizer = self.optimizer(tmp_path)
        whole, split = self.slots(optimizer), self.slots(optimizer, parts=3)
        for step in (1, 2, 3):
            optimizer.update(whole, self.do(step))
            optimizer.update(split, self.do(step))
        for slot in whole:
            pieces = torch.cat([s.master for s in split if s.extent.name == slot.extent.name])
            assert torch.allclose(pieces, slot.master, rtol=1e-6, atol=1e-7), (
                f"{slot.extent.name} split into three extents takes another step than the whole: "
                "work on `slot.extent` only, or set `elementwise = False` if the optimizer needs whole matrices"
            )

    def test_split_masters_equal_whole_ones(self, tmp_path: Path) -> None:
        """With `takes_split_masters`, masters in halves take, bit for bit, the steps of whole ones."""
        optimizer = self.optimizer(tmp_path)
        if not optimizer.takes_split_masters:
            return
        whole, split = self.slots(optimizer), [in_halves(slot) for slot in self.slots(optimizer)]
        self._walk(optimizer, whole, split)
        assert_same(
            snapshot([joined(slot) for slot in split]),
            snapshot(whole),
            "four updates of split masters beside whole ones (trainforge.toolbox.halves says what the halves are)",
        )

    def test_bf16_gradients_equal_fp32_ones(self, tmp_path: Path) -> None:
        """With `takes_bf16_gradients`, such a gradient makes, bit for bit, the step of the same numbers in fp32."""
        optimizer = self.optimizer(tmp_path)
        if not optimizer.takes_bf16_gradients:
            return
        narrow = [replace(slot, grad=slot.grad.bfloat16()) for slot in self.slots(optimizer)]
        wide = [
            replace(slot, grad=small.grad.float())
            for slot, small in zip(self.slots(optimizer), narrow, strict=True)
        ]
        self._walk(optimizer, wide, narrow)
        assert_same(
            snapshot(narrow),
            snapshot(wide),
            "four updates with bf16 gradients beside the same in fp32 (widen them first, then scale)",
        )

    def _walk(self, optimizer: Optimizer, ones: Sequence[Slot], others: Sequence[Slot]) -> None:
        """Four updates of both with the same gradients, one of which changes nothing."""
        for step, found_inf in enumerate((0.0, 0.0, 1.0, 0.0), start=1):
            refill(others, step)
            for one, other in zip(ones, others, strict=True):
                one.grad.copy_(other.grad)
            optimizer.update(ones, self.do(step, scale=0.3, found_inf=found_inf))
            optimizer.update(others, self.do(step, scale=0.3, found_inf=found_inf))

    def test_it_holds_no_state_of_its_own(self, tmp_path: Path) -> None:
        """A fresh optimizer goes on exactly where another stopped; slots may come in any order and any chunks."""
        one, other = self.optimizer(tmp_path), self.optimizer(tmp_path)
        kept, handed = self.slots(one), self.slots(one)
        one.update(kept, self.do(1))
        one.update(handed, self.do(1))
        refill(kept, 5)
        refill(handed, 5)
        one.update(kept, self.do(2))
        for slot in reversed(handed):
            other.update([slot], self.do(2))
        assert_same(
            snapshot(handed),
            snapshot(kept),
            "step 2 by a fresh optimizer, slot by slot (keep everything in `slot.state`, nothing in `self`)",
        )

    def test_nothing_outside_the_slots_changes(self, tmp_path: Path) -> None:
        """Memory around a slot stays as it is: slots are views into large buffers."""
        optimizer = self.optimizer(tmp_path)
        slots = self.slots(optimizer)
        optimizer.update(slots, self.do())
        for slot in slots:
            for what, tensor in (("master", slot.master), ("grad", slot.grad)):
                assert tensor._base is not None, "a slot's tensor was rebound"
                guards = torch.cat([tensor._base[:4], tensor._base[-4:]])
                assert (guards == 7.0).all(), f"updating {slot.extent.name} wrote outside its {what}"

    def test_an_empty_update_is_allowed(self, tmp_path: Path) -> None:
        """No slot at all (nothing was used), and a slot without elements."""
        optimizer = self.optimizer(tmp_path)
        optimizer.update([], self.do())
        spec = ParameterSpec("empty", (0, 4))
        state = {k: self._zeros(s, spec.extent) for k, s in optimizer.state(spec).items()}
        nothing = torch.zeros(0, device=self.device)
        optimizer.update([Slot(spec, spec.extent, nothing, nothing.clone(), state)], self.do())


def refill(slots: Sequence[Slot], seed: int) -> None:
    """Put fresh gradients into slots, the same for the same seed."""
    for slot in slots:
        generator = torch.Generator().manual_seed(seed + slot.spec.elements + slot.extent.offset)
        slot.grad.copy_(torch.randn(slot.extent.length, generator=generator))


def in_halves(slot: Slot) -> Slot:
    """The slot with its master split."""
    high, low = (
        torch.empty_like(slot.master, dtype=torch.bfloat16),
        torch.empty_like(slot.master, dtype=torch.int16),
    )
    halves.split(slot.master, high, low)
    return replace(slot, master=high, low=low)


def joined(slot: Slot) -> Slot:
    """The slot with its halves joined again, in a copy."""
    assert slot.low is not None, "only a split master can be joined"
    master = torch.empty_like(slot.master, dtype=torch.float32)
    halves.join(slot.master, slot.low, master)
    return replace(slot, master=master, low=None)


def snapshot(slots: Sequence[Slot]) -> dict[str, Tensor]:
    """Copies of masters and state, by `"name offset key"`."""
    found = {}
    for slot in slots:
        place = f"{slot.extent.name} {slot.extent.offset}"
        found[f"{place} master"] = slot.master.clone()
        found.update({f"{place} {key}": tensor.clone() for key, tensor in slot.state.items()})
    return found
