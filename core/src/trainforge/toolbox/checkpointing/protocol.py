"""One save, from the snapshot to its name: what runs in the background, on every rank, without a collective.

Each rank writes its data, durably, and leaves a record in the temporary folder. Rank 0 waits for all records, writes
`checkpoint.json`, and renames the folder; the other ranks watch the folder to learn how it ended. So a rank that
fails makes the save fail everywhere, with its reason.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainforge.errors import CheckpointError, TrainForgeError
from trainforge.stages import CheckpointInfo, checkpoint_name
from trainforge.toolbox.checkpointing import folders, room
from trainforge.toolbox.checkpointing.documents import NAME, write_durably
from trainforge.toolbox.checkpointing.layout import Chunk, split_name
from trainforge.toolbox.checkpointing.manifests import StoredManifest, StoredPart, T, same, write_manifest
from trainforge.units import format_seconds

_CLOSING_S = 20.0
_VISIBLE_S = 10.0
_FAILED = "failed.json"


class RankRecord(BaseModel):
    """What a rank wrote, in the words of its format, or why it could not."""

    error: str | None = None
    finite: bool = True
    content: dict[str, Any] = {}


@dataclass
class SaveFacts:
    """What is known of a save before anything is written.

    Attributes:
        step, save_id, writer: as in `checkpoint.json`.
        folder: where checkpoints lie.
        rank, world: this rank and how many there are.
        chunks: those of all ranks.
        parts: (version, plain data) of each part.
        metrics: what was measured at this step.
        timeout: longest wait for another rank, in seconds.
        closing: set when the process is about to end: then waiting for others is cut short.
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
    timeout: float
    closing: threading.Event = field(default_factory=threading.Event)

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
        """Of the state of all ranks."""
        return sum(chunk.bytes for chunk in self.chunks)

    def chunks_of(self, rank: int) -> list[Chunk]:
        """A rank's chunks, in the order in which they are written: wide elements first.

        So every chunk in a file without gaps is aligned to its element.
        """
        return sorted(
            (chunk for chunk in self.chunks if chunk.rank == rank), key=lambda chunk: -chunk.item_bytes
        )


@contextlib.contextmanager
def telling_others(facts: SaveFacts) -> Iterator[None]:
    """What fails in here keeps this rank from writing: rank 0 hears why, and does not wait for its part."""
    try:
        yield
    except BaseException as error:
        if facts.rank:
            record = RankRecord(error=_worded(error))
            with contextlib.suppress(OSError):  # then rank 0 waits, as for a rank that was killed
                write_durably(_record_path(facts, facts.rank), record.model_dump_json().encode())
        raise


