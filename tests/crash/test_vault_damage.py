"""Damage to the files of vault, and files that somebody made up: refused with a sentence, and nothing done for them."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner
from tests.crash.test_hostile import sign
from tests.crash.vault_stage import kept, load, save, vault
from tests.run.runs import run, write_recipe

from trainforge.cli import main
from trainforge.errors import CheckpointError
from trainforge_loongforge.vault import packs
from trainforge_loongforge.vault.checkpoint import VaultCheckpoint
from trainforge_loongforge.vault.manifest import Manifest, addresses, read_manifest
from trainforge_loongforge.vault.packs import read_index

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS = (10, 11, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints, whose chunks lie in several packs, some of them compressed."""
    root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VaultCheckpoint, "chunk_bytes", 64)
        patch.setattr(packs, "PACK_BYTES", 300)
        for step in STEPS:
            stage = vault(root, keep=9, compress=step == 11)
            save(stage, step)
            stage.close()
    return root


@pytest.fixture
def root(saved: Path, in_memory: Path) -> Path:
    shutil.copytree(saved, in_memory / "run")
    return in_memory / "run"


def folder_of(root: Path, step: int = 12) -> Path:
    return root / "checkpoints" / f"step-{step:08d}"


def damage(file: Path, sound: bytes, kind: int, chance: random.Random) -> int | None:
    """Delete, cut the end off, or flip a bit: gives at which byte."""
    place = chance.randrange(len(sound))
    if kind == 0:
        file.unlink()
        return None
    if kind in (1, 2):
        file.write_bytes(sound[:place])
        return None
    content = bytearray(sound)
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return place


