"""Who writes which span: every element of the state once, the work spread over the ranks.

Each rank lists the extents it holds (its table). From all tables together, every rank works out the same plan:
where extents of several ranks overlap, the span goes to the holder with the least to write so far. Large spans are
cut, so that one big embedding is shared out too and a reader needs little memory for checking checksums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from trainforge.stages import ModelSpec, NamedTensor, Optimizer, PartState


@dataclass(frozen=True)
class Chunk:
    """A span of a tensor that one rank writes. `tensor` is `part/key/name`; offset and length in elements."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    length: int
    rank: int

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Size of the span."""
        return self.length * self.item_bytes


Row = Sequence[Any]
"""`[tensor, shape, dtype, offset, length]`: an extent that a rank holds; JSON types, so that ranks can exchange it."""


def bytes_of(table: Iterable[Row]) -> int:
    """Bytes of the extents of a table."""
    return sum(ITEM_BYTES[dtype] * length for _, _, dtype, _, length in table)


@dataclass(frozen=True)
class Held:
    """A tensor in memory that holds `[offset, offset + length)` of the global tensor, flattened."""

    offset: int
    length: int
    named: NamedTensor


def split_name(tensor: str) -> tuple[str, str, str]:
    """Part, key and name of `part/key/name`. Only a name may hold a slash."""
    part, key, name = tensor.split("/", 2)
    return part, key, name


def held_tensors(states: Mapping[str, PartState]) -> tuple[list[Row], dict[str, list[Held]]]:
    """This rank's table, and its live tensors by `part/key/name`.

    Raises:
        CheckpointError: a tensor cannot be described; names it.
    """
    table: list[Row] = []
    held: dict[str, list[Held]] = {}
    for part, state in states.items():
        for named in state.tensors:
            tensor, extent = f"{part}/{named.key}/{named.extent.name}", named.extent
            dtype = str(named.dtype).removeprefix("torch.")
            if "/" in part or "/" in named.key:
                raise CheckpointError(
                    f"{tensor} cannot be saved: names of parts and keys must not contain a slash"
                )
            if dtype not in ITEM_BYTES:
                raise CheckpointError(f"{tensor} has dtype {dtype}, which cannot be saved")
            if named.tensor.numel() != extent.length:
                raise CheckpointError(
                    f"{tensor} has {named.tensor.numel()} elements where its extent says {extent.length}"
                )
            table.append([tensor, list(extent.global_shape), dtype, extent.offset, extent.length])
            held.setdefault(tensor, []).append(Held(extent.offset, extent.length, named))
    return table, held


def plan_chunks(tables: Sequence[Iterable[Row]], chunk_bytes: int) -> list[Chunk]:
    """All chunks of a save, from the tables of all ranks (by rank); the same result wherever it is computed.

    Large spans are cut on a grid of `chunk_bytes` over the whole tensor, so that other shards give the same chunks.

    Raises:
        CheckpointError: ranks disagree about a tensor, or nobody holds some of its elements; names it.
    """
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for rank, table in enumerate(tables):
        for tensor, shape, dtype, offset, length in table:
            known = facts.setdefault(tensor, (tuple(shape), dtype))
            if known != (tuple(shape), dtype):
                raise CheckpointError(
                    f"{tensor} is {dtype} {list(shape)} on rank {rank} and {known[1]} {list(known[0])} on another"
                )
            spans.setdefault(tensor, []).append((offset, offset + length, rank))
    load: Counter[int] = Counter()
    chunks = []
    for tensor, (shape, dtype) in facts.items():
        most = chunk_bytes // ITEM_BYTES[dtype]
        for begin, end, holders in _pieces(tensor, math.prod(shape), spans[tensor]):
            for offset, stop in _on_grid(begin, end, most):
                rank = min(holders, key=lambda holder: (load[holder], holder))
                chunks.append(Chunk(tensor, shape, dtype, offset, stop - offset, rank))
                load[rank] += chunks[-1].bytes
    return chunks


def _on_grid(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """`[begin, end)` cut at the multiples of `step`; one empty piece where it is empty."""
    yield from pairwise([begin, *range((begin // step + 1) * step, end, step), end])


def state_bytes(model: ModelSpec, optimizer: Optimizer) -> int:
    """Bytes of all masters (fp32) and of the optimizer's state, over all ranks."""
    total = 0
    for spec in model.parameters:
        if spec.trainable:
            total += 4 * spec.elements
            total += sum(
                (spec.elements if state.per_element else 1) * ITEM_BYTES[state.dtype]
                for state in optimizer.state(spec).values()
            )
    return total


def _pieces(tensor: str, size: int, spans: list[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """Cut `[0, size)` wherever a span begins or ends; each piece with the ranks that hold it."""
    if size == 0:
        return [(0, 0, sorted({rank for _, _, rank in spans}))]
    edges: dict[int, list[tuple[int, int]]] = {}
    for begin, end, rank in spans:
        if begin < 0 or end > size:
            raise CheckpointError(
                f"{tensor} has {size} elements, and rank {rank} gives it elements {begin} to {end}"
            )
        if begin < end:
            edges.setdefault(begin, []).append((1, rank))
            edges.setdefault(end, []).append((-1, rank))
    pieces, holders = [], Counter[int]()
    places = sorted({0, size, *edges})
    for begin, end in pairwise(places):
        for change, rank in edges.get(begin, ()):
            holders[rank] += change
        twice = [rank for rank, count in holders.items() if count > 1]
        if twice:
            raise CheckpointError(f"{tensor}: rank {twice[0]} gives elements {begin} to {end} twice")
        holding = sorted(rank for rank, count in holders.items() if count)
        if not holding:
            raise CheckpointError(f"{tensor} cannot be saved: no rank holds its elements {begin} to {end}")
        pieces.append((begin, end, holding))
    return pieces