class Save(ABC):
    """A save in flight on one rank. A format says how data and document are written.

    Attributes:
        facts: of the save.
        document: the manifest as it was committed; None until then.
    """

    def __init__(self, facts: SaveFacts) -> None:
        self.facts = facts
        self.document: StoredManifest[Any] | None = None

    @abstractmethod
    def write(self, chunks: Sequence[Chunk]) -> RankRecord:
        """Write this rank's chunks, durably. An `OSError` is worded by the caller; anything raised fails the save."""

    @abstractmethod
    def undo(self) -> None:
        """Remove what `write` has left; it may have been called or not."""

    @abstractmethod
    def manifest(self, records: Sequence[RankRecord]) -> StoredManifest[Any]:
        """What `checkpoint.json` is to say (rank 0, with the records of all ranks)."""

    @abstractmethod
    def read(self, folder: Path) -> StoredManifest[Any]:
        """What `checkpoint.json` in a folder says, checked."""

    @abstractmethod
    def size(self) -> int:
        """Bytes of the checkpoint at `facts.final`."""

    def common(self, records: Sequence[RankRecord]) -> dict[str, Any]:
        """The fields of a manifest that are the same in every format, but `format` and `parts`."""
        facts = self.facts
        return {
            "step": facts.step,
            "writer": facts.writer,
            "saved_at": time.time(),
            "save_id": facts.save_id,
            "world": facts.world,
            "metrics": facts.metrics,
            "finite": all(record.finite for record in records),
        }

    def parts(self, entry: Callable[[Chunk], T]) -> dict[str, StoredPart[T]]:
        """The parts of a manifest; `entry` describes a tensor, of which it is given any chunk."""
        facts = self.facts
        tensors: dict[str, list[T]] = {part: [] for part in facts.parts}
        for chunk in {chunk.tensor: chunk for chunk in facts.chunks}.values():
            tensors[split_name(chunk.tensor)[0]].append(entry(chunk))
        return {
            part: StoredPart(version=version, data=data, tensors=tuple(tensors[part]))
            for part, (version, data) in facts.parts.items()
        }

    def committed(self) -> CheckpointInfo:
        """What lies at `facts.final` now.

        Raises:
            CheckpointError: it is not this save.
        """
        facts, manifest = self.facts, self.read(self.facts.final)
        if manifest.save_id != facts.save_id:
            raise self.given_up()
        self.document = manifest
        return CheckpointInfo(
            facts.step,
            facts.final,
            facts.writer,
            self.size(),
            manifest.saved_at,
            manifest.metrics,
            manifest.finite,
        )

    def run(self) -> CheckpointInfo:
        """Write, and wait until the checkpoint is committed.

        Raises:
            CheckpointError: it could not be written here or on another rank.
        """
        record = self._write_own()
        if self.facts.rank == 0:
            self._commit(record)
        else:
            self._follow(record)
        return self.committed()

    def _write_own(self) -> RankRecord:
        """Write this rank's data. A failure is put into the record, and what was written is removed."""
        facts = self.facts
        try:
            return self.write(facts.chunks_of(facts.rank))
        except OSError as error:
            self._undo()  # first, so that the free bytes are told that a person really has
            return RankRecord(error=str(room.disk_error(error, facts.folder, facts.bytes)))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self._undo()
            return RankRecord(error=_worded(error))

    def _commit(self, own: RankRecord) -> None:
        facts = self.facts
        try:
            if own.error is not None:
                raise CheckpointError(own.error)
            records = [own] + [self._record_of(rank) for rank in range(1, facts.world)]
            self._describe(records)
            for rank in range(1, facts.world):
                self._record_path(rank).unlink()
            folders.commit(facts.temporary, facts.final)
        except OSError as error:
            failure = room.disk_error(error, facts.folder, facts.bytes)
            self._give_up(str(failure))
            raise failure from error
        except Exception as error:
            self._give_up(str(error))
            raise

    def _describe(self, records: Sequence[RankRecord]) -> None:
        """Write `checkpoint.json` into the temporary folder, durably, and read it back."""
        manifest = self.manifest(records)
        write_manifest(self.facts.temporary, manifest)
        if not same(self.read(self.facts.temporary), manifest):
            raise CheckpointError(f"{self.facts.temporary / NAME} does not read back as it was written")

    def _record_of(self, rank: int) -> RankRecord:
        path = self._record_path(rank)
        if not self._wait_for(path.exists):
            raise CheckpointError(
                f"rank {rank} has not written its part of step {self.facts.step} after "
                f"{format_seconds(self.facts.timeout)}: see its log, or raise {self.facts.writer}.timeout"
            )
        record = RankRecord.model_validate_json(path.read_bytes())
        if record.error is not None:
            raise CheckpointError(f"rank {rank}: {record.error}")
        return record

    def _follow(self, own: RankRecord) -> None:
        """Leave the record for rank 0, and watch how it ends."""
        facts = self.facts
        failed = facts.temporary / _FAILED
        try:
            write_durably(self._record_path(facts.rank), own.model_dump_json().encode())
        except FileNotFoundError:
            self._remove_own()  # rank 0 has given up and made room meanwhile; it is about to say why
        except OSError as error:
            self._remove_own()
            if facts.temporary.exists():  # else rank 0 has given up already
                raise room.disk_error(error, facts.folder, facts.bytes) from error
        if not self._wait_for(lambda: failed.exists() or not facts.temporary.exists()):
            raise CheckpointError(
                f"rank 0 has not committed step {facts.step} after {format_seconds(facts.timeout)}"
            )
        if facts.temporary.exists():
            self._remove_own()
            raise CheckpointError(RankRecord.model_validate_json(failed.read_bytes()).error)
        if not self._wait_for(facts.final.exists, _VISIBLE_S):
            self._undo()
            raise self.given_up()

    def given_up(self) -> CheckpointError:
        """What another rank says when the checkpoint did not come to be and nobody said why."""
        return CheckpointError(f"rank 0 gave up saving step {self.facts.step}; its log says why")

    def _remove_own(self) -> None:
        """Give back what this rank wrote, perhaps after rank 0 had made room."""
        with contextlib.suppress(OSError):
            self._record_path(self.facts.rank).unlink(missing_ok=True)
        self._undo()

    def _undo(self) -> None:
        """Undo as far as the disk lets us: whoever comes here has a reason to tell, which must not be lost."""
        with contextlib.suppress(OSError):
            self.undo()

    def _give_up(self, reason: str) -> None:
        """Make room again; when others watch, leave them the reason."""
        self._undo()
        temporary = self.facts.temporary
        if self.facts.world > 1 and temporary.exists():
            for path in temporary.iterdir():
                path.unlink(missing_ok=True)
            try:
                write_durably(temporary / _FAILED, RankRecord(error=reason).model_dump_json().encode())
                return
            except OSError:
                pass  # not even room for the reason: the folder goes, and its absence tells
        shutil.rmtree(temporary, ignore_errors=True)

    def _record_path(self, rank: int) -> Path:
        return _record_path(self.facts, rank)

    def _wait_for(self, condition: Callable[[], bool], limit: float | None = None) -> bool:
        """Poll until the condition holds; False when it takes longer than the limit (or the process is ending)."""
        deadline, pause = time.monotonic() + (limit or self.facts.timeout), 0.002
        closing_at: float | None = None
        while not condition():
            now = time.monotonic()
            if closing_at is None and self.facts.closing.is_set():
                closing_at = now + _CLOSING_S
            if now > deadline or (closing_at is not None and now > closing_at):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return True


def _record_path(facts: SaveFacts, rank: int) -> Path:
    return facts.temporary / f"rank-{rank:05d}.json"


def _worded(error: BaseException) -> str:
    """An error as another rank tells it."""
    return str(error) if isinstance(error, TrainForgeError) else f"{type(error).__name__}: {error}"
