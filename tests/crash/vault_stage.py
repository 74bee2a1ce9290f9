"""The stage of vault with state that is only tensors, for tests of what happens to its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.dcp.toys import whole
from tests.support.context import make_context
from torch import Tensor

from trainforge.checkpoints import list_checkpoints
from trainforge.stages import Comm
from trainforge_loongforge.vault import VaultSection, build, manifest
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint
from trainforge_loongforge.vault.locking import LOCK
from trainforge_loongforge.vault.packs import TEMPORARY, read_index

State = dict[str, Tensor]


def vault(
    run_dir: Path,
    *,
    rank: int = 0,
    world: int = 1,
    comm: Comm | None = None,
    keep: int = 2,
    reads: bool = False,
    **section: Any,
) -> VaultCheckpoint:
    """The stage as a run has it; with `reads`, as those have it who only read."""
    built: dict[str, Any] = {"comm": comm or Comm()}
    if not reads:
        built |= {"model": SimpleNamespace(parameters=()), "optimizer": None}
    ctx = make_context(run_dir=run_dir, rank=rank, world=world, plugin="vault", keep=keep, built=built)
    stage = build(ctx, VaultSection(**section))
    assert isinstance(stage, VaultCheckpoint)
    return stage


def state(version: int) -> State:
    """Some of it never changes, some comes back every third time, some is new each time."""
    return {
        "frozen": torch.arange(60.0),
        "returns": torch.arange(40.0) + 1000 * (version % 3),
        "rarely": torch.arange(48.0) + 500 + 1000 * (version // 3),
        "new": torch.arange(20.0) + 3000 + 100 * version,
        "version": torch.full((5,), float(version)).bfloat16(),
        "empty": torch.zeros(0, 3),
    }


def save(stage: VaultCheckpoint, step: int, version: int | None = None) -> None:
    """Save the state of that version (or of the step's number), and wait until it is durable."""
    stage.save(step, {"p": whole(**state(step if version is None else version))})
    stage.wait()


def load(stage: VaultCheckpoint, path: Path) -> int:
    """The version that a checkpoint holds, every bit of it."""
    target = {name: values.new_full(values.shape, 7) for name, values in state(0).items()}
    stage.restore({"p": whole(**target)}, path)
    version = int(target["version"][0])
    for name, values in state(version).items():
        assert target[name].equal(values), (path, name)
    return version


def kept(run_dir: Path) -> list[tuple[int, int]]:
    """Step and version of every checkpoint, oldest first; each must be whole."""
    stage = vault(run_dir, reads=True)
    found = []
    for info in list_checkpoints(run_dir / "checkpoints"):
        assert stage.verify(info.path) == []
        found.append((info.step, load(stage, info.path)))
    stage.close()
    return found


def leftovers(run_dir: Path) -> list[str]:
    """What lies among checkpoints and packs that no save will use, by name."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    live: set[bytes] = set()
    for info in list_checkpoints(folder):
        live |= manifest.addresses(manifest.read_manifest(info.path))
    known = [*(path.name for path in folder.glob("step-*")), "packs", LOCK]
    odd = [path.name for path in folder.iterdir() if path.name not in known]
    for path in (folder / "packs").glob("*"):
        if path.name.startswith(TEMPORARY) or live.isdisjoint(entry.address for entry in read_index(path)):
            odd.append(path.name)
    return odd
