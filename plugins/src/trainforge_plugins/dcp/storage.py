"""What torch.distributed.checkpoint drives: a planner and a writer for saving. For loading see `reading.py`.

A tensor appears to DCP as its row-major flattening, 1-D, under the name `part/key/name`; extents are chunks of it.
No collective takes place here: ranks have agreed on the layout before (`toolbox.checkpointing.layout`), and each saves
and loads its own spans, so that a background thread can do it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainforge.toolbox.checkpointing.layout import Chunk
from trainforge_plugins.dcp.manifest import FileEntry, Span

SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "bool": "BOOL", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save_chunks(
    path: Path, chunks: Sequence[Chunk], copies: Sequence[Tensor]
) -> tuple[FileEntry, list[Span]]:
    """Write this rank's chunks into the safetensors file `path`, and bring it to the disk.

    Returns:
        The file's entry, and where each chunk lies, in the order of `chunks`.
    """
    writer = SafetensorsWriter(path)
    unwrapped(lambda: save({}, storage_writer=writer, planner=ChunkSavePlanner(chunks, copies), no_dist=True))
    assert writer.entry is not None, "DCP calls finish"
    return writer.entry, writer.spans


def unwrapped(work: Callable[[], Any]) -> None:
    """Run DCP and raise what really happened: it wraps every error in one that is no `Exception`."""
    try:
        work()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from None


class ChunkSavePlanner(SavePlanner):
    """Plans exactly the chunks that it is given."""

    def __init__(self, chunks: Sequence[Chunk], copies: Sequence[Tensor]) -> None:
        self._chunks, self._copies = chunks, copies
        self._places = {(chunk.tensor, chunk.offset): place for place, chunk in enumerate(chunks)}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to prepare."""

    def create_local_plan(self) -> SavePlan:
        """One item per chunk, in order."""
        return SavePlan([_write_item(chunk) for chunk in self._chunks])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan is this rank's alone; the metadata of all ranks goes to checkpoint.json instead."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The copy of a chunk."""
        assert write_item.index.offset is not None, "every chunk has an offset"
        return self._copies[self._places[write_item.index.fqn, write_item.index.offset[0]]]


class SafetensorsWriter(StorageWriter):
    """Writes one safetensors file, hashing as it goes. `entry` and `spans` tell afterwards what was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[str, int, str] = ("", 0, "")
        self.entry: FileEntry | None = None
        self.spans: list[Span] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Keep the plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write header and chunks, and fsync the file."""
        header = _header(plan.items)
        results, position, whole = [], len(header), xxhash.xxh3_128(header)
        with self._path.open("wb", buffering=0) as file:
            write_fully(file, header)
            for item in plan.items:
                data = _bytes_of(planner.resolve_data(item))
                write_fully(file, data)
                whole.update(data)
                results.append(
                    WriteResult(item.index, data.nbytes, _span(self._path.name, item, position, data))
                )
                position += data.nbytes
            os.fsync(file.fileno())
        self._file = (xxhash.xxh3_128_hexdigest(header), len(header), whole.hexdigest())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the entry and the spans."""
        header_digest, header_bytes, digest = self._file
        self.spans = [result.storage_data for result in results[0]]
        size = header_bytes + sum(result.size_in_bytes for result in results[0])
        self.entry = FileEntry(
            bytes=size, xxh3_128=digest, header_bytes=header_bytes, header_xxh3_128=header_digest
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never found by its path: it is made for one."""
        return False


def _bytes_of(data: Any) -> memoryview:
    return memoryview(data.view(torch.uint8).numpy())


def write_fully(file: Any, data: Any) -> None:
    """Write all of a buffer; a raw file may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _header(items: Sequence[WriteItem]) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON, padded so that the data is aligned to 64 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in items:
        assert item.tensor_data is not None, "every item is a chunk"
        begin, length = item.tensor_data.chunk.offsets[0], item.tensor_data.chunk.sizes[0]
        dtype = item.tensor_data.properties.dtype
        end = position + length * dtype.itemsize
        entries[f"{item.index.fqn}[{begin}:{begin + length}]"] = {
            "dtype": SAFETENSORS_DTYPES[str(dtype).removeprefix("torch.")],
            "shape": [length],
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _span(file: str, item: WriteItem, at: int, data: memoryview) -> Span:
    assert item.tensor_data is not None, "every item is a chunk"
    chunk = item.tensor_data.chunk
    return Span(
        offset=chunk.offsets[0],
        length=chunk.sizes[0],
        file=file,
        at=at,
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
    )


def _write_item(chunk: Chunk) -> WriteItem:
    """DCP's description of a chunk."""
    return WriteItem(
        MetadataIndex(chunk.tensor, torch.Size([chunk.offset])),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size([chunk.offset]), torch.Size([chunk.length])),
            TensorProperties(dtype=getattr(torch, chunk.dtype)),
            torch.Size([math.prod(chunk.shape)]),
        ),
    )
