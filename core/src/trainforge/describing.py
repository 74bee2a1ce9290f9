"""What plugins say of the checkpoints that they wrote, and what changed between two of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainforge.checkpoints import open_readers
from trainforge.digest import content_digest
from trainforge.errors import CheckpointError, SelectionError
from trainforge.stored_run import StoredWeights, build_model, open_run, reading

if TYPE_CHECKING:
    from pathlib import Path

    from trainforge.context import Console
    from trainforge.stages import Checkpoint, CheckpointInfo


@dataclass(frozen=True)
class Description:
    """What the plugin that wrote a checkpoint says of it; see `Checkpoint.describe`.

    Attributes:
        info: the checkpoint.
        bytes: its size if it lay there alone.
        new_bytes: what its save added to the disk, or None when nobody says.
        tensors: a digest of each tensor by `part/key/name`, or None when nobody says.
        tensor_bytes: the sizes of tensors, as far as they are known.
        cuts: digests of a tensor can be compared where these are the same.
        problem: why the plugin could not be asked, or cannot tell.
    """

    info: CheckpointInfo
    bytes: int
    new_bytes: int | None = None
    tensors: Mapping[str, str] | None = None
    tensor_bytes: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def describe_sizes(infos: Sequence[CheckpointInfo]) -> list[Description]:
    """As `describe_checkpoints`, for sizes alone: no plugin is imported for one whose folder is all there is of it."""
    asked = iter(describe_checkpoints([info for info in infos if info.shares]))
    return [next(asked) if info.shares else Description(info, info.bytes) for info in infos]


def describe_checkpoints(infos: Sequence[CheckpointInfo]) -> list[Description]:
    """Ask the plugins that wrote these checkpoints. One that is not installed is no error."""
    found: dict[Path, Description] = {}
    for writer in dict.fromkeys(info.writer for info in infos):
        its = [info for info in infos if info.writer == writer]
        try:
            with open_readers(its) as readers:
                found |= {info.path: _describe(readers[writer], info) for info in its}
        except SelectionError as error:
            found |= {info.path: Description(info, info.bytes, problem=str(error)) for info in its}
    return [found[info.path] for info in infos]


def _describe(reader: Checkpoint, info: CheckpointInfo) -> Description:
    try:
        about = reader.describe(info.path)
    except CheckpointError as error:
        return Description(info, info.bytes, problem=str(error))
    known = {key: about[key] for key in ("new_bytes", "tensors", "tensor_bytes", "cuts") if key in about}
    return Description(info, about.get("bytes", info.bytes), **known)


def comparable(
    run_dir: Path, a: CheckpointInfo, b: CheckpointInfo, console: Console
) -> tuple[Description, Description, str]:
    """Describe two checkpoints of a run so that `compare` can compare them.

    Where the plugin that wrote both keeps no digests, or another wrote one of them, the weights (masters, one at a
    time) are read and the rest is left out.

    Returns:
        Both, and a sentence that says what was left out and why, or nothing.

    Raises:
        UserError: the run has no recipe, or it has code run (see `trust.py`).
        CheckpointError: a checkpoint is damaged.
    """
    before, after = describe_checkpoints([a, b])
    why = _incomparable(before, after)
    if not why:
        return before, after, ""
    before, after = (_with_weights_read(run_dir, one, console) for one in (before, after))
    return before, after, f"only the weights were compared, by reading them: {why}"


def _incomparable(before: Description, after: Description) -> str:
    """Why the digests of two checkpoints cannot be compared; nothing when they can."""
    for one in (before, after):
        if one.tensors is None:
            return f"{one.info.writer} keeps no digests"
    a, b = before.info, after.info
    if a.writer != b.writer:
        return f"{a.writer} and {b.writer} have not the same digests"
    if any(before.cuts[name] != after.cuts[name] for name in before.cuts.keys() & after.cuts.keys()):
        return (
            f"steps {a.step} and {b.step} are not cut into the same pieces, as with another number of ranks"
        )
    return ""


def _with_weights_read(run_dir: Path, about: Description, console: Console) -> Description:
    import torch

    stored = open_run(run_dir, about.info.step, needs=("model",))
    ctx = build_model(stored, torch.device("cpu"), console)
    digests, sizes = {}, {}
    trainable = [spec for spec in ctx.model.parameters if spec.trainable]
    total = sum(spec.elements for spec in trainable)
    with (
        contextlib.closing(ctx.model),
        reading(stored, ctx) as reader,
        console.task(f"reading step {about.info.step}", total, "parameters") as task,
    ):
        weights = StoredWeights(reader, about.info.path, ctx.model)
        for spec in trainable:
            name = f"memory/master/{spec.name}"
            value = weights(spec.name)
            digests[name], sizes[name] = content_digest(value), value.nbytes
            task.advance(spec.elements)
    return replace(about, tensors=digests, tensor_bytes=sizes)


@dataclass(frozen=True)
class Difference:
    """What changed from one checkpoint to another: names of tensors, `part/key/name`.

    Attributes:
        changed: in both, with other content.
        gone, added: in one of them only.
        same: how many are the same, bit for bit.
    """

    changed: list[str]
    gone: list[str]
    added: list[str]
    same: int


def compare(before: Description, after: Description) -> Difference:
    """Compare two checkpoints tensor by tensor; the digests of both are known, and of one kind (`comparable`)."""
    old, new = before.tensors or {}, after.tensors or {}
    shared = [name for name in new if name in old]
    changed = [name for name in shared if old[name] != new[name]]
    return Difference(
        changed,
        gone=[name for name in old if name not in new],
        added=[name for name in new if name not in old],
        same=len(shared) - len(changed),
    )
