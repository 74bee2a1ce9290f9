"""What `vault` writes in a save: the chunks that are new, in packs, and a manifest of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import xxhash

from trainforge.errors import CheckpointError
from trainforge.stages import CheckpointInfo
from trainforge.toolbox.checkpointing.documents import NAME, canonical
from trainforge.toolbox.checkpointing.layout import Chunk, split_name
from trainforge.toolbox.checkpointing.protocol import RankRecord, Save, SaveFacts
from trainforge_loongforge.vault import manifest
from trainforge_loongforge.vault.manifest import Manifest, PartEntry, TensorEntry, chunk_of
from trainforge_loongforge.vault.snapshot import Snapshot
from trainforge_loongforge.vault.store import Store, Written


class VaultSave(Save):
    """A save in flight on one rank.

    Attributes:
        written: what this rank stored; None until then.
        document: the manifest as it was committed; None until then.

    Args:
        facts: of the save.
        snapshot: this rank's chunks, in the order of `facts.chunks_of`.
        store: where they go.
    """

    def __init__(self, facts: SaveFacts, snapshot: Snapshot, store: Store) -> None:
        super().__init__(facts)
        self._snapshot, self._store = snapshot, store
        self.written: Written | None = None
        self.document: Manifest | None = None

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

    def describe(self, records: Sequence[RankRecord]) -> None:
        """Write `checkpoint.json` and read it back."""
        document = self._manifest(records)
        manifest.write_manifest(self.facts.temporary, document)
        back = manifest.read_manifest(self.facts.temporary)
        # as text: NaN is not equal to itself
        if canonical(back.model_dump()) != canonical(document.model_dump()):
            raise CheckpointError(f"{self.facts.temporary / NAME} does not read back as it was written")

    def committed(self) -> CheckpointInfo:
        """What lies there under the final name."""
        facts = self.facts
        document = manifest.read_manifest(facts.final)
        if document.save_id != facts.save_id:
            raise self.given_up()
        self.document = document
        return CheckpointInfo(
            facts.step,
            facts.final,
            facts.writer,
            document.bytes,
            document.saved_at,
            document.metrics,
            document.finite,
        )

    def _has_its_name(self) -> bool:
        try:
            return manifest.read_manifest(self.facts.final).save_id == self.facts.save_id
        except CheckpointError:
            return False

    def _manifest(self, records: Sequence[RankRecord]) -> Manifest:
        facts = self.facts
        found: dict[str, list[tuple[int, tuple[int, str, str]]]] = {}
        for rank, record in enumerate(records):
            for chunk, ref in zip(facts.chunks_of(rank), record.content["chunks"], strict=True):
                found.setdefault(chunk.tensor, []).append((chunk.offset, tuple(ref)))
        tensors: dict[str, list[TensorEntry]] = {part: [] for part in facts.parts}
        for chunk in {chunk.tensor: chunk for chunk in facts.chunks}.values():
            part, key, name = split_name(chunk.tensor)
            chunks = tuple(ref for _, ref in sorted(found[chunk.tensor]))
            tensors[part].append(
                TensorEntry(key=key, name=name, shape=chunk.shape, dtype=chunk.dtype, chunks=chunks)
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
            bytes=facts.bytes,
            new_bytes=sum(record.content["new_bytes"] for record in records),
            plan=_plan_digest(facts.folder.parent),
            versions={name: version(name) for name in ("trainforge", "trainforge-loongforge", "torch")},
            parts={
                part: PartEntry(version=number, data=data, tensors=tuple(tensors[part]))
                for part, (number, data) in facts.parts.items()
            },
        )


def _plan_digest(run_dir: Path) -> str:
    """Of the plan that the run was started with last: which plugins, which versions, which recipe."""
    try:
        return xxhash.xxh3_128_hexdigest((run_dir / "plan.json").read_bytes())
    except OSError:
        return ""
