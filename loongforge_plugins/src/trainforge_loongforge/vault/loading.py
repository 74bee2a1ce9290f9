"""Where the chunks of a checkpoint go: straight into the live tensors wherever memory holds the same bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainforge.toolbox.checkpointing.layout import Held
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.manifest import TensorEntry
from trainforge_loongforge.vault.reading import Wanted


def targets(entries: Mapping[str, TensorEntry], wanted: Mapping[str, Sequence[Held]]) -> Iterator[Wanted]:
    """Each chunk that is needed, with where it goes.

    Args:
        entries: of the checkpoint, by `part/key/name`.
        wanted: the live tensors of this rank by the same names.
    """
    for tensor, spans in wanted.items():
        refs = entries[tensor].refs
        offsets = [offset for offset, _ in refs]
        needed: dict[int, list[Held]] = {}
        for span in spans:
            first = max(0, bisect_right(offsets, span.offset) - 1)
            for number in range(first, bisect_left(offsets, span.offset + span.length)):
                needed.setdefault(number, []).append(span)
        for number, holders in needed.items():
            yield refs[number][1], _target(*refs[number], holders)


def _target(offset: int, ref: Ref, holders: Sequence[Held]) -> memoryview | Callable[[memoryview], None]:
    length = ref.length // holders[0].named.dtype.itemsize
    if len(holders) == 1:
        span = holders[0]
        within = span.offset <= offset and offset + length <= span.offset + span.length
        if within and length and (there := _as_it_lies(span, offset, length)) is not None:
            return there.numpy().data
    return lambda data: _scatter(data, offset, holders)


def _as_it_lies(span: Held, offset: int, length: int) -> Tensor | None:
    """The memory of these elements, where it holds their bytes just so."""
    tensor = span.named.tensor.detach()
    if span.named.low is not None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    start = offset - span.offset
    return tensor.view(-1)[start : start + length].view(torch.uint8)


def _scatter(data: memoryview, offset: int, holders: Sequence[Held]) -> None:
    """Write what each holder has of a chunk."""
    if not data.nbytes:
        return
    values = torch.frombuffer(data, dtype=holders[0].named.dtype)
    for span in holders:
        begin = max(offset, span.offset)
        end = min(offset + len(values), span.offset + span.length)
        if begin < end:
            span.named.write(begin - span.offset, values[begin - offset : end - offset])
