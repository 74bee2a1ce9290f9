"""The rules of the memory stage: a memory may do anything, as long as the numbers are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainforge.stages import Batch, Extent, Ready, Slot
from trainforge.testing.bench import Stages, Walker, build_stages, make_update, tiny_context
from trainforge.testing.conformance.base import PluginConformance, assert_close, assert_same

GENTLE = {"eps": 1e-4}
"""With Adam's usual epsilon a gradient that is nothing but rounding moves a weight as far as any other."""

FROZEN = ("blocks.0.up.weight", "blocks.1.up.bias")


class MemoryConformance(PluginConformance):
    """Whether a memory trains like `ReferenceMemory`, whatever way it walks the model.

    Attributes:
        tolerance: of losses, norms and weights in fp32, relative to the largest magnitude (absolute below 1).
    """

    stage = "memory"
    tolerance: ClassVar[float] = 1e-6

    def build(self, folder: Path, **facts: Any) -> Stages:
        """All six stages with this memory in place."""
        return super().build(folder, **{**facts, "train": {**GENTLE, **facts.get("train", {})}})

    def compare(
        self, folder: Path, model: Mapping[str, Any], steps: int = 5, **facts: Any
    ) -> tuple[Walker, Walker]:
        """Walk the plugin and the reference side by side; gives both after `steps` equal steps."""
        facts.setdefault("accumulate", 4)
        facts["model"] = model
        ours = Walker(self.build(folder / "ours", **facts))
        wanted = Walker(self.reference(folder / "reference", **facts))
        for step in range(1, steps + 1):
            got, want = ours.take(), wanted.take()
            assert got.used == want.used, (
                f"step {step}: the sink was called for {sorted(got.used ^ want.used)} in only one of plugin and "
                "reference: call it for exactly the parameters that got a gradient"
            )
            assert_close(
                torch.tensor(got.loss),
                torch.tensor(want.loss),
                f"loss of step {step}",
                tolerance=self.tolerance,
            )
            assert_close(
                torch.tensor(got.norm),
                torch.tensor(want.norm),
                f"norm of step {step}",
                tolerance=self.tolerance,
            )
        self.compare_weights(ours, wanted, f"after {steps} steps")
        return ours, wanted

    def reference(self, folder: Path, **facts: Any) -> Stages:
        """The reference stages with the same facts."""
        facts.setdefault("device", self.device)  # dropout draws other numbers on another device
        facts["train"] = {**GENTLE, **self.train, **facts.get("train", {})}
        return build_stages(tiny_context(folder, **facts))

    def compare_weights(self, ours: Walker, wanted: Walker, when: str) -> None:
        """Assert that all weights agree."""
        theirs = wanted.weights()
        for name, tensor in ours.weights().items():
            assert_close(tensor, theirs[name], f"{name} {when}", tolerance=self.tolerance)

    def test_it_starts_from_the_models_weights(self, tmp_path: Path) -> None:
        """`weights(name)` is the whole fp32 master on the CPU, filled by `ModelSpec.load`."""
        stages = self.build(tmp_path)
        for spec in stages.model.parameters:
            weight, wanted = stages.memory.weights(spec.name), torch.empty(spec.elements)
            stages.model.load(spec.name, wanted, spec.extent)
            assert weight.dtype == torch.float32, f"weights({spec.name!r}) is {weight.dtype}, not fp32"
            assert weight.device.type == "cpu", (
                f"weights({spec.name!r}) lies on {weight.device}, not on the CPU"
            )
            assert tuple(weight.shape) == spec.shape, (
                f"weights({spec.name!r}) has shape {tuple(weight.shape)}"
            )
            same = torch.equal(weight.flatten(), wanted)
            assert same, f"weights({spec.name!r}) is not what ModelSpec.load gave: fill masters from it"

    def test_it_trains_like_the_plain_loop(self, tmp_path: Path) -> None:
        """Losses, norms and weights over clipped steps with dropout, frozen and unused parameters, empty batches."""
        self.compare(tmp_path, {"dropout": 0.2, "freeze": FROZEN})

    def test_tied_weights(self, tmp_path: Path) -> None:
        """A tied embedding has one master, one state and the sum of both gradients."""
        self.compare(tmp_path, {"tied": True, "dropout": 0.1})

    def test_auxiliary_losses(self, tmp_path: Path) -> None:
        """An auxiliary loss is weighted by the micro-batch's share of supervised tokens, and not in the loss."""
        self.compare(tmp_path, {"auxiliary": 0.5})

    def test_one_micro_batch_without_clipping(self, tmp_path: Path) -> None:
        """The plainest case, rows of different length in one micro-batch."""
        self.compare(tmp_path, {}, accumulate=1, micro_batch=4, train={"clip": None})

    def test_recompute_changes_nothing(self, tmp_path: Path) -> None:
        """`train.recompute` saves memory; dropout draws the same numbers the second time."""
        self.compare(tmp_path, {"dropout": 0.2}, train={"recompute": True})

    def test_loss_chunks_change_nothing(self, tmp_path: Path) -> None:
        """`train.loss_chunk` below, and not dividing, the number of tokens."""
        self.compare(tmp_path, {}, micro_batch=2, accumulate=2, train={"loss_chunk": 5})

    def test_the_gradient_buffers(self, tmp_path: Path) -> None:
        """Every trainable parameter lies whole, once, in a 1-D buffer, without overlap."""
        stages = self.build(tmp_path, model={"freeze": FROZEN})
        names: list[str] = []
        for buffer in stages.memory.gradients:
            assert buffer.tensor.dim() == 1, "a gradient buffer must be 1-D"
            assert buffer.tensor.is_contiguous(), "a gradient buffer must be contiguous"
            end = 0
            for extent, start in sorted(
                zip(buffer.extents, buffer.starts, strict=True), key=lambda pair: pair[1]
            ):
                assert extent.whole, f"the gradient of {extent.name} must be whole in the buffer"
                assert start >= end, f"the gradient of {extent.name} overlaps the one before it"
                end = start + extent.length
                names.append(extent.name)
            assert end <= buffer.tensor.numel(), "the last gradient does not fit into its buffer"
        wanted = sorted(spec.name for spec in stages.model.parameters if spec.trainable)
        assert sorted(names) == wanted, (
            f"gradient buffers hold {sorted(set(names) ^ set(wanted))} wrongly or not"
        )

    def test_sinks_tell_of_final_gradients(self, tmp_path: Path) -> None:
        """Once per parameter and step, after the last micro-batch; what lies there then is final."""
        walker = Walker(self.build(tmp_path, model={"tied": True, "freeze": FROZEN}))
        memory, told = walker.stages.memory, walker.sink
        seen: dict[str, Tensor] = {}

        def sink(extent: Extent, ready: Ready | None) -> None:
            assert extent.name not in seen, f"the sink was called twice for {extent.name} in one step"
            if ready is not None:
                ready.wait()
            seen[extent.name] = gradient(walker.stages, extent.name).clone()
            told(extent, ready)

        walker.sink = sink
        for _ in range(2):
            seen.clear()
            batches = walker.stages.data.take(3)
            memory.forward_backward(seeded(batches), 0.1, sink)
            walker.stages.comm.finish()
            for name, early in seen.items():
                same = torch.equal(early, gradient(walker.stages, name))
                assert same, f"the gradient of {name} changed after the sink was told that it is final"
            assert not set(FROZEN) & set(seen), (
                f"the sink was called for a frozen one: {set(FROZEN) & set(seen)}"
            )
            idle = [name for name in seen if "idle" in name]
            assert not idle, f"the sink was called for {idle}, which got no gradient"

    def test_a_step_that_is_not_finite_changes_nothing(self, tmp_path: Path) -> None:
        """One NaN in backward: the norm shows it, and no weight or moment of any parameter changes a bit."""
        walker = Walker(self.build(tmp_path))
        walker.take()
        before, weights = self.everything(walker), walker.weights()
        model: Any = walker.stages.model
        model.hidden = spoiled(model.hidden)
        result = walker.walk(walker.stages.data.take(4))
        assert result.norm != result.norm, "a NaN in a gradient must make grad_norm() NaN"
        assert_same(walker.weights(), weights, "a step with a NaN gradient")
        assert_same(self.everything(walker), before, "a step with a NaN gradient")

    def test_unused_and_frozen_parameters_are_untouched(self, tmp_path: Path) -> None:
        """Without a gradient anywhere: no decay, no moments. Frozen: not in the state at all."""
        walker = Walker(self.build(tmp_path, model={"freeze": FROZEN}, train={"weight_decay": 0.5}))
        before = walker.weights()
        for _ in range(2):
            walker.take()
        after = walker.weights()
        for name in before:
            if "idle" in name or name in FROZEN:
                assert torch.equal(after[name], before[name]), f"{name} changed, although it had no gradient"
        for named in walker.stages.memory.state().tensors:
            assert named.extent.name not in FROZEN, (
                f"state() holds {named.key} of {named.extent.name}, which is frozen"
            )
            if "idle" in named.extent.name and named.key != "master":
                assert not named.tensor.any(), f"{named.key} of {named.extent.name} moved without a gradient"

    def test_gradients_of_other_ranks_are_forgotten(self, tmp_path: Path) -> None:
        """A reduction fills spans that got no gradient here; without one in the next step they are zero again."""
        walker = Walker(self.build(tmp_path))
        stages, memory = walker.stages, walker.stages.memory
        idle = {spec.name for spec in stages.model.parameters if "idle" in spec.name}
        for _ in range(2):
            memory.forward_backward(seeded(stages.data.take(3)), 0.1, walker.sink)
            for name in idle:
                span = gradient(stages, name)
                assert not span.any(), (
                    f"{name} got no gradient here, but its span is not zero: what ranks add up there would be wrong"
                )
                span.fill_(3.0)
            used = stages.comm.finish() | idle
            update = make_update(1, 0.01, memory.grad_norm(), 1.0)
            memory.apply(lambda slots, update=update: stages.optimizer.update(slots, update), used)  # type: ignore[misc]
            memory.drain()

    def test_only_used_parameters_are_updated(self, tmp_path: Path) -> None:
        """`apply(update, used)` brings exactly the slots in `used`, each once; `drain` leaves none pending."""
        walker = Walker(self.build(tmp_path))
        stages, memory = walker.stages, walker.stages.memory
        for _ in range(2):
            memory.forward_backward(seeded(stages.data.take(3)), 0.1, walker.sink)
            used = frozenset(sorted(stages.comm.finish())[::2])
            update = make_update(1, 0.01, memory.grad_norm(), 1.0)
            brought: dict[str, int] = {}

            def count(slots: Any, update: Any = update, brought: Any = brought) -> None:
                for slot in slots:
                    brought[slot.extent.name] = brought.get(slot.extent.name, 0) + slot.extent.length
                    self._check_slot(slot)
                stages.optimizer.update(slots, update)

            memory.apply(count, used)
            memory.drain()
            owned: dict[str, int] = {}
            for extent in stages.comm.partition(stages.model.parameters):
                if extent.name in used:
                    owned[extent.name] = owned.get(extent.name, 0) + extent.length
            wrong = {n for n in {*brought, *owned} if brought.get(n) != owned.get(n)}
            assert not wrong, (
                f"after apply() and drain() these were not updated exactly once, or not in `used`: {sorted(wrong)}"
            )
            state = self.everything(walker)
            memory.drain()
            assert_same(self.everything(walker), state, "a second drain()")

    @staticmethod
    def _check_slot(slot: Slot) -> None:
        shape = (slot.extent.length,)
        for what, tensor in (("master", slot.master), ("grad", slot.grad)):
            assert tensor.shape == shape, f"{what} of {slot.extent.name} must be 1-D and {shape[0]} long"
            assert tensor.dtype == torch.float32, (
                f"{what} of {slot.extent.name} must be fp32, not {tensor.dtype}"
            )
            assert tensor.device == slot.master.device, f"{what} of {slot.extent.name} lies on another device"

    def test_evaluating_leaves_no_trace(self, tmp_path: Path) -> None:
        """The losses are those of the current weights, without dropout; the next steps are as if it never was."""
        model = {"dropout": 0.3}
        plain, evaluating = (
            Walker(self.build(tmp_path / "a", model=model)),
            Walker(self.build(tmp_path / "b", model=model)),
        )
        reference = Walker(self.reference(tmp_path / "c", model=model))
        for _ in range(2):
            walkers = (plain, evaluating, reference)
            results = [walker.take() for walker in walkers]
            assert results[0] == results[1], (
                "evaluate() changed the step after it (weights, mode or generators)"
            )
            for walker in walkers[1:]:
                walker.stages.memory.drain()
            ours = evaluating.stages.memory.evaluate(evaluating.stages.data.validation())
            wanted = reference.stages.memory.evaluate(reference.stages.data.validation())
            assert_close(ours, wanted, "evaluate(): summed cross-entropy per batch", tolerance=1e-5)
            assert not ours.requires_grad, "evaluate() must not keep a graph"
        assert_same(evaluating.weights(), plain.weights(), "evaluate()")

    def test_batches_without_a_supervised_token(self, tmp_path: Path) -> None:
        """They contribute nothing: the same step with and without them, whatever place they have."""
        with_empty, without = Walker(self.build(tmp_path / "a")), Walker(self.build(tmp_path / "b"))
        batches = [batch for batch in with_empty.stages.data.take(3) if batch.supervised]
        hollow = Batch(
            batches[0].input_ids,
            torch.full_like(batches[0].labels, -100),
            batches[0].position_ids,
            None,
            0,
            3,
            9,
        )
        one = with_empty.walk([hollow, *batches, hollow])
        other = without.walk(batches)
        assert one.loss == other.loss, (
            f"a batch without supervised tokens moved the loss by {one.loss - other.loss}"
        )
        assert_same(with_empty.weights(), without.weights(), "a batch without supervised tokens")

    def test_checkpoints_fit_any_memory(self, tmp_path: Path) -> None:
        """A state saved here goes on in the reference memory, and the other way round."""
        model = {"dropout": 0.1, "freeze": FROZEN}
        ours, wanted = self.compare(tmp_path, model, steps=3)
        path, step = ours.save(), ours.step
        resumed = Walker(self.reference(tmp_path / "x", model=model, accumulate=4))
        resumed.restore(ours.stages.checkpoint, path, step)
        returned = Walker(self.build(tmp_path / "y", model=model, accumulate=4))
        returned.restore(wanted.stages.checkpoint, wanted.save(), step)
        for walker in (ours, resumed, returned, wanted):
            walker.take()
            walker.take()
        self.compare_weights(resumed, ours, "in the reference memory, resumed from this memory's checkpoint")
        self.compare_weights(returned, wanted, "resumed from the reference memory's checkpoint")
        again = Walker(self.build(tmp_path / "z", model=model, accumulate=4))
        again.restore(ours.stages.checkpoint, path, step)
        again.take()
        again.take()
        assert_same(again.weights(), ours.weights(), "resuming from its own checkpoint instead of going on")

    def everything(self, walker: Walker) -> dict[str, Tensor]:
        """Copies of all tensors of the drained state."""
        walker.stages.memory.drain()
        state = walker.stages.memory.state()
        return {
            f"{t.key} {t.extent.name} {t.extent.offset}": t.tensor.detach().clone() for t in state.tensors
        }


def gradient(stages: Stages, name: str) -> Tensor:
    """The gradient of a parameter in memory's flat buffers."""
    for buffer in stages.memory.gradients:
        for index, extent in enumerate(buffer.extents):
            if extent.name == name:
                return buffer.span(index)
    raise AssertionError(f"no gradient buffer holds {name}")


def spoiled(hidden: Callable[[Batch], tuple[Tensor, Tensor | None]]) -> Callable[[Batch], Any]:
    """A model's `hidden` whose backward starts from a gradient with a NaN in it."""

    def with_nan(batch: Batch) -> tuple[Tensor, Tensor | None]:
        states, auxiliary = hidden(batch)
        return _Spoil.apply(states), auxiliary  # type: ignore[no-untyped-call]

    return with_nan


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = float("nan")
        return grad


def seeded(batches: list[Batch]) -> list[Batch]:
    """The same batches with seeds, as the loop fills them."""
    for batch in batches:
        batch.seed = 1000 + batch.index
    return batches
