"""One save, from the snapshot to its name: what runs in the background, on every rank, without a collective.

Each rank writes its file, fsyncs it, reads it back, and leaves a record in the temporary folder. Rank 0 waits for all
records, writes `checkpoint.json`, renames the folder and prunes older checkpoints; the other ranks watch the folder
to learn how it ended. So a rank that fails makes the save fail everywhere, with its reason.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from trainforge.errors import CheckpointError
from trainforge.stages import CheckpointInfo, checkpoint_name
from trainforge.units import format_seconds
from trainforge_plugins.dcp import folders, manifest, room
from trainforge_plugins.dcp.layout import Chunk, split_name
from trainforge_plugins.dcp.manifest import FileEntry, Manifest, PartEntry, Span, TensorEntry
from trainforge_plugins.dcp.staging import in_file_order
from trainforge_plugins.dcp.storage import save_chunks

_CLOSING_S = 20.0
_VISIBLE_S = 10.0
_FAILED = "failed.json"


class RankRecord(BaseModel):
    """What a rank wrote, or why it could not. `spans` are in the order of its chunks; no entry: no file."""

    error: str | None = None
    entry: FileEntry | None = None
    spans: list[Span] = []
    finite: bool = True


@dataclass
class Save:
    """A save in flight on one rank.

    Attributes:
        step, save_id, writer: as in the manifest.
        folder: where checkpoints lie.
        rank, world: this rank and how many there are.
        chunks: those of all ranks.
        parts: (version, plain data) of each part.
        metrics: what was measured at this step.
        verify: read the files back.
        timeout: longest wait for another rank, in seconds.
        closing: set when the process is about to end: then waiting for others is cut short.
        copies: the snapshot of this rank's chunks, in file order; or what copies each when it is written.
    """

    step: int
    save_id: str
    writer: str
    folder: Path
    rank: int
    world: int
    chunks: list[Chunk]
    parts: dict[str, tuple[int, dict[str, Any]]]
    metrics: dict[str, float]
    verify: bool
    timeout: float
    closing: threading.Event = field(default_factory=threading.Event)
    copies: Sequence[Tensor] = ()

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return folders.temporary_folder(self.folder, self.step, self.save_id)

    @property
    def final(self) -> Path:
        """What it will be called."""
        return self.folder / checkpoint_name(self.step)

    @property
    def bytes(self) -> int:
        """What all ranks write."""
        return sum(chunk.bytes for chunk in self.chunks)

    def chunks_of(self, rank: int) -> list[Chunk]:
        """A rank's chunks in file order."""
        return in_file_order([chunk for chunk in self.chunks if chunk.rank == rank])

    def run(self) -> CheckpointInfo:
        """Write, and wait until the checkpoint is committed.

        Raises:
            CheckpointError: it could not be written here or on another rank.
        """
        record = self._write_own()
        if self.rank == 0:
            self._commit(record)
        else:
            self._follow(record)
        document = manifest.read_manifest(self.final)
        if document.save_id != self.save_id:
            raise CheckpointError(f"rank 0 gave up saving step {self.step}; its log says why")
        size = sum(path.stat().st_size for path in self.final.iterdir())
        return CheckpointInfo(
            self.step, self.final, self.writer, size, document.saved_at, document.metrics, document.finite
        )

    def _write_own(self) -> RankRecord:
        """Write this rank's file. A failure is put into the record, and what was written is removed."""
        chunks = self.chunks_of(self.rank)
        path = self.temporary / file_name(self.rank)
        if not chunks:
            return RankRecord()
        try:
            entry, spans = save_chunks(path, chunks, self.copies)
            problem = None
            if self.verify:
                folders.forget_cached(path)
                problem = manifest.verify_file(path, entry)
        except OSError as error:
            path.unlink(missing_ok=True)  # first, so that the free bytes are told that a person really has
            problem = str(room.disk_error(error, self.folder, self.bytes))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            return RankRecord(entry=entry, spans=spans, finite=self._finite(chunks))
        path.unlink(missing_ok=True)
        return RankRecord(error=problem)

    def _finite(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the masters that this rank writes are finite; on the snapshot, chunk by chunk."""
        return all(
            bool(torch.isfinite(self.copies[place]).all())
            for place, chunk in enumerate(chunks)
            if split_name(chunk.tensor)[1] == "master"
        )

    def _commit(self, own: RankRecord) -> None:
        try:
            if own.error is not None:
                raise CheckpointError(own.error)
            records = [own] + [self._record_of(rank) for rank in range(1, self.world)]
            document = self._manifest(records)
            manifest.write_manifest(self.temporary, document)
            if manifest.read_manifest(self.temporary) != document:
                raise CheckpointError(
                    f"{self.temporary / manifest.NAME} does not read back as it was written"
                )
            for rank in range(1, self.world):
                self._record_path(rank).unlink()
            folders.commit(self.temporary, self.final)
        except OSError as error:
            failure = room.disk_error(error, self.folder, self.bytes)
            self._give_up(str(failure))
            raise failure from error
        except Exception as error:
            self._give_up(str(error))
            raise

    def _record_of(self, rank: int) -> RankRecord:
        path = self._record_path(rank)
        if not self._wait_for(path.exists):
            raise CheckpointError(
                f"rank {rank} has not written its part of step {self.step} after {format_seconds(self.timeout)}: see "
                "its log, or raise dcp.timeout"
            )
        record = RankRecord.model_validate_json(path.read_bytes())
        if record.error is not None:
            raise CheckpointError(f"rank {rank}: {record.error}")
        return record

    def _follow(self, own: RankRecord) -> None:
        """Leave the record for rank 0, and watch how it ends."""
        failed = self.temporary / _FAILED
        try:
            manifest.write_durably(self._record_path(self.rank), own.model_dump_json().encode())
        except OSError as error:
            self._remove_own()
            if self.temporary.exists():  # else rank 0 has given up already
                raise room.disk_error(error, self.folder, self.bytes) from error
        if not self._wait_for(lambda: failed.exists() or not self.temporary.exists()):
            raise CheckpointError(
                f"rank 0 has not committed step {self.step} after {format_seconds(self.timeout)}"
            )
        if self.temporary.exists():
            self._remove_own()
            raise CheckpointError(RankRecord.model_validate_json(failed.read_bytes()).error)
        if not self._wait_for(self.final.exists, _VISIBLE_S):
            raise CheckpointError(f"rank 0 gave up saving step {self.step}; its log says why")

    def _remove_own(self) -> None:
        """Give back what this rank wrote, perhaps after rank 0 had made room."""
        for path in (self._record_path(self.rank), self.temporary / file_name(self.rank)):
            path.unlink(missing_ok=True)

    def _give_up(self, reason: str) -> None:
        """Make room again; when others watch, leave them the reason."""
        if self.world > 1 and self.temporary.exists():
            for path in self.temporary.iterdir():
                path.unlink(missing_ok=True)
            try:
                manifest.write_durably(
                    self.temporary / _FAILED, RankRecord(error=reason).model_dump_json().encode()
                )
                return
            except OSError:
                pass  # not even room for the reason: the folder goes, and its absence tells
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _manifest(self, records: Sequence[RankRecord]) -> Manifest:
        spans: dict[str, list[Span]] = {}
        for rank, record in enumerate(records):
            for chunk, span in zip(self.chunks_of(rank), record.spans, strict=True):
                spans.setdefault(chunk.tensor, []).append(span)
        tensors: dict[str, list[TensorEntry]] = {part: [] for part in self.parts}
        for chunk in {chunk.tensor: chunk for chunk in self.chunks}.values():
            part, key, name = split_name(chunk.tensor)
            ordered = tuple(sorted(spans[chunk.tensor], key=lambda span: span.offset))
            tensors[part].append(
                TensorEntry(key=key, name=name, shape=chunk.shape, dtype=chunk.dtype, spans=ordered)
            )
        return Manifest(
            step=self.step,
            writer=self.writer,
            format=manifest.FORMAT,
            saved_at=time.time(),
            save_id=self.save_id,
            world=self.world,
            metrics=self.metrics,
            finite=all(record.finite for record in records),
            files={file_name(rank): r.entry for rank, r in enumerate(records) if r.entry is not None},
            parts={
                part: PartEntry(version=version, data=data, tensors=tuple(tensors[part]))
                for part, (version, data) in self.parts.items()
            },
        )

    def _record_path(self, rank: int) -> Path:
        return self.temporary / f"rank-{rank:05d}.json"

    def _wait_for(self, condition: Callable[[], bool], limit: float | None = None) -> bool:
        """Poll until the condition holds; False when it takes longer than the limit (or the process is ending)."""
        deadline, pause = time.monotonic() + (limit or self.timeout), 0.002
        closing_at: float | None = None
        while not condition():
            now = time.monotonic()
            if closing_at is None and self.closing.is_set():
                closing_at = now + _CLOSING_S
            if now > deadline or (closing_at is not None and now > closing_at):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return True


def file_name(rank: int) -> str:
    """The data file of a rank."""
    return f"rank-{rank:05d}.safetensors"
