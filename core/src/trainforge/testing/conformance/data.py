"""The rules of the data stage."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainforge.errors import DataExhausted, IncompatibleError
from trainforge.stages import IGNORED, Batch, Comm, Data
from trainforge.testing.bench import REFERENCE, build_stage, load_plugin, tiny_context
from trainforge.testing.conformance.base import refusal
from trainforge.testing.conformance.exporting import TokenizerRules


class DataConformance(TokenizerRules):
    """Whether data comes in one global order that any number of ranks shares, and resumes exactly.

    Give the plugin a small data set in `config`: a few dozen samples. Override `reread_tokenizer` when its section can
    name a saved tokenizer.

    Attributes:
        model: the recipe's `model` section for the tiny model (its `vocab` bounds the token ids).
        model_plugin: another plugin for the model stage.
        global_batch: samples per step; must be a multiple of `micro_batch` times every world size.
        worlds: numbers of ranks to compare.
    """

    stage = "data"
    model: ClassVar[Mapping[str, Any]] = {}
    model_plugin: ClassVar[Any] = REFERENCE
    global_batch: ClassVar[int] = 6
    micro_batch: ClassVar[int] = 1
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def data(self, folder: Path, rank: int = 0, world: int = 1, **facts: Any) -> Data:
        """The data stage of one rank among `world`, all of them in this process."""
        accumulate = self.global_batch // (world * self.micro_batch)
        ctx = tiny_context(
            folder,
            rank=rank,
            world=world,
            micro_batch=self.micro_batch,
            accumulate=accumulate,
            model=self.model,
            device=self.device,
            **{**facts, "train": {**self.train, **facts.get("train", {})}},
        )
        comm = Comm()
        comm.rank, comm.world = rank, world
        ctx.built["comm"] = comm
        build_stage(ctx, load_plugin(self.model_plugin), "model", {})
        stage: Data = build_stage(ctx, load_plugin(self.plugin), "data", self.config)
        return stage

    def steps(self, ranks: list[Data], count: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step over all ranks, by their index."""
        each = self.global_batch // (len(ranks) * self.micro_batch)
        for _ in range(count):
            batches = []
            for rank, data in enumerate(ranks):
                taken = data.take(each)
                assert len(taken) == each, (
                    f"take({each}) gave {len(taken)} micro-batches; empty ones fill a step up"
                )
                for i, batch in enumerate(taken):
                    wanted = i * len(ranks) + rank
                    assert batch.index == wanted, (
                        f"Batch.index is {batch.index}; micro-batch {i} of rank {rank} of {len(ranks)} has "
                        f"i * world + rank = {wanted}"
                    )
                batches += taken
            yield sorted(batches, key=lambda batch: batch.index)

    def ranks(self, folder: Path, world: int) -> list[Data]:
        """The data stages of all ranks."""
        return [self.data(folder, rank, world) for rank in range(world)]

    def some_batches(self, folder: Path) -> list[Batch]:
        """Every batch of an epoch (at most 20 steps)."""
        data = self.data(folder)
        return [batch for step in self.steps([data], min(data.steps_per_epoch, 20)) for batch in step]

    def test_shapes_and_types(self, tmp_path: Path) -> None:
        """int64 `[rows, tokens]` everywhere; ids lie below the vocabulary; positions restart with each document."""
        vocab = getattr(self.data(tmp_path), "vocab_size", self.model.get("vocab", 61))
        for batch in self.some_batches(tmp_path):
            tensors = {
                "input_ids": batch.input_ids,
                "labels": batch.labels,
                "position_ids": batch.position_ids,
            }
            if batch.document_ids is not None:
                tensors["document_ids"] = batch.document_ids
            for name, tensor in tensors.items():
                assert tensor.dtype == torch.int64, f"{name} is {tensor.dtype}, not int64"
                assert tensor.shape == batch.input_ids.shape, f"{name} has shape {tuple(tensor.shape)}"
                assert tensor.dim() == 2, f"{name} must be [rows, tokens]"
            low, high = int(batch.input_ids.min()), int(batch.input_ids.max())
            assert low >= 0, f"token id {low} is negative"
            assert self.model_plugin != REFERENCE or high < vocab, f"token id {high} is beyond the vocabulary"
            assert not batch.position_ids[:, 0].any(), "position_ids must start at 0 in every row"
            self._check_positions(batch)

    @staticmethod
    def _check_positions(batch: Batch) -> None:
        same = same_document(batch)
        step = batch.position_ids[:, 1:] - batch.position_ids[:, :-1]
        assert (step[same] == 1).all(), "position_ids must count up within a document"
        if batch.document_ids is not None:
            starts = ~same & (batch.document_ids[:, 1:] >= 0)
            assert not batch.position_ids[:, 1:][starts].any(), (
                "position_ids must restart at 0 with every document"
            )

    def test_labels_are_shifted(self, tmp_path: Path) -> None:
        """`labels[r, t]` is the token after `input_ids[r, t]`, or ignored."""
        for batch in self.some_batches(tmp_path):
            told = (batch.labels[:, :-1] != IGNORED) & same_document(batch)
            wrong = batch.labels[:, :-1][told] != batch.input_ids[:, 1:][told]
            assert not wrong.any(), (
                "labels[r, t] must be input_ids[r, t + 1]: shift labels by one to the left"
            )
            if batch.document_ids is not None:
                padding = batch.labels[batch.document_ids < 0]
                assert (padding == IGNORED).all(), "padding must not be supervised"

    def test_counts(self, tmp_path: Path) -> None:
        """`supervised`, `real` and `documents` say what is in the tensors."""
        for batch in self.some_batches(tmp_path):
            supervised = int((batch.labels != IGNORED).sum())
            assert batch.supervised == supervised, (
                f"supervised says {batch.supervised}; {supervised} labels count"
            )
            real = batch.input_ids.numel()
            if batch.document_ids is not None:
                real = int((batch.document_ids >= 0).sum())
            assert batch.real == real, (
                f"real says {batch.real}; {real} tokens are not padding (document id -1)"
            )
            if batch.documents is not None:
                runs = batch.input_ids.shape[0] + int((~same_document(batch)).sum())
                assert batch.documents == runs, (
                    f"documents says {batch.documents}; there are {runs} runs of ids"
                )

    def test_an_epoch_is_the_same_on_any_number_of_ranks(self, tmp_path: Path) -> None:
        """The same samples in the same step, each at most once per epoch, at every world size; epochs differ."""
        told: dict[int, list[list[int]]] = {}
        for world in self.worlds:
            ranks = self.ranks(tmp_path, world)
            told[world] = [
                [sample for batch in step for sample in batch.sample_ids]
                for step in self.steps(ranks, 2 * ranks[0].steps_per_epoch)
            ]
        first = told[self.worlds[0]]
        assert any(first), "Batch.sample_ids is empty: it tells which samples a batch holds"
        for world, steps in told.items():
            assert [sorted(s) for s in steps] == [sorted(s) for s in first], (
                f"{world} ranks do not see the same samples per step as {self.worlds[0]}: "
                "share one global order and cut the global batch, not the data set"
            )
        half = len(first) // 2
        epochs = [[sample for step in part for sample in step] for part in (first[:half], first[half:])]
        for epoch in epochs:
            twice = [sample for sample, count in Counter(epoch).items() if count > 1]
            assert not twice, f"samples {twice[:5]} come more than once in an epoch"
        size = self.data(tmp_path).samples
        assert len(epochs[0]) == len(epochs[1]), "two epochs have different lengths"
        assert size - self.global_batch < len(epochs[0]) <= size, (
            f"{len(epochs[0])} of {size} samples in an epoch"
        )

    def test_the_same_seed_gives_the_same_order(self, tmp_path: Path) -> None:
        """Two runs with one seed agree bit for bit."""
        one, other = self.data(tmp_path), self.data(tmp_path)
        for left, right in zip(self.steps([one], 3), self.steps([other], 3), strict=True):
            for a, b in zip(left, right, strict=True):
                assert same_batch(a, b), "two builds with the same seed give different batches"

    def test_resuming_goes_on_exactly(self, tmp_path: Path) -> None:
        """From any position (within an epoch, at its boundary), at any number of ranks."""
        length = self.data(tmp_path).steps_per_epoch
        for stop in sorted({0, 1, max(length - 1, 1), length, length + 1}):
            plain = self.data(tmp_path)
            for _ in self.steps([plain], stop):
                pass
            saved = plain.state()
            data = json.loads(json.dumps(saved.data))
            assert data == saved.data, "state().data must hold JSON types only (no tuples, no int keys)"
            wanted = [sorted(ids(step)) for step in self.steps([plain], 3)]
            for world in self.worlds:
                ranks = self.ranks(tmp_path, world)
                for rank in ranks:
                    rank.load(saved.version, copy.deepcopy(data))
                got = [sorted(ids(step)) for step in self.steps(ranks, 3)]
                assert got == wanted, (
                    f"resumed after step {stop} on {world} ranks, the samples differ from going on"
                )

    def test_the_position_is_what_was_consumed(self, tmp_path: Path) -> None:
        """Reading ahead does not move it, and asking for it or for validation data does not either."""
        data = self.data(tmp_path)
        data.take(self.global_batch // self.micro_batch)
        state = copy.deepcopy(data.state().data)
        for _ in range(2):
            list(data.validation())
            data.ledger()
            assert data.state().data == state, "state() moved although nothing was taken"

    def test_another_data_set_is_refused(self, tmp_path: Path) -> None:
        """Resuming with another fingerprint names both values."""
        data = self.data(tmp_path)
        state = data.state()
        fingerprint = [key for key in state.data if "fingerprint" in key]
        assert fingerprint, "state().data needs a `fingerprint` of data set, sampler and tokenizer"
        altered = copy.deepcopy(state.data)
        altered[fingerprint[0]], old, new = change_something(altered[fingerprint[0]])
        error = refusal(self.data(tmp_path).load, state.version, altered)
        assert error is not None, (
            f"load() accepted a checkpoint with another fingerprint ({new} instead of {old})"
        )
        assert isinstance(error, IncompatibleError), (
            f"load() raised {error!r} instead of an IncompatibleError"
        )
        for value in (old, new):
            assert str(value) in str(error), f"the refusal must show both values; {value} is not in: {error}"

    def test_batches_live_until_the_next_take(self, tmp_path: Path) -> None:
        """Validation, state and ledger do not overwrite the batches in use."""
        data = self.data(tmp_path)
        batches = data.take(self.global_batch // self.micro_batch)
        kept = copy.deepcopy(batches)
        list(data.validation())
        data.state()
        for batch, copied in zip(batches, kept, strict=True):
            assert same_batch(batch, copied), "a batch changed before the next take()"

    def test_validation_is_the_same_everywhere(self, tmp_path: Path) -> None:
        """The same count on every rank, the same samples in total, and the same again the next time."""
        told = {}
        for world in self.worlds:
            batches = [list(data.validation()) for data in self.ranks(tmp_path, world)]
            counts = {len(rank) for rank in batches}
            assert len(counts) == 1, f"ranks have {sorted(counts)} validation batches: pad with empty ones"
            told[world] = sorted(sample for rank in batches for batch in rank for sample in batch.sample_ids)
        assert all(samples == told[self.worlds[0]] for samples in told.values()), (
            "validation samples depend on the number of ranks"
        )
        data = self.data(tmp_path)
        first, second = list(data.validation()), list(data.validation())
        assert all(same_batch(a, b) for a, b in zip(first, second, strict=True)), (
            "validation() differs from call to call"
        )

    def test_the_ledger_is_json(self, tmp_path: Path) -> None:
        """It becomes rows.json."""
        json.dumps(self.data(tmp_path).ledger())

    def test_running_out_is_data_exhausted(self, tmp_path: Path) -> None:
        """Three epochs pass without StopIteration; a provider that does not repeat says DataExhausted."""
        data = self.data(tmp_path)
        try:
            for _ in self.steps([data], 3 * data.steps_per_epoch):
                pass
        except DataExhausted:
            pass
        except RuntimeError as error:  # a generator turns StopIteration into this
            raise AssertionError(f"take() raised {error.__cause__!r} instead of DataExhausted") from error


def ids(step: list[Batch]) -> list[int]:
    """All sample ids of a step."""
    return [sample for batch in step for sample in batch.sample_ids]


def same_document(batch: Batch) -> torch.Tensor:
    """Where token t + 1 belongs to the document of token t, `[rows, tokens - 1]`."""
    if batch.document_ids is None:
        return torch.ones_like(batch.input_ids[:, 1:], dtype=torch.bool)
    return batch.document_ids[:, 1:] == batch.document_ids[:, :-1]


def same_batch(left: Batch, right: Batch) -> bool:
    """Whether two batches hold the same tensors and samples."""
    return left.sample_ids == right.sample_ids and all(
        torch.equal(getattr(left, name), getattr(right, name))
        for name in ("input_ids", "labels", "position_ids")
    )


def change_something(value: Any) -> tuple[Any, Any, Any]:
    """A copy of plain data with one leaf changed; gives the copy, the old leaf and the new one."""
    if isinstance(value, dict) and value:
        key = next((k for k, v in value.items() if v not in (None, [], {})), next(iter(value)))
        changed, old, new = change_something(value[key])
        return {**value, key: changed}, old, new
    if isinstance(value, list) and value:
        changed, old, new = change_something(value[0])
        return [changed, *value[1:]], old, new
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value + 1, value, value + 1
    return f"other {value}", value, f"other {value}"
