"""`VaultCheckpoint`: the stage, in the format of `manifest.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from trainforge.checkpoints import remove_folder
from trainforge.errors import CheckpointError, ConfigError
from trainforge.stages import Extent, NamedTensor, Slot
from trainforge.toolbox.checkpointing import folders
from trainforge.toolbox.checkpointing.documents import NAME, read_sealed
from trainforge.toolbox.checkpointing.layout import Chunk, Held
from trainforge.toolbox.checkpointing.protocol import Save, SaveFacts
from trainforge.toolbox.checkpointing.stage import FolderCheckpoint
from trainforge.toolbox.host_limits import host_limit
from trainforge.units import format_bytes
from trainforge.wording import counted
from trainforge_loongforge.vault import manifest
from trainforge_loongforge.vault.hashing import Ref, give_way
from trainforge_loongforge.vault.loading import targets
from trainforge_loongforge.vault.locking import lock, locked
from trainforge_loongforge.vault.manifest import Manifest
from trainforge_loongforge.vault.packs import CHUNK_BYTES
from trainforge_loongforge.vault.saving import VaultSave
from trainforge_loongforge.vault.snapshot import SMALL_BYTES, Buffers, Snapshot, holder, overtakable
from trainforge_loongforge.vault.storage import Storage
from trainforge_loongforge.vault.store import Store

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge_loongforge.vault import VaultSection

PACKS = "packs"
_PATIENCE_S = 60.0  # for who prunes by hand beside a run
_HALF = 0.5
_PLACED = 64  # chunks of a page-locked buffer, of which one may be lost to what does not fit


class VaultCheckpoint(FolderCheckpoint):
    """Checkpoints whose data is shared: what has not changed is written once, whichever steps have it."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, ctx: Context, config: VaultSection) -> None:
        self._config = config
        folder = ctx.run_dir / "checkpoints"
        self._storage = Storage.choose(config.storage, folder)
        self._store = Store(folder / PACKS, self._storage, compress=config.compress)
        self._buffers = Buffers()
        self._snapshot_of: Snapshot | None = None  # while it is being written
        self._known: dict[tuple[str, int, int], Ref] = {}
        self._addresses: dict[tuple[Path, int], frozenset[bytes]] = {}
        super().__init__(ctx, background=config.background, timeout=config.timeout)
        self._reserving: threading.Thread | None = None
        self._staged = threading.Event()  # page-locked buffers have been made, or will not be
        self._staged.set()
        self._names: set[str] = set()
        if self._in_run:
            self._names = {spec.name for spec in ctx.model.parameters if spec.trainable}
            self._begin(ctx)

    # -------------------------------------------------------------------------------------------------- starting

    def _begin(self, ctx: Context) -> None:
        if self._rank == 0:
            reason = f" ({self._storage.reason})" if self._storage.reason else ""
            ctx.console.note(f"vault: packs are written in mode {self._storage.mode}{reason}")
            if self._folder.is_dir():
                with locked(self._folder, self._timeout):
                    self._collect_or_say()
        memory = ctx.built.get("memory")
        if memory is not None and self._background is not False:
            self._staged.clear()
            self._reserving = threading.Thread(
                target=self._reserve,
                args=(ctx.device, memory.state().tensors),
                name="vault buffers",
                daemon=True,
            )
            self._reserving.start()

    def _reserve(self, device: torch.device, tensors: Sequence[NamedTensor]) -> None:
        """Have buffers ready for the first save and the first update that overtakes it, where RAM has room for them.

        Where they cannot be had, the save that needs them says so.
        """
        with contextlib.suppress(ConfigError):
            self._reserve_staging(device, tensors)
            self._reserve_copies(tensors)

    def _reserve_staging(self, device: torch.device, tensors: Sequence[NamedTensor]) -> None:
        try:
            size = sum(named.tensor.nbytes for named in tensors if named.tensor.device.type != "cpu")
            size = size // self._world * _PLACED // (_PLACED - 1)
            limit = host_limit(None)
            if size and (limit is None or size <= limit.free * _HALF):
                torch.accelerator.set_device_index(device)
                self._staging.reserve(size)
        finally:
            self._staged.set()

    def _reserve_copies(self, tensors: Sequence[NamedTensor]) -> None:
        sizes = [
            named.tensor.numel() * named.dtype.itemsize
            for named in tensors
            if named.tensor.device.type == "cpu" and named.extent.name in self._names
        ]
        chunks = sum(-(-size // CHUNK_BYTES) for size in sizes if size > SMALL_BYTES) // self._world
        give_way()
        self._buffers.reserve(min(chunks, self._most_copies()))

    # ---------------------------------------------------------------------------------------------------- saving

    def _lock(self) -> list[int]:
        return [lock(self._folder, self._timeout)]

    def _save_of(self, facts: SaveFacts, held: Mapping[str, Sequence[Held]]) -> tuple[Save, bool]:
        self._staged.wait()
        chunks = facts.chunks_of(self._rank)
        live = {chunk: found for chunk in chunks if (found := overtakable(self._names, held, chunk))}
        fixed = [chunk for chunk in chunks if chunk not in live]
        staged = self._copied(fixed, held)
        background = staged is not None
        copies = {} if staged is None else dict(zip(fixed, staged, strict=True))
        snapshot = Snapshot(self._buffers, self._most_copies() if background else 0)
        for chunk in chunks:
            known = self._known.get(_place(chunk))
            if chunk in copies:
                snapshot.add_copied(chunk, copies[chunk], known)
            else:
                snapshot.add_live(chunk, live.get(chunk) or holder(held, chunk), known)
        self._snapshot_of = snapshot
        return VaultSave(facts, snapshot, self._store), background

    def _most_copies(self) -> int:
        """How many chunks may be copied while updates overtake the writing."""
        share = _HALF if self._config.copies == "auto" else self._config.copies
        limit, made = host_limit(None), self._buffers.made
        if limit is None:
            return 2**31
        return max(made, int((limit.free // CHUNK_BYTES + made) * share))

    def before_write(self, slots: Sequence[Slot]) -> None:
        """Let what the update is about to change be copied, or written first."""
        snapshot = self._snapshot_of
        if snapshot is not None:
            snapshot.before_write({slot.extent.name for slot in slots})

    def _ended(self, save: Save) -> None:
        assert isinstance(save, VaultSave)
        snapshot, self._snapshot_of = self._snapshot_of, None
        if snapshot is not None:
            snapshot.end()
            self._metrics["slowdown_ms"] = snapshot.delayed_s * 1000
        if not isinstance(save.document, Manifest) or save.written is None:
            return
        own = save.facts.chunks_of(self._rank)
        self._known = {_place(chunk): ref for chunk, ref in zip(own, save.written.refs, strict=True)}
        self._metrics["new_bytes"] = float(save.document.new_bytes)
        self._metrics["retried_transfers"] = float(self._storage.retried)

    # --------------------------------------------------------------------------------------------------- reading

    def _read(self, path: Path) -> Manifest:
        return manifest.read_manifest(path)

    def _load(self, path: Path, stored: Any, wanted: Mapping[str, Sequence[Held]]) -> None:
        entries = dict(stored.tensors())
        for tensor, spans in wanted.items():
            for offset, ref in entries[tensor].refs:
                size = ref.length // spans[0].named.dtype.itemsize
                self._known[tensor, offset, size] = ref
        try:
            self._store.read_many(targets(entries, wanted))
        except CheckpointError as error:
            problems = self.verify(path)
            raise CheckpointError(problems[0] if problems else f"{path}: {error}") from error

    def _load_range(
        self, path: Path, stored: Any, tensor: str, entry: Any, start: int, out: torch.Tensor
    ) -> None:
        extent = Extent(entry.name, entry.shape, start, len(out))
        held = Held(start, len(out), NamedTensor(entry.key, extent, out))
        try:
            self._store.read_many(targets({tensor: entry}, {tensor: [held]}))
        except CheckpointError as error:
            problems = self.verify(path)
            raise CheckpointError(problems[0] if problems else f"{path}: {error}") from error

    def verify(self, path: Path) -> list[str]:
        """Read every chunk of the checkpoint from the disk; a sentence for each that is damaged or missing."""
        try:
            document = manifest.read_manifest(path)
        except CheckpointError as error:
            return [str(error)]
        problems = self._store.verify(ref for _, entry in document.tensors() for _, ref in entry.refs)
        labels = manifest.labelled(document, problems)
        return [f"step {document.step} is damaged in {labels[ref]}: {why}" for ref, why in problems.items()]

    def describe(self, path: Path) -> Mapping[str, Any]:
        """Sizes, and a digest of each tensor: of its dtype, its shape and its chunks."""
        document = manifest.read_manifest(path)
        return {
            "bytes": document.bytes,
            "new_bytes": document.new_bytes,
            "tensors": {
                label: xxhash.xxh3_128_hexdigest(
                    " ".join(
                        [entry.dtype, *map(str, entry.shape), *(chunk for _, chunk, _ in entry.chunks)]
                    ).encode()
                )
                for label, entry in document.tensors()
            },
            "cuts": {
                label: ",".join(str(length) for length, _, _ in entry.chunks)
                for label, entry in document.tensors()
            },
            "tensor_bytes": {label: entry.bytes for label, entry in document.tensors()},
        }

    # -------------------------------------------------------------------------------------------------- making room

    def remove(self, paths: Sequence[Path]) -> int:
        """Delete checkpoints, and the chunks that none of those that stay has.

        Raises:
            CheckpointError: the disk refuses to; what is left whole can be used.
        """
        with locked(self._folder, _PATIENCE_S):
            try:
                freed = sum(remove_folder(path) for path in paths)
                return freed + self._collect()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints in {self._folder} cannot be deleted, or not all that only they had "
                    f"({error.strerror or error}): see the folder's permissions and free bytes, and prune again"
                ) from error

    def _pruned(self) -> None:
        self._collect_or_say()

    def _collect_or_say(self) -> None:
        """Make room; what is not possible now, as on a full disk, is tried again after the next save."""
        try:
            self._collect()
        except OSError as error:
            self._console.warn(
                f"vault: no room can be made in {self._folder / PACKS} now ({error.strerror or error}); no checkpoint "
                "is concerned, and the next save tries again"
            )

    def _collect(self) -> int:
        """Delete chunks that no checkpoint has; the lock is held. Gives the bytes freed."""
        live: set[bytes] = set()
        try:
            for path in self._folder.iterdir():
                if folders.holds_checkpoint(path.name):
                    live |= self._addresses_of(path)
        except CheckpointError as error:
            self._console.warn(f"vault: no room is made while a checkpoint cannot be read: {error}")
            return 0
        collected = self._store.collect(live)
        for pack, why in collected.damaged.items():
            self._console.warn(f"vault: {pack} is kept although it is damaged: {why}")
        if collected.missing:
            self._console.warn(
                f"vault: no pack holds {counted(len(collected.missing), 'chunk')} that checkpoints name: `forge "
                f"checkpoints {self._folder.parent} verify` says which of them cannot be restored"
            )
        self._metrics["overhead_bytes"] = float(collected.overhead_bytes)
        if collected.freed_bytes:
            self._console.log(
                f"vault: {format_bytes(collected.freed_bytes)} freed, {format_bytes(collected.rewritten_bytes)} "
                f"written anew, {format_bytes(collected.overhead_bytes)} kept beside what is needed"
            )
        return max(0, collected.freed_bytes - collected.rewritten_bytes)

    def _addresses_of(self, path: Path) -> frozenset[bytes]:
        """Of the chunks of a checkpoint; none of one in another format.

        Raises:
            CheckpointError: it is ours, or nobody's, and cannot be read.
        """
        about = (path / NAME).stat() if (path / NAME).exists() else None
        key = (path, about.st_mtime_ns if about else 0)
        if key not in self._addresses:
            self._addresses = {old: found for old, found in self._addresses.items() if old[0].is_dir()}
            self._addresses[key] = _read_addresses(path, self._plugin)
        return self._addresses[key]

    def close(self) -> None:
        """Wait for the save in flight; raises what went wrong and was not yet told."""
        self._staged.wait()
        try:
            super().close()
        finally:
            self._store.close()
            self._buffers.close()
            if self._reserving is not None:
                self._reserving.join()


def _read_addresses(path: Path, plugin: str) -> frozenset[bytes]:
    try:
        return manifest.addresses(manifest.read_manifest(path))
    except CheckpointError:
        try:
            writer = read_sealed(path / NAME).get("writer")
        except CheckpointError as error:
            refused = isinstance(error.__cause__, OSError) and not isinstance(
                error.__cause__, FileNotFoundError
            )
            if path.name.startswith(folders.ASIDE) and not refused:  # else it may be whole
                return frozenset()  # nobody can use it any more
            raise
        if writer == plugin or not isinstance(writer, str):
            raise
        return frozenset()


def _place(chunk: Chunk) -> tuple[str, int, int]:
    return chunk.tensor, chunk.offset, chunk.length
