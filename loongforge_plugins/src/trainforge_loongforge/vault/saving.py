"""What `vault` writes in a save: the chunks that are new, in packs, and a manifest of all."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import xxhash

from trainforge.errors import CheckpointError
from trainforge.toolbox.checkpointing.layout import Chunk, split_name
from trainforge.toolbox.checkpointing.protocol import RankRecord, Save, SaveFacts
from trainforge_loongforge.vault import manifest
from trainforge_loongforge.vault.manifest import FORMAT, Manifest, TensorEntry, chunk_of
from trainforge_loongforge.vault.snapshot import Snapshot
from trainforge_loongforge.vault.store import Store, Written


class VaultSave(Save):
    """A save in flight on one rank.

    Attributes:
        written: what this rank stored; None until then.

    Args:
        facts: of the save.
        snapshot: this rank's chunks, in the order of `facts.chunks_of`.
        store: where they go.
    """

    def __init__(self, facts: SaveFacts, snapshot: Snapshot, store: Store) -> None:
        super().__init__(facts)
        self._snapshot, self._store = snapshot, store
        self.written: Written | None = None

    def write(self, chunks: Sequence[Chunk]) -> RankRecord:
        """Store what is new. The record has every chunk of this rank, in order."""
        try:
            self.written = self._store.write(self.facts.save_id, self.facts.rank, self._snapshot.pieces)
        finally:
            self._snapshot.end()
        refs = zip(chunks, self.written.refs, strict=True)
        content = {
            "chunks": [chunk_of(ref, chunk.item_bytes) for chunk, ref in refs],
            "new_bytes": self.written.new_bytes,
        }
        return RankRecord(finite=self._snapshot.finite, content=content)

    def undo(self) -> None:
        """Remove this rank's packs, unless the checkpoint has its name and the disk did not let it be taken back."""
        self._snapshot.end()
        if not self._has_its_name():
            self._store.undo(self.facts.save_id, self.facts.rank)

    def manifest(self, records: Sequence[RankRecord]) -> Manifest:
        """Which chunks make up each tensor."""
        found: dict[str, list[tuple[int, tuple[int, str, str]]]] = {}
        for rank, record in enumerate(records):
            for chunk, ref in zip(self.facts.chunks_of(rank), record.content["chunks"], strict=True):
                found.setdefault(chunk.tensor, []).append((chunk.offset, tuple(ref)))

        def entry(chunk: Chunk) -> TensorEntry:
            _, key, name = split_name(chunk.tensor)
            chunks = tuple(ref for _, ref in sorted(found[chunk.tensor]))
            return TensorEntry(key=key, name=name, shape=chunk.shape, dtype=chunk.dtype, chunks=chunks)

        return Manifest(
            **self.common(records),
            format=FORMAT,
            parts=self.parts(entry),
            bytes=self.facts.bytes,
            new_bytes=sum(record.content["new_bytes"] for record in records),
            versions={name: version(name) for name in ("trainforge", "trainforge-loongforge", "torch")},
            plan=_plan_digest(self.facts.folder.parent),
        )

    def read(self, folder: Path) -> Manifest:
        """What lies there."""
        return manifest.read_manifest(folder)

    def size(self) -> int:
        """Of the state, wherever its chunks lie."""
        return self.facts.bytes

    def _has_its_name(self) -> bool:
        try:
            return manifest.read_manifest(self.facts.final).save_id == self.facts.save_id
        except CheckpointError:
            return False


def _plan_digest(run_dir: Path) -> str:
    """Of the plan that the run was started with last: which plugins, which versions, which recipe."""
    try:
        return xxhash.xxh3_128_hexdigest((run_dir / "plan.json").read_bytes())
    except OSError:
        return ""
