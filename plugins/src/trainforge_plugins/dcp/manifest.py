"""The format on disk: `checkpoint.json`, and data files that are plain safetensors.

    step-00000012/
        checkpoint.json             what is in the checkpoint and where; JSON, indented by one space
        rank-00000.safetensors      what rank 0 wrote; a rank that had nothing to write has no file
        rank-00001.safetensors

`checkpoint.json` has the fields of `Manifest` below, and is sealed (see `trainforge.toolbox.checkpointing.documents`).

A tensor is stored row-major and flattened, cut into spans (offset and length in elements). The spans of a tensor
cover it exactly once. Each has the checksum of its bytes (little endian, as on the machine that wrote them) and
begins `at` that byte of its file. In the safetensors file the span is the 1-D entry `part/key/name[offset:end]`, so
the weights can be read without this package. Every byte of a data file belongs to its header or to a span; both have
checksums, and so has the whole file.

Why not what torch ships: `FileSystemWriter` keeps its metadata in a pickle, which can execute code on load, and
nothing notices a flipped bit. `HuggingFaceStorageWriter` has no pickle, but it infers a tensor's shape from the
shards it happens to find (a lost file gives a smaller tensor, not an error), cannot hold two spans of one tensor in
one file, and has no checksums either. So planners, writer and reader here are subclasses of the interfaces of
torch.distributed.checkpoint, with this metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing import manifests
from trainforge.toolbox.checkpointing.manifests import Record, StoredManifest, StoredTensor
from trainforge_plugins.dcp import soundness

FORMAT = 1
_READ_BYTES = 16 * 2**20


class Span(Record):
    """A stored piece of a tensor: `length` elements from element `offset`, at byte `at` of `file`."""

    offset: int
    length: int
    file: str
    at: int
    xxh3_128: str


class TensorEntry(StoredTensor):
    """A stored tensor; `spans` are in order of their offset."""

    spans: tuple[Span, ...]


class FileEntry(Record):
    """A data file. The first `header_bytes` are safetensors' header with its length."""

    bytes: int
    xxh3_128: str
    header_bytes: int
    header_xxh3_128: str


class Manifest(StoredManifest[TensorEntry]):
    """What `checkpoint.json` says."""

    files: dict[str, FileEntry]

    @property
    def bytes(self) -> int:
        """Bytes of the data files."""
        return sum(entry.bytes for entry in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json`, checking its checksum.

    Raises:
        CheckpointError: it is missing, altered, of another format, or says what cannot be (see `soundness.py`).
    """
    return manifests.read_manifest(folder, Manifest, FORMAT, soundness.problems)


def describe(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """What checksums tell of each tensor (see `Checkpoint.describe`): they are those of spans, so cuts count."""
    entries = dict(manifest.tensors())
    return {
        "tensors": {
            name: xxhash.xxh3_128_hexdigest(
                " ".join([entry.dtype, *map(str, entry.shape), *(s.xxh3_128 for s in entry.spans)]).encode()
            )
            for name, entry in entries.items()
        },
        "cuts": {name: ",".join(str(span.length) for span in entry.spans) for name, entry in entries.items()},
        "tensor_bytes": {name: entry.bytes for name, entry in entries.items()},
    }


def verify(folder: Path) -> list[str]:
    """Compare every byte of the checkpoint with its checksums; a sentence for each problem."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, entry in manifest.files.items():
        problem = verify_file(folder / name, entry)
        if problem is not None:
            problems.append(problem + _damaged_tensors(folder, manifest, name))
    return problems


def verify_file(path: Path, entry: FileEntry) -> str | None:
    """Compare a data file with its entry; a sentence when they differ."""
    problem = check_size(path, entry)
    if problem is not None:
        return problem
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if digest.hexdigest() != entry.xxh3_128:
        return f"{path} is damaged: its checksum does not match its content"
    return None


def check_size(path: Path, entry: FileEntry) -> str | None:
    """Whether the file is there with the right length; a sentence when it is not."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if size == entry.bytes else f"{path} is damaged: it has {size} bytes instead of {entry.bytes}"


def _damaged_tensors(folder: Path, manifest: Manifest, name: str) -> str:
    """Which tensors of a damaged file are hit, as the end of a sentence."""
    damaged = []
    try:
        with (folder / name).open("rb") as file:
            for label, span, end in _spans_of(manifest, name):
                file.seek(span.at)
                if xxhash.xxh3_128_hexdigest(file.read(end - span.at)) != span.xxh3_128:
                    damaged.append(label)
    except OSError:
        return ""
    shown = ", ".join(damaged[:3]) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    return f" ({shown})" if damaged else ""


def _spans_of(manifest: Manifest, name: str) -> Iterator[tuple[str, Span, int]]:
    """Spans stored in a file, each with a label and the byte behind its last."""
    found = [
        (f"{part}/{tensor.key}/{tensor.name}", span)
        for part, stored in manifest.parts.items()
        for tensor in stored.tensors
        for span in tensor.spans
        if span.file == name
    ]
    found.sort(key=lambda item: (item[1].at, item[1].length))
    ends = [span.at for _, span in found[1:]] + [manifest.files[name].bytes]
    for (label, span), end in zip(found, ends, strict=True):
        yield label, span, end
