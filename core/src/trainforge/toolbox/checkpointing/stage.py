"""`FolderCheckpoint`: a stage that keeps checkpoints in folders. A plugin brings the format, this class the rest.

It agrees with the other ranks, takes the snapshot, and lets the writing go on behind training.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash
from torch import Tensor

from trainforge.errors import CheckpointError, ConfigError
from trainforge.retention import measured
from trainforge.stages import Checkpoint, CheckpointInfo, Comm, Extent, LazyTensor, Part, PartState
from trainforge.toolbox.checkpointing import folders, room
from trainforge.toolbox.checkpointing.contents import Chunkwise
from trainforge.toolbox.checkpointing.documents import NAME
from trainforge.toolbox.checkpointing.layout import (
    Chunk,
    Held,
    Row,
    bytes_of,
    held_tensors,
    plan_chunks,
    state_bytes,
)
from trainforge.toolbox.checkpointing.manifests import StoredManifest, StoredTensor
from trainforge.toolbox.checkpointing.protocol import Save, SaveFacts, telling_others
from trainforge.toolbox.checkpointing.staging import OneByOne, Staging
from trainforge.toolbox.host_limits import host_limit
from trainforge.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from trainforge.context import Context

_VISIBLE_S = 10.0
_SLOW_S = 0.5  # a wait for the save before that is worth a word
_SNAPSHOT_MARGIN = 1.1  # the run takes RAM for other things too while it is written


@dataclass
class _Prepared:
    """What a rank brings to the agreement about a save."""

    save_id: str = ""
    table: list[Row] = field(default_factory=list)
    held: dict[str, list[Held]] = field(default_factory=dict)
    plain: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    temporary: Path | None = None
    locks: list[int] = field(default_factory=list)

    def abandon(self) -> None:
        """Take back what was made for a save that does not take place."""
        _unlock(self.locks)
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


class FolderCheckpoint(Checkpoint):
    """Checkpoints in `run_dir/checkpoints`, which all ranks must see (one host, or a shared file system).

    Every rank calls `save` and `restore` together. What ranks must agree on is gathered on the caller's thread; the
    background thread uses no collective. A save that fails on one rank fails on all of them.

    Attributes:
        chunk_bytes: the largest piece of a tensor that is written as one.

    Args:
        ctx: of the run, or of somebody outside one (without model and optimizer), who reads or converts.
        background: write while training goes on; "auto" where there is RAM for a snapshot. Outside a run: no.
        timeout: longest wait for another rank, in seconds.
    """

    chunk_bytes: int

    def __init__(self, ctx: Context, *, background: bool | Literal["auto"], timeout: float) -> None:
        self._in_run = {"model", "optimizer"} <= ctx.built.keys()
        self._background: bool | Literal["auto"] = background if self._in_run else False
        self._timeout = timeout
        self._plugin, self._train = ctx.plugin, ctx.train
        self._rank, self._world = ctx.rank, ctx.world
        self._comm: Comm = ctx.built.get("comm") or Comm()
        self._folder = ctx.run_dir / "checkpoints"
        self._staging, self._console = Staging(ctx.device), ctx.console
        self._layouts: list[str] = []
        self._chunks: list[Chunk] = []
        self._sound: set[Path] = set()
        self._committed: deque[CheckpointInfo] = deque()  # filled by the background thread
        self._metrics: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._told_wait_s = _SLOW_S / 2
        self._stored: tuple[tuple[Path, int, int, int], StoredManifest[Any]] | None = None
        if self._in_run:  # else another process may be saving there, or only one checkpoint is to be replaced
            self._clean(ctx)
            self._check_room(ctx)

    # ------------------------------------------------------------------------------------------ what a format brings

    @abstractmethod
    def _save_of(self, facts: SaveFacts, held: Mapping[str, Sequence[Held]]) -> tuple[Save, bool]:
        """The save, with its snapshot taken or arranged; and whether it may go on in the background."""

    @abstractmethod
    def _read(self, path: Path) -> StoredManifest[Any]:
        """What the checkpoint at `path` says about itself, checked; `CheckpointError` when it cannot be used."""

    @abstractmethod
    def _load(self, path: Path, stored: StoredManifest[Any], wanted: Mapping[str, Sequence[Held]]) -> None:
        """Fill the wanted tensors in place; every byte is verified before it counts."""

    @abstractmethod
    def _load_range(
        self,
        path: Path,
        stored: StoredManifest[Any],
        tensor: str,
        entry: StoredTensor,
        start: int,
        out: Tensor,
    ) -> None:
        """Fill `out` (1-D, on the CPU) with elements from `start` of `tensor` (`part/key/name`), verified."""

    def _lock(self) -> list[int]:
        """What rank 0 locks for a save, beside its temporary folder: file descriptors, closed when it has ended."""
        return []

    def _ended(self, save: Save) -> None:
        """A save has ended, well or not (on the background thread, still locked)."""

    def _pruned(self) -> None:
        """Older checkpoints have gone (rank 0, on the background thread): give back what only they needed."""

    # -------------------------------------------------------------------------------------------------- the stage

    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Snapshot the parts and write them; in the background, the writing goes on after it has returned."""
        began = time.perf_counter()
        prepared, error = _Prepared(), self._settle()
        self._tell_if_slow(step, time.perf_counter() - began)
        try:
            if error is None:
                self._prepare(step, parts, prepared)
        except OSError as problem:
            error = room.disk_error(problem, self._folder, bytes_of(prepared.table))
        except Exception as problem:  # whatever it is, the other ranks must hear of it
            error = problem
        try:
            facts = self._facts(step, self._agree(step, prepared, error), prepared)
            with telling_others(facts):
                save, background = self._save_of(facts, prepared.held)
        except BaseException:
            prepared.abandon()
            raise
        self._start(save, prepared.locks, began, background)

    def wait(self) -> None:
        """Wait until the save in flight is committed.

        Raises:
            CheckpointError: it could not be written, here or on another rank.
        """
        error = self._settle()
        if error is not None:
            raise error

    def committed(self) -> list[CheckpointInfo]:
        """The checkpoints committed since the last call; raises what went wrong with one that has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def restore(self, parts: Mapping[str, Part], path: Path) -> None:
        """Fill the parts from the checkpoint at `path`, however many ranks wrote it.

        Raises:
            CheckpointError: something is missing, damaged or of another shape, on this rank or another. The parts
                may then be filled in part.
        """
        error: Exception | None = None
        stored = None
        try:
            stored = self._read_once(path)
            states = {name: part.state() for name, part in parts.items()}
            _check_wanted(path, stored, states)
            self._load(path, stored, held_tensors(states)[1])
        except OSError as problem:
            error = CheckpointError(f"{path} cannot be read: {problem.strerror or problem}")
            error.__cause__ = problem
        except Exception as problem:  # whatever it is, the other ranks must hear of it
            error = problem
        self._raise_together(error, self._comm.gather(None if error is None else str(error)))
        assert stored is not None, "without an error there is a manifest"
        self._sound.add(path.resolve())
        for name, part in parts.items():
            part.load(stored.parts[name].version, stored.parts[name].data)

    def contents(self, path: Path) -> Mapping[str, PartState]:
        """All that the checkpoint at `path` holds; of its tensors, two chunks at most are in memory at a time."""
        stored, chunkwise = self._read(path), Chunkwise(self.chunk_bytes)

        def lazily(part: str, entry: StoredTensor) -> LazyTensor:
            tensor, elements = f"{part}/{entry.key}/{entry.name}", math.prod(entry.shape)
            load = partial(self._load_range, path, stored, tensor, entry)
            return LazyTensor(
                entry.key,
                Extent(entry.name, entry.shape, 0, elements),
                torch.empty(elements, dtype=getattr(torch, entry.dtype), device="meta"),
                load=partial(chunkwise.read, tensor, elements, load),
            )

        return {
            name: PartState(part.version, part.data, tuple(lazily(name, entry) for entry in part.tensors))
            for name, part in stored.parts.items()
        }

    def metrics(self) -> dict[str, float]:
        """Of the last save: how long training was blocked, how long until it was durable, its size."""
        return dict(self._metrics)

    def close(self) -> None:
        """Wait for the save in flight, not long for other ranks; raises what went wrong and was not yet told."""
        self._closing.set()
        try:
            self.wait()
        finally:
            self._staging.close()

    def _facts(self, step: int, save_id: str, prepared: _Prepared) -> SaveFacts:
        return SaveFacts(
            step=step,
            save_id=save_id,
            writer=self._plugin,
            folder=self._folder,
            rank=self._rank,
            world=self._world,
            chunks=self._chunks,
            parts=prepared.plain,
            metrics=prepared.metrics,
            timeout=self._timeout,
            closing=self._closing,
        )

    def _snapshot(
        self, chunks: list[Chunk], held: Mapping[str, Sequence[Held]]
    ) -> tuple[Sequence[Tensor], bool]:
        """Copies of this rank's chunks, and whether training may go on while they are written."""
        copies = self._copied(chunks, held)
        return (OneByOne(chunks, held), False) if copies is None else (copies, True)

    def _copied(self, chunks: list[Chunk], held: Mapping[str, Sequence[Held]]) -> Sequence[Tensor] | None:
        """Copies of the chunks, complete; None where training has to wait while they are written."""
        if not self._in_background(chunks):
            return None
        try:
            return self._staging.snapshot(chunks, held)
        except ConfigError as error:  # page-locked memory is short, whatever RAM there is
            if self._background != "auto":
                raise
            self._console.warn(f"{self._plugin}: {error}. Training waits while a checkpoint is written")
            return None

    def _read_once(self, path: Path) -> StoredManifest[Any]:
        """What `_read` gives, for as long as checkpoint.json stays the same: weights are read one by one."""
        try:
            about = (path / NAME).stat()
        except OSError:
            return self._read(path)  # which says what is wrong
        key = (path, about.st_ino, about.st_mtime_ns, about.st_size)
        if self._stored is None or self._stored[0] != key:
            self._stored = None
            self._stored = (key, self._read(path))
        return self._stored[1]

    def _clean(self, ctx: Context) -> None:
        if self._rank == 0:
            unfinished = folders.clean(self._folder)
            if unfinished:
                ctx.console.note(f"removed what {unfinished} unfinished save(s) had left in {self._folder}")

    def _check_room(self, ctx: Context) -> None:
        """Warn, or raise on every rank, when the disk is too small; the estimate leaves out what is not a weight."""
        error = None
        try:
            if self._rank == 0:
                each, count = state_bytes(ctx.model, ctx.optimizer), room.most_kept(ctx.train)
                warning = room.check_room(self._folder, each, count)
                if warning:
                    ctx.console.warn(warning)
        except CheckpointError as problem:
            error = problem
        self._raise_together(error, self._comm.gather(None if error is None else str(error)))

    def _tell_if_slow(self, step: int, waited_s: float) -> None:
        """Say that the disk does not keep up; again only when it has become twice as bad."""
        if self._rank == 0 and waited_s > self._told_wait_s * 2:
            self._told_wait_s = waited_s
            self._console.warn(
                f"{self._plugin}: the checkpoint of step {step} had to wait {format_seconds(waited_s)} for the one "
                "before to reach the disk, and training with it: save less often (train.save_every), or to a faster "
                "disk"
            )

    def _prepare(self, step: int, parts: Mapping[str, Part], prepared: _Prepared) -> None:
        states = {name: part.state() for name, part in parts.items()}
        prepared.plain, prepared.metrics = _plain_copies(states), measured(states)
        prepared.table, prepared.held = held_tensors(states)
        if self._rank == 0:
            prepared.save_id = secrets.token_hex(8)
            path = folders.temporary_folder(self._folder, step, prepared.save_id)
            prepared.locks += self._lock()
            prepared.locks.append(folders.create_locked(path))
            prepared.temporary = path

    def _agree(self, step: int, prepared: _Prepared, error: Exception | None) -> str:
        """Agree with the other ranks on the save's id and on who writes what; gives the id."""
        layout = xxhash.xxh3_128_hexdigest(json.dumps(prepared.table).encode())
        ranks = self._comm.gather([None if error is None else str(error), prepared.save_id, layout])
        self._raise_together(error, [problem for problem, _, _ in ranks])
        save_id, layouts = ranks[0][1], [layout for _, _, layout in ranks]
        if layouts != self._layouts:
            sees = _appears(folders.temporary_folder(self._folder, step, save_id))
            tables = self._comm.gather([sees, prepared.table])
            for rank, (seen, _) in enumerate(tables):
                if not seen:
                    raise CheckpointError(
                        f"rank {rank} does not see {self._folder}: put the run folder on a file system that all ranks "
                        "share (--run-dir)"
                    )
            self._chunks = plan_chunks([table for _, table in tables], self.chunk_bytes)
            self._layouts = layouts
        return str(save_id)

    def _raise_together(self, error: Exception | None, problems: Sequence[str | None]) -> None:
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise CheckpointError(f"rank {rank}: {problem}")

    def _in_background(self, chunks: list[Chunk]) -> bool:
        """Whether to write from a snapshot while training goes on. Each rank decides for itself."""
        if self._background != "auto":
            return self._background
        limit, needed = host_limit(None), self._staging.missing(chunks)
        if limit is None or needed * _SNAPSHOT_MARGIN <= limit.free:
            return True
        self._console.warn(
            f"{self._plugin}: a copy of the state ({format_bytes(needed)}) does not fit into {limit.name} "
            f"({format_bytes(limit.free)}), so training waits while a checkpoint is written"
        )
        return False

    def _start(self, save: Save, locks: list[int], began: float, background: bool) -> None:
        thread = threading.Thread(
            target=self._finish,
            args=(save, locks, began),
            name=f"checkpoint of step {save.facts.step}",
            daemon=True,
        )
        thread.start()
        self._thread = thread
        if not background:
            self.wait()
        self._metrics["blocked_ms"] = (time.perf_counter() - began) * 1000

    def _finish(self, save: Save, locks: list[int], began: float) -> None:
        """What the background thread does. Errors wait for the caller's next call."""
        try:
            info = save.run()
            self._metrics |= {"durable_ms": (time.perf_counter() - began) * 1000, "bytes": float(info.bytes)}
            self._sound.add(info.path.resolve())
            self._committed.append(info)
            if self._rank == 0 and self._in_run:
                self._prune(info.path)
        except OSError as error:
            self._error = room.disk_error(error, self._folder, save.facts.bytes)
        except Exception as error:
            self._error = error
        finally:
            try:
                self._ended(save)
            except Exception as error:
                self._error = self._error or error
            finally:
                _unlock(locks)

    def _prune(self, latest: Path) -> None:
        try:
            folders.prune(self._folder, self._train, latest, self._plugin, self._is_sound)
            self._pruned()
        except OSError as error:
            raise CheckpointError(
                f"an older checkpoint in {self._folder} cannot be deleted ({error.strerror}): see its permissions, or "
                "raise train.keep"
            ) from error

    def _is_sound(self, path: Path) -> bool:
        """Whether a checkpoint may count as kept. Those of an earlier process are verified once."""
        if path.resolve() not in self._sound and not self.verify(path):
            self._sound.add(path.resolve())
        return path.resolve() in self._sound

    def _settle(self) -> Exception | None:
        """Wait for the save in flight; gives what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


def _plain_copies(states: Mapping[str, PartState]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Copies of the parts' plain data, by way of JSON."""
    copies = {}
    for name, state in states.items():
        try:
            copies[name] = (state.version, json.loads(json.dumps(state.data)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the plain data of {name} cannot be saved as JSON: {error}") from error
    return copies


def _check_wanted(path: Path, stored: StoredManifest[Any], states: Mapping[str, PartState]) -> None:
    """Whether all that the parts ask for is stored, in the same shape."""
    for part, state in states.items():
        if part not in stored.parts:
            raise CheckpointError(
                f"the checkpoint {path} has no part {part}; it has {', '.join(sorted(stored.parts))}"
            )
        entries = {(entry.key, entry.name): entry for entry in stored.parts[part].tensors}
        for named in state.tensors:
            extent, label = named.extent, f"{part}/{named.key}/{named.extent.name}"
            entry = entries.get((named.key, extent.name))
            if entry is None:
                raise CheckpointError(f"the checkpoint {path} has no tensor {label}")
            if entry.shape != tuple(extent.global_shape):
                raise CheckpointError(
                    f"{label} has shape {list(entry.shape)} in the checkpoint {path} and "
                    f"{list(extent.global_shape)} in this run"
                )
            dtype = str(named.dtype).removeprefix("torch.")
            if entry.dtype != dtype:
                raise CheckpointError(
                    f"{label} is {entry.dtype} in the checkpoint {path} and {dtype} in this run"
                )
            if not 0 <= extent.offset <= extent.offset + extent.length <= math.prod(entry.shape):
                raise CheckpointError(
                    f"{label} has no elements {extent.offset} to {extent.offset + extent.length}"
                )


def _unlock(locks: list[int]) -> None:
    while locks:
        os.close(locks.pop())


def _appears(path: Path) -> bool:
    """Whether a folder that another rank has just made can be seen; network file systems take a moment."""
    deadline = time.monotonic() + _VISIBLE_S
    while not path.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