@pytest.mark.slow
def test_two_thousand_damages_are_each_named_and_none_loads(root: Path):
    """Over all files: verify names what a damage concerns, restore refuses those steps, and all others are whole."""
    chance = random.Random(5)
    folder = root / "checkpoints"
    manifests = {step: read_manifest(folder_of(root, step)) for step in STEPS}
    indexes = {path: read_index(path) for path in (folder / "packs").iterdir()}
    files = sorted([*indexes, *(folder_of(root, step) / "checkpoint.json" for step in STEPS)])
    assert len(indexes) > 5
    named = harmless = unheard = 0
    for trial in range(2000):
        file = files[trial % len(files)]
        sound, times = file.read_bytes(), file.stat()
        place = damage(file, sound, trial // len(files) % 10, chance)
        if trial % 2 and file.exists():  # a disk that garbles a file leaves its times alone
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        stage = vault(root, reads=True)
        for step, manifest in manifests.items():
            if not concerns(file, place, step, manifest, indexes) and trial % 5:
                continue  # those are looked at now and then
            problems = stage.verify(folder_of(root, step))
            if not concerns(file, place, step, manifest, indexes):
                assert problems == [], (trial, file.name, place)
                assert load(stage, folder_of(root, step)) == step
                continue
            if not problems and is_compressed(indexes[file], place):
                assert (
                    load(stage, folder_of(root, step)) == step
                )  # zstd has bits that change nothing it stands for
                unheard += 1
                continue
            assert problems, (trial, file.name, place)
            assert_named(problems, file, manifest)
            named += 1
            if all("the next is not zero" in problem or "p/master/empty," in problem for problem in problems):
                assert load(stage, folder_of(root, step)) == step  # no bit of a tensor is concerned
                harmless += 1
                continue
            with pytest.raises(
                CheckpointError, match=rf"step {step} is damaged in p/|{folder_of(root, step).name}/check"
            ):
                load(stage, folder_of(root, step))
        stage.close()
        file.write_bytes(sound)
    assert named > 2000
    assert harmless < named / 4
    assert unheard < named / 100
    assert kept(root) == [(step, step) for step in STEPS]


def concerns(
    file: Path, place: int | None, step: int, manifest: Manifest, indexes: dict[Path, list[packs.Entry]]
) -> bool:
    """Whether a step needs what is damaged in a file: all of it, or the byte at `place`."""
    if file not in indexes:
        return file.parent.name == f"step-{step:08d}"
    wanted, entries = addresses(manifest), indexes[file]
    end = entries[-1].at + entries[-1].stored
    if place is None or not entries[0].at <= place < end:
        return any(entry.address in wanted for entry in entries)
    return entry_at(entries, place).address in wanted


def is_compressed(entries: list[packs.Entry], place: int | None) -> bool:
    """Whether the byte at `place` is one of a compressed chunk."""
    if place is None or place < entries[0].at:
        return False
    entry = entry_at(entries, place)
    return entry.codec == packs.ZSTD and place < entry.at + entry.stored


def entry_at(entries: list[packs.Entry], place: int) -> packs.Entry:
    """The chunk that the byte at `place` belongs to, or follows."""
    return next(entry for entry in reversed(entries) if entry.at <= place and entry.stored)


def assert_named(problems: list[str], file: Path, manifest: Manifest) -> None:
    if file.name == "checkpoint.json":
        assert len(problems) == 1
        assert str(file) in problems[0]
        return
    labels = {
        f"step {manifest.step} is damaged in {name}, chunk {number} of {len(entry.chunks)}"
        for name, entry in manifest.tensors()
        for number in range(len(entry.chunks))
    }
    for problem in problems:
        head, _, rest = problem.partition(": ")
        assert head in labels, problem
        assert file.name in rest or "is in no pack" in rest, problem


def test_a_run_passes_over_a_damaged_newest_step_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = write_recipe(tmp_path, train={"steps": 6, "save_every": 2, "keep": 9})
    run_dir = tmp_path / "run"
    run(recipe, run_dir, max_steps=4, plugins=["vault"])
    newest = max((run_dir / "checkpoints/packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[read_index(newest)[0].at] ^= 1
    newest.write_bytes(content)
    asked = CliRunner().invoke(main, ["checkpoints", str(run_dir), "verify"])
    assert asked.exit_code == 1
    assert "step 4 is damaged in" in asked.output
    assert newest.name in asked.output
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"step 4 is damaged in memory/"):
        run(recipe, run_dir, resume=4, plugins=["vault"])
    again = run(recipe, run_dir, plugins=["vault"])
    told = capsys.readouterr().out
    assert "step 4 is damaged in memory/" in told
    assert "resumed from step 2" in told
    assert again.code == 0
    whole = run(recipe, tmp_path / "whole", plugins=["vault"])
    assert again.summary["weights_digest"] == whole.summary["weights_digest"]


def tensor(document: dict[str, Any], name: str = "new") -> dict[str, Any]:
    return next(t for t in document["parts"]["p"]["tensors"] if t["name"] == name)


def chunk(document: dict[str, Any], at: int, value: Any) -> None:
    tensor(document)["chunks"][0][at] = value


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"address {name!r}": lambda d, name=name: chunk(d, 1, name)
        for name in (
            "../" * 21 + "x",
            "/etc/passwd",
            "",
            "g" * 64,
            "A" * 64,
            "0" * 63,
            "0" * 10**6,
            "0" * 64 + "\n",
            None,
        )
    },
    "no checksum": lambda d: chunk(d, 2, ""),
    "a checksum of another length": lambda d: chunk(d, 2, "0" * 64),
    "a negative length": lambda d: chunk(d, 0, -16),
    "an absurd length": lambda d: chunk(d, 0, 2**62),
    "a length that is none": lambda d: chunk(d, 0, 1.5),
    "another chunk length": lambda d: chunk(d, 0, 15),
    "no chunk": lambda d: tensor(d).update(chunks=[]),
    "a chunk twice": lambda d: tensor(d)["chunks"].append(list(tensor(d)["chunks"][0])),
    "a chunk with a place": lambda d: tensor(d)["chunks"][0].append("packs/x"),
    "a hundred thousand empty chunks": lambda d: tensor(d)["chunks"].extend(
        [[0, "0" * 64, "0" * 32]] * 10**5
    ),
    "a huge shape": lambda d: tensor(d).update(shape=[2**40, 2**40]),
    "a huge shape of nothing": lambda d: tensor(d).update(shape=[2**62, 2**62, 0]),
    "a negative shape": lambda d: tensor(d).update(shape=[-20]),
    "two negative sizes": lambda d: tensor(d).update(shape=[-4, -5]),
    "a thousand dimensions": lambda d: tensor(d).update(shape=[20, *[1] * 1000]),
    "a tensor twice": lambda d: d["parts"]["p"]["tensors"].append(tensor(d)),
    "a dtype that is a function of torch": lambda d: tensor(d).update(dtype="load"),
    "a key with a slash": lambda d: tensor(d).update(key="../master"),
    "a part with a slash": lambda d: d["parts"].update({"../p": d["parts"]["p"]}),
    "a negative step": lambda d: d.update(step=-1),
    "a step that is none": lambda d: d.update(step="12; rm"),
    "a world of none": lambda d: d.update(world=0),
    "no time": lambda d: d.update(saved_at=float("nan")),
    "another format": lambda d: d.update(format=99),
    "an unknown field": lambda d: d.update(more=1),
    "parts that are a list": lambda d: d.update(parts=[]),
    "a number for a name": lambda d: d.update(writer=7),
    "data that is no object": lambda d: d["parts"]["p"].update(data=[1]),
}


