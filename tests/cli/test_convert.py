"""`forge checkpoints RUN convert`: the same state in another plugin's format, in the place of the old one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tests.run.runs import Outcome, run, write_recipe

from trainforge.checkpoints import list_checkpoints, open_reader
from trainforge.cli import main
from trainforge.runfolder import RunFolder
from trainforge_loongforge.vault.saving import VaultSave
from trainforge_plugins.dcp import saving
from trainforge_plugins.dcp.checkpoint import DcpCheckpoint

ROOT = Path(__file__).parents[2]
DATA = "rank-00000.safetensors"
PLUGINS = {"dcp": (), "vault": ("vault",)}


def forge(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="forge")


def convert(folder: Path, to: str, *options: object) -> Result:
    return forge("checkpoints", folder, "convert", "--to", to, *options)


def writers(folder: Path) -> dict[int, str]:
    return {info.step: info.writer for info in list_checkpoints(folder / "checkpoints")}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]


def state_of(folder: Path, step: int) -> dict[str, Any]:
    """Everything that a checkpoint holds, by name, as bytes and plain data."""
    info = next(info for info in list_checkpoints(folder / "checkpoints") if info.step == step)
    reader = open_reader(info)
    found: dict[str, Any] = {}
    for part, state in reader.contents(info.path).items():
        found[part] = (state.version, state.data)
        for named in state.tensors:
            out = torch.empty(named.extent.length, dtype=named.dtype)
            named.read(0, out)
            found[f"{part}/{named.key}/{named.extent.name}"] = (
                named.extent,
                named.dtype,
                bytes(out.view(torch.uint8).numpy()) if len(out) else b"",
            )
    reader.close()
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": 6, "save_every": 1, "keep": 3}
    return write_recipe(tmp_path_factory.mktemp("convert"), train=train)


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Outcome:
    """The run that nobody interrupts."""
    return run(recipe, recipe.parent / "whole")


@pytest.fixture(scope="module")
def halves(recipe: Path) -> dict[str, Path]:
    """A run of three steps of each plugin; all are kept."""
    for name, plugins in PLUGINS.items():
        run(recipe, recipe.parent / name, max_steps=3, plugins=plugins)
    return {name: recipe.parent / name for name in PLUGINS}


@pytest.fixture
def half(halves: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run that `dcp` saved."""
    return Path(shutil.copytree(halves["dcp"], tmp_path / "run"))


@pytest.mark.parametrize(("old", "new"), [("dcp", "vault"), ("vault", "dcp")])
def test_a_converted_run_goes_on_as_if_nothing_had_happened(
    recipe: Path, whole: Outcome, halves: dict[str, Path], tmp_path: Path, old: str, new: str
):
    folder = Path(shutil.copytree(halves[old], tmp_path / "run"))
    before, second = state_of(folder, 3), files(folder / "checkpoints/step-00000002")
    done = convert(folder, new)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"step 3 is now a checkpoint of {new} (")
    assert writers(folder) == {1: old, 2: old, 3: new}
    assert state_of(folder, 3) == before
    assert files(folder / "checkpoints/step-00000002") == second
    assert forge("checkpoints", folder, "verify").stdout == "step 1: sound\nstep 2: sound\nstep 3: sound\n"
    assert leftovers(folder) == []
    last = run(recipe, folder, plugins=PLUGINS[new])
    assert last.series("step") == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "lr", "grad_norm"):
        assert last.series(name) == whole.series(name), name
    assert last.summary["weights_digest"] == whole.summary["weights_digest"]
    assert last.sample_ids == whole.sample_ids[3:]


def test_there_and_back_is_the_same_and_leaves_no_pack_behind(half: Path):
    names, before = set(files(half)), state_of(half, 2)
    assert convert(half, "vault", "--step", 2).exit_code == 0
    assert writers(half) == {1: "dcp", 2: "vault", 3: "dcp"}
    assert list((half / "checkpoints/packs").glob("*.pack"))
    assert convert(half, "dcp", "--step", 2).exit_code == 0
    assert state_of(half, 2) == before
    assert set(files(half)) - names == {"checkpoints/vault.lock"}


def test_a_folder_that_a_living_run_uses_is_refused(half: Path):
    living = RunFolder(half)
    living.open(fresh=False)
    before = files(half / "checkpoints")
    refused = convert(half, "vault")
    assert refused.exit_code == 2
    assert refused.stderr == f"error: a run is using {half}: wait for it, or stop it first\n"
    living.close()
    assert files(half / "checkpoints") == before
    (half / ".lock").unlink()  # as in a copy: no run has been here
    assert convert(half, "vault").exit_code == 0
    assert writers(half) == {1: "dcp", 2: "dcp", 3: "vault"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "dcp"], "step 3 was written by dcp already"),
        (["--to", "nobody"], "no plugin is called nobody"),
        (["--to", "text"], "does not serve the stage checkpoint"),
        (["--to", "vault", "--step", "7"], "--step 7: there is no such checkpoint"),
        ([], "convert and --to belong together"),
    ],
)
def test_what_cannot_be_converted_is_said(half: Path, arguments: list[str], says: str):
    before = files(half)
    refused = forge("checkpoints", half, "convert", *arguments)
    assert refused.exit_code != 0
    assert says in refused.stderr
    assert files(half) == before
    assert forge("checkpoints", half, "verify", "--to", "vault").exit_code != 0


