"""Whether what `checkpoint.json` says can be: a checksum tells that a file is as it was written, not who wrote it.

After `check` no name leads out of the folder, and no number asks for more memory than the data files have bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from trainforge_plugins.dcp.manifest import FileEntry, Manifest, TensorEntry

CHUNK_BYTES = 64 * 2**20
"""The largest span."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def check(manifest: Manifest) -> str | None:
    """The first thing that cannot be, as the end of a sentence; None when there is none."""
    return next(_problems(manifest), None)


def _problems(manifest: Manifest) -> Iterator[str]:
    if manifest.step < 0 or manifest.world < 1 or not math.isfinite(manifest.saved_at):
        yield "its step, world or saved_at cannot be"
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            yield f"it names a file that is no data file of its folder: {name!r}"
        if not 8 <= entry.header_bytes <= entry.bytes or not _are_digests(entry):
            yield f"the sizes or checksums of {name!r} cannot be"
    placed: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for part, stored in manifest.parts.items():
        seen: set[tuple[str, str]] = set()
        for tensor in stored.tensors:
            label = f"{part}/{tensor.key}/{tensor.name}"
            if (tensor.key, tensor.name) in seen or "/" in part or "/" in tensor.key:
                yield f"it holds {label} twice, or under a name that cannot be"
            seen.add((tensor.key, tensor.name))
            yield from _of_tensor(label, tensor, placed)
    for name, places in placed.items():
        yield from _of_file(name, manifest.files[name], places)


def _of_tensor(label: str, tensor: TensorEntry, placed: dict[str, list[tuple[int, int]]]) -> Iterator[str]:
    """Spans must cover the tensor once and in order. Notes the bytes that each takes of its file."""
    if tensor.dtype not in ITEM_BYTES:
        yield f"{label} has a dtype that is not stored: {tensor.dtype!r}"
        return
    if any(size < 0 for size in tensor.shape) or len(tensor.shape) > 64:
        yield f"{label} has a shape that cannot be"
    position = 0
    for span in tensor.spans:
        size = span.length * ITEM_BYTES[tensor.dtype]
        if span.file not in placed or not _DIGEST.fullmatch(span.xxh3_128):
            yield f"a span of {label} lies in a file that is not listed, or has no checksum"
            return
        if span.length < 0 or size > CHUNK_BYTES or span.offset != position:
            yield f"it does not say where all of {label} lies, once and in spans of at most {CHUNK_BYTES} bytes"
            return
        position += span.length
        placed[span.file].append((span.at, span.at + size))
    if position != math.prod(tensor.shape) or not tensor.spans:
        yield f"it does not say where all of {label} lies"


def _of_file(name: str, entry: FileEntry, places: list[tuple[int, int]]) -> Iterator[str]:
    """Every byte behind the header belongs to one span."""
    position = entry.header_bytes
    for begin, end in sorted(places):
        if begin != position:
            yield f"its spans overlap in {name}, or leave bytes out"
            return
        position = end
    if position != entry.bytes:
        yield f"its spans do not end where {name} does"


def _are_digests(entry: FileEntry) -> bool:
    return bool(_DIGEST.fullmatch(entry.xxh3_128) and _DIGEST.fullmatch(entry.header_xxh3_128))
