"""`ReferenceCheckpoint`: JSON and raw bytes, written at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainforge.errors import CheckpointError
from trainforge.retention import measured, retention
from trainforge.stages import (
    Checkpoint,
    CheckpointInfo,
    NamedTensor,
    Part,
    PartState,
    checkpoint_name,
    is_checkpoint_name,
)

if TYPE_CHECKING:
    from torch import Tensor

    from trainforge.context import Context


class ReferenceCheckpoint(Checkpoint):
    """A folder with `checkpoint.json`, and per rank `rank-N.json` (what lies where) and `rank-N.bin` (the bytes).

    Every tensor and every JSON document carries a SHA-256.
    """

    def __init__(self, ctx: Context) -> None:
        self._folder, self._comm, self._keep = ctx.run_dir / "checkpoints", ctx.comm, ctx.train.keep
        self._keep_every, self._best = ctx.train.keep_every, ctx.train.best
        self._writer = ctx.plugin
        self._committed: list[CheckpointInfo] = []

    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Write aside, then rename. What `train` does not keep goes afterwards."""
        aside, final = self._folder / f"writing-{step}", self._folder / checkpoint_name(step)
        try:
            aside.mkdir(parents=True, exist_ok=True)
            states = {name: part.state() for name, part in parts.items()}
            self._write_rank(aside, states)
            finite = all(self._comm.gather(_finite(states)))  # now every rank's files are there, too
            if self._comm.rank == 0:
                self._commit(aside, final, step, {"metrics": measured(states), "finite": finite})
            self._comm.gather(None)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {final}: {error}; make room there or choose another folder"
            ) from error

    def _write_rank(self, folder: Path, states: Mapping[str, PartState]) -> None:
        index: dict[str, Any] = {}
        with (folder / f"rank-{self._comm.rank}.bin").open("wb") as out:
            for name, state in states.items():
                entries = [self._write_tensor(out, named) for named in state.tensors]
                index[name] = {"version": state.version, "data": state.data, "tensors": entries}
            out.flush()
            os.fsync(out.fileno())
        _write_json(folder / f"rank-{self._comm.rank}.json", index)

    @staticmethod
    def _write_tensor(out: Any, named: NamedTensor) -> dict[str, Any]:
        content = _bytes(_values(named))
        start = out.tell()
        out.write(content)
        return {
            "key": named.key,
            "name": named.extent.name,
            "global_shape": named.extent.global_shape,
            "offset": named.extent.offset,
            "length": named.extent.length,
            "dtype": str(named.dtype).removeprefix("torch."),
            "start": start,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def _commit(self, aside: Path, final: Path, step: int, about: dict[str, Any]) -> None:
        saved_at = time.time()
        facts = {
            "step": step,
            "writer": self._writer,
            "format": 1,
            "saved_at": saved_at,
            "ranks": self._comm.world,
            **about,
        }
        _write_json(aside / "checkpoint.json", facts)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        size = sum(file.stat().st_size for file in final.iterdir())
        self._committed.append(CheckpointInfo(step, final, self._writer, size, saved_at, **about))
        there = [_info(path) for path in self._folder.iterdir() if is_checkpoint_name(path.name) is not None]
        for old in retention(there, self._keep, self._keep_every, self._best):
            shutil.rmtree(old.path)

    def wait(self) -> None:
        """Nothing is ever in flight."""

    def committed(self) -> list[CheckpointInfo]:
        """What was committed since the last call."""
        fresh, self._committed = self._committed, []
        return fresh

    def restore(self, parts: Mapping[str, Part], path: Path) -> None:
        """Fill every tensor from whichever saved extents overlap it."""
        if problems := self.verify(path):
            raise CheckpointError(f"{path} is damaged: {problems[0]}")
        ranks = [
            _read_json(path / f"rank-{r}.json") for r in range(_read_json(path / "checkpoint.json")["ranks"])
        ]
        for name, part in parts.items():
            if name not in ranks[0]:
                raise CheckpointError(f"{path} holds no part {name!r}; it has {', '.join(ranks[0])}")
            saved = [
                (path / f"rank-{r}.bin", e) for r, index in enumerate(ranks) for e in index[name]["tensors"]
            ]
            for named in part.state().tensors:
                _fill(named, saved, name)
            part.load(ranks[0][name]["version"], ranks[0][name]["data"])

    def verify(self, path: Path) -> list[str]:
        """Recompute every checksum."""
        try:
            ranks = _read_json(path / "checkpoint.json")["ranks"]
            problems = []
            for rank in range(ranks):
                content = (path / f"rank-{rank}.bin").read_bytes()
                for part, state in _read_json(path / f"rank-{rank}.json").items():
                    for entry in state["tensors"]:
                        piece = content[entry["start"] : entry["start"] + entry["bytes"]]
                        if hashlib.sha256(piece).hexdigest() != entry["sha256"]:
                            where = f"{entry['key']} of {entry['name']} ({part})"
                            problems.append(f"rank-{rank}.bin: the bytes of {where} are not what was written")
            return problems
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"{path.name}: {error}"]


