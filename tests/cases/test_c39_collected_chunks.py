"""C39: a collection never takes a chunk that a kept checkpoint names, whatever failed or was killed before.

Six incremental saves of which two stay; the fourth fails once and is repeated. Some of its chunks are those of an
older checkpoint, some are new in both attempts: a failed attempt must hide neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vault.toys import all_bits, keyed, other_bits, random_bits, stage_in, step_path

from trainforge.checkpoints import list_checkpoints
from trainforge.errors import CheckpointError
from trainforge.stages import is_checkpoint_name
from trainforge_loongforge.vault.manifest import addresses, read_manifest
from trainforge_loongforge.vault.packs import PackWriter, read_index
from trainforge_loongforge.vault.store import Store

ROOT = Path(__file__).parents[2]
SAVES, FAILS = range(1, 7), 4


def content(step):
    """Five tensors that never change, five that change once, two that come back every other step, and new ones."""
    seeds = {f"frozen{i}": i for i in range(5)} | {f"soon{i}": 10 + i + 50 * (step > 1) for i in range(5)}
    seeds |= {f"turn{i}": 200 + 10 * i + step % 2 for i in range(2)}
    seeds |= {f"new{i}": 1000 * step + i for i in range(4)}
    return {("value", name): random_bits("float32", (500,), seed) for name, seed in seeds.items()}


def save_all(run_dir, kill_at=0):
    """The six saves. With `kill_at`, the process ends at that change of the disk of the collections, counted from 1."""
    count = [0]

    def counting(owner, name):
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            count[0] += collecting[0]
            if collecting[0] and count[0] == kill_at:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(owner, name, counted)

    collecting, collect = [False], Store.collect

    def collected(self, *args, **kwargs):
        collecting[0] = True
        try:
            return collect(self, *args, **kwargs)
        finally:
            collecting[0] = False

    if kill_at:
        Store.collect = collected
        for owner, name in ((Path, "unlink"), (Path, "rename"), (Path, "replace"), (PackWriter, "add")):
            counting(owner, name)
        counting(os, "fsync")
    stage, failures = stage_in(run_dir, keep=2), iter([OSError(5, "Input/output error")])
    add = PackWriter.add
    for step in SAVES:
        stage.save(step, {"p": keyed(content(step))})
        stage.wait()
        if step + 1 == FAILS:

            def failing(self, *args, _add=add, **kwargs):
                entry = _add(self, *args, **kwargs)
                for error in failures:
                    raise error
                return entry

            PackWriter.add = failing
            try:
                stage.save(FAILS, {"p": keyed(content(FAILS))})
                stage.wait()
                raise AssertionError("the save was made to fail")
            except CheckpointError as error:
                assert "Input/output error" in str(error)  # noqa: PT017  (not within pytest)
            finally:
                PackWriter.add = add
    stage.close()


def restores(run_dir, step):
    """Whether a step comes back, byte for byte, to somebody who only reads."""
    reader, target = stage_in(run_dir, reads=True), other_bits(content(step))
    reader.restore({"p": keyed(target)}, step_path(run_dir, step))
    reader.close()
    return all_bits(target) == all_bits(content(step))


def kept_steps(run_dir):
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(step for name in names if (step := is_checkpoint_name(name)) is not None)


def unneeded(run_dir):
    """The share of stored bytes that no checkpoint needs, and what else lies among the packs."""
    packs = sorted((run_dir / "checkpoints/packs").iterdir())
    live = set()
    for info in list_checkpoints(run_dir / "checkpoints"):
        live |= addresses(read_manifest(info.path))
    entries = [entry for path in packs if path.suffix == ".pack" for entry in read_index(path)]
    dead = sum(entry.stored for entry in entries if entry.address not in live)
    odd = [path.name for path in packs if path.suffix != ".pack" or path.name.startswith(".")]
    return dead / sum(entry.stored for entry in entries), odd


@pytest.fixture
def untouched(monkeypatch):
    """What `save_all` replaces within this process comes back."""
    monkeypatch.setattr(PackWriter, "add", PackWriter.add)


def test_every_kept_checkpoint_restores_alone(tmp_path, untouched):
    save_all(tmp_path / "run")
    assert kept_steps(tmp_path / "run") == [5, 6]
    for step in (5, 6):
        assert restores(tmp_path / "run", step)
        alone = tmp_path / f"alone{step}"
        shutil.copytree(tmp_path / "run", alone)
        others = [path for path in (alone / "checkpoints").glob("step-*") if path != step_path(alone, step)]
        for path in others:
            shutil.rmtree(path)  # no chain: nothing of another step's is asked for
        assert restores(alone, step)
        stage = stage_in(alone)  # it collects what the others had
        assert restores(alone, step)
        assert stage.verify(step_path(alone, step)) == []
        stage.close()
        share, odd = unneeded(alone)
        assert share < 0.5
        assert not odd


KILLED = """
import os, sys
from pathlib import Path
from tests.cases.test_c39_collected_chunks import save_all

for line in sys.stdin:  # one import, many victims
    kill_at, run_dir = line.split()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            save_all(Path(run_dir), int(kill_at))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_collector_killed_anywhere_leaves_only_extra_files(tmp_path):
    """At every change of the disk that a collection makes, in the order in which they happen."""
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    found, kill_at = [], 0
    while True:
        kill_at += 1
        run_dir = tmp_path / str(kill_at)
        parent.stdin.write(f"{kill_at} {run_dir}\n")
        code = int(parent.stdout.readline())
        assert code in (0, 9)
        steps = kept_steps(run_dir)
        found.append(tuple(steps))
        for step in steps:
            assert restores(run_dir, step), (kill_at, step)
        stage = stage_in(run_dir, keep=2)  # the next start ends what was begun
        if steps:
            share, odd = unneeded(run_dir)
            assert share < 0.5, kill_at
            assert not odd, kill_at
        last = max(steps, default=0) + 1
        stage.save(last, {"p": keyed(content(last))})
        stage.close()
        for step in [*steps, last][-2:]:
            assert restores(run_dir, step), (kill_at, step)
        shutil.rmtree(run_dir)
        if code == 0:
            break
    parent.stdin.close()
    parent.wait()
    parent.stdout.close()
    assert kill_at > 15
    assert len(set(found)) > 3, "the kills were all in the collection of one save"


def test_a_report_says_what_each_checkpoint_added(tmp_path, untouched):
    """`describe`, of which `forge checkpoints list` and `diff` are made: what is new, and what is shared."""
    save_all(tmp_path)
    reader = stage_in(tmp_path, reads=True)
    one, other = (reader.describe(step_path(tmp_path, step)) for step in (5, 6))
    assert one["bytes"] == other["bytes"] == 16 * 2000
    assert other["new_bytes"] == 4 * 2000  # what turns was in step 4, the rest in step 5
    same = {name for name, digest in one["tensors"].items() if other["tensors"][name] == digest}
    assert same == {f"p/value/{name}{i}" for name in ("frozen", "soon") for i in range(5)}