def test_a_damaged_checkpoint_is_named_and_stays_as_it_is(half: Path):
    data = half / "checkpoints/step-00000003" / DATA
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    before = files(half / "checkpoints")
    refused = convert(half, "vault")
    assert refused.exit_code == 1
    assert f"{data} is damaged in memory/" in refused.stderr
    assert leftovers(half) == []
    after = files(half / "checkpoints")
    assert after.pop("vault.lock") == b""
    assert after == before


@pytest.mark.parametrize(("old", "new"), [("dcp", "vault"), ("vault", "dcp")])
def test_a_full_disk_leaves_the_old_one(
    halves: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
):
    folder = Path(shutil.copytree(halves[old], tmp_path / "run"))
    before = state_of(folder, 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(VaultSave, "manifest", full)
    monkeypatch.setattr(saving, "save_chunks", full)
    refused = convert(folder, new)
    assert refused.exit_code == 1
    assert "no room for a checkpoint" in refused.stderr
    assert writers(folder) == {1: old, 2: old, 3: old}
    assert state_of(folder, 3) == before
    assert leftovers(folder) == []


def test_ctrl_c_stops_it_and_leaves_the_old_one(half: Path, monkeypatch: pytest.MonkeyPatch):
    real, loads = DcpCheckpoint._load_range, []

    def interrupted(self: DcpCheckpoint, *asked: Any) -> None:
        real(self, *asked)
        loads.append(asked[1])
        if len(loads) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    monkeypatch.setattr(DcpCheckpoint, "_load_range", interrupted)
    before = files(half / "checkpoints/step-00000003")
    stopped = convert(half, "vault")
    assert stopped.exit_code == 1
    assert stopped.stderr == "error: stopped at once by Ctrl-C\n"
    deadline = time.monotonic() + 20
    # who writes in the background learns of it at its next read
    while leftovers(half) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(half) == []
    assert len(loads) < 10  # of 104
    assert files(half / "checkpoints/step-00000003") == before


def test_a_plugin_that_cannot_say_what_it_holds_is_named(half: Path, tmp_path: Path):
    (tmp_path / "mute.py").write_text(
        "from trainforge.hookspecs import hookimpl\nfrom trainforge.provider import Provider\n"
        "from trainforge.stages import Checkpoint\n\nclass Mute(Checkpoint):\n"
        "    def save(self, step, parts): ...\n    def wait(self): ...\n    def restore(self, parts, path): ...\n"
        "    def verify(self, path): return []\n"
        "@hookimpl\ndef forge_checkpoint(): return Provider(build=lambda ctx, config: Mute())\n"
    )
    about = half / "checkpoints/step-00000003/checkpoint.json"
    about.write_text('{"step": 3, "writer": "mute", "saved_at": 1}')
    plan = half / "plan.json"
    plan.write_text(
        f'{{"stages": {{"checkpoint": {{"plugin": "mute", "reference": "{tmp_path}/mute.py"}}}}}}'
    )
    refused = convert(half, "vault")
    assert refused.exit_code == 1
    assert "cannot say all that a checkpoint holds" in refused.stderr
    assert writers(half) == {1: "dcp", 2: "dcp", 3: "mute"}


KILLED = """
import os, sys
from pathlib import Path
from trainforge.cli import main

folder, to, point = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
real, done = Path.rename, 0

def rename(self, target):
    global done
    if folder in self.parents and "step-" in self.name:
        if done == point:
            os._exit(9)
        done += 1
    return real(self, target)

Path.rename = rename
main(["checkpoints", str(folder), "convert", "--to", to])
"""


@pytest.mark.parametrize("point", [0, 1])
@pytest.mark.parametrize(("old", "new"), [("dcp", "vault"), ("vault", "dcp")])
def test_killed_while_the_new_one_takes_its_place(
    recipe: Path, whole: Outcome, halves: dict[str, Path], tmp_path: Path, old: str, new: str, point: int
):
    """0: before the old one makes way; 1: when it has, and the new one has not got its name. The old one comes back."""
    folder = Path(shutil.copytree(halves[old], tmp_path / "run"))
    command = [sys.executable, "-c", KILLED, str(folder), new, str(point)]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 9
    assert len(leftovers(folder)) == 1 + point
    pruned = forge("checkpoints", folder, "prune")  # takes nothing that the old one needs
    assert "deleted step 1" in pruned.stdout
    last = run(recipe, folder, plugins=PLUGINS[new])
    assert last.series("loss") == whole.series("loss")
    assert last.sample_ids == whole.sample_ids[3:]
    assert last.summary["weights_digest"] == whole.summary["weights_digest"]


BIG = """
import resource, sys, threading, torch
from pathlib import Path
from click.testing import CliRunner
from tests.dcp.toys import checkpoint, whole
from trainforge.cli import main

folder = Path(sys.argv[1])
if sys.argv[2] == "save":
    stage = checkpoint(folder, background=False)
    stage.save(1, {"memory": whole(**{f"w{i}": torch.full((48 * 2**20,), float(i)) for i in range(4)})})
    stage.close()
else:
    import trainforge_loongforge.vault.checkpoint, trainforge_plugins.dcp.checkpoint, trainforge.converting
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = CliRunner().invoke(main, ["checkpoints", str(folder), "convert", "--to", sys.argv[2]])
    assert result.exit_code == 0, result.output
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_it_needs_a_few_chunks_of_ram(tmp_path: Path):
    """768 MiB of state; chunks of dcp are 64 MiB."""

    def child(what: str) -> str:
        command = [sys.executable, "-c", BIG, str(tmp_path), what]
        return subprocess.run(
            command, cwd=ROOT, timeout=240, check=True, capture_output=True, text=True
        ).stdout

    child("save")
    for to in ("vault", "dcp"):
        assert int(child(to)) < 450