@pytest.mark.parametrize("trick", HOSTILE, ids=lambda name: name[:40])
def test_what_cannot_be_is_refused_though_its_checksum_is_right(root: Path, trick: str):
    path = folder_of(root) / "checkpoint.json"
    document = json.loads(path.read_text())
    HOSTILE[trick](document)
    path.write_bytes(sign(document))
    assert_refused(root)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"parts": ' + b"[" * 100_000 + b"]" * 100_000 + b', "checksum": "0"}',
        b'{"step": ' + b"9" * 10_000 + b"}",
        b'{"step": 1e999, "writer": "vault", "saved_at": 1' + b"0" * 400 + b"}",
        b'"\\ud800"',
        b"null",
        b"",
        b"\x80\x04cos\nsystem\n.",
    ],
    ids=[
        "deep lists",
        "deep objects",
        "deep parts",
        "a long number",
        "endless",
        "half a letter",
        "null",
        "empty",
        "pickle",
    ],
)
def test_json_that_is_no_manifest_is_refused(root: Path, content: bytes):
    (folder_of(root) / "checkpoint.json").write_bytes(content)
    assert_refused(root)


def test_json_that_is_larger_than_any_manifest_is_not_read(root: Path):
    os.truncate(folder_of(root) / "checkpoint.json", 2**40)
    assert_refused(root)


def assert_refused(root: Path) -> None:
    stage, path = vault(root, reads=True), folder_of(root)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = stage.verify(path)
    assert len(problems) == 1
    assert str(path / "checkpoint.json") in problems[0]
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        load(stage, path)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 1_500_000, "memory was taken for it (KiB)"
    stage.close()
    packs_before = sorted((root / "checkpoints/packs").iterdir())
    vault(root, keep=9).close()  # a start makes no room when it cannot tell what is needed
    assert sorted((root / "checkpoints/packs").iterdir()) == packs_before


ENTRY = struct.Struct("<32s16sQQQB")
FOOTER = struct.Struct("<QQ16s8s")


def rebuilt(content: bytes, change: Callable[[list[list[Any]]], None]) -> bytes:
    """A pack with a changed index and the right checksum of it, as anybody can make one (docs/plugins/vault.md)."""
    at, length, _, magic = FOOTER.unpack(content[-FOOTER.size :])
    entries = [list(fields) for fields in ENTRY.iter_unpack(content[at : at + length])]
    change(entries)
    index = b"".join(ENTRY.pack(*fields) for fields in entries)
    return content[:at] + index + FOOTER.pack(at, len(index), xxhash.xxh3_128_digest(index), magic)


def set_field(number: int, value: Any) -> Callable[[list[list[Any]]], None]:
    def change(entries: list[list[Any]]) -> None:
        entries[0][number] = value

    return change


def bomb(entries: list[list[Any]]) -> None:
    entries[0][4:] = [4 * 2**20, 1]


def anothers(entries: list[list[Any]]) -> None:
    entries[0][0] = entries.pop(1)[0]


PACKS: dict[str, Callable[[list[list[Any]]], None]] = {
    "beyond the end": set_field(2, 2**40),
    "in the header": set_field(2, 0),
    "an absurd size": set_field(3, 2**63),
    "an absurd length": set_field(4, 2**63),
    "a bomb": bomb,
    "an unknown codec": set_field(5, 7),
    "a chunk twice": lambda entries: entries.__setitem__(1, list(entries[0])),
    "another's address": anothers,
    "no chunks": lambda entries: entries.clear(),
}


@pytest.mark.parametrize("trick", PACKS)
def test_a_pack_from_elsewhere_is_not_believed(root: Path, trick: str):
    for path in (root / "checkpoints/packs").iterdir():
        if len(read_index(path)) > 1:
            path.write_bytes(rebuilt(path.read_bytes(), PACKS[trick]))
    stage = vault(root, reads=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(problem.startswith("step 12 is damaged in p/") for problem in stage.verify(folder_of(root)))
    with pytest.raises(CheckpointError, match="step 12 is damaged in p/"):
        load(stage, folder_of(root))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