def _finite(states: Mapping[str, PartState]) -> bool:
    named = (named for state in states.values() for named in state.tensors if named.key == "master")
    return all(bool(torch.isfinite(_values(one)).all()) for one in named)


def _info(path: Path) -> CheckpointInfo:
    facts = _read_json(path / "checkpoint.json")
    about = facts["metrics"], facts["finite"]
    return CheckpointInfo(facts["step"], path, facts["writer"], 0, facts["saved_at"], *about)


def _values(named: NamedTensor) -> Tensor:
    """A copy of the values, 1-D; those of split masters in fp32."""
    values = torch.empty(named.extent.length, dtype=named.dtype)
    named.read(0, values)
    return values


def _bytes(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def _fill(target: NamedTensor, saved: list[tuple[Path, dict[str, Any]]], part: str) -> None:
    """Copy every overlap of saved extents with the target's."""
    extent, covered = target.extent, torch.zeros(target.extent.length, dtype=torch.bool)
    found = False
    for file, entry in saved:
        if (entry["key"], entry["name"]) != (target.key, extent.name):
            continue
        if tuple(entry["global_shape"]) != extent.global_shape:
            shapes = f"{entry['global_shape']} in the checkpoint and {list(extent.global_shape)} here"
            raise CheckpointError(f"{part}: {target.key} of {extent.name} is {shapes}")
        found = True
        first = max(extent.offset, entry["offset"])
        last = min(extent.offset + extent.length, entry["offset"] + entry["length"])
        if first >= last:
            continue
        content = bytearray(file.read_bytes()[entry["start"] : entry["start"] + entry["bytes"]])
        values = torch.frombuffer(content, dtype=getattr(torch, entry["dtype"]))
        here = slice(first - extent.offset, last - extent.offset)
        target.write(here.start, values[first - entry["offset"] : last - entry["offset"]])
        covered[here] = True
    if not found or not covered.all():
        raise CheckpointError(f"{part}: the checkpoint lacks {target.key} of {extent.name}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value)
    checked = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "json": text}
    with path.open("w") as out:
        out.write(json.dumps({**checked, **_facts(path, value)}))
        out.flush()
        os.fsync(out.fileno())


def _facts(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """`checkpoint.json` also shows its fields plainly, for readers that know only the contract."""
    return value if path.name == "checkpoint.json" else {}


def _read_json(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if hashlib.sha256(document["json"].encode()).hexdigest() != document["sha256"]:
        raise ValueError(f"{path.name} is not what was written")
    value: dict[str, Any] = json.loads(document["json"])
    if any(document[key] != fact for key, fact in _facts(path, value).items()):
        raise ValueError(f"{path.name} is not what was written")
    return value
