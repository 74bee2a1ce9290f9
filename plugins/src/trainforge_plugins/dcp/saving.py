"""What `dcp` writes in a save: one safetensors file per rank, read back, and `checkpoint.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing import folders
from trainforge.toolbox.checkpointing.finite import is_finite
from trainforge.toolbox.checkpointing.layout import Chunk, split_name
from trainforge.toolbox.checkpointing.protocol import RankRecord, Save, SaveFacts
from trainforge_plugins.dcp import manifest
from trainforge_plugins.dcp.manifest import FORMAT, FileEntry, Manifest, Span, TensorEntry
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

    def manifest(self, records: Sequence[RankRecord]) -> Manifest:
        """Where all that the ranks wrote lies."""
        spans: dict[str, list[Span]] = {}
        files: dict[str, FileEntry] = {}
        for rank, record in enumerate(records):
            if record.content:
                files[file_name(rank)] = FileEntry.model_validate(record.content["entry"])
            own = [Span.model_validate(span) for span in record.content.get("spans", ())]
            for chunk, span in zip(self.facts.chunks_of(rank), own, strict=True):
                spans.setdefault(chunk.tensor, []).append(span)

        def entry(chunk: Chunk) -> TensorEntry:
            _, key, name = split_name(chunk.tensor)
            ordered = tuple(sorted(spans[chunk.tensor], key=lambda span: span.offset))
            return TensorEntry(key=key, name=name, shape=chunk.shape, dtype=chunk.dtype, spans=ordered)

        return Manifest(**self.common(records), format=FORMAT, files=files, parts=self.parts(entry))

    def read(self, folder: Path) -> Manifest:
        """What lies there."""
        return manifest.read_manifest(folder)

    def size(self) -> int:
        """Of the folder: all of it lies there."""
        return sum(path.stat().st_size for path in self.facts.final.iterdir())

    def _finite(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the masters that this rank writes are finite; on the snapshot, chunk by chunk."""
        return all(
            is_finite(self._copies[place], chunk)
            for place, chunk in enumerate(chunks)
            if split_name(chunk.tensor)[1] == "master"
        )


def file_name(rank: int) -> str:
    """The data file of a rank."""
    return f"rank-{rank:05d}.safetensors"
