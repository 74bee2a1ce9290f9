"""Synthetic sequences that a tiny model can learn, in an order that any number of ranks shares."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainforge.errors import IncompatibleError
from trainforge.seeding import derive_seed
from trainforge.stages import IGNORED, Batch, Data, PartState

if TYPE_CHECKING:
    from torch import Tensor

    from trainforge.context import Context
    from trainforge.testing.reference import ReferenceSection


LETTERS = f"{string.ascii_letters} .,;:!?'-"
"""What the reference tokenizer knows: token i is letter i."""


class LetterTokenizer:
    """A token for each letter; what is no letter of its own gives none. The samples above are no text of it."""

    def __init__(self, config: ReferenceSection) -> None:
        text = LETTERS if config.letters is None else Path(config.letters).read_text("utf-8")
        self.letters = text[: config.vocab]

    def encode(self, text: str) -> list[int]:
        """The places of its letters."""
        return [self.letters.index(letter) for letter in text if letter in self.letters]

    def decode(self, ids: Sequence[int]) -> str:
        """The letters at these places."""
        return "".join(self.letters[token] for token in ids)

    def save(self, out: Path) -> None:
        """Write letters.txt."""
        (out / "letters.txt").write_text(self.letters, encoding="utf-8")


class SyntheticData(Data):
    """Sample i counts upwards from a random id with a random stride; its length differs from sample to sample.

    The rows of a step are the next `global_batch` samples of the epoch's permutation; micro-batch number g of
    the step (over all ranks) holds rows `g * micro_batch` and following.
    """

    def __init__(self, config: ReferenceSection, ctx: Context) -> None:
        self._config, self._seed = config, ctx.run.seed
        self._batching, self._rank, self._world = ctx.batching, ctx.rank, ctx.world
        self.samples = config.samples
        self.steps_per_epoch = -(-config.samples // ctx.batching.global_batch)
        self._consumed = 0

    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches of this rank; the last step of an epoch may be short."""
        epoch, start = divmod(self._consumed, self.samples)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", epoch))
        order = torch.randperm(self.samples, generator=generator).tolist()
        rows = order[start : start + self._batching.global_batch]
        self._consumed += len(rows)
        return [self._batch(rows, i * self._world + self._rank) for i in range(count)]

    def validation(self) -> Iterable[Batch]:
        """Samples beyond the training ones, one micro-batch after another, the same count on every rank."""
        rows = list(range(self.samples, self.samples + self._config.validation))
        rounds = -(-len(rows) // (self._batching.micro_batch * self._world))
        return (self._batch(rows, i * self._world + self._rank) for i in range(rounds))

    def _batch(self, rows: list[int], index: int) -> Batch:
        size = self._batching.micro_batch
        ids = rows[index * size : (index + 1) * size]
        inputs = torch.zeros(size, self._config.tokens, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED)
        documents = torch.full_like(inputs, -1)  # padding is a document of its own
        for row, sample in enumerate(ids):
            tokens = self._sample(sample)
            length = len(tokens) - 1
            inputs[row, :length], documents[row, :length] = tokens[:-1], 0
            if not self._config.silent_every or sample % self._config.silent_every:
                labels[row, :length] = tokens[1:]
        real = int((documents >= 0).sum())
        positions = torch.arange(inputs.shape[1]).repeat(size, 1)
        positions = torch.where(documents >= 0, positions, positions - (documents >= 0).sum(1, keepdim=True))
        return Batch(
            inputs,
            labels,
            positions,
            documents if real < inputs.numel() else None,
            int((labels != IGNORED).sum()),
            real,
            index,
            tuple(ids),
        )

    def _sample(self, sample: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "sample", sample))
        length = int(torch.randint(3, self._config.tokens + 2, (), generator=generator))
        start, stride = torch.randint(1, 5, (2,), generator=generator).tolist()
        return torch.arange(start, start + stride * length, stride) % self._config.vocab

    def state(self) -> PartState:
        """How many global samples were consumed, and what they were drawn from."""
        fingerprint = {"seed": self._seed, **self._config.model_dump()}
        return PartState(data={"consumed": self._consumed, "fingerprint": fingerprint})

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Go to a saved position."""
        here = self.state().data["fingerprint"]
        for key in sorted({*here, *data["fingerprint"]}):
            saved, now = data["fingerprint"].get(key), here.get(key)
            if saved != now:
                raise IncompatibleError(
                    f"the checkpoint was made with {key} = {saved}; this run has {key} = {now}"
                )
        self._consumed = data["consumed"]
