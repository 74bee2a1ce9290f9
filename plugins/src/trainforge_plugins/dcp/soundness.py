"""Whether what `checkpoint.json` says can be: a checksum tells that a file is as it was written, not who wrote it.

Where there is no problem, no name leads out of the folder, and no number asks for more memory than the data files have
bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES
from trainforge.toolbox.checkpointing.manifests import common_problems

if TYPE_CHECKING:
    from trainforge_plugins.dcp.manifest import FileEntry, Manifest, TensorEntry

CHUNK_BYTES = 64 * 2**20
"""The largest span."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def problems(manifest: Manifest) -> Iterator[str]:
    """What cannot be, each as the end of a sentence."""
    yield from common_problems(manifest)
    for name, entry in manifest.files.items():
        if not _FILE.fullmatch(name):
            yield f"it names a file that is no data file of its folder: {name!r}"
        if not 8 <= entry.header_bytes <= entry.bytes or not _are_digests(entry):
            yield f"the sizes or checksums of {name!r} cannot be"
    placed: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for label, tensor in manifest.tensors():
        yield from _of_tensor(label, tensor, placed)
    for name, places in placed.items():
        yield from _of_file(name, manifest.files[name], places)


def _of_tensor(label: str, tensor: TensorEntry, placed: dict[str, list[tuple[int, int]]]) -> Iterator[str]:
    """Spans must cover the tensor once and in order. Notes the bytes that each takes of its file."""
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
