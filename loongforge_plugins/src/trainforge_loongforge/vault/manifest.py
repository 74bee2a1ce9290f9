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

from trainforge.toolbox.checkpointing import manifests
from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES
from trainforge.toolbox.checkpointing.manifests import StoredManifest, StoredTensor, common_problems
from trainforge_loongforge.vault.hashing import Ref
from trainforge_loongforge.vault.packs import CHUNK_BYTES

FORMAT = 1
_ADDRESS, _CHECKSUM = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


class TensorEntry(StoredTensor):
    """A stored tensor; its chunks in order."""

    chunks: tuple[tuple[int, str, str], ...]

    @cached_property
    def refs(self) -> tuple[tuple[int, Ref], ...]:
        """Each chunk's first element, and the chunk."""
        offset, found = 0, []
        for length, address, checksum in self.chunks:
            size = length * ITEM_BYTES[self.dtype]
            found.append((offset, Ref(bytes.fromhex(address), bytes.fromhex(checksum), size)))
            offset += length
        return tuple(found)


class Manifest(StoredManifest[TensorEntry]):
    """What `checkpoint.json` says.

    Attributes:
        bytes: of the state, as it would take if nothing were shared.
        new_bytes: that its save wrote, as stored.
        versions: of what wrote it, by name.
        plan: xxh3-128 of the run's plan.json, in hexadecimal; empty where there was none.
    """

    bytes: int
    new_bytes: int
    versions: dict[str, str]
    plan: str


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json`, checking its checksum.

    Raises:
        CheckpointError: it is missing, altered, of another format, or says what cannot be.
    """
    return manifests.read_manifest(folder, Manifest, FORMAT, _problems)


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from common_problems(manifest)
    for label, tensor in manifest.tensors():
        yield from _of_tensor(label, tensor)


def _of_tensor(label: str, tensor: TensorEntry) -> Iterator[str]:
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
