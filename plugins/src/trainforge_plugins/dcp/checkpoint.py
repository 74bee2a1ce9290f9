"""`DcpCheckpoint`: the stage, in the format of `manifest.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainforge.toolbox.checkpointing.layout import Held
from trainforge.toolbox.checkpointing.protocol import Save, SaveFacts
from trainforge.toolbox.checkpointing.stage import FolderCheckpoint
from trainforge_plugins.dcp import manifest
from trainforge_plugins.dcp.manifest import Manifest
from trainforge_plugins.dcp.reading import load_range, load_spans
from trainforge_plugins.dcp.saving import DcpSave
from trainforge_plugins.dcp.soundness import CHUNK_BYTES

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_plugins.dcp import DcpSection


class DcpCheckpoint(FolderCheckpoint):
    """Checkpoints through torch.distributed.checkpoint; each is a folder of its own."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, ctx: Context, config: DcpSection) -> None:
        super().__init__(ctx, background=config.background, timeout=config.timeout)
        self._verify = config.verify

    def verify(self, path: Path) -> list[str]:
        """Compare every byte of the checkpoint with its checksums; a sentence for each problem."""
        return manifest.verify(path)

    def describe(self, path: Path) -> Mapping[str, Any]:
        """A digest of each tensor's checksums, how it is cut, and its size."""
        return manifest.describe(manifest.read_manifest(path))

    def _save_of(self, facts: SaveFacts, held: Mapping[str, Sequence[Held]]) -> tuple[Save, bool]:
        copies, background = self._snapshot(facts.chunks_of(facts.rank), held)
        return DcpSave(facts, copies, verify=self._verify), background

    def _read(self, path: Path) -> Manifest:
        return manifest.read_manifest(path)

    def _load(self, path: Path, stored: Any, wanted: Mapping[str, Sequence[Held]]) -> None:
        load_spans(path, stored, wanted)

    def _load_range(self, path: Path, stored: Any, tensor: str, entry: Any, start: int, out: Tensor) -> None:
        load_range(path, stored, tensor, entry, start, out)
