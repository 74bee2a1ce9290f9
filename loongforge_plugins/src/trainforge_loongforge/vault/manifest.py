"""The manifest of a step: which chunks make up each tensor. It names them by what they hold, never by where they lie.

    checkpoints/
        step-00000012/checkpoint.json     the fields of `Manifest` below, sealed (toolbox.checkpointing.documents)
        packs/SAVEID-r00000-000.pack      chunks (packs.py); any pack may hold a chunk, and several may
        vault.lock                        locked by a save or a collection

A tensor is stored row-major, flattened, in the byte order of the machine that wrote it (little endian), and cut into
chunks of at most 4 MiB. A chunk is `[elements, blake3, xxh3-128]`, in hexadecimal; the chunks of a tensor cover it in
order. Split masters are stored as the fp32 values that they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.documents import NAME, read_sealed, write_sealed
from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.packs import CHUNK_BYTES

FORMAT = 1
_ADDRESS, _CHECKSUM = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorEntry(_Record):
    """A stored tensor. `dtype` is PyTorch's name without `torch.`."""

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[int, str, str], ...]

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @cached_property
    def refs(self) -> tuple[tuple[int, Ref], ...]:
        """Each chunk's first element, and the chunk."""
        offset, found = 0, []
        for length, address, checksum in self.chunks:
            size = length * ITEM_BYTES[self.dtype]
            found.append((offset, Ref(bytes.fromhex(address), bytes.fromhex(checksum), size)))
            offset += length
        return tuple(found)


class PartEntry(_Record):
    """A part of the run's state: plain data and tensors."""

    version: int
    data: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


class Manifest(_Record):
    """What `checkpoint.json` says.

    Attributes:
        saved_at: in Unix seconds.
        save_id: differs for every save.
        metrics: what was measured at its step.
        finite: whether all masters are finite.
        bytes: of the state, as it would take if nothing were shared.
        new_bytes: that its save wrote, as stored.
        versions: of what wrote it, by name.
        plan: xxh3-128 of the run's plan.json, in hexadecimal; empty where there was none.
    """

    step: int
    writer: str
    format: Literal[1]
    saved_at: float
    save_id: str
    world: int
    metrics: dict[str, float] = {}
    finite: bool = True
    bytes: int
    new_bytes: int
    versions: dict[str, str] = {}
    plan: str = ""
    parts: dict[str, PartEntry]

    def tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """Every tensor with its name `part/key/name`."""
        for part, stored in self.parts.items():
            for entry in stored.tensors:
                yield f"{part}/{entry.key}/{entry.name}", entry


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` and bring it to the disk."""
    write_sealed(folder / NAME, manifest.model_dump())  # mode="json" would make null of infinity


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json`, checking its checksum.

    Raises:
        CheckpointError: it is missing, altered, of another format, or says what cannot be.
    """
    path = folder / NAME
    document = read_sealed(path)
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {document.get('format')}, and this version reads format {FORMAT}: use the version "
            "that wrote it"
        )
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        where = ".".join(str(item) for item in error.errors()[0]["loc"])
        raise CheckpointError(f"{path} is not a checkpoint of this format: see {where}") from error
    problem = next(_problems(manifest), None)
    if problem is not None:
        raise CheckpointError(f"{path} cannot be used: {problem}")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """What cannot be: a checksum tells that a file is as it was written, not who wrote it."""
    if manifest.step < 0 or manifest.world < 1 or not math.isfinite(manifest.saved_at):
        yield "its step, world or saved_at cannot be"
    seen: set[tuple[str, str, str]] = set()
    for part, stored in manifest.parts.items():
        for tensor in stored.tensors:
            label = f"{part}/{tensor.key}/{tensor.name}"
            if (part, tensor.key, tensor.name) in seen or "/" in part or "/" in tensor.key:
                yield f"it holds {label} twice, or under a name that cannot be"
            seen.add((part, tensor.key, tensor.name))
            yield from _of_tensor(label, tensor)


def _of_tensor(label: str, tensor: TensorEntry) -> Iterator[str]:
    if tensor.dtype not in ITEM_BYTES:
        yield f"{label} has a dtype that is not stored: {tensor.dtype!r}"
        return
    if any(size < 0 for size in tensor.shape) or len(tensor.shape) > 64:
        yield f"{label} has a shape that cannot be"
    for length, address, checksum in tensor.chunks:
        of_nothing = len(tensor.chunks) == 1 and length == 0
        if not (of_nothing or 0 < length * ITEM_BYTES[tensor.dtype] <= CHUNK_BYTES):
            yield f"{label} has a chunk whose length cannot be"
        if not _ADDRESS.fullmatch(address) or not _CHECKSUM.fullmatch(checksum):
            yield f"{label} has a chunk whose address or checksum cannot be"
    if sum(length for length, _, _ in tensor.chunks) != math.prod(tensor.shape) or not tensor.chunks:
        yield f"its chunks are not all of {label}"


def addresses(manifest: Manifest) -> frozenset[bytes]:
    """Of all its chunks."""
    return frozenset(ref.address for _, entry in manifest.tensors() for _, ref in entry.refs)


def chunk_of(ref: Ref, item_bytes: int) -> tuple[int, str, str]:
    """A chunk as a manifest has it."""
    return ref.length // item_bytes, ref.address.hex(), ref.xxh3_128.hex()


def labelled(manifest: Manifest, wanted: Iterable[Ref]) -> dict[Ref, str]:
    """Where chunks belong: the first tensor that has each, and the chunk's number in it."""
    asked, found = set(wanted), dict[Ref, str]()
    for label, entry in manifest.tensors():
        for number, (_, ref) in enumerate(entry.refs):
            if ref in asked:
                found.setdefault(ref, f"{label}, chunk {number} of {len(entry.refs)}")
    return found
