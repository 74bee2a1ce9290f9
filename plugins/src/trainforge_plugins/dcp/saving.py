"""What `dcp` writes in a save: one safetensors file per rank, read back, and `checkpoint.json`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from trainforge.errors import CheckpointError
from trainforge.stages import CheckpointInfo
from trainforge.toolbox.checkpointing import folders
from trainforge.toolbox.checkpointing.documents import NAME
from trainforge.toolbox.checkpointing.finite import is_finite
from trainforge.toolbox.checkpointing.layout import Chunk, split_name
from trainforge.toolbox.checkpointing.protocol import RankRecord, Save, SaveFacts
from trainforge_plugins.dcp import manifest
from trainforge_plugins.dcp.manifest import FileEntry, Manifest, PartEntry, Span, TensorEntry
from trainforge_plugins.dcp.storage import save_chunks


class DcpSave(Save):
    """A save in flight on one rank.

    Args:
        facts: of the save.
        copies: the snapshot of this rank's chunks, in file order; or what copies each when it is written.
        verify: read the files back.
    """

    def __init__(self, facts: SaveFacts, copies: Sequence[Tensor], *, verify: bool) -> None:
        super().__init__(facts)
        self._copies, self._verify = copies, verify

    def write(self, chunks: Sequence[Chunk]) -> RankRecord:
        """Write this rank's file. The record has its entry and the spans, in the order of the chunks."""
        if not chunks:
            return RankRecord()
        path = self.facts.temporary / file_name(self.facts.rank)
        entry, spans = save_chunks(path, chunks, self._copies)
        if self._verify:
            folders.forget_cached(path)
            problem = manifest.verify_file(path, entry)
            if problem is not None:
                raise CheckpointError(problem)
        content = {"entry": entry.model_dump(), "spans": [span.model_dump() for span in spans]}
        return RankRecord(finite=self._finite(chunks), content=content)

    def undo(self) -> None:
        """Remove this rank's file."""
        (self.facts.temporary / file_name(self.facts.rank)).unlink(missing_ok=True)

    def describe(self, records: Sequence[RankRecord]) -> None:
        """Write `checkpoint.json` and read it back."""
        document = self._manifest(records)
        manifest.write_manifest(self.facts.temporary, document)
        if manifest.read_manifest(self.facts.temporary) != document:
            raise CheckpointError(f"{self.facts.temporary / NAME} does not read back as it was written")

    def committed(self) -> CheckpointInfo:
        """What lies there under the final name."""
        facts = self.facts
        document = manifest.read_manifest(facts.final)
        if document.save_id != facts.save_id:
            raise self.given_up()
        size = sum(path.stat().st_size for path in facts.final.iterdir())
        return CheckpointInfo(
            facts.step, facts.final, facts.writer, size, document.saved_at, document.metrics, document.finite
        )

    def _finite(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the masters that this rank writes are finite; on the snapshot, chunk by chunk."""
        return all(
            is_finite(self._copies[place], chunk)
            for place, chunk in enumerate(chunks)
            if split_name(chunk.tensor)[1] == "master"
        )

    def _manifest(self, records: Sequence[RankRecord]) -> Manifest:
        facts = self.facts
        spans: dict[str, list[Span]] = {}
        files: dict[str, FileEntry] = {}
        for rank, record in enumerate(records):
            if record.content:
                files[file_name(rank)] = FileEntry.model_validate(record.content["entry"])
            own = [Span.model_validate(span) for span in record.content.get("spans", ())]
            for chunk, span in zip(facts.chunks_of(rank), own, strict=True):
                spans.setdefault(chunk.tensor, []).append(span)
        tensors: dict[str, list[TensorEntry]] = {part: [] for part in facts.parts}
        for chunk in {chunk.tensor: chunk for chunk in facts.chunks}.values():
            part, key, name = split_name(chunk.tensor)
            ordered = tuple(sorted(spans[chunk.tensor], key=lambda span: span.offset))
            tensors[part].append(
                TensorEntry(key=key, name=name, shape=chunk.shape, dtype=chunk.dtype, spans=ordered)
            )
        return Manifest(
            step=facts.step,
            writer=facts.writer,
            format=manifest.FORMAT,
            saved_at=time.time(),
            save_id=facts.save_id,
            world=facts.world,
            metrics=facts.metrics,
            finite=all(record.finite for record in records),
            files=files,
            parts={
                part: PartEntry(version=version, data=data, tensors=tuple(tensors[part]))
                for part, (version, data) in facts.parts.items()
            },
        )


def file_name(rank: int) -> str:
    """The data file of a rank."""
    return f"rank-{rank:05d}.safetensors"
