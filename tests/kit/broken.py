"""Broken plugins, one and more for each rule of the kit. Each differs from a reference stage in one thing."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from trainforge.errors import CheckpointError
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits
from trainforge.stages import Comm, Extent, LazyTensor, PartState, StateSpec
from trainforge.testing.checkpoint import ReferenceCheckpoint
from trainforge.testing.data import LetterTokenizer, SyntheticData
from trainforge.testing.memory import ReferenceMemory
from trainforge.testing.model import TinyModel
from trainforge.testing.optimizer import ReferenceOptimizer
from trainforge.testing.reference import ReferenceSection, TinyModelSection

CASES: list[tuple[str, str, str, str]] = []
"""(stage, name of the plugin in this module, rule that must reject it, part of the message)."""

FACTS: dict[str, dict[str, Any]] = {
    "model": {
        "model": {"tied": True},
        "reread": lambda self, out: {"tied": True, "folder": str(out)},
    },
    "data": {"reread_tokenizer": lambda self, out: {"letters": str(out / "letters.txt")}},
}
"""What the class of rules is told about the plugins of a stage."""


class Plugin:
    """A plugin that serves one stage by building a class."""

    def __init__(self, stage: str, kind: Any) -> None:
        self.stage, self.kind = stage, kind
        setattr(self, f"forge_{stage}", hookimpl(lambda: self.provider()))

    def build(self, ctx: Any, config: Any) -> Any:
        arguments = {
            "model": (config, ctx.run.seed),
            "data": (config, ctx),
            "optimizer": (ctx.train,),
            "comm": (),
        }
        return self.kind(*arguments.get(self.stage, (ctx,)))

    def provider(self) -> Provider:
        config = {"model": TinyModelSection, "data": ReferenceSection}.get(self.stage, Section)
        traits = Traits(max_world=1, shards_state=getattr(self.kind, "shards", False))
        tokenizer = self.tokenizer if self.stage == "data" else None
        return Provider(build=self.build, config=config, traits=traits, tokenizer=tokenizer)

    def tokenizer(self, ctx: Any, config: Any) -> Any:
        return getattr(self.kind, "tokenizer", lambda ctx, config: LetterTokenizer(config))(ctx, config)


def breaks(stage: str, rule: str, message: str) -> Any:
    """Register a class as the plugin that `rule` must reject, with `message` in the reason."""

    def register(kind: type) -> Any:
        CASES.append((stage, kind.__name__, rule, message))
        return Plugin(stage, kind)

    return register


# -------------------------------------------------------------------------------------------------------- memory


@breaks("memory", "test_it_starts_from_the_models_weights", "ModelSpec.load")
class OwnInitialWeights(ReferenceMemory):
    def weights(self, name):
        return super().weights(name) + 0.001


@breaks("memory", "test_it_trains_like_the_plain_loop", "loss of step 1")
class MeanOfMeans(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        return super().forward_backward(
            batches, 1 / (len(batches) * max(b.supervised for b in batches)), sink
        )


@breaks("memory", "test_it_trains_like_the_plain_loop", "loss of step 1")
class DropoutWithoutSeeds(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        return super().forward_backward([replace(b, seed=b.seed + 1) for b in batches], scale, sink)


@breaks("memory", "test_tied_weights", "step")
class TwoCopiesOfTiedWeights(ReferenceMemory):
    def __init__(self, ctx):
        super().__init__(ctx)
        head = ctx.model.module.head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


@breaks("memory", "test_auxiliary_losses", "norm of step 1")
class ForgetsAuxiliaryLosses(ReferenceMemory):
    def _loss(self, batch):
        return super()._loss(batch)[0], 0.0


@breaks("memory", "test_one_micro_batch_without_clipping", "norm of step 1")
class SumOfSquares(ReferenceMemory):
    def grad_norm(self):
        return super().grad_norm().square()


@breaks("memory", "test_recompute_changes_nothing", "loss of step")
class RecomputesWithOtherDropout(ReferenceMemory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.shift = int(ctx.train.recompute is True)

    def forward_backward(self, batches, scale, sink):
        return super().forward_backward([replace(b, seed=b.seed + self.shift) for b in batches], scale, sink)


@breaks("memory", "test_loss_chunks_change_nothing", "loss of step")
class DropsTheLastChunk(ReferenceMemory):
    def __init__(self, ctx):
        super().__init__(ctx)
        self.chunk = ctx.train.loss_chunk

    def _loss(self, batch):
        labels = batch.labels.clone()
        kept = labels.numel() // self.chunk * self.chunk
        if kept:
            labels.view(-1)[kept:] = -100
        return super()._loss(replace(batch, labels=labels))


@breaks("memory", "test_the_gradient_buffers", "overlaps")
class OverlappingGradients(ReferenceMemory):
    def __init__(self, ctx):
        super().__init__(ctx)
        starts = (0, *(start - 1 for start in self._buffer.starts[1:]))
        self.gradients = (replace(self._buffer, starts=starts),)


@breaks("memory", "test_sinks_tell_of_final_gradients", "twice")
class TellsTwice(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        def twice(extent, ready):
            sink(extent, ready)
            sink(extent, ready)

        return super().forward_backward(batches, scale, twice)


@breaks("memory", "test_sinks_tell_of_final_gradients", "changed after the sink")
class TellsTooEarly(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        told = []
        loss = super().forward_backward(batches, scale, lambda extent, ready: told.append(extent))
        final = self._buffer.tensor.clone()
        self._buffer.tensor.zero_()
        for extent in told:
            sink(extent, None)
        self._buffer.tensor.copy_(final)
        return loss


@breaks("memory", "test_a_step_that_is_not_finite_changes_nothing", "must make grad_norm")
class NormWithoutNan(ReferenceMemory):
    def grad_norm(self):
        return super().grad_norm().nan_to_num(1.0)


@breaks("memory", "test_unused_and_frozen_parameters_are_untouched", "had no gradient")
class UpdatesEverything(ReferenceMemory):
    def apply(self, update, used):
        super().apply(update, frozenset(self._specs))


@breaks("memory", "test_gradients_of_other_ranks_are_forgotten", "its span is not zero")
class ZeroesOnlyItsOwnGradients(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        told, before = set(), self._buffer.tensor.clone()

        def noted(extent, ready):
            told.add(extent.name)
            sink(extent, ready)

        total = super().forward_backward(batches, scale, noted)
        for index, extent in enumerate(self._buffer.extents):
            if extent.name not in told:
                start = self._buffer.starts[index]
                self._buffer.span(index).copy_(before[start : start + extent.length])
        return total


@breaks("memory", "test_only_used_parameters_are_updated", "exactly once")
class NeverFinishesUpdates(ReferenceMemory):
    def apply(self, update, used):
        super().apply(update, frozenset(sorted(used)[1:]))


@breaks("memory", "test_evaluating_leaves_no_trace", "summed cross-entropy per batch")
class MeansInEvaluation(ReferenceMemory):
    def evaluate(self, batches):
        batches = list(batches)
        return super().evaluate(batches) / torch.tensor([max(b.supervised, 1) for b in batches])


@breaks("memory", "test_evaluating_leaves_no_trace", "changed the step after it")
class TrainsWhileEvaluating(ReferenceMemory):
    def evaluate(self, batches):
        losses = super().evaluate(batches)
        for slot in self._slots:
            slot.master.mul_(1.001)
        self._refresh()
        return losses


@breaks("memory", "test_batches_without_a_supervised_token", "moved the loss")
class CountsEmptyBatches(ReferenceMemory):
    def forward_backward(self, batches, scale, sink):
        contributing = sum(bool(batch.supervised) for batch in batches)
        return super().forward_backward(batches, scale * contributing / len(batches), sink)


@breaks("memory", "test_checkpoints_fit_any_memory", "exp_avg")
class SavesNoMoments(ReferenceMemory):
    def state(self):
        state = super().state()
        return replace(state, tensors=tuple(t for t in state.tensors if t.key == "master"))


@breaks("memory", "test_checkpoints_fit_any_memory", "resumed from the reference memory's checkpoint")
class ForgetsToRefresh(ReferenceMemory):
    def load(self, version, data):
        pass


# ----------------------------------------------------------------------------------------------------- optimizer


@breaks("optimizer", "test_state_is_pure", "pure function")
class StateByCall(ReferenceOptimizer):
    calls = 0

    def state(self, spec):
        type(self).calls += 1
        return {**super().state(spec), f"extra{self.calls}": StateSpec()}


@breaks("optimizer", "test_it_updates_masters_in_place", "in place")
class RebindsMasters(ReferenceOptimizer):
    def update(self, slots, update):
        super().update([replace(slot, master=slot.master.clone()) for slot in slots], update)


@breaks("optimizer", "test_found_inf_changes_nothing", "step changed")
class CountsSkippedSteps(ReferenceOptimizer):
    def update(self, slots, update):
        super().update(slots, update)
        for slot in slots:
            slot.state["step"] += update.found_inf


@breaks("optimizer", "test_scale_is_honoured", "multiply gradients")
class IgnoresScale(ReferenceOptimizer):
    def update(self, slots, update):
        super().update(slots, replace(update, scale=torch.ones(())))


@breaks("optimizer", "test_the_learning_rate_is_honoured", "update.lr")
class RateOfTheRecipe(ReferenceOptimizer):
    def update(self, slots, update):
        super().update(slots, replace(update, lr=self._train.lr))


@breaks("optimizer", "test_learning_rate_groups_are_honoured", "slot.spec.lr_scale")
class OneRateForAll(ReferenceOptimizer):
    def update(self, slots, update):
        super().update([replace(slot, spec=replace(slot.spec, lr_scale=1.0)) for slot in slots], update)


@breaks("optimizer", "test_weight_decay_is_honoured", "decayed, although")
class DecaysNorms(ReferenceOptimizer):
    def _decays(self, spec):
        return True


@breaks("optimizer", "test_split_extents_equal_whole_ones", "another step than the whole")
class LooksAtTheWholeExtent(ReferenceOptimizer):
    def update(self, slots, update):
        for slot in slots:
            slot.grad.div_(slot.grad.norm())
            slot.grad[0] *= 2
        super().update(slots, update)


@breaks("optimizer", "test_split_masters_equal_whole_ones", "split masters beside whole ones")
class ForgetsTheLowerHalf(ReferenceOptimizer):
    takes_split_masters = True

    def update(self, slots, update):
        widened = [replace(slot, master=slot.master.float()) for slot in slots]
        super().update(widened, update)
        for slot, wide in zip(slots, widened, strict=True):
            slot.master.copy_(wide.master)


@breaks("optimizer", "test_bf16_gradients_equal_fp32_ones", "bf16 gradients beside the same in fp32")
class ScalesInBf16(ReferenceOptimizer):
    takes_bf16_gradients = True


@breaks("optimizer", "test_it_holds_no_state_of_its_own", "nothing in `self`")
class RemembersItself(ReferenceOptimizer):
    seen = 0

    def update(self, slots, update):
        self.seen += 1
        super().update(slots, replace(update, lr=update.lr / self.seen))


@breaks("optimizer", "test_nothing_outside_the_slots_changes", "outside its master")
class WritesBeyond(ReferenceOptimizer):
    def update(self, slots, update):
        super().update(slots, update)
        for slot in slots:
            slot.master._base.mul_(0.9)


@breaks("optimizer", "test_an_empty_update_is_allowed", "")
class NeedsASlot(ReferenceOptimizer):
    def update(self, slots, update):
        assert slots, "nothing to update"
        super().update(slots, update)


# ---------------------------------------------------------------------------------------------------------- data


@breaks("data", "test_shapes_and_types", "not int64")
class SmallIntegers(SyntheticData):
    def _batch(self, rows, index):
        batch = super()._batch(rows, index)
        return replace(batch, input_ids=batch.input_ids.int())


@breaks("data", "test_labels_are_shifted", "shift labels")
class UnshiftedLabels(SyntheticData):
    def _batch(self, rows, index):
        batch = super()._batch(rows, index)
        return replace(batch, labels=torch.where(batch.labels == -100, -100, batch.input_ids))


@breaks("data", "test_counts", "supervised says")
class CountsPadding(SyntheticData):
    def _batch(self, rows, index):
        batch = super()._batch(rows, index)
        return replace(batch, supervised=batch.labels.numel())


@breaks("data", "test_an_epoch_is_the_same_on_any_number_of_ranks", "same samples per step")
class CutsTheDataSet(SyntheticData):
    def take(self, count):
        return [
            replace(b, sample_ids=tuple(s + self._world for s in b.sample_ids)) for b in super().take(count)
        ]


@breaks("data", "test_an_epoch_is_the_same_on_any_number_of_ranks", "more than once")
class DrawsWithReplacement(SyntheticData):
    def take(self, count):
        return [replace(b, sample_ids=tuple(s // 2 for s in b.sample_ids)) for b in super().take(count)]


@breaks("data", "test_the_same_seed_gives_the_same_order", "same seed")
class TrulyRandom(SyntheticData):
    def __init__(self, config, ctx):
        super().__init__(config, ctx)
        self._seed = random.SystemRandom().randrange(2**40)


@breaks("data", "test_resuming_goes_on_exactly", "differ from going on")
class ReplaysTheFirstEpoch(SyntheticData):
    def load(self, version, data):
        super().load(version, {**data, "consumed": data["consumed"] % self.samples})


@breaks("data", "test_the_position_is_what_was_consumed", "moved although nothing")
class CountsValidation(SyntheticData):
    def validation(self):
        self._consumed += 1
        return super().validation()


@breaks("data", "test_another_data_set_is_refused", "accepted a checkpoint")
class TakesAnyCheckpoint(SyntheticData):
    def load(self, version, data):
        self._consumed = data["consumed"]


@breaks("data", "test_batches_live_until_the_next_take", "before the next take")
class ReusesBuffers(SyntheticData):
    def take(self, count):
        self.given = super().take(count)
        return self.given

    def validation(self):
        for batch in self.given:
            batch.input_ids.zero_()
        return super().validation()


@breaks("data", "test_validation_is_the_same_everywhere", "pad with empty ones")
class UnevenValidation(SyntheticData):
    def validation(self):
        return [batch for batch in super().validation() if batch.sample_ids]


@breaks("data", "test_the_ledger_is_json", "")
class LedgerOfSets(SyntheticData):
    def ledger(self):
        return {"skipped": {1, 2}}


@breaks("data", "test_running_out_is_data_exhausted", "instead of DataExhausted")
class StopsIteration(SyntheticData):
    def take(self, count):
        def batches():
            if self._consumed >= 2 * self.samples:
                raise StopIteration
            yield from SyntheticData.take(self, count)

        return list(batches())


@breaks("data", "test_the_tokenizer_is_built_alone", "before it was built")
class TokenizerOfTheData(SyntheticData):
    @staticmethod
    def tokenizer(ctx, config):
        return ctx.data.tokenizer


class ForgetsSpaces(LetterTokenizer):
    def encode(self, text):
        return super().encode(text.replace(" ", ""))


@breaks("data", "test_the_tokenizer_gives_text_back", "is 'thewhaleswamby'")
class TextWithoutSpaces(SyntheticData):
    @staticmethod
    def tokenizer(ctx, config):
        return ForgetsSpaces(config)


class NumpyIds(LetterTokenizer):
    def encode(self, text):
        return list(torch.tensor(super().encode(text)).numpy())


@breaks("data", "test_the_tokenizer_gives_text_back", "among its ids, not an int")
class IdsOfNumpy(SyntheticData):
    @staticmethod
    def tokenizer(ctx, config):
        return NumpyIds(config)


@breaks("data", "test_the_tokenizer_is_that_of_the_data", "the data stage as")
class AddsAnEndToken(SyntheticData):
    def encode(self, text):
        return [*LetterTokenizer(self._config).encode(text), 0]


class SavesNothing(LetterTokenizer):
    def save(self, out):
        pass


@breaks("data", "test_the_tokenizer_saves_its_files", "wrote no file")
class NothingSaved(SyntheticData):
    @staticmethod
    def tokenizer(ctx, config):
        return SavesNothing(config)


class SavesOtherLetters(LetterTokenizer):
    def save(self, out):
        (out / "letters.txt").write_text(self.letters[::-1])


@breaks("data", "test_the_tokenizer_saves_its_files", "read again")
class OthersSaved(SyntheticData):
    @staticmethod
    def tokenizer(ctx, config):
        return SavesOtherLetters(config)


# ---------------------------------------------------------------------------------------------------------- comm


@breaks("comm", "test_ranks_know_their_place", "gather")
class GathersNothing(Comm):
    def gather(self, value):
        return []


@breaks("comm", "test_gradients_are_summed_in_place", "must be waited for")
class DoesNotWait(Comm):
    def watch(self, buffers):
        inner, self._sent = super().watch(buffers), []
        spans = {extent.name: b.span(index) for b in buffers for index, extent in enumerate(b.extents)}

        def sink(extent, ready):
            self._sent.append((spans[extent.name], spans[extent.name].clone()))
            inner(extent, None)

        return sink

    def finish(self):
        while self._sent:
            span, values = self._sent.pop()
            span.copy_(values)
        return super().finish()


@breaks("comm", "test_used_tells_of_any_rank", "finish() gave")
class NeverForgets(Comm):
    def finish(self):
        return frozenset(self._used)


@breaks("comm", "test_every_element_has_an_owner", "covers elements of")
class LosesElements(Comm):
    def partition(self, parameters):
        return [replace(e, length=max(e.length - 1, 0)) for e in super().partition(parameters)]


@breaks("comm", "test_every_element_has_an_owner", "frozen or unknown")
class OwnsFrozenOnes(Comm):
    def partition(self, parameters):
        return [spec.extent for spec in parameters]


@breaks("comm", "test_partition_does_not_change", "the second time")
class ChangesItsMind(Comm):
    calls = 0

    def partition(self, parameters):
        self.calls += 1
        return super().partition(parameters)[:: -1 if self.calls > 1 else 1]


@breaks("comm", "test_published_weights_reach_every_rank", "what its owners have")
class SpoilsWeights(Comm):
    def publish(self, weights):
        for weight in weights.values():
            weight.zero_()


@breaks("comm", "test_publishing_a_part", "alone did not")
class PublishesAllOrNothing(Comm):
    def publish(self, weights):
        if len(weights) == 1:
            next(iter(weights.values())).zero_()


@breaks("comm", "test_sums_over_shards_and_ranks", "sum_ranks")
class DoublesSums(Comm):
    def sum_ranks(self, tensor):
        return tensor.mul_(2)


@breaks("comm", "test_its_state_is_plain", "JSON")
class StateOfTensors(Comm):
    def state(self):
        return PartState(data={"residual": torch.zeros(2)})


# ---------------------------------------------------------------------------------------------------- checkpoint


@breaks("checkpoint", "test_what_comes_back_is_what_was_saved", "came back different")
class SavesInBf16(ReferenceCheckpoint):
    @staticmethod
    def _write_tensor(out, named):
        rounded = named.tensor.bfloat16().to(named.tensor.dtype)
        return ReferenceCheckpoint._write_tensor(out, replace(named, tensor=rounded))


@breaks("checkpoint", "test_another_layout_can_read_it", "differs")
class SameLayoutOnly(ReferenceCheckpoint):
    def restore(self, parts, path):
        super().restore(parts, path)
        for part in parts.values():
            for named in part.state().tensors:
                if not named.extent.whole and named.extent.offset:
                    named.tensor.zero_()


class TellsContents(ReferenceCheckpoint):
    """Remembers what it saved, for `contents`."""

    def save(self, step, parts):
        states = {name: part.state() for name, part in parts.items()}
        self.saved = {
            name: replace(
                state, tensors=tuple(replace(named, tensor=named.tensor.clone()) for named in state.tensors)
            )
            for name, state in states.items()
        }
        super().save(step, parts)

    def contents(self, path):
        return self.saved


@breaks("checkpoint", "test_contents_are_what_was_saved", "gives the parts")
class LeavesPartsOut(TellsContents):
    def contents(self, path):
        return {"memory": self.saved["memory"]}


@breaks("checkpoint", "test_contents_are_what_was_saved", "of memory")
class LeavesTensorsOut(TellsContents):
    def contents(self, path):
        memory = self.saved["memory"]
        return {**self.saved, "memory": replace(memory, tensors=memory.tensors[1:])}


@breaks("checkpoint", "test_contents_are_what_was_saved", "not read as they were saved")
class ReadsFromTheStart(TellsContents):
    def contents(self, path):
        def lazy(named):
            return LazyTensor(
                named.key, named.extent, named.tensor, load=lambda start, out: named.read(0, out)
            )

        memory = self.saved["memory"]
        return {**self.saved, "memory": replace(memory, tensors=tuple(map(lazy, memory.tensors)))}


@breaks("checkpoint", "test_contents_are_what_was_saved", "instead of a CheckpointError")
class HasNoContents(ReferenceCheckpoint):
    def contents(self, path):
        raise NotImplementedError


@breaks("checkpoint", "test_split_masters_are_fp32_in_it", "fp32 values that they are")
class SavesUpperHalvesOnly(ReferenceCheckpoint):
    @staticmethod
    def _write_tensor(out, named):
        return ReferenceCheckpoint._write_tensor(out, replace(named, low=None))


@breaks("checkpoint", "test_split_masters_are_fp32_in_it", "lower halves")
class FillsUpperHalvesOnly(ReferenceCheckpoint):
    def restore(self, parts, path):
        kept = [(low, low.clone()) for part in parts.values() for low in part.low.values()]
        super().restore(parts, path)
        for low, before in kept:
            low.copy_(before)


@breaks("checkpoint", "test_split_masters_are_fp32_in_it", "called not finite")
class CallsLargeMastersInfinite(ReferenceCheckpoint):
    def save(self, step, parts):
        super().save(step, parts)
        upper = [named.tensor for part in parts.values() for named in part.state().tensors]
        finite = all(bool(tensor.isfinite().all()) for tensor in upper)
        self._committed = [replace(info, finite=finite) for info in self._committed]


@breaks("checkpoint", "test_a_committed_folder", "must lie in")
class OtherNames(ReferenceCheckpoint):
    def save(self, step, parts):
        super().save(step + 1, parts)


@breaks("checkpoint", "test_committed_tells_once", "told of the same")
class TellsAgain(ReferenceCheckpoint):
    def committed(self):
        return list(self._committed)


@breaks("checkpoint", "test_a_save_is_a_snapshot", "had returned")
class WritesLater(ReferenceCheckpoint):
    later: Any = None

    def save(self, step, parts):
        self.later = (step, parts)

    def wait(self):
        if self.later:
            super().save(*self.later)


@breaks(
    "checkpoint", "test_a_flipped_bit_is_noticed", "wrong bytes|no flipped bit|instead of a CheckpointError"
)
class TrustsTheDisk(ReferenceCheckpoint):
    def verify(self, path):
        return []


@breaks("checkpoint", "test_a_damaged_file_is_noticed", "instead of a CheckpointError|noticed")
class TrustsThatFilesExist(ReferenceCheckpoint):
    def verify(self, path):
        return []


@breaks("checkpoint", "test_what_is_missing_is_named", "must name")
class NamesNothing(ReferenceCheckpoint):
    def restore(self, parts, path):
        try:
            super().restore(parts, path)
        except CheckpointError:
            raise CheckpointError("something is missing") from None


@breaks("checkpoint", "test_older_checkpoints_go", "after saving steps 1 to 4")
class KeepsEverything(ReferenceCheckpoint):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._keep = 100


@breaks("checkpoint", "test_retention_follows_the_recipe", "there are [6, 7]")
class KnowsKeepOnly(ReferenceCheckpoint):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._keep_every = self._best = None


@breaks("checkpoint", "test_an_update_may_overtake_the_writing", "exp_avg of")
class CopiesMastersOnly(ReferenceCheckpoint):
    later: Any = None

    def save(self, step, parts):
        self.later, self.copies = (step, parts), {}

    def before_write(self, slots):
        for slot in slots:
            self.copies.setdefault(slot.extent.name, slot.master.clone())

    def wait(self):
        super().save(self.later[0], {name: self._as_it_was(part) for name, part in self.later[1].items()})

    def _as_it_was(self, part):
        state = part.state()
        tensors = tuple(
            replace(one, tensor=self.copies[one.extent.name])
            if one.key == "master" and one.extent.name in self.copies
            else one
            for one in state.tensors
        )
        return SimpleNamespace(state=lambda: replace(state, tensors=tensors))


@breaks("checkpoint", "test_what_stays_needs_nothing_of_what_is_removed", "has damaged step 2")
class TakesTheNextOneAlong(ReferenceCheckpoint):
    def remove(self, paths):
        freed = super().remove(paths)
        min(self._folder.glob("*/rank-0.bin")).write_bytes(b"")
        return freed


@breaks("checkpoint", "test_what_stays_needs_nothing_of_what_is_removed", "there are [1, 2, 3, 4]")
class RemovesNothing(ReferenceCheckpoint):
    def remove(self, paths):
        return 0


@breaks("checkpoint", "test_equal_digests_mean_equal_bits", "one bit other than before and the same digest")
class DigestsOfShapes(ReferenceCheckpoint):
    def describe(self, path):
        index = json.loads(json.loads((path / "rank-0.json").read_text())["json"])
        return {
            "tensors": {
                f"{part}/{one['key']}/{one['name']}": str(one["global_shape"])
                for part, state in index.items()
                for one in state["tensors"]
            }
        }


@breaks("checkpoint", "test_a_save_can_be_repeated", "saving step 12 twice")
class SavesAStepOnce(ReferenceCheckpoint):
    def save(self, step, parts):
        if not (self._folder / f"step-{step:08d}").exists():
            super().save(step, parts)


@breaks("checkpoint", "test_a_failed_save_is_told_and_leaves_no_checkpoint", "neither save")
class FailsSilently(ReferenceCheckpoint):
    def save(self, step, parts):
        try:
            super().save(step, parts)
        except CheckpointError:
            shutil.rmtree(self._folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------- model


@breaks("model", "test_nothing_has_storage", "build the module under")
class RealStorage(TinyModel):
    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.module.to_empty(device="cpu")


@breaks("model", "test_every_parameter_is_described", "does not name")
class ForgetsAParameter(TinyModel):
    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.parameters = self.parameters[:-1]


@breaks("model", "test_blocks", "lies in block")
class WrongBlocks(TinyModel):
    def _spec(self, name, parameter):
        spec = super()._spec(name, parameter)
        return spec if spec.block is None else replace(spec, block=0)


@breaks("model", "test_experts_are_stacked", "experts, but shape")
class WrongExperts(TinyModel):
    def _spec(self, name, parameter):
        return replace(super()._spec(name, parameter), experts=3)


@breaks("model", "test_initial_weights_are_the_same_bits_everywhere", "is not that span")
class DrawsSpansAnew(TinyModel):
    def load(self, name, out, extent):
        super().load(name, out, Extent(extent.name, (extent.length,), 0, extent.length))


@breaks("model", "test_shapes", "head() gave")
class HeadAddsAColumn(TinyModel):
    def head(self, hidden):
        logits = super().head(hidden)
        return torch.cat([logits, logits[:, :1]], 1)


@breaks("model", "test_the_head_works_token_by_token", "chunk by chunk")
class HeadLooksAround(TinyModel):
    def head(self, hidden):
        return super().head(hidden - hidden.mean(0))


@breaks("model", "test_the_head_uses_what_it_says", "head_parameters says")
class ForgetsHeadParameters(TinyModel):
    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.head_parameters = ()


@breaks("model", "test_it_is_causal", "before a changed token")
class SeesTheFuture(TinyModel):
    def hidden(self, batch):
        hidden, auxiliary = super().hidden(batch)
        return hidden + hidden.mean(1, keepdim=True), auxiliary


@breaks("model", "test_documents_do_not_see_each_other", "packed document")
class IgnoresDocuments(TinyModel):
    def hidden(self, batch):
        return super().hidden(replace(batch, document_ids=None))


@breaks("model", "test_flops", "flops_per_token gives")
class NegativeFlops(TinyModel):
    def flops_per_token(self, tokens):
        return -1.0


@breaks("model", "test_limits", "vocab_size is")
class WrongVocabulary(TinyModel):
    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.vocab_size += 1


# ------------------------------------------------------------------------------------------------------ observer


class Quiet:
    """Receives nothing."""


class Failing:
    @hookimpl
    def forge_step_ended(self, run, step):
        raise ValueError("no disk left")


class Steering:
    @hookimpl
    def forge_metrics_logged(self, run, step, metrics):
        for named in run.stages.memory.state().tensors:
            named.tensor.mul_(0.99)
        run.stages.memory.load(1, {})


class Providing:
    @hookimpl
    def forge_data(self):
        pass


class ObserverPlugin(Plugin):
    def build(self, ctx, config):
        return self.kind()


OBSERVERS = (
    (Quiet, "test_it_observes_something", "receives no event"),
    (Providing, "test_it_observes_something", "events are"),
    (Failing, "test_the_run_is_the_same_with_it", "was muted"),
    (Steering, "test_the_run_is_the_same_with_it", "differ with this observer"),
)
for kind, rule, message in OBSERVERS:
    CASES.append(("observer", f"{kind.__name__}Observer", rule, message))
    globals()[f"{kind.__name__}Observer"] = ObserverPlugin("observer", kind)


@breaks("model", "test_an_export_reads_back", "read again is not what")
class ExportsInitialWeights(TinyModel):
    def export(self, out, weights, dtype):
        def initial(name):
            value = weights(name)
            self.load(name, value.view(-1), next(s.extent for s in self.parameters if s.name == name))
            return value

        super().export(out, initial, dtype)


@breaks("model", "test_an_export_reads_back", "exported in bf16")
class CutsOffTheLowBits(TinyModel):
    def export(self, out, weights, dtype):
        def cut(name):
            return (weights(name).view(torch.int32) & -65536).view(torch.float32)

        super().export(out, cut if dtype == "bf16" else weights, dtype)


@breaks("model", "test_an_export_asks_for_few_weights_at_a_time", "held")
class HoldsTheWholeModel(TinyModel):
    def export(self, out, weights, dtype):
        state = {spec.name: weights(spec.name) for spec in self.parameters}
        super().export(out, lambda name: state[name], dtype)


@breaks("model", "test_an_export_asks_for_few_weights_at_a_time", "never asked for")
class LeavesOutTheNorm(TinyModel):
    def export(self, out, weights, dtype):
        self.parameters = tuple(spec for spec in self.parameters if spec.name != "norm.weight")
        super().export(out, weights, dtype)
        self.parameters = TinyModel(self.config, 0).parameters


@breaks("model", "test_an_export_asks_for_few_weights_at_a_time", "gave storage to")
class FillsTheModule(TinyModel):
    def export(self, out, weights, dtype):
        super().export(out, weights, dtype)
        self.module.norm.to_empty(device="cpu")


@breaks("model", "test_an_export_stores_tied_weights_once", "stored twice")
class WritesTheHeadToo(TinyModel):
    def export(self, out, weights, dtype):
        super().export(out, weights, dtype)
        (out / f"head.weight.{dtype}").write_bytes(weights("head.weight").numpy().tobytes())


@breaks("model", "test_an_export_lets_errors_through", "ended with None")
class SkipsWhatIsDamaged(TinyModel):
    def export(self, out, weights, dtype):
        with contextlib.suppress(CheckpointError):
            super().export(out, weights, dtype)


@breaks("model", "test_adapters_alone_or_a_refusal", "not the name of a model")
class NamesNoBase(TinyModel):
    def export_adapters(self, out, weights, dtype):
        self.export(out, weights, dtype)
