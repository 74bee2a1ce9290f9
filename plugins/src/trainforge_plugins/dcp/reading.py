"""Loading: the planner and the reader that torch.distributed.checkpoint drives.

With `CheckpointReader`, `torch.distributed.checkpoint.load` reads a checkpoint also without our `Checkpoint` stage:
into flat 1-D tensors named `part/key/name`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainforge.errors import CheckpointError
from trainforge.stages import NamedTensor
from trainforge.toolbox.checkpointing.layout import Held
from trainforge_plugins.dcp.manifest import Manifest, Span, TensorEntry, check_size, read_manifest
from trainforge_plugins.dcp.storage import unwrapped


def load_spans(folder: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Held]]) -> None:
    """Fill the wanted tensors in place. Every byte that is used has been compared with its checksum before.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    reader = CheckpointReader(folder, manifest, wanted)
    unwrapped(lambda: load({}, storage_reader=reader, planner=HeldLoadPlanner(wanted), no_dist=True))


def load_range(
    folder: Path, manifest: Manifest, tensor: str, entry: TensorEntry, start: int, out: Tensor
) -> None:
    """Fill `out` with elements from `start` of a stored tensor, without DCP: one span at a time, verified.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    offsets, stop = [span.offset for span in entry.spans], start + len(out)
    for span in entry.spans[max(0, bisect_right(offsets, start) - 1) : bisect_left(offsets, stop)]:
        path = folder / span.file
        problem = check_size(path, manifest.files[span.file])
        if problem is not None:
            raise CheckpointError(problem)
        try:
            with path.open("rb", buffering=0) as file:
                count = span.length * out.element_size()
                data = _checked_bytes(file, span.at, count, span.xxh3_128, f"{path} is damaged in {tensor}")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        begin, end = max(span.offset, start), min(span.offset + span.length, stop)
        values = torch.frombuffer(data, dtype=out.dtype)
        out[begin - start : end - start].copy_(values[begin - span.offset : end - span.offset])


class HeldLoadPlanner(LoadPlanner):
    """Plans to read the stored chunks that intersect with what this rank holds."""

    def __init__(self, wanted: Mapping[str, Sequence[Held]]) -> None:
        self._wanted = wanted
        self._stored: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what is stored."""
        assert metadata is not None, "the reader gives metadata"
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """One item for each stored chunk and each span of ours that it serves."""
        items = []
        for tensor, spans in self._wanted.items():
            chunks = self._stored[tensor].chunks  # in order of their offset, without a gap
            offsets = [chunk.offsets[0] for chunk in chunks]
            for index, span in enumerate(spans):
                first = max(0, bisect_right(offsets, span.offset) - 1)
                last = bisect_left(offsets, span.offset + span.length)
                for chunk in chunks[first:last]:
                    begin = max(chunk.offsets[0], span.offset)
                    end = min(chunk.offsets[0] + chunk.sizes[0], span.offset + span.length)
                    if begin < end:
                        items.append(_read_item(tensor, index, begin, end, chunk.offsets[0], span.offset))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: only tensors are stored."""
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the elements go: a 1-D view of the live tensor; scratch where that is kept in halves."""
        named, start, length = self._target(read_item)
        if named.low is not None:
            return torch.empty(length, dtype=named.dtype)
        return named.tensor.detach().view(-1)[start : start + length]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Split what goes into halves; everything else was filled in place."""
        named, start, _ = self._target(read_item)
        if named.low is not None:
            named.write(start, tensor)

    def _target(self, read_item: ReadItem) -> tuple[NamedTensor, int, int]:
        index = read_item.dest_index
        held = self._wanted[index.fqn][index.index or 0]
        return held.named, read_item.dest_offsets[0], read_item.lengths[0]


class CheckpointReader(StorageReader):
    """Reads a committed checkpoint, comparing each header and each chunk with its checksum before it is used.

    Args:
        folder: the checkpoint.
        manifest: what it holds; read when None.
        only: names of tensors (`part/key/name`) that are described to DCP; None for all.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None = None, only: Container[str] | None = None
    ) -> None:
        self._folder, self._only = folder, only
        self._manifest = manifest or read_manifest(folder)
        self._spans: dict[tuple[str, int], Span] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the stored tensors to DCP: flat, with their chunks."""
        described: dict[str, Any] = {}
        for part, stored in self._manifest.parts.items():
            for entry in stored.tensors:
                tensor = f"{part}/{entry.key}/{entry.name}"
                if self._only is not None and tensor not in self._only:
                    continue
                self._spans.update({(tensor, span.offset): span for span in entry.spans})
                self._dtypes[tensor] = getattr(torch, entry.dtype)
                described[tensor] = TensorStorageMetadata(
                    TensorProperties(dtype=self._dtypes[tensor]),
                    torch.Size([math.prod(entry.shape)]),
                    [
                        ChunkStorageMetadata(torch.Size([s.offset]), torch.Size([s.length]))
                        for s in entry.spans
                    ],
                )
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each needed chunk once, in the order of the file."""
        by_file: dict[str, dict[tuple[str, int], list[ReadItem]]] = {}
        for item in plan.items:
            assert item.storage_index.offset is not None, "every chunk has an offset"
            place = (item.storage_index.fqn, item.storage_index.offset[0])
            by_file.setdefault(self._spans[place].file, {}).setdefault(place, []).append(item)
        for name, wanted in by_file.items():
            self._read_file(self._folder / name, wanted, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self, path: Path, wanted: dict[tuple[str, int], list[ReadItem]], planner: LoadPlanner
    ) -> None:
        entry = self._manifest.files[path.name]
        problem = check_size(path, entry)
        if problem is not None:
            raise CheckpointError(problem)
        try:
            with path.open("rb", buffering=0) as file:
                _checked_bytes(
                    file, 0, entry.header_bytes, entry.header_xxh3_128, f"{path} is damaged in its header"
                )
                for place in sorted(wanted, key=lambda place: self._spans[place].at):
                    span, dtype = self._spans[place], self._dtypes[place[0]]
                    data = _checked_bytes(
                        file,
                        span.at,
                        span.length * dtype.itemsize,
                        span.xxh3_128,
                        f"{path} is damaged in {place[0]}",
                    )
                    _scatter(torch.frombuffer(data, dtype=dtype), wanted[place], planner)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never found by its path: it is made for one."""
        return False


def _scatter(stored: Tensor, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    for item in items:
        start = item.storage_offsets[0]
        target = planner.resolve_tensor(item)
        target.detach().copy_(stored[start : start + item.lengths[0]])
        planner.commit_tensor(item, target)


def _checked_bytes(file: Any, at: int, count: int, checksum: str, problem: str) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    file.seek(at)
    while view:
        got = file.readinto(view)
        if not got:
            raise CheckpointError(f"{problem}: it ends too early")
        view = view[got:]
    if xxhash.xxh3_128_hexdigest(data) != checksum:
        raise CheckpointError(f"{problem}: its checksum does not match its content")
    return data


def _read_item(tensor: str, index: int, begin: int, end: int, stored_at: int, held_at: int) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(tensor, torch.Size([held_at]), index),
        torch.Size([begin - held_at]),
        MetadataIndex(tensor, torch.Size([stored_at])),
        torch.Size([begin - stored_at]),
        torch.Size([end - begin]),
    )
