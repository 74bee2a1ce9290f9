"""The data stage: an exact place in a keyed order of packed rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainforge.errors import ConfigError, DataError, IncompatibleError, RanksError
from trainforge.stages import Batch, Data, PartState
from trainforge_plugins.text.cache import CacheRequest, TokenCache, open_cache
from trainforge_plugins.text.chat import choose_template, missing_template
from trainforge_plugins.text.inputs import check_wishes, find_files, find_inputs, places
from trainforge_plugins.text.ledger import skipped_lines
from trainforge_plugins.text.order import Permutation
from trainforge_plugins.text.packing import ConversationRows, Rows, TextRows, collate
from trainforge_plugins.text.rendering import Rendering, hash_of_processor
from trainforge_plugins.text.sources import Source
from trainforge_plugins.text.split import Split, split_rows
from trainforge_plugins.text.tokenizers import (
    Tokenizer,
    chosen_tokenizer,
    load_tokenizer,
    own_code_allowed,
)

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_plugins.text import TextSection
    from trainforge_plugins.text.pictures import Pictures

STATE_VERSION = 1
ORDER_VERSION = 1
"""Of permutation, packing and split together: another number means that the same seed gives other samples."""


def build_data(ctx: Context, config: TextSection) -> TextData:
    """Load the tokenizer, open or build the caches, and check that the rows fit the model and the batch.

    Raises:
        DataError: the text, the tokenizer or the batch size has to be changed.
    """
    positions = ctx.model.max_positions
    if positions is not None and config.max_len > positions:
        raise DataError(
            f"text.max_len is {config.max_len}, but the model has {positions} positions: set text.max_len to at most "
            f"{positions}"
        )
    sources = find_inputs(config)
    check_wishes(config, sources)
    tokenizer = load_tokenizer(ctx, config.tokenizer)
    _check_end_token(tokenizer, ctx.model.vocab_size)
    cache = _open(ctx, config, tokenizer, places(config), sources)
    if config.image_dir is not None and not len(cache.images.documents):
        raise ConfigError(
            f"text.image_dir is {config.image_dir}, but no row that can be used has an image: correct it (forge data "
            "inspect lists rows that cannot be used), or leave it out"
        )
    validation = config.validation
    separate = None
    if isinstance(validation, str | tuple):
        patterns = [validation] if isinstance(validation, str) else list(validation)
        held_out = _open(ctx, config, tokenizer, patterns, find_files(config, patterns, "text.validation"))
        separate = _rows(ctx, config, tokenizer, held_out)
        validation = None
    rows = _rows(ctx, config, tokenizer, cache)
    split = split_rows(len(rows), _held_out(len(rows), validation))
    data = TextData(ctx, config, tokenizer, cache, rows, split, separate)
    _check_agreement(ctx, data)
    return data


def _check_agreement(ctx: Context, data: TextData) -> None:
    """Every rank must have the same samples; ranks of another machine read files of their own.

    Raises:
        RanksError: one has others; says in what they differ.
    """
    first, *others = ctx.comm.gather(data.facts()) if ctx.world > 1 else [{}]
    for rank, facts in enumerate(others, start=1):
        different = [
            f"{name} is {facts[name]} and not {first[name]}" for name in first if facts[name] != first[name]
        ]
        if different:
            raise RanksError(
                f"rank {rank} has other samples than rank 0: {'; '.join(different)}: give every machine the same files "
                "and tokenizer"
            )


def _pictures(ctx: Context, config: TextSection, cache: TokenCache) -> Pictures | None:
    """What loads the images of the rows, if they have any."""
    if not len(cache.images.documents):
        return None
    from trainforge_plugins.text.pictures import Pictures
    from trainforge_plugins.text.vision import load_processor

    processor = load_processor(chosen_tokenizer(ctx, config.tokenizer), own_code_allowed(ctx))
    return Pictures(cache.images, processor)


def _rows(ctx: Context, config: TextSection, tokenizer: Tokenizer, cache: TokenCache) -> Rows:
    padding = tokenizer.end or 0
    if cache.conversations:
        pictures = _pictures(ctx, config, cache)
        return ConversationRows(cache, config.max_len, padding, config.packing, pictures)
    return TextRows(cache, config.max_len, padding)


def _open(
    ctx: Context,
    config: TextSection,
    tokenizer: Tokenizer,
    patterns: Sequence[str],
    sources: Sequence[Source],
) -> TokenCache:
    rendering = None
    if any(source.format == "chat" for source in sources):
        template = choose_template(config.template, tokenizer)
        if told := missing_template(config.template, tokenizer):
            ctx.console.note(told)
        processor = chosen_tokenizer(ctx, config.tokenizer)
        image_dir = config.image_dir or (config.dataset_dir if config.dataset is not None else None)
        rendering = Rendering(
            template,
            config.train_on,
            config.max_len,
            config.too_long,
            processor,
            hash_of_processor(processor),
            own_code_allowed(ctx),
            None if image_dir is None else image_dir.expanduser(),
        )
    request = CacheRequest(
        sources,
        tokenizer,
        config.field,
        config.strict,
        config.workers,
        config.worker_timeout,
        rendering,
    )
    root = Path(config.cache or ctx.cache_dir).expanduser()
    who = f"rank {ctx.rank} (process {os.getpid()})"
    cache = open_cache(root, patterns, request, ctx.console, ctx.local_rank == 0, who)
    token, row = cache.top
    if token >= ctx.model.vocab_size:
        raise _too_large(tokenizer, token, f"at or after {row}", ctx.model.vocab_size)
    if cache.tokens == cache.documents:
        raise DataError(
            f"every document of {', '.join(patterns)} is a single token, so there is nothing to predict: add text"
        )
    return cache


def _check_end_token(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.end is not None and tokenizer.end >= vocab_size:
        raise _too_large(tokenizer, tokenizer.end, "at the end of the first row", vocab_size)


def _too_large(tokenizer: Tokenizer, token: int, where: str, vocab_size: int) -> DataError:
    return DataError(
        f"the tokenizer {tokenizer.name!r} gives token id {token} ({where}), but the model's embedding has only "
        f"{vocab_size} rows: set text.tokenizer to the model's own tokenizer, or give the model a vocab_size of at "
        f"least {max(token + 1, tokenizer.size)}"
    )


def _held_out(rows: int, wanted: float | None) -> int:
    """Rows to hold out: a share gives at least one row and leaves at least half; a count is taken as it is."""
    if not wanted:
        return 0
    if wanted < 1:
        return min(max(1, round(wanted * rows)), rows // 2)
    if wanted >= rows:
        raise DataError(
            f"text.validation holds out {wanted:g} rows, but there are only {rows}: set a smaller count, or a share "
            "such as 0.02"
        )
    return int(wanted)


class TextData(Data):
    """Rows of `max_len` tokens in an order keyed by (seed, epoch). Sample ids are row numbers.

    Nothing here is random but the order, and the order is computed from (seed, epoch, position): so the samples of a
    step are the same for any number of ranks, and after any resume.

    Attributes:
        tokenizer: what made the tokens.
        cache: where they lie.
        samples: training rows in an epoch.
    """

    def __init__(
        self,
        ctx: Context,
        config: TextSection,
        tokenizer: Tokenizer,
        cache: TokenCache,
        rows: Rows,
        split: Split,
        separate: Rows | None,
    ) -> None:
        self._config, self.tokenizer, self.cache = config, tokenizer, cache
        self.row_tokens = config.max_len
        self._rows, self._split, self._separate = rows, split, separate
        self._seed, self._rank, self._world, self._batching = ctx.run.seed, ctx.rank, ctx.world, ctx.batching
        self._pin = ctx.device.type != "cpu"
        self.samples = split.training
        whole, rest = divmod(self.samples, ctx.batching.global_batch)
        self.steps_per_epoch = whole + (rest > 0 and config.last_batch == "partial")
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{self.samples} training rows of {config.max_len} tokens do not fill one global batch of "
                f"{ctx.batching.global_batch} rows ({ctx.world} ranks), and text.last_batch: drop leaves out what does "
                f"not: set text.last_batch: partial, train.global_batch to at most {self.samples}, a smaller "
                "text.max_len, or add text"
            )
        self._epoch = self._consumed = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Batch]:
        """The next step's micro-batches of this rank. The tensors are fresh, so they live as long as anyone needs."""
        micro = self._batching.micro_batch
        assert count * micro * self._world == self._batching.global_batch
        batches = [self._collate(self._rows, numbers, index) for index, numbers in self._step(count)]
        self._advance(min(self._consumed + self._batching.global_batch, self.samples))
        self._rows.prepare(number for _, numbers in self._step(count) for number in numbers)
        return batches

    def _step(self, count: int) -> Iterator[tuple[int, list[int]]]:
        """Of each of this rank's micro-batches in the step that comes now: its place in the step, and its rows."""
        micro, start = self._batching.micro_batch, self._consumed
        stop = min(start + self._batching.global_batch, self.samples)
        for index in range(self._rank, count * self._world, self._world):
            first = start + index * micro
            yield index, [self._row_at(place) for place in range(min(first, stop), min(first + micro, stop))]

    def _row_at(self, place: int) -> int:
        """The number of the row that comes at `place` in this epoch."""
        return self._split.training_row(self._order[place] if self._order else place)

    def _order_of(self, epoch: int) -> Permutation | None:
        return Permutation(self.samples, self._seed, epoch) if self._config.shuffle else None

    def _advance(self, consumed: int) -> None:
        left = self.samples - consumed
        over = left == 0 or (self._config.last_batch == "drop" and left < self._batching.global_batch)
        self._move(self._epoch + 1, 0) if over else self._move(self._epoch, consumed)

    def _move(self, epoch: int, consumed: int) -> None:
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        self._epoch, self._consumed = epoch, consumed

    def _collate(self, rows: Rows, numbers: Sequence[int], index: int) -> Batch:
        return collate(rows, numbers, self._config.max_len, index, self._pin)

    def validation(self) -> Iterator[Batch]:
        """The evaluation's micro-batches of this rank, at most `text.validation_rows` rows over all ranks."""
        rows = self._rows if self._separate is None else self._separate
        available = self._split.held_out if self._separate is None else len(self._separate)
        used = min(available, self._config.validation_rows)
        numbers = [i * available // used for i in range(used)]
        if self._separate is None:
            numbers = [self._split.validation_row(i) for i in numbers]
        micro = self._batching.micro_batch
        per_rank = -(-used // (micro * self._world))
        for index in range(self._rank, per_rank * self._world, self._world):
            yield self._collate(rows, numbers[index * micro : (index + 1) * micro], index)

    def close(self) -> None:
        """End the threads that decode images."""
        for rows in (self._rows, self._separate):
            if rows is not None:
                rows.close()

    def ledger(self) -> dict[str, Any]:
        """Rows (lines) seen, used and skipped by reason, and what they became."""
        counts = {"tokens": self.cache.tokens, "packed_rows": len(self._rows)}
        if self.cache.conversations:
            counts["supervised"] = self.cache.count_supervised()
        return {**self.cache.ledger, **counts}

    def start_report(self) -> list[str]:
        """Sizes, and what was skipped if anything was."""
        cache, held = self.cache, self._split.held_out
        kind = "conversation" if cache.conversations else "document"
        line = (
            f"{cache.documents:,} {kind}{'s' * (cache.documents != 1)}, "
            f"{cache.tokens:,} tokens ({self.tokenizer.name}), "
            f"{self.samples:,} training rows of {self._config.max_len}"
        )
        if self._separate is not None:
            line += f", {len(self._separate):,} rows for validation from other files"
        elif held:
            line += f", {held:,} rows held out for validation"
        if self.tokenizer.end is None:
            line += "; the tokenizer has no end token, so documents follow each other without one"
        notes = self._of_conversations()
        if held and self._separate is None and cache.ledger.get("repeated"):
            notes.append(
                "rows that come more than once (text.sources) are trained on and held out as well, so the validation "
                "loss is too low: set text.validation to other files"
            )
        return [line, *notes, *skipped_lines(cache.ledger)]

    def _of_conversations(self) -> list[str]:
        """What is learnt of them, how full the rows are, and how many were cut, if any were."""
        cache, config = self.cache, self._config
        if not cache.conversations:
            return []
        learnt = cache.count_supervised()
        line = f"{learnt:,} tokens ({learnt / cache.tokens:.1%}) are learnt (train_on: {config.train_on})"
        alone = cache.images.documents
        with_images = int(np.diff(cache.bounds())[alone].sum())
        shared = len(self._rows) - len(alone)
        if config.packing and shared:
            line += f"; rows are {(cache.tokens - with_images) / (shared * config.max_len):.1%} full"
        if len(alone):
            line += f"; {len(alone):,} have images, each in a row of its own"
        truncated, used = cache.ledger["truncated"], cache.ledger["used"]
        if not truncated:
            return [line]
        return [
            line,
            f"{truncated:,} cut to {config.max_len} tokens ({truncated / used:.2%}, too_long: {config.too_long})",
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids that a model wrote, up to the end of the document."""
        return self.tokenizer.continuation(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end token."""
        return [int(token) for token in self.tokenizer.encode(text.encode("utf-8", "replace"))]

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "data set": f"{self.cache.digest} ({self.cache.tokens:,} tokens)",
            "tokenizer": self.tokenizer.fingerprint,
            "run.seed": self._seed,
            "text.max_len": self._config.max_len,
            **({"text.packing": self._config.packing} if self.cache.conversations else {}),
            "text.shuffle": self._config.shuffle,
            "text.last_batch": self._config.last_batch,
            "rows held out (text.validation)": self._split.held_out,
            "order": ORDER_VERSION,
        }

    def facts(self) -> dict[str, Any]:
        """All that must be the same on every rank, as plain data, by names for a person."""
        held_out = None if self._separate is None else len(self._separate)
        return {**self._fingerprint(), "rows for validation": held_out}

    def state(self) -> PartState:
        """The epoch, the samples consumed in it over all ranks, and what decides which samples those were."""
        place = {"epoch": self._epoch, "consumed": self._consumed}
        return PartState(STATE_VERSION, {**place, "fingerprint": self._fingerprint()})

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            IncompatibleError: the same place would now mean other samples.
        """
        if version != STATE_VERSION:
            raise IncompatibleError(
                f"the checkpoint holds version {version} of the text plugin's state, and this program reads version "
                f"{STATE_VERSION}: resume with the version that saved it"
            )
        saved, current = data["fingerprint"], self._fingerprint()
        changed = [
            f"{name} was {saved.get(name)} and is now {current.get(name)}"
            for name in {**current, **saved}
            if saved.get(name) != current.get(name)
        ]
        if changed:
            raise IncompatibleError(
                f"the checkpoint was made with other samples: {'; '.join(changed)}: set it back, or start a new run"
            )
        self._move(int(data["epoch"]), int(data["consumed"]))
