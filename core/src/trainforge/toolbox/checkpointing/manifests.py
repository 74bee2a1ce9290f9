"""`checkpoint.json` as every format has it: what it says of a step and of its parts. A format adds its own fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.documents import NAME, canonical, read_sealed, write_sealed
from trainforge.toolbox.checkpointing.dtypes import ITEM_BYTES


class Record(BaseModel):
    """An object in `checkpoint.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredTensor(Record):
    """A stored tensor. `dtype` is PyTorch's name without `torch.`; a format says where its elements lie."""

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


T = TypeVar("T", bound=StoredTensor)


class StoredPart(Record, Generic[T]):
    """A part of the run's state: plain data and tensors."""

    version: int
    data: dict[str, Any]
    tensors: tuple[T, ...]


class StoredManifest(Record, Generic[T]):
    """What `checkpoint.json` says.

    Attributes:
        saved_at: in Unix seconds.
        save_id: differs for every save.
        metrics: what was measured at its step.
        finite: whether all masters are finite.
    """

    step: int
    writer: str
    format: int
    saved_at: float
    save_id: str
    world: int
    metrics: dict[str, float] = {}
    finite: bool = True
    parts: dict[str, StoredPart[T]]

    def tensors(self) -> Iterator[tuple[str, T]]:
        """Every tensor with its name `part/key/name`."""
        for part, stored in self.parts.items():
            for entry in stored.tensors:
                yield f"{part}/{entry.key}/{entry.name}", entry


M = TypeVar("M", bound=StoredManifest[Any])


def write_manifest(folder: Path, manifest: StoredManifest[Any]) -> None:
    """Write `checkpoint.json` and bring it to the disk.

    Raises:
        CheckpointError: a part's plain data does not consist of JSON types.
    """
    write_sealed(folder / NAME, manifest.model_dump())  # mode="json" would make null of infinity


def read_manifest(folder: Path, kind: type[M], format_: int, problems: Callable[[M], Iterable[str]]) -> M:
    """Read `checkpoint.json`, checking its checksum.

    Args:
        folder: of the checkpoint.
        kind: what it must be.
        format_: the only number that it may have.
        problems: what cannot be, each as the end of a sentence, of one that is well-formed.

    Raises:
        CheckpointError: it is missing, altered, of another format, or says what cannot be.
    """
    path = folder / NAME
    document = read_sealed(path)
    if document.get("format") != format_:
        raise CheckpointError(
            f"{path} has format {document.get('format')}, and this version reads format {format_}: use the version "
            "that wrote it"
        )
    try:
        manifest = kind.model_validate(document)
    except ValidationError as error:
        where = ".".join(str(item) for item in error.errors()[0]["loc"])
        raise CheckpointError(f"{path} is not a checkpoint of this format: see {where}") from error
    problem = next(iter(problems(manifest)), None)
    if problem is not None:
        raise CheckpointError(f"{path} cannot be used: {problem}")
    return manifest


def common_problems(manifest: StoredManifest[Any]) -> Iterator[str]:
    """What cannot be in any format: a checksum tells that a file is as it was written, not who wrote it."""
    if manifest.step < 0 or manifest.world < 1 or not math.isfinite(manifest.saved_at):
        yield "its step, world or saved_at cannot be"
    for part, stored in manifest.parts.items():
        seen: set[tuple[str, str]] = set()
        for tensor in stored.tensors:
            label = f"{part}/{tensor.key}/{tensor.name}"
            if (tensor.key, tensor.name) in seen or "/" in part or "/" in tensor.key:
                yield f"it holds {label} twice, or under a name that cannot be"
            seen.add((tensor.key, tensor.name))
            if tensor.dtype not in ITEM_BYTES:
                yield f"{label} has a dtype that is not stored: {tensor.dtype!r}"
            if any(size < 0 for size in tensor.shape) or len(tensor.shape) > 64:
                yield f"{label} has a shape that cannot be"


def same(one: StoredManifest[Any], other: StoredManifest[Any]) -> bool:
    """Whether two say the same, as text: NaN is not equal to itself."""
    return canonical(one.model_dump()) == canonical(other.model_dump())
